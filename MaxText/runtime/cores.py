"""Number of CPU cores that this process may use."""

import os


def num_cores() -> int:
    """Returns the number of cores in this process's CPU affinity, or of the machine without one."""
    get_affinity = getattr(os, "sched_getaffinity", None)  # Linux only
    if get_affinity is not None:
        return len(get_affinity(0))
    return os.cpu_count() or 1
