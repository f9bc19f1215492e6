"""Agreement of processes: all succeed or all fail."""

from collections.abc import Callable
from typing import TypeVar

import jax
import numpy as np

_T = TypeVar("_T")


def on_all_processes(done: bool) -> bool:
    """Returns whether `done` holds on every process. Collective."""
    if jax.process_count() == 1:
        return done
    from jax.experimental import multihost_utils

    return bool(np.all(multihost_utils.process_allgather(np.array(done))))


def agreed(what: str, work: Callable[[], _T]) -> _T:
    """Runs `work` (not collective) on every process; OSError if it fails on another one."""
    try:
        result = work()
    except Exception:
        on_all_processes(False)
        raise
    if not on_all_processes(True):
        raise OSError(f"{what} failed on another process, which says why")
    return result
