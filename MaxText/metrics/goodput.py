"""Goodput: share of a run's time in useful steps, and the rest.

The base is the program's running time over all attempts, without the downtime between them, which
says nothing about the program. docs/reference/run_folder_and_events.md defines every part.
"""

import collections
import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

# Part of the time -> label, in display order.
PARTS: dict[str, str] = {
    "useful": "useful steps",
    "data_wait": "waiting for data",
    "startup": "start-up",
    "compile": "compile",
    "evaluation": "evaluation",
    "checkpoint": "checkpoint",
    "lost": "lost work",
    "shutdown": "sampling, finish",
    "other": "other",
}

SMALLEST_SHARE = 0.0002  # smallest share shown: times are stored in milliseconds


@dataclasses.dataclass(frozen=True)
class Launch:
    """A start of the program in a run folder; times in seconds.

    Attributes:
      number: From 0.
      first_row: Its start or resume row.
      launched: Unix time of the launch.
      seconds: Time that it ran. If it was killed: up to its last row, plus lost work that a later
        start reported.
      down_after: Time until the next launch; 0 for the last.
    """

    number: int
    first_row: Mapping[str, Any]
    launched: float
    seconds: float
    down_after: float


@dataclasses.dataclass(frozen=True)
class Goodput:
    """Time of a run.

    Attributes:
      seconds: Of each of PARTS; they add up to the running time.
      attempts: The starts of the program, in their order.
    """

    seconds: Mapping[str, float]
    attempts: tuple[Launch, ...]

    @property
    def running_seconds(self) -> float:
        """Running time over all starts."""
        return sum(self.seconds.values())

    @property
    def down_seconds(self) -> float:
        """Time between the starts, which is not part of the running time."""
        return sum(attempt.down_after for attempt in self.attempts)

    @property
    def goodput(self) -> float:
        """Share of the running time in useful steps, from 0 to 1."""
        return self.share("useful")

    def share(self, part: str) -> float:
        """Returns the share of one of PARTS in the running time, from 0 to 1."""
        return self.seconds[part] / self.running_seconds if self.running_seconds else 0.0

    def running_at(self, rows: Sequence[Mapping[str, Any]]) -> np.ndarray:
        """Returns running seconds at each row, without downtime, float [N]."""
        offsets = {}
        running_before = 0.0
        for attempt in self.attempts:
            offsets[attempt.number] = running_before - attempt.launched
            running_before += attempt.seconds
        return np.array([row["time"] + offsets[row["restart"]] for row in rows], float)


def measure_goodput(rows: Sequence[Mapping[str, Any]], replaced: Collection[int] = ()) -> Goodput:
    """Sums the time of a run by part.

    Args:
      rows: All rows of events.jsonl.
      replaced: Indices of rows that a rollback has replaced; their time is lost.
    """
    parts = dict.fromkeys(PARTS, 0.0)
    by_attempt: dict[int, list[Mapping[str, Any]]] = {}
    for index, row in enumerate(rows):
        by_attempt.setdefault(row["restart"], []).append(row)
        for part, seconds in _parts_of(row, index in replaced):
            parts[part] += seconds
    kept_rows = [row for index, row in enumerate(rows) if index not in replaced]
    skipped = _skipped_seconds(kept_rows)
    parts["useful"] -= skipped
    parts["lost"] += skipped + sum(
        _recomputed_seconds(rows_of_attempt[0]) for rows_of_attempt in by_attempt.values()
    )
    attempts, other = _attempts(by_attempt)
    parts["other"] += other
    return Goodput(parts, attempts)


def _parts_of(row: Mapping[str, Any], is_replaced: bool) -> list[tuple[str, float]]:
    """Returns which parts the time of a row belongs to, in seconds."""
    seconds = row.get("seconds") or 0.0
    if is_replaced or row["event"] in ("step_skipped", "record_skipped"):
        return [("lost", seconds)]
    if row["event"] == "step":
        waited = min(row.get("data_seconds") or 0.0, seconds)
        return [("useful", seconds - waited), ("data_wait", waited)]
    return [(row["phase"] if row["phase"] in PARTS else "other", seconds)]


def _skipped_seconds(rows: Sequence[Mapping[str, Any]]) -> float:
    """Returns the seconds of steps whose update was skipped."""
    skips = collections.Counter[int | None]()
    total = 0.0
    for row in rows:
        if row["event"] == "step_skipped":
            skips[row.get("step")] += row.get("count") or 1
    for row in rows if skips else ():
        if row["event"] == "step":
            # A row stands for several steps if not every step is reported.
            updates = row.get("updates") or 1
            skipped = sum(skips[row["step"] - age] for age in range(updates))
            total += _parts_of(row, False)[0][1] * min(skipped, updates) / updates
    return total


def _recomputed_seconds(first_row: Mapping[str, Any]) -> float:
    """Returns the seconds of repeated work of earlier attempts."""
    return sum(((first_row.get("lost") or {}).get("seconds") or {}).values())


def _attempts(by_attempt: dict[int, list[Mapping[str, Any]]]) -> tuple[tuple[Launch, ...], float]:
    """Returns the attempts, and their time without rows."""
    launches: list[Launch] = []
    other = pending = 0.0
    next_launch = None
    # Backwards, because each attempt reports the losses of earlier ones.
    for number, rows in reversed(by_attempt.items()):
        launched = rows[0]["time"] - (rows[0].get("seconds") or 0.0)
        ended = max(row["time"] for row in rows)
        stopped = any(row["event"] == "stop" for row in rows)
        unnamed = max(ended - launched - sum(row.get("seconds") or 0.0 for row in rows), 0.0)
        gap = max(next_launch - ended, 0.0) if next_launch is not None else 0.0
        # Rows of lost work were removed. After a kill they were the last ones, so their time looks
        # like downtime; otherwise it precedes the stop row.
        in_gap = 0.0 if stopped else min(pending, gap)
        in_attempt = min(pending - in_gap, unnamed)
        other += unnamed - in_attempt
        launches.append(Launch(number, rows[0], launched, ended - launched + in_gap, gap - in_gap))
        pending += _recomputed_seconds(rows[0]) - in_gap - in_attempt
        next_launch = launched
    return tuple(reversed(launches)), other
