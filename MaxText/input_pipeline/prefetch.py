"""Prefetches batches in threads or worker processes; retries reads.

The thread is a daemon: a read that hangs can be retried and abandoned.
"""

import contextlib
import math
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from MaxText.config.data_sections import DataRetryConfig
from MaxText.errors import UserError, WaitCancelledError
from MaxText.input_pipeline.reader_processes import ReaderProcesses
from MaxText.storage.retry import call_with_retries, exponential_delays

if TYPE_CHECKING:
    from MaxText.input_pipeline.sequences.batch_source import BatchSource

BATCHES_READY = 4  # prefetched elements are whole batches, so a few suffice
_SECONDS_TO_CLOSE = 2.0  # close() waits this long for a read in progress, then abandons it
_POLL_SECONDS = 0.1  # polling interval of `should_stop`
_MAX_DELAY_SECONDS = 60.0  # longest delay before a retry

_Result = TypeVar("_Result")


def never_stop() -> bool:
    """Returns False: a read is never cancelled."""
    return False


def poll_intervals(seconds: float, should_stop: Callable[[], bool]) -> Iterator[float]:
    """Yields short times to wait, `seconds` in all (which may be infinite).

    Raises WaitCancelledError before the first one or between two if `should_stop` returns true.
    """
    deadline = time.monotonic() + seconds
    while True:
        if should_stop():
            raise WaitCancelledError
        seconds_left = deadline - time.monotonic()
        if seconds_left <= 0:
            return
        yield min(seconds_left, _POLL_SECONDS)


class Prefetcher:
    """Batches of a source, read ahead by a thread or by processes."""

    def __init__(self, source: "BatchSource", first_step: int, num_processes: int):
        """Starts reading at `first_step`, in a thread if `num_processes` is 0."""
        steps = range(first_step, len(source))
        self._processes = None
        if num_processes:
            self._processes = ReaderProcesses(source, steps, num_processes)
            batches = iter(self._processes)
        else:
            batches = (source[step] for step in steps)
        # The thread has read one more batch when it waits for room.
        self._ready: _Queue = queue.Queue(BATCHES_READY - 1)
        self._stopped = threading.Event()
        # The thread holds no reference to this object, so it ends when the object is collected.
        self._thread = threading.Thread(
            target=_produce,
            args=(batches, self._ready, self._stopped),
            name="batches",
            daemon=True,
        )
        self._thread.start()
        weakref.finalize(self, _stop, self._ready, self._stopped)

    def next(
        self, timeout: float, should_stop: Callable[[], bool] = never_stop
    ) -> dict[str, np.ndarray]:
        """Returns the next batch within `timeout` seconds (0: no limit).

        Raises TimeoutError, WaitCancelledError if `should_stop` returns true, or any error from
        reading the batch.
        """
        for seconds in poll_intervals(timeout or math.inf, should_stop):
            with contextlib.suppress(queue.Empty):
                batch = self._ready.get(timeout=seconds)
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


# Batches that are ready, or the error that ended reading.
_Queue = queue.Queue[dict[str, np.ndarray] | Exception]


def _produce(
    batches: Iterator[dict[str, np.ndarray]], ready: _Queue, stopped: threading.Event
) -> None:
    """Puts batches into the queue until `stopped`, or an error, which is put there too."""
    try:
        for batch in batches:
            ready.put(batch)
            if stopped.is_set():
                return
    except Exception as error:
        ready.put(error)


def _stop(ready: _Queue, stopped: threading.Event) -> None:
    """Makes `_produce` end after its current batch."""
    stopped.set()
    with contextlib.suppress(queue.Empty):
        while True:  # makes room for a thread that waits for it
            ready.get_nowait()


class Retries:
    """Retries of failed reads, with their messages.

    Attributes:
      options: Number of retries, first delay, and timeout.
      log: Receives each message at once.
      should_stop: Cancels waiting when it returns true.
    """

    def __init__(self, options: DataRetryConfig, log: Callable[[str], None]):
        self.options = options
        self.log = log
        self.should_stop: Callable[[], bool] = never_stop
        self._messages: list[str] = []

    def drain(self) -> list[str]:
        """Returns the messages since the last call."""
        messages = self._messages
        self._messages = []
        return messages

    def call(
        self,
        read: Callable[[], _Result],
        *,
        failure: str,
        is_retryable: Callable[[Exception], bool],
    ) -> _Result:
        """Returns the result of the first successful call of `read`.

        The delay between two calls doubles each time, up to a minute.

        Args:
          read: What may fail.
          failure: Beginning of messages: what could not be done.
          is_retryable: Whether an error may be gone at the next call; other errors are raised at
            once.

        Raises:
          UserError: The last call failed, too.
          WaitCancelledError: `should_stop` returned true.
        """
        began = time.monotonic()
        max_tries = self.options.attempts + 1
        num_tries = 0

        def try_to_read() -> _Result:
            nonlocal num_tries
            num_tries += 1
            try:
                return read()
            except Exception as error:
                if num_tries < max_tries or not is_retryable(error):
                    raise
                tries = "1 try" if num_tries == 1 else f"{num_tries} tries"
                hint = "" if isinstance(error, UserError) else "Check the storage. "
                raise UserError(
                    f"{failure} after {tries} in {time.monotonic() - began:,.1f} s: "
                    f"{_reason(error)}. {hint}Run the same command again to resume."
                ) from error

        def report(error: Exception, delay: float) -> None:
            next_try = f"Try {num_tries + 1} of {max_tries} in {delay:g} s."
            message = f"{failure}: {_reason(error)}. {next_try}"
            self._messages.append(message)
            self.log(message)

        return call_with_retries(
            try_to_read,
            delays=exponential_delays(
                self.options.attempts, self.options.delay, _MAX_DELAY_SECONDS
            ),
            is_retryable=is_retryable,
            report=report,
            wait=self._wait,
        )

    def _wait(self, seconds: float) -> None:
        """Waits; raises WaitCancelledError once `should_stop` returns true."""
        for interval in poll_intervals(seconds, self.should_stop):
            time.sleep(interval)


def _reason(error: Exception) -> str:
    """Returns an error's message, without the full stop."""
    return (str(error) or type(error).__name__).removesuffix(".")
