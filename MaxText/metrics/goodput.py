"""Goodput: share of a run's time in useful steps, and where the rest went.

The base is the time in which the program ran, over all its attempts. Time between a kill and the
next start is reported separately: it says nothing about the program. docs/report.md defines every
part.
"""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

# Part of the time -> how it is called. In this order wherever they are shown.
PARTS: dict[str, str] = {
    "useful": "useful steps",
    "data_wait": "waiting for data",
    "start_up": "start-up",
    "compile": "compile",
    "evaluation": "evaluation",
    "checkpoint": "checkpoint",
    "lost": "lost work",
    "finish": "sampling, finish",
    "other": "other",
}

# Parts of a smaller share are left out where no run has more: times are stored in milliseconds.
NOTHING = 0.0002


@dataclasses.dataclass(frozen=True)
class Attempt:
    """A start of the program in a run folder.

    Attributes:
      first_row: Its start or resume row.
      launched: Unix seconds of the process start.
      running_before: Seconds that earlier attempts ran.
      seconds: How long it ran; for a killed one at least up to its last row, and as long as the
        work took whose loss the next attempt reports.
      down_after: Seconds until the next attempt; 0 for the last.
      stopped: Whether it ended by itself.
    """

    number: int
    first_row: Mapping[str, Any]
    launched: float
    running_before: float
    seconds: float
    down_after: float
    stopped: bool


@dataclasses.dataclass(frozen=True)
class Goodput:
    """Time of a run.

    Attributes:
      seconds: For each of PARTS; they add up to the running time.
    """

    seconds: Mapping[str, float]
    attempts: tuple[Attempt, ...]

    @property
    def running_seconds(self) -> float:
        return sum(self.seconds.values())

    @property
    def down_seconds(self) -> float:
        """Time between attempts."""
        return sum(attempt.down_after for attempt in self.attempts)

    @property
    def goodput(self) -> float:
        """Share of the running time in useful steps."""
        return self.share("useful")

    def share(self, part: str) -> float:
        """Returns the share of the running time in one of PARTS."""
        return self.seconds[part] / self.running_seconds if self.running_seconds else 0.0

    def running_at(self, rows: Sequence[Mapping[str, Any]]) -> np.ndarray:
        """Returns running seconds at each row, without down times: float [N]."""
        before = {each.number: each.running_before - each.launched for each in self.attempts}
        return np.array([row["time"] + before[row["attempt"]] for row in rows], float)


def measure_goodput(rows: Sequence[Mapping[str, Any]], replaced: Collection[int] = ()) -> Goodput:
    """Adds up the time of a run.

    Args:
      rows: All of events.jsonl, in order.
      replaced: Indices of rows whose work was done again later; their time is lost.
    """
    parts = dict.fromkeys(PARTS, 0.0)
    by_attempt: dict[int, list[Mapping[str, Any]]] = {}
    for index, row in enumerate(rows):
        by_attempt.setdefault(row["attempt"], []).append(row)
        for part, seconds in _parts_of(row, index in replaced):
            parts[part] += seconds
    kept = [row for index, row in enumerate(rows) if index not in replaced]
    skipped = _skipped_seconds(kept)
    parts["useful"] -= skipped
    parts["lost"] += skipped + sum(_lost(rows_of[0]) for rows_of in by_attempt.values())
    attempts, other = _attempts(list(by_attempt.items()))
    parts["other"] += other
    return Goodput(parts, attempts)


def _parts_of(row: Mapping[str, Any], is_replaced: bool) -> list[tuple[str, float]]:
    seconds = row.get("seconds") or 0.0
    if is_replaced or row["event"] == "skip":
        return [("lost", seconds)]
    if row["event"] == "step":
        waited = min(row.get("data_seconds") or 0.0, seconds)
        return [("useful", seconds - waited), ("data_wait", waited)]
    return [(row["phase"] if row["phase"] in PARTS else "other", seconds)]


def skips_updates(row: Mapping[str, Any]) -> bool:
    """Returns whether a row is about updates that were not applied, not about unread records."""
    return row["event"] == "skip" and row.get("what") != "record"


def _skipped_seconds(rows: Sequence[Mapping[str, Any]]) -> float:
    """Returns the time of updates that were computed but not applied."""
    steps = iter(sorted((row for row in rows if row["event"] == "step"), key=lambda r: r["step"]))
    skips = [row for row in rows if skips_updates(row) and row.get("step") is not None]
    step, total, counted = next(steps, None), 0.0, 0
    for skip in sorted(skips, key=lambda row: row["step"]):
        # With few reports a row stands for several updates, up to its own.
        while step is not None and step["step"] < skip["step"]:
            step, counted = next(steps, None), 0
        if step is None:
            break
        updates = step.get("updates") or 1
        newly = min(skip.get("count") or 1, updates - counted)
        counted += newly
        total += _parts_of(step, False)[0][1] * newly / updates
    return total


def _lost(first_row: Mapping[str, Any]) -> float:
    """Returns the seconds of work that earlier attempts had done and this one repeats."""
    return sum(((first_row.get("lost") or {}).get("seconds") or {}).values())


def _attempts(
    by_attempt: Sequence[tuple[int, Sequence[Mapping[str, Any]]]],
) -> tuple[tuple[Attempt, ...], float]:
    """Returns the attempts, and the time inside them that no row accounts for."""
    found: list[Attempt] = []
    other = pending = 0.0
    next_launch = None
    # From the last to the first, as each says what the ones before have lost.
    for number, rows in reversed(by_attempt):
        launched = rows[0]["time"] - (rows[0].get("seconds") or 0.0)
        ended = max(row["time"] for row in rows)
        stopped = any(row["event"] == "stop" for row in rows)
        unnamed = max(ended - launched - sum(row.get("seconds") or 0.0 for row in rows), 0.0)
        gap = max(next_launch - ended, 0.0) if next_launch is not None else 0.0
        # The rows of lost work are gone. After a kill they were the last ones, so that the time
        # they took looks like a pause; otherwise it lies before the row of the end.
        in_gap = 0.0 if stopped else min(pending, gap)
        in_attempt = min(pending - in_gap, unnamed)
        other += unnamed - in_attempt
        seconds = ended - launched + in_gap
        found.append(Attempt(number, rows[0], launched, 0.0, seconds, gap - in_gap, stopped))
        pending += _lost(rows[0]) - in_gap - in_attempt
        next_launch = launched
    attempts, before = [], 0.0
    for attempt in reversed(found):
        attempts.append(dataclasses.replace(attempt, running_before=before))
        before += attempt.seconds
    return tuple(attempts), other
