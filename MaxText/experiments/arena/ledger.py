"""The ledger of an arena session: ledger.jsonl, to which rows are only ever added.

A row is durable before anything follows from it, so a session that is killed at any moment loses at
most the runs at work. Rows of refused and discarded candidates stay like all others.
"""

import dataclasses
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, TypeVar

from pydantic import TypeAdapter, ValidationError

from MaxText.errors import UserError
from MaxText.monitoring.json_lines import JsonlFile, read_rows

FILE = "ledger.jsonl"
# Owners of runs that belong to no candidate.
BASELINE = "baseline"

Outcome = Literal["keep", "discard", "undecided", "refused"]
TrialState = Literal["completed", "diverged", "failed", "stopped", "refused"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CandidateRow:
    """A candidate, as it was submitted and examined; the baseline has one as well.

    Attributes:
      name: Unique in the session; also names its folder.
      spec: As the user wrote it.
      source_hash: Of its resolved keys and the contents of its files; "" if it could not be read.
      files: Source file of the user's code -> SHA-256.
      changes: Key -> value of the baseline and of the candidate, as YAML.
      reasons: Why it was refused; empty if it was not.
      cost: Fields of CountedCost; None if it was refused before.
      steps: Of its runs, by which it meets the budget.
      level: One-sided error of its test.
    """

    name: str
    spec: str
    source_hash: str = ""
    files: Mapping[str, str] = dataclasses.field(default_factory=dict)
    changes: Mapping[str, tuple[str, str]] = dataclasses.field(default_factory=dict)
    reasons: tuple[str, ...] = ()
    cost: Mapping[str, float] | None = None
    steps: int = 0
    seconds_per_step: float | None = None  # None unless the budget is in seconds
    level: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrialRow:
    """One run that has ended.

    Attributes:
      owner: Name of the candidate, or BASELINE.
      seed: Of the order of the data and of the initial weights.
      state: What became of it; `stopped` is a clear loser.
      loss: Validation loss in nats per token, as the session measures it; None if not completed.
      bytes_per_token: UTF-8 bytes per target of the validation text; None if unknown.
      evaluations: Validation losses during training, in order; they decide about clear losers.
      train_seconds: In training steps.
      duration: Seconds of its process, since it was last started.
      reasons: Why it does not count; empty if it is completed.
    """

    owner: str
    seed: int
    state: TrialState
    loss: float | None = None
    bytes_per_token: float | None = None
    evaluations: tuple[float, ...] = ()
    train_seconds: float = 0.0
    duration: float = 0.0
    tokens: float = 0.0
    flops: float = 0.0  # as train.py counts them
    reasons: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class LookRow:
    """A look of a candidate's sequential test; see sequential_test.Look."""

    owner: str
    num_seeds: int
    improvement: float
    low: float
    high: float
    predictive_power: float
    std: float  # of a paired difference


@dataclasses.dataclass(frozen=True, kw_only=True)
class VerdictRow:
    """The verdict on a candidate.

    Attributes:
      owner: Name of the candidate.
      verdict: Final; it is never revised.
      reasons: Sentences.
    """

    owner: str
    verdict: Outcome
    reasons: tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class FinalRow:
    """A kept candidate against the baseline on the hidden half of the validation text.

    Losses are in nats per token, by seed as text.
    """

    owner: str
    losses: Mapping[str, float]
    baseline_losses: Mapping[str, float]
    bytes_per_token: float | None = None
    reasons: tuple[str, ...] = ()


Row = CandidateRow | TrialRow | LookRow | VerdictRow | FinalRow
RowT = TypeVar("RowT", CandidateRow, TrialRow, LookRow, VerdictRow, FinalRow)
_KINDS: dict[str, type[Row]] = {
    "candidate": CandidateRow,
    "trial": TrialRow,
    "look": LookRow,
    "verdict": VerdictRow,
    "final": FinalRow,
}
_EVENTS = {kind: event for event, kind in _KINDS.items()}


class Ledger:
    """The rows of a session."""

    def __init__(self, rows: Sequence[Row], file: JsonlFile | None = None):
        """Holds rows.

        Args:
          rows: So far.
          file: Gets new rows; None for a ledger that is only read.
        """
        self.rows = list(rows)
        self._file = file

    def append(self, row: Row) -> None:
        """Adds a row, durably."""
        if self._file is not None:
            fields = {"event": _EVENTS[type(row)], "time": round(time.time(), 3)}
            self._file.append(fields | dataclasses.asdict(row))
            self._file.flush()
        self.rows.append(row)

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()

    def of(self, kind: type[RowT], owner: str | None = None) -> list[RowT]:
        """Returns the rows of a kind, in order.

        Args:
          kind: Class of the rows.
          owner: Of the rows; None for all.
        """
        return [
            row
            for row in self.rows
            if isinstance(row, kind) and owner in (None, getattr(row, "owner", None))
        ]

    def candidate(self, name: str) -> CandidateRow | None:
        """Returns the row of a candidate, or of the baseline; None if there is none yet."""
        return next((row for row in self.of(CandidateRow) if row.name == name), None)

    @property
    def candidates(self) -> list[CandidateRow]:
        """All candidates, in order, without the baseline."""
        return [row for row in self.of(CandidateRow) if row.name != BASELINE]

    def verdict(self, owner: str) -> VerdictRow | None:
        """Returns the verdict on a candidate; None if it is not decided."""
        return next(iter(self.of(VerdictRow, owner)), None)

    def losses(self, owner: str) -> dict[int, float]:
        """Returns the measured losses of completed runs, by seed."""
        return {row.seed: row.loss for row in self.of(TrialRow, owner) if row.loss is not None}


def open_ledger(folder: Path, *, writes: bool = True) -> Ledger:
    """Returns the ledger of a session's folder.

    Args:
      folder: Of the session, whose lock the caller holds if it writes.
      writes: Whether rows will be added. A row that a crash has cut off is then removed.

    Raises:
      UserError: A row is not of this program.
    """
    path = folder / FILE
    file = JsonlFile(str(path), lambda row: True) if writes else None
    rows = []
    for number, fields in enumerate(read_rows(str(path)), 1):
        kind = _KINDS.get(fields.pop("event", ""))
        fields.pop("time", None)
        try:
            if kind is None:
                raise ValueError("no event of a session")
            rows.append(TypeAdapter(kind).validate_python(fields))
        except (ValidationError, ValueError) as error:
            raise UserError(
                f"{path}: row {number} cannot be read ({error}). Another version wrote it, or it "
                "was edited: restore the file, or set output= to another folder."
            ) from error
    return Ledger(rows, file)
