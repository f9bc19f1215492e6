"""What several processes must do together or not at all."""

from collections.abc import Callable
from typing import TypeVar

import jax
import numpy as np

_T = TypeVar("_T")


def on_all_processes(done: bool) -> bool:
    """Whether every process succeeded. Every process must call it."""
    if jax.process_count() == 1:
        return done
    from jax.experimental import multihost_utils

    return bool(np.all(multihost_utils.process_allgather(np.array(done))))


def agreed(what: str, work: Callable[[], _T]) -> _T:
    """What `work` returns, once it has succeeded on every process. Every process must call it.

    Where it fails on one, it fails on all of them, so that none waits for another in what follows.

    Args:
      what: in words, for the processes where it did not fail.
      work: must not wait for other processes itself.

    Raises:
      Exception: what `work` raised here.
      OSError: it failed on another process.
    """
    try:
        result = work()
    except Exception:
        on_all_processes(False)
        raise
    if not on_all_processes(True):
        raise OSError(f"{what} failed on another process, which says why")
    return result
