"""Agreement of processes: all succeed or all fail."""

from collections.abc import Callable
from typing import TypeVar

import jax
import numpy as np

_T = TypeVar("_T")


def on_all_processes(done: bool) -> bool:
    """Returns whether every process succeeded. Every process must call it."""
    if jax.process_count() == 1:
        return done
    from jax.experimental import multihost_utils

    return bool(np.all(multihost_utils.process_allgather(np.array(done))))


def agreed(what: str, work: Callable[[], _T]) -> _T:
    """Returns the result of `work` once it has succeeded on every process; fails on all if on one.

    Every process must call it.

    Args:
      what: Names the work on processes where it did not fail.
      work: Must not wait for other processes itself.

    Raises:
      Exception: What `work` raised here.
      OSError: It failed on another process.
    """
    try:
        result = work()
    except Exception:
        on_all_processes(False)
        raise
    if not on_all_processes(True):
        raise OSError(f"{what} failed on another process, which says why")
    return result
