"""Prefetches batches in a thread or in Grain worker processes.

Failed reads are retried. The thread is a daemon of this module: Grain's iterators have no timeout,
and its thread pool blocks process exit while a read hangs.
"""

import contextlib
import dataclasses
import functools
import math
import pickle
import queue
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import grain
import numpy as np
from absl import flags

from MaxText.config.data_sections import DataConfig
from MaxText.errors import UserError, WaitCancelledError
from MaxText.storage import file_access
from MaxText.storage.errors import FileReadError, is_transient
from MaxText.storage.file_access import is_url

if TYPE_CHECKING:
    from MaxText.input_pipeline.data_sources import OpenDataSource
    from MaxText.input_pipeline.sequences.global_batch import GlobalBatch

BATCHES_READY = 4  # prefetched elements are whole batches, so a few suffice
_BATCHES_SENT = 2  # buffered in each worker process
_SECONDS_TO_CLOSE = 2.0  # close() waits this long for a read in progress, then abandons it
_SECONDS_BETWEEN_LOOKS = 0.1  # polling interval of `stopping`
_MAX_WAIT_SECONDS = 60.0  # longest delay before a retry

_Value = TypeVar("_Value")


def never() -> bool:
    return False


class ReadTimeout(TimeoutError):
    pass


class WorkerDiedError(OSError):
    pass


class Prefetcher:
    """Prefetched batches of a source, starting at step `first`."""

    def __init__(self, source: "GlobalBatch", first: int, num_processes: int):
        self._stopped = threading.Event()
        # SimpleQueue is implemented in C: handing over a batch takes microseconds.
        self._ready: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._wanted: queue.SimpleQueue[None] = queue.SimpleQueue()
        for _ in range(BATCHES_READY):
            self._wanted.put(None)
        self._batches = _batches_from(source, first, num_processes)
        batches = map(_copied, self._batches) if num_processes else self._batches
        # The thread holds no reference to this object, so it ends when the object is collected.
        queues = self._ready, self._wanted, self._stopped
        self._thread = _start(functools.partial(_produce, batches, *queues))
        weakref.finalize(self, _stop, self._stopped, self._wanted)

    def next(self, timeout: float | None, stopping: Callable[[], bool] = never) -> dict[str, Any]:
        """Returns the next batch within `timeout` seconds (None: no limit).

        Raises ReadTimeout, WaitCancelledError if `stopping` returns true, WorkerDiedError, or any
        error from reading the batch.
        """
        batch = _get(self._ready, timeout, stopping, "no batch came")
        self._wanted.put(None)
        return batch

    def close(self) -> None:
        """Stops reading; abandons a hanging read."""
        _stop(self._stopped, self._wanted)
        self._thread.join(_SECONDS_TO_CLOSE)
        # Grain's close() joins its processes, even one that hangs, before it terminates them.
        _start(functools.partial(_end, self._batches)).join(_SECONDS_TO_CLOSE)


def _batches_from(
    source: "GlobalBatch", first: int, num_processes: int
) -> Iterator[dict[str, Any]]:
    steps, read = range(first, len(source)), functools.partial(_read, source)
    if not num_processes:
        return map(read, steps)
    # Grain's worker processes read absl flags, which programs without absl's main never parse.
    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()
    options = grain.MultiprocessingOptions(
        num_workers=num_processes, per_worker_buffer_size=_BATCHES_SENT
    )
    dataset = (
        grain.MapDataset.source(steps)
        .map(read)
        .to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))
    )
    return iter(dataset.mp_prefetch(options))


def _read(source: "GlobalBatch", step: int) -> dict[str, Any]:
    """Returns a batch, or its error, to arrive intact from another process."""
    try:
        return source[step]
    except Exception as error:
        return {"failure": _picklable(error)}


def _picklable(error: Exception) -> Exception:
    """Returns the error (or its text), with a bug's traceback as a note."""
    if not isinstance(error, (UserError, OSError)):
        error.add_note(f"In the reader:\n{traceback.format_exc()}")
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def _copied(batch: dict[str, Any]) -> dict[str, Any]:
    """Copies out of shared memory; a worker reuses it for its next batch."""
    return batch if "failure" in batch else {name: np.array(batch[name]) for name in batch}


def _produce(
    batches: Iterator[dict[str, Any]],
    ready: "queue.SimpleQueue[Any]",
    wanted: "queue.SimpleQueue[None]",
    stopped: threading.Event,
) -> None:
    result: Any = None
    while not isinstance(result, Exception):
        wanted.get()
        if stopped.is_set():
            return
        try:
            batch = next(batches)
            result = batch.get("failure", batch)
        except StopIteration:
            return
        except Exception as error:
            result = WorkerDiedError(f"a reader process ended: {error}")
        ready.put(result)


def _stop(stopped: threading.Event, wanted: "queue.SimpleQueue[None]") -> None:
    stopped.set()
    wanted.put(None)


def _end(batches: Any) -> None:
    # If a worker hangs, a thread is still blocked in the iterator, and errors are meaningless.
    with contextlib.suppress(Exception):
        batches.close()  # only worker processes have to end


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
    """Returns the next element of a queue, or raises it if it is an error."""
    until = math.inf if timeout is None else time.monotonic() + timeout
    while True:
        with contextlib.suppress(queue.Empty):
            left = until - time.monotonic()
            result = ready.get(timeout=max(0.0, min(left, _SECONDS_BETWEEN_LOOKS)))
            if isinstance(result, Exception):
                raise result
            return result
        if stopping():
            raise WaitCancelledError
        if time.monotonic() >= until:
            raise ReadTimeout(f"{problem} within {timeout:g} s")


def call_with_timeout(
    call: Callable[[], _Value], timeout: float | None, stopping: Callable[[], bool] = never
) -> _Value:
    """Calls a function, abandoning it if it hangs.

    Raises ReadTimeout, or WaitCancelledError if `stopping` returns true.
    """
    ready: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def work() -> None:
        try:
            ready.put(call())
        except Exception as error:
            ready.put(error)

    _start(work)
    return _get(ready, timeout, stopping, "storage did not answer")


def interruptible_sleep(seconds: float, stopping: Callable[[], bool]) -> None:
    """Sleeps; raises WaitCancelledError if `stopping` is or becomes true."""
    until = time.monotonic() + seconds
    while True:
        if stopping():
            raise WaitCancelledError
        left = until - time.monotonic()
        if left <= 0:
            return
        time.sleep(min(left, _SECONDS_BETWEEN_LOOKS))


class RetryLog:
    """Prints and collects messages about retries."""

    def __init__(self, log: Callable[[str], None]):
        self.log = log
        self._news: list[str] = []

    def add(self, message: str) -> None:
        self._news.append(message)
        self.log(message)

    def drain(self) -> list[str]:
        """Returns the messages since the last call."""
        news, self._news = self._news, []
        return news


@dataclasses.dataclass(frozen=True)
class RetryPolicy:
    """Retry limits."""

    retries: int = 0
    seconds: float = 0.0  # delay before the first retry; doubles each time
    timeout: float = 0.0  # seconds without a batch that count as a failure; 0 is unlimited

    @classmethod
    def of(cls, data: DataConfig) -> "RetryPolicy":
        return cls(data.data_retry.attempts, data.data_retry.delay, data.data_retry.timeout)

    def call(
        self,
        what: str,
        attempt: Callable[[int], _Value],
        *,
        is_worth_it: Callable[[BaseException], bool],
        hint: Callable[[BaseException], str],
        retry_log: RetryLog,
        stopping: Callable[[], bool] = never,
    ) -> _Value:
        """Returns the result of the first successful call of `attempt`.

        `attempt` takes the attempt number, from 1. Errors for which `is_worth_it` is false are
        raised at once. Raises UserError, starting with `what` and ending with `hint`, after the
        last attempt, and WaitCancelledError if `stopping` returned true.
        """
        began, tries, delay, number = time.monotonic(), self.retries + 1, self.seconds, 0
        while True:
            number += 1
            try:
                result = attempt(number)
                break
            except Exception as error:
                if not is_worth_it(error):
                    raise
                problem = (str(error) or type(error).__name__).removesuffix(".")
                if number >= tries:
                    how_often = "1 try" if number == 1 else f"{number} tries"
                    seconds = time.monotonic() - began
                    raise UserError(
                        f"{what} after {how_often} in {seconds:,.1f} s: {problem}. {hint(error)}"
                    ) from error
                delay = min(delay, _MAX_WAIT_SECONDS)
                retry_log.add(f"{what}: {problem}. Try {number + 1} of {tries} in {delay:g} s.")
            interruptible_sleep(delay, stopping)
            delay *= 2
        if number > 1:
            done, seconds = what.replace("could not be", "was"), time.monotonic() - began
            retry_log.add(f"{done} at try {number}, after {seconds:,.1f} s.")
        return result


def open_with_retries(
    location: str, open_once: Callable[[], _Value], policy: RetryPolicy, retry_log: RetryLog
) -> _Value:
    """Opens data with the same retries as reads during the run."""
    remote = is_url(location) or location.startswith("@")
    return policy.call(
        f"{location} could not be opened",
        lambda _: open_once(),
        is_worth_it=lambda error: is_transient(error, remote),
        hint=lambda _: "Check its storage, and run the same command again.",
        retry_log=retry_log,
    )


class RetryingReader:
    """Prefetched batches of a source in order, from any step, with retries.

    After a failed read the reader is abandoned, its files are reopened and checked, and reading
    resumes at exactly the step that failed. Not thread-safe.
    """

    def __init__(
        self,
        source: "GlobalBatch",
        opened: "Sequence[OpenDataSource]",
        *,
        what: str,
        retry_log: RetryLog,
        policy: RetryPolicy,
        num_processes: int = 0,
    ):
        self.source = source
        self.stopping: Callable[[], bool] = never
        self._opened = opened
        self._what = what
        self._retry_log = retry_log
        self._policy = policy
        self._num_processes = num_processes
        self._prefetcher: Prefetcher | None = None
        self._last_batch: tuple[int, dict[str, Any]] | None = None

    def close(self) -> None:
        """Stops reading; the next `read` may request any step."""
        self._last_batch = None
        self._stop()

    def _stop(self) -> None:
        if self._prefetcher is not None:
            self._prefetcher.close()
            self._prefetcher = None

    def read(self, step: int) -> dict[str, Any]:
        """Returns the arrays of the next step, or of any step after `close`.

        Raises UserError after all retries or if the data does not fit the model, or
        WaitCancelledError.
        """
        interruptible_sleep(0.0, self.stopping)

        def attempt(number: int) -> dict[str, Any]:
            try:
                if number > 1:
                    call_with_timeout(self._reopen, self._policy.timeout or None, self.stopping)
                if self._prefetcher is None:
                    self._prefetcher = Prefetcher(self.source, step, self._num_processes)
                return self._prefetcher.next(self._policy.timeout or None, self.stopping)
            except Exception:
                self._stop()
                raise

        arrays = self._policy.call(
            f"Step {step} of the {self._what} could not be read",
            attempt,
            is_worth_it=lambda error: isinstance(error, (FileReadError, OSError)),
            hint=self._hint,
            retry_log=self._retry_log,
            stopping=self.stopping,
        )
        self._last_batch = step, arrays
        return arrays

    def _hint(self, problem: BaseException) -> str:
        where = ", ".join(source.entry.location for source in self._opened)
        if isinstance(problem, ReadTimeout):
            hint = f"Check the storage of {where}, or raise data_retry.timeout."
        elif isinstance(problem, WorkerDiedError):
            hint = "See above for the cause (often memory: lower grain_worker_count)."
        elif isinstance(problem, OSError):
            hint = f"Check the storage of {where}."
        else:
            hint = ""  # the message has a hint
        return f"{hint} Then run the same command to resume from the last checkpoint.".lstrip()

    def _reopen(self) -> None:
        """Reopens all files; rereads the last batch to see whether they changed.

        Raises FileReadError if they did, because they may be put back.
        """
        for one in self._opened:
            for store in (one.data.store, one.data.labels):
                if store is not None:
                    file_access.invalidate_cache(store.files)
        if self._last_batch is None:
            return
        step, arrays = self._last_batch
        try:
            again = self.source[step]
        except FileReadError:
            raise
        except UserError:  # ids beyond vocab_size
            again = {}
        if not all(np.array_equal(again.get(name, ()), arrays[name]) for name in arrays):
            raise FileReadError(
                f"The files changed: step {step}, read again, gives another batch. Restore the "
                "files that the run was started with, or start a new run (another run_name)."
            )
