"""Means over seeds, and differences between configurations paired by seed."""

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence

from MaxText.formatting import pluralize

CONFIDENCE = 0.95


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Mean over seeds, with Student's confidence interval."""

    count: int
    mean: float | None = None
    std: float | None = None  # divisor count - 1; None below two seeds, as all that follows
    ci_low: float | None = None
    ci_high: float | None = None
    p_value: float | None = None  # two-sided, that the true mean is 0

    @classmethod
    def of(cls, numbers: Sequence[float]) -> "Estimate":
        """Returns the estimate from one number per seed."""
        count = len(numbers)
        if count < 2:
            return cls(count, *numbers)
        # scipy.special, because scipy.stats takes a second to import.
        from scipy.special import stdtr, stdtrit

        mean = statistics.fmean(numbers)
        std = statistics.stdev(numbers)
        error = std / math.sqrt(count)
        half = float(stdtrit(count - 1, 0.5 + CONFIDENCE / 2)) * error
        p_value = 2 * float(stdtr(count - 1, -abs(mean) / error)) if error else float(mean == 0)
        return cls(
            count=count,
            mean=mean,
            std=std,
            ci_low=mean - half,
            ci_high=mean + half,
            p_value=p_value,
        )

    @property
    def is_significant(self) -> bool:
        """Whether chance rarely gives such a mean."""
        return self.p_value is not None and self.p_value < 1 - CONFIDENCE


def paired_difference(first: Mapping[int, float], other: Mapping[int, float]) -> Estimate:
    """Returns `other` minus `first` (seed -> value), paired by seed.

    A seed gives both configurations the same data order, so much of its effect on the loss cancels
    in the difference.
    """
    seeds = sorted(first.keys() & other.keys())
    return Estimate.of([other[seed] - first[seed] for seed in seeds])


def holm_corrected(estimates: Mapping[str, Estimate]) -> dict[str, Estimate]:
    """Corrects the p values of estimates for their number (Holm 1979).

    The chance of any false finding stays that of a single estimate. Intervals stay as they are.
    """
    tested = sorted(
        (estimate.p_value, name)
        for name, estimate in estimates.items()
        if estimate.p_value is not None
    )
    corrected = dict(estimates)
    corrected_p = 0.0
    for rank, (p_value, name) in enumerate(tested):
        corrected_p = max(corrected_p, min(p_value * (len(tested) - rank), 1.0))
        corrected[name] = dataclasses.replace(estimates[name], p_value=corrected_p)
    return corrected


def format_difference(
    first: str,
    other: str,
    difference: Estimate,
    num_comparisons: int = 1,
    *,
    unit: str = "nats/token",
) -> str:
    """Describes the difference of two means.

    Args:
      first: Label of the baseline.
      other: Label of the configuration that is compared with it.
      difference: The other's minus the baseline's.
      num_comparisons: Differences that the p value is corrected for.
      unit: Of the difference.
    """
    mean = difference.mean
    low = difference.ci_low
    high = difference.ci_high
    seeds = pluralize(difference.count, "seed")
    if mean is None:
        return f"{other} and {first} have no completed seed in common."
    direction = "lower" if mean < 0 else "higher"
    if low is None or high is None:
        return (
            f"{other} is {direction} than {first} by {abs(mean):.4f} {unit} with one seed. One "
            "seed cannot distinguish a difference from chance: add seeds=3."
        )
    if num_comparisons > 1:
        seeds += f"; p = {difference.p_value:.2g}, Holm's of {num_comparisons} comparisons"
    if not difference.is_significant:
        return (
            f"No significant difference between {other} and {first}: {mean:+.4f} {unit} "
            f"(95 % interval {low:+.4f} to {high:+.4f}, {seeds})."
        )
    ends = sorted((abs(low), abs(high)))
    return (
        f"{other} is {direction} than {first} by {abs(mean):.4f} {unit} "
        f"(95 % interval {ends[0]:.4f} to {ends[1]:.4f}, {seeds})."
    )
