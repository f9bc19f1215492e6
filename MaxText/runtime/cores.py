"""Number of available cores."""

import os


def num_cores() -> int:
    """Returns the number of cores available to this process."""
    affinity = getattr(os, "sched_getaffinity", None)  # Linux only
    return len(affinity(0)) if affinity else os.cpu_count() or 1
