"""Ancestors of a run, with the sum of their tokens and FLOPs.

Saved with each checkpoint, because the ancestors' folders may be gone.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

from MaxText.growth.record import Record
from MaxText.run.restore import RestoreResult
from MaxText.run.training_stats import TrainingStats


class TrainingCost(NamedTuple):
    """Training tokens and FLOPs, counted as in cost/flops.py."""

    tokens: float
    flops: float


_NOTHING = TrainingCost(0, 0.0)


class Ancestor(NamedTuple):
    """The starting checkpoint of a run."""

    run_name: str | None
    folder: str
    step: int | None  # the step after which it was saved, if known
    how: str  # "parameters", "full_state", or "growth" (grown parameters)
    tokens: float | None  # used until then, including its own ancestors; None if unknown
    flops: float | None
    growth: Record | None = None  # how its parameters grew; None if they did not


@dataclasses.dataclass(frozen=True)
class Lineage:
    """Origin of a run; `spent` was used by the run itself before `first_step`."""

    stats: TrainingStats
    ancestors: tuple[Ancestor, ...] = ()
    first_step: int = 0
    spent: TrainingCost = _NOTHING

    @classmethod
    def of(cls, restored: RestoreResult, stats: TrainingStats) -> "Lineage":
        if restored.how == "scratch":
            return cls(stats)
        if restored.how == "resume":
            first, stored = restored.first_step, restored.metadata.get("spent")
            spent = TrainingCost(**stored) if stored else _by_plan(stats, 0, first)
            return cls(stats, _ancestors(restored.metadata), first, spent)
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

    def fields(self) -> list[dict[str, Any]]:
        return [ancestor._asdict() for ancestor in self.ancestors]

    def metadata(self, step: int) -> dict[str, Any]:
        return {"spent": self.spent_before(step + 1)._asdict(), "lineage": self.fields()}


def _ancestors(metadata: Mapping[str, Any]) -> tuple[Ancestor, ...]:
    return tuple(Ancestor(**entry) for entry in metadata.get("lineage", ()))


def ancestors_of(
    metadata: Mapping[str, Any], folder: str, step: int | None, how: str, growth: Record | None
) -> tuple[Ancestor, ...]:
    """Returns the ancestors of a new run, the checkpoint it starts from last."""
    ancestors, spent = _ancestors(metadata), metadata.get("spent")
    earlier = ancestors[-1] if ancestors else _NOTHING
    tokens = flops = None
    if spent is not None and earlier.tokens is not None and earlier.flops is not None:
        tokens, flops = earlier.tokens + spent["tokens"], earlier.flops + spent["flops"]
    run_name = (metadata.get("config") or {}).get("run_name")
    return (*ancestors, Ancestor(run_name, folder, step, how, tokens, flops, growth))


def _by_plan(stats: TrainingStats, first: int, end: int) -> TrainingCost:
    return TrainingCost(
        stats.tokens_before(end) - stats.tokens_before(first),
        stats.flops_before(end) - stats.flops_before(first),
    )
