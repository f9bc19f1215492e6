"""Means over seeds, and differences between configurations paired by seed."""

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence

CONFIDENCE = 0.95


@dataclasses.dataclass(frozen=True)
class Summary:
    """Count, mean and sample standard deviation (divisor count - 1)."""

    count: int
    mean: float | None
    std: float | None

    @classmethod
    def of(cls, numbers: Sequence[float]) -> "Summary":
        return cls(
            count=len(numbers),
            mean=statistics.fmean(numbers) if numbers else None,
            std=statistics.stdev(numbers) if len(numbers) > 1 else None,
        )


@dataclasses.dataclass(frozen=True)
class Difference:
    """Mean difference over common seeds, with its confidence interval."""

    count: int
    mean: float | None
    ci_low: float | None = None  # confidence interval of the mean; None below two seeds
    ci_high: float | None = None

    @property
    def is_significant(self) -> bool:
        """Whether the interval excludes 0."""
        low, high = self.ci_low, self.ci_high
        return low is not None and high is not None and not low <= 0 <= high


def paired_difference(first: Mapping[int, float], other: Mapping[int, float]) -> Difference:
    """Returns `other` minus `first` (seed -> value), paired by seed.

    The interval is Student's. A seed gives both configurations the same data order, so much of its
    effect on the loss cancels in the difference.
    """
    summary = Summary.of(
        [other[seed] - first[seed] for seed in sorted(first.keys() & other.keys())]
    )
    if summary.mean is None or summary.std is None:
        return Difference(summary.count, summary.mean)
    # scipy.special, because scipy.stats takes a second to import.
    from scipy.special import stdtrit

    quantile = float(stdtrit(summary.count - 1, 0.5 + CONFIDENCE / 2))
    half = quantile * summary.std / math.sqrt(summary.count)
    return Difference(summary.count, summary.mean, summary.mean - half, summary.mean + half)


def format_difference(first: str, other: str, difference: Difference) -> str:
    """Describes the difference of two losses in nats per token."""
    mean, low, high = difference.mean, difference.ci_low, difference.ci_high
    seeds = f"{difference.count} seed{'s' if difference.count > 1 else ''}"
    if mean is None:
        return f"{other} and {first} have no completed seed in common."
    direction = "lower" if mean < 0 else "higher"
    if low is None or high is None:
        return (
            f"{other} is {direction} than {first} by {abs(mean):.4f} nats/token with one seed. One "
            "seed cannot distinguish a difference from chance: add seeds=3."
        )
    if not difference.is_significant:
        return (
            f"No significant difference between {other} and {first}: {mean:+.4f} nats/token "
            f"(95 % interval {low:+.4f} to {high:+.4f}, {seeds})."
        )
    ends = sorted((abs(low), abs(high)))
    return (
        f"{other} is {direction} than {first} by {abs(mean):.4f} nats/token "
        f"(95 % interval {ends[0]:.4f} to {ends[1]:.4f}, {seeds})."
    )
