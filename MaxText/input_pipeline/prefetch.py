"""Prefetches batches in a thread or in Grain worker processes.

The thread that waits for batches is a daemon of this module: Grain's iterators have no timeout,
and its thread pool blocks process exit while a read hangs.
"""

import contextlib
import functools
import math
import pickle
import queue
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeVar

import grain
import numpy as np
from absl import flags

from MaxText.errors import StopWaiting, UserError

# Prefetched elements are whole batches, so a few suffice.
BATCHES_READY = 4
# Buffered in each worker process.
_BATCHES_SENT = 2
_SECONDS_TO_CLOSE = 2.0  # close() waits this long for a read in progress, then abandons it
_SECONDS_BETWEEN_LOOKS = 0.1  # polling interval of `stopping`

_Value = TypeVar("_Value")


def never() -> bool:
    return False


class StepDataset(Protocol):
    """Random access to batches by step; pickled to worker processes."""

    def __len__(self) -> int: ...

    def __getitem__(self, step: int) -> dict[str, Any]: ...


class ReadTimeout(TimeoutError):
    pass


class WorkerDiedError(OSError):
    pass


class _Failure:
    def __init__(self, error: BaseException):
        self.error = error


class _StepsFrom:
    """View of a source whose element 0 is step `first`, so that readers start anywhere at no cost.

    Errors are returned as elements, so that they arrive intact from another process.
    """

    def __init__(self, source: StepDataset, first: int):
        self._source = source
        self._first = first

    def __len__(self) -> int:
        return max(0, len(self._source) - self._first)

    def __getitem__(self, index: int) -> dict[str, Any]:
        try:
            return self._source[self._first + index]
        except Exception as error:
            return {"failure": _Failure(_picklable(error))}


def _picklable(error: Exception) -> Exception:
    """Returns the error (or its text, if unpicklable), with the traceback of a bug as a note."""
    if not isinstance(error, (UserError, OSError)):
        error.add_note(f"In the reader:\n{traceback.format_exc()}")
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


class Prefetcher:
    """Prefetched batches of a source, starting at step `first`."""

    def __init__(self, source: StepDataset, first: int, num_processes: int):
        self._stopped = threading.Event()
        # SimpleQueue is implemented in C: handing over a batch takes microseconds.
        self._ready: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._wanted: queue.SimpleQueue[None] = queue.SimpleQueue()
        for _ in range(BATCHES_READY):
            self._wanted.put(None)
        self._batches = _grain_iterator(source, first, num_processes)
        # The thread holds no reference to this object, so it ends when the object is collected.
        copies = num_processes > 0
        work = functools.partial(
            _produce, self._batches, self._ready, self._wanted, self._stopped, copies
        )
        self._thread = _start(work)
        weakref.finalize(self, _stop, self._stopped, self._wanted)

    def next(self, timeout: float | None, stopping: Callable[[], bool] = never) -> dict[str, Any]:
        """Returns the next batch, which must exist, within `timeout` seconds (None: no limit).

        Raises ReadTimeout, StopWaiting if `stopping` returns true, WorkerDiedError, or any error
        from reading the batch.
        """
        result = _get(self._ready, timeout, stopping, "no batch came")
        self._wanted.put(None)
        if isinstance(result, _Failure):
            raise result.error
        return result

    def close(self) -> None:
        """Stops reading, abandoning a read that hangs."""
        _stop(self._stopped, self._wanted)
        self._thread.join(_SECONDS_TO_CLOSE)
        # Grain's close() joins its processes, even one that hangs, before it terminates them.
        _start(functools.partial(_end, self._batches)).join(_SECONDS_TO_CLOSE)


def _grain_iterator(source: StepDataset, first: int, num_processes: int) -> Any:
    dataset = grain.MapDataset.source(_StepsFrom(source, first)).to_iter_dataset(
        grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    )
    if num_processes:
        # Grain's worker processes read absl flags, which programs without absl's main never parse.
        if not flags.FLAGS.is_parsed():
            flags.FLAGS.mark_as_parsed()
        dataset = dataset.mp_prefetch(
            grain.MultiprocessingOptions(
                num_workers=num_processes, per_worker_buffer_size=_BATCHES_SENT
            )
        )
    return iter(dataset)


def _produce(
    batches: Iterator[Any],
    ready: "queue.SimpleQueue[Any]",
    wanted: "queue.SimpleQueue[None]",
    stopped: threading.Event,
    copies: bool,
) -> None:
    result: Any = None
    while not isinstance(result, _Failure):
        wanted.get()
        if stopped.is_set():
            return
        try:
            result = next(batches)
            result = result.get("failure", result)
            if copies and isinstance(result, dict):
                # Copy out of shared memory, which the worker then reuses for the next batch.
                result = {name: np.array(value) for name, value in result.items()}
        except StopIteration:
            return
        except Exception as error:
            if stopped.is_set():
                return
            result = _Failure(WorkerDiedError(f"a reader process ended: {error}"))
        ready.put(result)


def _stop(stopped: threading.Event, wanted: "queue.SimpleQueue[None]") -> None:
    stopped.set()
    wanted.put(None)


def _end(batches: Any) -> None:
    # If a worker hangs, a thread is still blocked in the iterator, and errors are meaningless.
    with contextlib.suppress(Exception):
        batches.close()


def _start(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work, name="batches", daemon=True)
    thread.start()
    return thread


def _get(
    ready: "queue.SimpleQueue[Any]",
    timeout: float | None,
    stopping: Callable[[], bool],
    problem: str,
) -> Any:
    until = math.inf if timeout is None else time.monotonic() + timeout
    while True:
        with contextlib.suppress(queue.Empty):
            left = until - time.monotonic()
            return ready.get(timeout=max(0.0, min(left, _SECONDS_BETWEEN_LOOKS)))
        if stopping():
            raise StopWaiting
        if time.monotonic() >= until:
            raise ReadTimeout(f"{problem} within {timeout:g} s")


def call_with_timeout(
    call: Callable[[], _Value], timeout: float | None, stopping: Callable[[], bool] = never
) -> _Value:
    """Calls a function, abandoning it if it hangs.

    Raises ReadTimeout, or StopWaiting if `stopping` returns true.
    """
    ready: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def work() -> None:
        try:
            ready.put(call())
        except Exception as error:
            ready.put(_Failure(error))

    _start(work)
    result = _get(ready, timeout, stopping, "storage did not answer")
    if isinstance(result, _Failure):
        raise result.error
    return result


def interruptible_sleep(seconds: float, stopping: Callable[[], bool]) -> None:
    """Sleeps; raises StopWaiting if `stopping` is or becomes true."""
    until = time.monotonic() + seconds
    while True:
        if stopping():
            raise StopWaiting
        left = until - time.monotonic()
        if left <= 0:
            return
        time.sleep(min(left, _SECONDS_BETWEEN_LOOKS))
