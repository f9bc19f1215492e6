"""Means over seeds, and differences of configurations paired by seed."""

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence

CONFIDENCE = 0.95


@dataclasses.dataclass(frozen=True)
class Summary:
    """Some numbers as one.

    Attributes:
      count: how many.
      mean: None without numbers.
      deviation: sample standard deviation (divisor count - 1); None below two numbers.
    """

    count: int
    mean: float | None
    deviation: float | None

    @classmethod
    def of(cls, numbers: Sequence[float]) -> "Summary":
        """Summarises numbers."""
        return cls(
            count=len(numbers),
            mean=statistics.fmean(numbers) if numbers else None,
            deviation=statistics.stdev(numbers) if len(numbers) > 1 else None,
        )


@dataclasses.dataclass(frozen=True)
class Difference:
    """How far one configuration lies above another, over the seeds that both have.

    Attributes:
      count: such seeds.
      mean: of the differences per seed; None without any.
      low: lower end of the confidence interval of the mean; None below two seeds.
      high: its upper end.
    """

    count: int
    mean: float | None
    low: float | None = None
    high: float | None = None

    @property
    def is_seen(self) -> bool:
        """Whether the interval leaves 0 out."""
        return self.low is not None and self.high is not None and not self.low <= 0 <= self.high


def paired_difference(first: Mapping[int, float], other: Mapping[int, float]) -> Difference:
    """`other` minus `first`, with Student's interval for the mean of paired differences.

    A seed gives both configurations the same order of the data, so much of what a seed does to the
    loss is in both and drops out of the difference.

    Args:
      first: seed -> number.
      other: seed -> number.
    """
    summary = Summary.of(
        [other[seed] - first[seed] for seed in sorted(first.keys() & other.keys())]
    )
    if summary.mean is None or summary.deviation is None:
        return Difference(summary.count, summary.mean)
    # The quantile alone: scipy.stats takes a second to import.
    from scipy.special import stdtrit

    quantile = float(stdtrit(summary.count - 1, 0.5 + CONFIDENCE / 2))
    half = quantile * summary.deviation / math.sqrt(summary.count)
    return Difference(summary.count, summary.mean, summary.mean - half, summary.mean + half)


def in_words(first: str, other: str, difference: Difference) -> str:
    """A sentence about the difference of two losses in nats per token."""
    mean, low, high = difference.mean, difference.low, difference.high
    seeds = f"{difference.count} seed{'s' if difference.count > 1 else ''}"
    if mean is None:
        return f"{other} and {first} have no seed that both finished."
    direction = "lower" if mean < 0 else "higher"
    if low is None or high is None:
        return (
            f"{other} is {direction} than {first} by {abs(mean):.4f} nats/token with one seed. One "
            "seed cannot tell a difference from chance: add seeds=3."
        )
    if not difference.is_seen:
        return (
            f"No difference can be seen between {other} and {first}: {mean:+.4f} nats/token "
            f"(95 % interval {low:+.4f} to {high:+.4f}, {seeds})."
        )
    ends = sorted((abs(low), abs(high)))
    return (
        f"{other} is {direction} than {first} by {abs(mean):.4f} nats/token "
        f"(95 % interval {ends[0]:.4f} to {ends[1]:.4f}, {seeds})."
    )
