"""Retries of failed reads, both while opening data and while reading batches."""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from MaxText.config.data_sections import Data
from MaxText.errors import UserError
from MaxText.input_pipeline.prefetch import (
    Prefetcher,
    ReadTimeout,
    WorkerDiedError,
    call_with_timeout,
    interruptible_sleep,
    never,
)
from MaxText.storage import file_access
from MaxText.storage.errors import UnreadableFile, is_transient
from MaxText.storage.file_access import is_url

if TYPE_CHECKING:
    from MaxText.input_pipeline.data_sources import OpenDataSource
    from MaxText.input_pipeline.sequences.global_batch import GlobalBatch

_Value = TypeVar("_Value")

_MAX_WAIT_SECONDS = 60.0


class RetryLog:
    """Prints and collects messages about retries."""

    def __init__(self, show: Callable[[str], None]):
        self.show = show
        self._news: list[str] = []

    def add(self, message: str) -> None:
        self._news.append(message)
        self.show(message)

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
    def of(cls, data: Data) -> "RetryPolicy":
        return cls(data.data_read_retries, data.data_retry_seconds, data.data_read_timeout)

    def call(
        self,
        what: str,
        attempt: Callable[[int], _Value],
        *,
        is_worth_it: Callable[[BaseException], bool],
        hint: Callable[[BaseException], str],
        log: RetryLog,
        stopping: Callable[[], bool] = never,
    ) -> _Value:
        """Returns the result of the first successful call of `attempt`.

        `attempt` takes the attempt number, from 1. Errors for which `is_worth_it` is false are
        raised at once. Raises UserError, starting with `what` and ending with `hint`, after the
        last attempt, and StopWaiting if `stopping` returned true.
        """
        began, delay, number = time.monotonic(), self.seconds, 0
        while True:
            number += 1
            try:
                result = attempt(number)
            except Exception as error:
                if not is_worth_it(error):
                    raise
                if number > self.retries:
                    tries = "1 try" if number == 1 else f"{number} tries"
                    raise UserError(
                        f"{what} after {tries} in {time.monotonic() - began:,.1f} s: "
                        f"{_sentence(error)} {hint(error)}"
                    ) from error
                delay = min(delay, _MAX_WAIT_SECONDS)
                log.add(
                    f"{what}: {_sentence(error)} Try {number + 1} of {self.retries + 1} in "
                    f"{delay:g} s."
                )
            else:
                if number > 1:
                    done = what.replace("could not be", "was")
                    seconds = time.monotonic() - began
                    log.add(f"{done} at try {number}, after {seconds:,.1f} s.")
                return result
            interruptible_sleep(delay, stopping)
            delay *= 2


def _sentence(problem: BaseException) -> str:
    text = str(problem) or type(problem).__name__
    return text if text.endswith(".") else f"{text}."


def open_with_retries(
    location: str, open_once: Callable[[], _Value], policy: RetryPolicy, log: RetryLog
) -> _Value:
    """Opens data with the same retries as reads during the run."""
    remote = is_url(location) or location.startswith("@")
    return policy.call(
        f"{location} could not be opened",
        lambda _: open_once(),
        is_worth_it=lambda error: is_transient(error, remote),
        hint=lambda _: "Check its storage, and run the same command again.",
        log=log,
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
        log: RetryLog,
        policy: RetryPolicy,
        num_processes: int = 0,
    ):
        self.source = source
        self.stopping: Callable[[], bool] = never
        self._opened = opened
        self._what = what
        self._log = log
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
        """Returns the arrays of the step after the last one read, or of any step after `close`.

        Raises UserError after all retries or if the data does not fit the model, or StopWaiting.
        """
        interruptible_sleep(0.0, self.stopping)
        failed_path: str | None = None

        def attempt(number: int) -> dict[str, Any]:
            nonlocal failed_path
            try:
                if number > 1:
                    try:
                        self._reopen_and_check(failed_path)
                    except UserError as error:  # the files may be put back
                        raise UnreadableFile(str(error), failed_path or "") from error
                if self._prefetcher is None:
                    self._prefetcher = Prefetcher(self.source, step, self._num_processes)
                return self._prefetcher.next(self._policy.timeout or None, self.stopping)
            except Exception as error:
                self._stop()
                failed_path = getattr(error, "path", None) or failed_path
                raise

        arrays = self._policy.call(
            f"Step {step} of the {self._what} could not be read",
            attempt,
            is_worth_it=lambda error: isinstance(error, (UnreadableFile, OSError)),
            hint=self._hint,
            log=self._log,
            stopping=self.stopping,
        )
        self._last_batch = step, arrays
        return arrays

    def _hint(self, problem: BaseException) -> str:
        where = ", ".join(source.entry.location for source in self._opened)
        if isinstance(problem, ReadTimeout):
            hint = f"Check the storage of {where}, or raise data_read_timeout."
        elif isinstance(problem, WorkerDiedError):
            hint = "See above for the cause (often memory: lower grain_worker_count)."
        elif isinstance(problem, OSError):
            hint = f"Check the storage of {where}."
        else:
            hint = ""  # the message has a hint
        return f"{hint} Then run the same command to resume from the last checkpoint.".lstrip()

    def _reopen_and_check(self, path: str | None) -> None:
        """Reopens all files, checks the one that failed, and verifies that the data is unchanged.

        Raises UnreadableFile if it is still missing or truncated, UserError if its contents
        changed, and ReadTimeout if the check hangs.
        """
        newest = self._last_batch

        def look() -> None:
            for one in self._opened:
                for store in (one.data.store, one.data.labels):
                    if store is not None:
                        file_access.forget(store.files)
                        store.check([path] if path else [])
            if newest is not None:
                self._compare(*newest)

        call_with_timeout(look, self._policy.timeout or None, self.stopping)

    def _compare(self, step: int, arrays: dict[str, Any]) -> None:
        """Rereads the last batch and verifies that it is unchanged; file sizes cannot prove it."""
        try:
            again = self.source[step]
            if all(np.array_equal(again[name], arrays[name]) for name in arrays):
                return
        except UnreadableFile:
            raise
        except UserError:  # ids beyond vocab_size
            pass
        raise UserError(
            f"The files changed: step {step}, read again, gives another batch. Restore the files "
            "that the run was started with, or start a new run (another run_name)."
        )
