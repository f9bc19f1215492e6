"""Results of a task, for the terminal and JSON."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from MaxText.metrics.tables import format_table


@dataclasses.dataclass(frozen=True)
class TaskScore:
    """Result of one task."""

    task: str
    path: str
    metrics: Mapping[str, float]  # perplexities, shares between 0 and 1, bits
    counts: Mapping[str, int]  # of passages, pages, words, bytes, tokens
    seconds: float  # wall time

    def to_json(self) -> dict[str, Any]:
        """Returns JSON values."""
        return dataclasses.asdict(self) | {
            "metrics": dict(self.metrics),
            "counts": dict(self.counts),
        }


def table(scores: Sequence[TaskScore]) -> str:
    """Formats one row per metric, with the counts it was computed over."""
    rows = []
    for score in scores:
        over = ", ".join(f"{count:,} {unit}" for unit, count in score.counts.items())
        for metric, value in score.metrics.items():
            rows.append([score.task, metric.replace("_", " "), _written(value), over])
            over = ""
    seconds = sum(score.seconds for score in scores)
    total = ["in all", "", "", f"{seconds:.1f} s"]
    return format_table(["task", "metric", "value", "over"], rows, total, right=(2,))


def _written(value: float) -> str:
    return f"{value:.4f}" if abs(value) < 100 else f"{value:.6g}"
