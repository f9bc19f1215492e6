"""Keeps the next batches ready: threads of this process, or Grain's reader processes.

The threads are ours and daemons. Grain's live in a pool that the interpreter waits for when it
ends, so that one read that never returns would keep the program from ending.
"""

import contextlib
import functools
import math
import operator
import pickle
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import grain
import numpy as np
from absl import flags

from MaxText.errors import StopWaiting, UserError

# An element is a whole batch: a few threads hide slow storage, and few batches are kept ready.
BATCHES_READY = 4
# Of each reader process, on their way to this one.
_BATCHES_SENT = 2
# How long closing waits for reads that are under way; those that hang are left behind.
_SECONDS_TO_CLOSE = 2.0
# Of one who waits, whether that should end.
_SECONDS_BETWEEN_LOOKS = 0.1

_Value = TypeVar("_Value")


def never() -> bool:
    """Nobody says that waiting should end."""
    return False


class Steps(Protocol):
    """Batches by step; pickled to reader processes."""

    def __len__(self) -> int:
        """Steps."""
        ...

    def __getitem__(self, step: int) -> dict[str, Any]:
        """The batch of a step."""
        ...


class ReadTimeout(TimeoutError):
    """No batch came in time."""


class ReaderLost(OSError):
    """A reader process has ended without being asked to."""


class _Failure:
    """Stands for a batch that could not be read."""

    def __init__(self, error: Exception):
        self.error = error


class _StepsFrom:
    """A source whose element 0 is step `first`: how a reader starts in the middle for free.

    Errors are elements, so that they arrive from another process as what they are.
    """

    def __init__(self, source: Steps, first: int):
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
    """The error, or its text, with the traceback of a bug in a note."""
    if not isinstance(error, (UserError, OSError)):
        error.add_note(f"In the reader process:\n{traceback.format_exc()}")
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


class _Slots:
    """Batches on their way from those who read to the one who takes, in the order of steps."""

    def __init__(self, first: int, end: int):
        self._end = end
        self._to_read = self._to_take = first
        self._ready: dict[int, Any] = {}
        self._stopped = False
        self._changed = threading.Condition()

    def claim(self) -> int | None:
        """The next step to read, once there is room for it; None when there is nothing to do."""
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    self._stopped
                    or self._to_read >= self._end
                    or self._to_read < self._to_take + BATCHES_READY
                )
            )
            if self._stopped or self._to_read >= self._end:
                return None
            self._to_read += 1
            return self._to_read - 1

    def put(self, step: int, result: Any) -> None:
        """Hands over what was read of a step, or a _Failure."""
        with self._changed:
            if not self._stopped:
                self._ready[step] = result
                self._changed.notify_all()

    def take(self, timeout: float | None, stopping: Callable[[], bool]) -> Any:
        """The result of the next step; raises ReadTimeout or StopWaiting."""
        until = math.inf if timeout is None else time.monotonic() + timeout
        with self._changed:
            while self._to_take not in self._ready:
                if stopping():
                    raise StopWaiting
                left = until - time.monotonic()
                if left <= 0:
                    raise ReadTimeout(f"no batch came within {timeout:g} s")
                self._changed.wait(min(left, _SECONDS_BETWEEN_LOOKS))
            result = self._ready.pop(self._to_take)
            self._to_take += 1
            self._changed.notify_all()
            return result

    def stop(self) -> None:
        """Lets readers end; what they still hand over is dropped."""
        with self._changed:
            self._stopped = True
            self._ready.clear()
            self._changed.notify_all()


def _read(slots: _Slots, read: Callable[[int], Any]) -> None:
    """What a thread does until there is nothing left, or a failure: who takes that begins anew."""
    while (step := slots.claim()) is not None:
        try:
            result = read(step)
        except Exception as error:
            result = _Failure(error)
        slots.put(step, result)
        if isinstance(result, _Failure):
            return
        del result


class ReadAhead:
    """The batches of a source from a step on, in order, the next ones made while one is used."""

    def __init__(self, source: Steps, first: int, num_threads: int, num_processes: int):
        """Starts reading.

        Args:
          source: the batches.
          first: step of the first one.
          num_threads: that read at the same time, in each process that does.
          num_processes: reader processes, 0 for none.
        """
        slots = _Slots(first, len(source))
        self._slots = slots
        self._processes: Any = None
        read: Callable[[int], Any] = functools.partial(operator.getitem, source)
        if num_processes:
            self._processes = _in_processes(source, first, num_threads, num_processes)
            read = functools.partial(_next_of, self._processes)
        self._threads = [
            threading.Thread(target=_read, args=(slots, read), name="batches", daemon=True)
            for _ in range(1 if num_processes else num_threads)
        ]
        # Threads hold no reference to this object: without its user they end.
        weakref.finalize(self, slots.stop)
        for thread in self._threads:
            thread.start()

    def next(self, timeout: float | None, stopping: Callable[[], bool] = never) -> dict[str, Any]:
        """The next batch; there must be one.

        Args:
          timeout: seconds to wait, None for ever.
          stopping: ends the wait when it becomes true.

        Raises:
          ReadTimeout: it did not come in time.
          StopWaiting: nobody shall wait for it any more.
          ReaderLost: a reader process died.
          Exception: whatever reading it raised.
        """
        result = self._slots.take(timeout, stopping)
        if isinstance(result, _Failure):
            raise result.error
        return result

    def close(self) -> None:
        """Stops reading; a read that hangs is left to itself."""
        self._slots.stop()
        deadline = time.monotonic() + _SECONDS_TO_CLOSE
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if self._processes is not None:
            # Waits for its processes, one that hangs included, before it ends them.
            closing = _started(functools.partial(_end, self._processes))
            closing.join(_SECONDS_TO_CLOSE)


def _in_processes(source: Steps, first: int, num_threads: int, num_processes: int) -> Any:
    """Grain's iterator over `source`, read by processes of its own."""
    # Grain reads absl flags in the processes it starts; programs without absl's main never
    # parse any, so their defaults are declared final here.
    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()
    dataset = grain.MapDataset.source(_StepsFrom(source, first)).to_iter_dataset(
        grain.ReadOptions(num_threads=num_threads, prefetch_buffer_size=BATCHES_READY)
    )
    options = grain.MultiprocessingOptions(
        num_workers=num_processes, per_worker_buffer_size=_BATCHES_SENT
    )
    return iter(dataset.mp_prefetch(options))


def _end(processes: Any) -> None:
    # Of a process that hangs, a thread still waits in the iterator: it is taken apart under both,
    # and what they then raise says nothing.
    with contextlib.suppress(Exception):
        processes.close()


def _next_of(processes: Any, step: int) -> Any:
    del step  # they count themselves
    try:
        arrays = next(processes)
    except Exception as error:
        # Errors of reading are elements; what is raised here is the loss of a process.
        raise ReaderLost(f"a reader process was lost ({error})") from error
    if "failure" in arrays:
        return arrays["failure"]
    # Out of the memory shared with the reader, which is then free for the next one.
    return {
        name: np.array(value) if isinstance(value, np.ndarray) else value
        for name, value in arrays.items()
    }


def _started(function: Callable[[], Any]) -> threading.Thread:
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    return thread


def within(
    seconds: float | None, function: Callable[[], _Value], stopping: Callable[[], bool] = never
) -> _Value:
    """What a function returns, unless it takes longer.

    Args:
      seconds: None waits for ever.
      function: goes on by itself when it takes longer.
      stopping: ends the wait when it becomes true.

    Raises:
      ReadTimeout: it took longer.
      StopWaiting: nobody shall wait any more.
      Exception: whatever it raised.
    """
    slots = _Slots(0, 1)
    _started(lambda: _read(slots, lambda _: function()))
    result = slots.take(seconds, stopping)
    if isinstance(result, _Failure):
        raise result.error
    return result


def pause(seconds: float, stopping: Callable[[], bool]) -> None:
    """Waits for so long, unless `stopping` becomes true; then raises StopWaiting."""
    until = time.monotonic() + seconds
    while not stopping():
        left = until - time.monotonic()
        if left <= 0:
            return
        time.sleep(min(left, _SECONDS_BETWEEN_LOOKS))
    raise StopWaiting
