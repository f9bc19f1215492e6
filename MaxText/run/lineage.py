"""Ancestors of a run, with the sum of their tokens and FLOPs.

Saved with each checkpoint, because the ancestors' folders may be gone.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from MaxText.growth.growth_plan import Record
from MaxText.run.restore import RestoreResult
from MaxText.run.training_stats import TrainingStats


class TrainingCost(NamedTuple):
    """Training tokens and FLOPs, counted as in cost/flops.py."""

    tokens: float
    flops: float


_NOTHING = TrainingCost(0, 0.0)


@dataclasses.dataclass(frozen=True)
class Lineage:
    """Origin of a run; `spent` was used by the run itself before `first_step`."""

    stats: TrainingStats
    ancestors: Sequence[dict[str, Any]] = ()  # of `ancestors_of`
    first_step: int = 0
    spent: TrainingCost = _NOTHING

    @classmethod
    def of(cls, restored: RestoreResult, stats: TrainingStats) -> "Lineage":
        if restored.how == "scratch":
            return cls(stats)
        if restored.how == "resume":
            first, stored = restored.first_step, restored.metadata.get("spent")
            spent = TrainingCost(**stored) if stored else _by_plan(stats, 0, first)
            return cls(stats, restored.metadata.get("lineage", ()), first, spent)
        ancestors = ancestors_of(
            restored.metadata, restored.folder, restored.stored_step, restored.how, restored.growth
        )
        return cls(stats, ancestors, restored.first_step)

    def spent_before(self, step: int) -> TrainingCost:
        """Returns this run's usage before a step, without its ancestors."""
        since = _by_plan(self.stats, self.first_step, step)
        return TrainingCost(self.spent.tokens + since.tokens, self.spent.flops + since.flops)

    def progress(self, step: int) -> dict[str, float]:
        """Returns this run's usage up to a step, by event tag."""
        spent = self.spent_before(step + 1)
        return {"progress/tokens": spent.tokens, "progress/flops": spent.flops}

    def metadata(self, step: int) -> dict[str, Any]:
        return {"spent": self.spent_before(step + 1)._asdict(), "lineage": [*self.ancestors]}


def ancestors_of(
    metadata: Mapping[str, Any], folder: str, step: int | None, how: str, growth: Record | None
) -> list[dict[str, Any]]:
    """Returns the ancestors of a new run, the checkpoint it starts from last.

    `step` is the step after which that was saved, `how` "parameters", "full_state" or "growth".
    Its `tokens` and `flops` include those of its own ancestors; None if unknown.
    """
    ancestors, spent = metadata.get("lineage", []), metadata.get("spent")
    earlier = ancestors[-1] if ancestors else _NOTHING._asdict()
    tokens = flops = None
    if spent is not None and earlier["tokens"] is not None and earlier["flops"] is not None:
        tokens, flops = earlier["tokens"] + spent["tokens"], earlier["flops"] + spent["flops"]
    run_name = (metadata.get("config") or {}).get("run_name")
    newest = {"run_name": run_name, "folder": folder, "step": step, "how": how}
    return [*ancestors, {**newest, "tokens": tokens, "flops": flops, "growth": growth}]


def _by_plan(stats: TrainingStats, first: int, end: int) -> TrainingCost:
    return TrainingCost(
        stats.tokens_before(end) - stats.tokens_before(first),
        stats.flops_before(end) - stats.flops_before(first),
    )
