"""Prefetches batches in threads or worker processes; retries reads.

The thread is a daemon: a read that hangs can be retried and abandoned.
"""

import contextlib
import functools
import math
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from MaxText.config.data_sections import DataRetryOptions
from MaxText.errors import UserError, WaitCancelledError
from MaxText.input_pipeline.reader_processes import ReaderProcesses

if TYPE_CHECKING:
    from MaxText.input_pipeline.sequences.global_batch import GlobalBatch

BATCHES_READY = 4  # prefetched elements are whole batches, so a few suffice
_SECONDS_TO_CLOSE = 2.0  # close() waits this long for a read in progress, then abandons it
_SECONDS_BETWEEN_LOOKS = 0.1  # polling interval of `stopping`
_MAX_WAIT_SECONDS = 60.0  # longest delay before a retry

_Value = TypeVar("_Value")


def never_stop() -> bool:
    return False


def pauses(seconds: float, stopping: Callable[[], bool]) -> Iterator[float]:
    """Yields pauses of `seconds` in all.

    Raises WaitCancelledError if `stopping` is or becomes true.
    """
    until = time.monotonic() + seconds
    while True:
        if stopping():
            raise WaitCancelledError
        left = until - time.monotonic()
        if left <= 0:
            return
        yield min(left, _SECONDS_BETWEEN_LOOKS)


class Prefetcher:
    """Prefetched batches of a source, starting at step `first`."""

    def __init__(self, source: "GlobalBatch", first: int, num_processes: int):
        steps = range(first, len(source))
        self._processes = None
        batches = (source[step] for step in steps)
        if num_processes:
            self._processes = ReaderProcesses(source, steps, num_processes)
            batches = iter(self._processes)
        # The thread has read one more batch when it waits for room.
        self._ready: queue.Queue[Any] = queue.Queue(BATCHES_READY - 1)
        self._stopped = threading.Event()
        # The thread holds no reference to this object, so it ends when the object is collected.
        queue_and_event = self._ready, self._stopped
        self._thread = _start(functools.partial(_produce, batches, *queue_and_event))
        weakref.finalize(self, _stop, *queue_and_event)

    def next(self, timeout: float, stopping: Callable[[], bool] = never_stop) -> dict[str, Any]:
        """Returns the next batch within `timeout` seconds (0: no limit).

        Raises TimeoutError, WaitCancelledError if `stopping` returns true, or any error from
        reading the batch.
        """
        for pause in pauses(timeout or math.inf, stopping):
            with contextlib.suppress(queue.Empty):
                batch = self._ready.get(timeout=pause)
                if isinstance(batch, Exception):
                    raise batch
                return batch
        raise TimeoutError(f"no batch came within {timeout:g} s (data_retry.timeout)")

    def close(self) -> None:
        """Stops reading; abandons a hanging read."""
        _stop(self._ready, self._stopped)
        if self._processes is not None:
            self._processes.close()
        self._thread.join(_SECONDS_TO_CLOSE)


def _start(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work, name="batches", daemon=True)
    thread.start()
    return thread


def _produce(
    batches: Iterator[dict[str, Any]], ready: "queue.Queue[Any]", stopped: threading.Event
) -> None:
    try:
        for batch in batches:
            ready.put(batch)
            if stopped.is_set():
                return
    except Exception as error:
        ready.put(error)


def _stop(ready: "queue.Queue[Any]", stopped: threading.Event) -> None:
    stopped.set()
    with contextlib.suppress(queue.Empty):
        while True:  # makes room for a thread that waits for it
            ready.get_nowait()


class Retries:
    """Retries of failed reads, with their messages."""

    def __init__(self, options: DataRetryOptions, log: Callable[[str], None]):
        self.options = options
        self.log = log
        self.stopping: Callable[[], bool] = never_stop
        self._news: list[str] = []

    def drain(self) -> list[str]:
        """Returns the messages since the last call."""
        news = self._news
        self._news = []
        return news

    def call(
        self, what: str, attempt: Callable[[], _Value], is_worth_it: Callable[[Exception], bool]
    ) -> _Value:
        """Returns the result of the first successful call of `attempt`.

        Errors for which `is_worth_it` is false are raised at once. Raises UserError, starting with
        `what`, after the last attempt, and WaitCancelledError if `stopping` returned true.
        """
        began = time.monotonic()
        tries = self.options.attempts + 1
        number = 1
        delay = 0.0
        while True:
            try:
                return attempt()
            except Exception as error:
                if not is_worth_it(error):
                    raise
                problem = (str(error) or type(error).__name__).removesuffix(".")
                if number >= tries:
                    hint = "" if isinstance(error, UserError) else "Check the storage. "
                    how_often = "1 try" if number == 1 else f"{number} tries"
                    raise UserError(
                        f"{what} after {how_often} in {time.monotonic() - began:,.1f} s: "
                        f"{problem}. {hint}Run the same command again to resume."
                    ) from error
                number += 1
                delay = min(2 * delay or self.options.delay, _MAX_WAIT_SECONDS)
                message = f"{what}: {problem}. Try {number} of {tries} in {delay:g} s."
                self._news.append(message)
                self.log(message)
            for pause in pauses(delay, self.stopping):
                time.sleep(pause)
