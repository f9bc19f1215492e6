"""How many cores this process may use: `num_cores`. Imports no jax."""

import os


def num_cores() -> int:
    """Cores that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)  # Linux only.
    return len(affinity(0)) if affinity else os.cpu_count() or 1
