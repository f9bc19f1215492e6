"""Reads that fail in mid-run: tried again from files opened anew, a limited number of times.

Imports no jax.
"""

import dataclasses
import io
import pickle
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from MaxText.configuration.data_sections import Data
from MaxText.errors import UserError
from MaxText.input_pipeline.data_errors import BadRecord, UnreadableFile
from MaxText.input_pipeline.data_sources import OpenedSource
from MaxText.input_pipeline.prefetch import (
    ReadAhead,
    ReaderLost,
    ReadTimeout,
    never,
    pause,
    within,
)
from MaxText.input_pipeline.sequences.global_batch import BAD, RowBatches
from MaxText.input_pipeline.storage import is_url
from MaxText.input_pipeline.token_store.record_index import RecordIndex

_LONGEST_WAIT = 60.0
# Mapped files need no waiting, and threads that only compute hand Python's lock to and fro: batches
# of 64 x 1024 then cost 1.1 ms of CPU with one thread and 2.0 ms with four.
_READ_THREADS = 4


class Incidents:
    """What went wrong and was mended, or is being tried again."""

    def __init__(self, show: Callable[[str], None]):
        """Args: `show`: takes each message at once."""
        self._show = show
        self._news: list[str] = []

    def add(self, message: str) -> None:
        """Notes and shows a message."""
        self._news.append(message)
        self._show(message)

    def drain(self) -> list[str]:
        """Messages since the last call."""
        news, self._news = self._news, []
        return news


@dataclasses.dataclass(frozen=True)
class Retrying:
    """How often and how long a failed read is tried again.

    Attributes:
      retries: further tries at most.
      seconds: wait before the first of them; each later one waits twice as long.
      timeout: seconds without a batch that count as a failed read; 0 waits for ever.
    """

    retries: int = 0
    seconds: float = 0.0
    timeout: float = 0.0

    @classmethod
    def of(cls, data: Data) -> "Retrying":
        """As the keys say."""
        return cls(data.data_read_retries, data.data_retry_seconds, data.data_read_timeout)

    def wait(self, failures: int) -> float:
        """Seconds to wait after so many failures."""
        # Doubled often enough, any number is beyond what floats hold.
        return min(self.seconds * 2.0 ** min(failures - 1, 60), _LONGEST_WAIT)


def _is_worth_a_retry(error: Exception) -> bool:
    """Whether a read may succeed later.

    OSError is also the base of a timeout and of the loss of a reader process; what other libraries
    raise is a BadRecord by now. Other errors of data are mistakes of the user, or ours.
    """
    return isinstance(error, (BadRecord, UnreadableFile, OSError))


class _Tries:
    """The tries of one step.

    Attributes:
      failed: how many have failed.
      wrong: how many of them found wrong contents.
      waits: how many were followed by a wait.
    """

    def __init__(self) -> None:
        self.failed = self.wrong = self.waits = 0
        self._began = time.monotonic()

    def count(self, problem: Exception) -> None:
        """Adds a failed one."""
        self.failed += 1
        self.wrong += isinstance(problem, BadRecord) and not problem.may_heal

    @property
    def seconds(self) -> float:
        """Since the first one began."""
        return time.monotonic() - self._began


class SteadyReader:
    """The batches of a source in order, made ahead, from any step.

    A failed read is tried again: what reads is given up, files are opened anew and looked at, and
    reading begins at exactly the step that failed. Not for several threads at once.

    Attributes:
      source: the batches by step; another object after a failed read.
      opened: the data sets behind it, likewise.
      stopping: whether nobody shall wait any more; looked at while waiting, and at each step.
    """

    def __init__(
        self,
        source: RowBatches,
        opened: list[OpenedSource],
        *,
        what: str,
        incidents: Incidents,
        retrying: Retrying,
        num_processes: int = 0,
    ):
        """Reads nothing.

        Args:
          source: the batches by step.
          opened: the data sets behind it, none for random tokens.
          what: is read, in words for messages.
          incidents: takes what was tried again.
          retrying: limits.
          num_processes: reader processes, 0 for threads of this one.
        """
        self.source = source
        self.opened = opened
        self.stopping: Callable[[], bool] = never
        self._what = what
        self._incidents = incidents
        self._retrying = retrying
        self._num_processes = num_processes
        self._ahead: ReadAhead | None = None
        self._newest: tuple[int, dict[str, Any]] | None = None

    def close(self) -> None:
        """Stops reading; the next `read` may be of any step."""
        self._newest = None
        self._stop()

    def _stop(self) -> None:
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None

    def read(self, step: int) -> dict[str, Any]:
        """The arrays of a step: the one after the last call's, or any after `close`.

        Raises:
          UserError: it cannot be read, after all tries; or the data do not fit the model.
          StopWaiting: nobody shall wait any more.
        """
        pause(0.0, self.stopping)
        tries = _Tries()
        while True:
            try:
                if tries.failed:
                    self._reopen(step)
                arrays = self._next(step)
                break
            except Exception as error:
                # What cannot be opened again could be at the start of the run: it may come back.
                is_reopening = tries.failed and self._ahead is None and isinstance(error, UserError)
                if not (is_reopening or _is_worth_a_retry(error)):
                    raise
                problem = error
            self._stop()
            tries.count(problem)
            if not self._is_given_up(problem, step, tries):
                self._wait(problem, step, tries)
        if tries.waits:
            how = "without what still could not be" if arrays.get(BAD) else "whole"
            self._incidents.add(
                f"{self._named(step)} was read at try {tries.failed + 1}, {how}, after "
                f"{tries.seconds:,.1f} s."
            )
        self._note_given_up(arrays)
        self._newest = step, dict(arrays)
        return arrays

    def _next(self, step: int) -> dict[str, Any]:
        if self._ahead is None:
            threads = _num_threads(self.opened)
            self._ahead = ReadAhead(self.source, step, threads, self._num_processes)
        return self._ahead.next(self._retrying.timeout or None, self.stopping)

    def _is_given_up(self, problem: Exception, step: int, tries: "_Tries") -> bool:
        """Whether the step is now to be read without the rows that cannot be."""
        source = self.source
        if not (source.skip_bad and isinstance(problem, (BadRecord, UnreadableFile))):
            return False
        if tries.failed <= self._retrying.retries:
            return problem.path in source.given_up  # of a reader that did not know yet
        if source.step_given_up == step:
            return False
        source.step_given_up = step
        source.given_up |= {problem.path}
        return True

    def _note_given_up(self, arrays: dict[str, Any]) -> None:
        """Nobody waits a second time for a file that did not come back; it is still looked for."""
        gone = {problem.path for problem in arrays.get(BAD, ()) if problem.may_heal}
        self.source.given_up |= gone

    def _wait(self, problem: Exception, step: int, tries: "_Tries") -> None:
        """Waits before the next try.

        Raises:
          UserError: there is none.
          StopWaiting: nobody shall wait any more.
        """
        retries = self._retrying.retries
        # Wrong bytes read again are likely the same; once, because the file may be being copied.
        if tries.failed > retries or tries.wrong > 1:
            raise UserError(
                f"{self._named(step)} could not be read after {tries.failed} "
                f"{'try' if tries.failed == 1 else 'tries'} in {tries.seconds:,.1f} s: "
                f"{_sentence(problem)} {self._remedy(problem)}"
            ) from problem
        last = tries.failed + 1 if tries.wrong else retries + 1
        wait = self._retrying.wait(tries.failed)
        self._incidents.add(
            f"{self._named(step)} could not be read: {_sentence(problem)} "
            f"Try {tries.failed + 1} of {last} in {wait:g} s, from files opened anew."
        )
        tries.waits += 1
        pause(wait, self.stopping)

    def _named(self, step: int) -> str:
        return f"Step {step} of the {self._what}"

    def _remedy(self, problem: Exception) -> str:
        where = ", ".join(source.entry.location for source in self.opened)
        if isinstance(problem, ReadTimeout):
            remedy = f"Look at the storage of {where}, or raise data_read_timeout."
        elif isinstance(problem, ReaderLost):
            remedy = "Look above for what ended it (often memory: lower grain_worker_count)."
        elif isinstance(problem, BadRecord):
            remedy = "Copy the file again."
            if not self.source.skip_bad:
                remedy = f"{remedy[:-1]}, or set on_bad_record=skip to leave such rows out."
        elif isinstance(problem, OSError):
            remedy = f"Look at the storage of {where}."
        else:
            remedy = ""  # the message has one
        return f"{remedy} The same command then goes on from the last checkpoint.".lstrip()

    def _reopen(self, step: int) -> None:
        """Takes copies of the readers that have nothing open, of files that are the same.

        Raises:
          UserError: a file was cut short, or they hold other data.
          ReadTimeout: looking at them hangs.
        """
        newest = self._newest
        if newest is not None and newest[1].get(BAD):
            newest = None  # the record may be whole by now

        def reopened() -> tuple[RowBatches, list[OpenedSource]]:
            source, opened = _copied((self.source, self.opened))
            for one in opened:
                try:
                    one.data.stream.check(source.given_up)
                except UnreadableFile:
                    if source.step_given_up != step:
                        raise
            if newest is not None:
                _compare(source[newest[0]], *newest)
            return source, opened

        self.source, self.opened = within(self._retrying.timeout or None, reopened, self.stopping)


def _compare(again: dict[str, Any], step: int, arrays: dict[str, Any]) -> None:
    """Proof that names and sizes cannot give: the last batch, read again, is the same."""
    if again.keys() == arrays.keys() and all(
        np.array_equal(again[name], arrays[name]) for name in again
    ):
        return
    raise UserError(
        f"The files hold other data than before: step {step}, read again, is another batch. Put "
        "the files back that the run was started with, or begin a new run (another run_name)."
    )


def _sentence(problem: Exception) -> str:
    text = str(problem) or type(problem).__name__
    return text if text.endswith(".") else f"{text}."


def _num_threads(opened: list[OpenedSource]) -> int:
    mapped = all(
        hasattr(source.data.stream, "gather") and not is_url(source.entry.location)
        for source in opened
    )
    return 1 if mapped else _READ_THREADS


class _Pickler(pickle.Pickler):
    """Pickles what reads, but for arrays and indices, which the copy shares."""

    def __init__(self, file: io.BytesIO):
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.shared: list[Any] = []

    def persistent_id(self, obj: Any) -> int | None:
        if not isinstance(obj, (np.ndarray, RecordIndex)):
            return None
        self.shared.append(obj)
        return len(self.shared) - 1


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, shared: list[Any]):
        super().__init__(file)
        self._shared = shared

    def persistent_load(self, pid: int) -> Any:
        return self._shared[pid]


def _copied(value: Any) -> Any:
    """A copy as a reader process gets it, with nothing open and no lock held; arrays are shared."""
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(value)
    file.seek(0)
    return _Unpickler(file, pickler.shared).load()
