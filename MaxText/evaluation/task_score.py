"""What a task gives: named numbers, for the terminal and for JSON. Imports no jax."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from MaxText.metrics.tables import ruled_table


@dataclasses.dataclass(frozen=True)
class TaskScore:
    """The outcome of one task.

    Attributes:
      task: its name.
      path: the file that was scored.
      metrics: name -> value; perplexities, shares between 0 and 1, bits.
      counts: what was scored: passages, pages, words, bytes, tokens.
      seconds: wall time of scoring.
    """

    task: str
    path: str
    metrics: Mapping[str, float]
    counts: Mapping[str, int]
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return dataclasses.asdict(self) | {
            "metrics": dict(self.metrics),
            "counts": dict(self.counts),
        }


def table(scores: Sequence[TaskScore]) -> str:
    """All metrics, one on a line, with what they were taken over."""
    rows = []
    for score in scores:
        over = ", ".join(f"{count:,} {unit}" for unit, count in score.counts.items())
        for metric, value in score.metrics.items():
            rows.append([score.task, metric.replace("_", " "), _written(value), over])
            over = ""
    seconds = sum(score.seconds for score in scores)
    total = ["in all", "", "", f"{seconds:.1f} s"]
    return ruled_table(["task", "metric", "value", "over"], rows, total, right=(2,))


def _written(value: float) -> str:
    """With four decimals, or six digits where it is large."""
    return f"{value:.4f}" if abs(value) < 100 else f"{value:.6g}"
