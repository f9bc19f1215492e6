"""What a ladder measures: arms, their rungs, and intervals of numbers computed from them.

A rung is one model size trained on one number of tokens with several seeds. An arm is a
configuration at all rungs. No jax, so that results can be analyzed without a device.
"""

import dataclasses
import itertools
import statistics
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from MaxText.errors import UserError
from MaxText.value_types import JsonObject

LEVEL = 0.95  # of every interval, unless several variants share it; see `ladder_verdict.judge`


class Interval(NamedTuple):
    """Median and ends of an equal-tailed interval."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, draws: np.ndarray, level: float = LEVEL) -> "Interval":
        """Returns the interval that contains `level` of the draws: float [K]."""
        tail = (1 - level) / 2
        low, median, high = np.quantile(draws, (tail, 0.5, 1 - tail))
        return cls(float(low), float(median), float(high))

    def contains(self, number: float) -> bool:
        return self.low <= number <= self.high


@dataclasses.dataclass(frozen=True)
class Rung:
    """Runs of one arm at one size, which differ only in seed."""

    compute: float  # FLOPs of one run, counted as for MFU
    tokens: float  # training tokens of one run
    parameters: int
    losses: Mapping[int, float]  # seed -> final validation loss in nats per token, if completed
    diverged: tuple[int, ...] = ()  # seeds
    width: int | None = None
    depth: int | None = None
    learning_rate: float | None = None
    # Seconds per token of interleaved timings: the i-th of one arm next to the i-th of the other.
    token_seconds: tuple[float, ...] = ()
    # Hardware -> seconds per token, estimated from the compiled program.
    estimated_token_seconds: Mapping[str, float] = dataclasses.field(default_factory=dict)

    @property
    def loss(self) -> float:
        """Mean over completed seeds.

        Raises:
          UserError: No run completed.
        """
        if not self.losses:
            raise UserError(
                f"no run of the rung at {self.compute:.3g} FLOPs completed, so it has no loss. "
                "Run the same command again to resume it."
            )
        return statistics.fmean(self.losses.values())

    @property
    def flops_per_token(self) -> float:
        return self.compute / self.tokens

    @property
    def tokens_per_parameter(self) -> float:
        return self.tokens / self.parameters

    @classmethod
    def from_json(cls, fields: JsonObject) -> "Rung":
        """Returns the rung that `dataclasses.asdict` and JSON made `fields` of."""
        return cls(
            **fields
            | {
                "losses": {int(seed): loss for seed, loss in fields["losses"].items()},
                "diverged": tuple(fields["diverged"]),
                "token_seconds": tuple(fields["token_seconds"]),
            }
        )


@dataclasses.dataclass(frozen=True)
class Arm:
    """A configuration at the rungs of a ladder, in ascending order of compute."""

    label: str
    rungs: tuple[Rung, ...]

    def __post_init__(self) -> None:
        computes = [rung.compute for rung in self.rungs]
        if any(low >= high for low, high in itertools.pairwise(computes)):
            raise ValueError(f"{self.label}: rungs must ascend in compute, not {computes}")

    @property
    def completed(self) -> tuple[Rung, ...]:
        """Rungs with at least one completed run."""
        return tuple(rung for rung in self.rungs if rung.losses)

    @property
    def num_diverged(self) -> int:
        return sum(len(rung.diverged) for rung in self.rungs)

    def to_json(self) -> JsonObject:
        """Returns JSON types from which `from_json` makes an equal arm."""
        rungs = [dataclasses.asdict(rung) for rung in self.rungs]
        for rung in rungs:  # JSON has neither integers as keys nor tuples
            rung["losses"] = {str(seed): loss for seed, loss in rung["losses"].items()}
            rung["diverged"] = list(rung["diverged"])
            rung["token_seconds"] = list(rung["token_seconds"])
        return {"label": self.label, "rungs": rungs}

    @classmethod
    def from_json(cls, fields: JsonObject) -> "Arm":
        """Returns the arm that `to_json` was called on."""
        return cls(fields["label"], tuple(map(Rung.from_json, fields["rungs"])))
