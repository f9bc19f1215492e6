"""Verdict on a variant: worked, did not work, mixed, or not decided."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import numpy as np
from scipy.special import fdtrc  # scipy.stats takes a second to import

from MaxText.errors import UserError
from MaxText.experiments.ladder.effective_speedup import FLOPS, TIME, Speedup
from MaxText.experiments.ladder.measurements import LEVEL, Arm, Interval, Rung
from MaxText.experiments.ladder.scaling_law import MAX_PROJECTION, MIN_RUNGS_TO_PROJECT
from MaxText.formatting import short_count

Outcome = Literal["worked", "did not work", "mixed", "not decided"]

# Keys of a verdict's intervals, and their words.
_PLACES = {
    "bottom": "bottom rung",
    "center": "center",
    "top": "top rung",
    "projected": f"{MAX_PROJECTION:g} times the top",
    "constant": "as a constant",
}
_MAX_SPREAD = 2.0  # ratio of the deviations of seeds at small and large rungs
_SPREAD_LEVEL = 0.01  # of the F test of that ratio: few seeds spread unevenly by chance


@dataclasses.dataclass(frozen=True)
class LadderVerdict:
    """Outcome of a ladder for one variant, with the intervals of S behind it."""

    label: str
    baseline: str
    outcome: Outcome
    reason: str
    currency: str  # that decided: FLOPS, TIME, or hardware
    level: float  # of the intervals
    # Currency -> place on the ladder ("bottom", "center", "top", "projected", "constant") -> S.
    intervals: Mapping[str, Mapping[str, Interval]]
    seen: str  # compute, tokens per parameter, widths and seeds of the ladder

    @property
    def sentences(self) -> list[str]:
        """The verdict in words, with its numbers and where it was seen."""
        lines = [f"{self.label} against {self.baseline}: {self.outcome}. {self.reason}"]
        for currency, places in self.intervals.items():
            numbers = [
                f"{_PLACES[place]} {format_interval(interval)}"
                for place, interval in places.items()
            ]
            lines.append(
                f"Effective speed-up in {describe_currency(currency)}, {100 * self.level:.4g} % "
                f"intervals: {'; '.join(numbers)}."
            )
        lines.append(f"Seen at {self.seen}.")
        return lines


def format_interval(interval: Interval, digits: int = 3) -> str:
    """Formats "1.139 (1.009 to 1.296)"."""
    low, median, high = (f"{number:.{digits}f}" for number in interval)
    return f"{median} ({low} to {high})"


def describe_currency(currency: str) -> str:
    """Returns the words for a currency."""
    if currency == FLOPS:
        return "FLOPs"
    return "measured time" if currency == TIME else f"estimated time on {currency}"


def judge(
    baseline: Arm,
    variant: Arm,
    speedup: Speedup | None,
    *,
    currencies: Sequence[str] = (FLOPS,),
    num_variants: int = 1,
) -> LadderVerdict:
    """Judges a variant.

    Mixed: bottom and top rung, or two currencies at the top, exclude 1 on opposite sides. Worked:
    the line is above 1 at the top rung, and its median is above 1 at `MAX_PROJECTION` times the
    top. Did not work: the constant and the line at the top are below 1, or the variant diverged
    where the baseline did not. Else not decided.

    Args:
      baseline: Arm that the variant is compared to.
      variant: Arm with the same rungs.
      speedup: Of the variant over the baseline; None if too few rungs completed.
      currencies: The last one decides; all are shown.
      num_variants: Verdicts that this ladder gives. Intervals are widened for them (Bonferroni), so
        that a false "worked" stays as rare as with one.

    Raises:
      UserError: Too few rungs for a verdict.
    """
    level = 1 - (1 - LEVEL) / num_variants
    intervals: dict[str, dict[str, Interval]] = {}
    if len(baseline.rungs) < MIN_RUNGS_TO_PROJECT:
        raise UserError(
            f"a verdict needs {MIN_RUNGS_TO_PROJECT} rungs, and {baseline.label} has "
            f"{len(baseline.rungs)}. Add rungs: ladder={MIN_RUNGS_TO_PROJECT + 1}."
        )
    if speedup is not None:
        intervals = {currency: _places(speedup, currency, level) for currency in currencies}
    outcome, reason = _decide(baseline, variant, intervals)
    return LadderVerdict(
        label=variant.label,
        baseline=baseline.label,
        outcome=outcome,
        reason=reason,
        currency=currencies[-1],
        level=level,
        intervals=intervals,
        seen=describe_range((baseline, variant)),
    )


def _places(speedup: Speedup, currency: str, level: float) -> dict[str, Interval]:
    return {
        "bottom": speedup.at(speedup.bottom, currency, level),
        "center": speedup.at(speedup.center, currency, level),
        "top": speedup.at(speedup.top, currency, level),
        "projected": speedup.at(MAX_PROJECTION * speedup.top, currency, level, beyond=True),
        "constant": speedup.constant(currency, level),
    }


def _side(interval: Interval) -> int:
    """Returns 1 for an interval above 1, -1 for one below, 0 for one that contains it."""
    return int(interval.low > 1) - int(interval.high < 1)


def _decide(
    baseline: Arm, variant: Arm, intervals: Mapping[str, Mapping[str, Interval]]
) -> tuple[Outcome, str]:
    """Returns the outcome and its reason; the last currency decides."""
    if variant.num_diverged and not baseline.num_diverged:
        return "did not work", f"{variant.num_diverged} of its runs diverged, none of the baseline."
    if not intervals:
        return "not decided", "Too few rungs completed in both arms."
    sides = {currency: _side(places["top"]) for currency, places in intervals.items()}
    if {-1, 1} <= {*sides.values()}:
        words = [
            f"{'above' if side > 0 else 'below'} 1 in {describe_currency(currency)}"
            for currency, side in sides.items()
            if side
        ]
        return "mixed", f"At the top rung the speed-up is {' and '.join(words)}."
    currency, places = list(intervals.items())[-1]
    bottom, top = _side(places["bottom"]), _side(places["top"])
    if bottom * top < 0:
        direction = "grows" if top > 0 else "falls"
        return "mixed", f"The speed-up {direction} with compute, from one side of 1 to the other."
    if top > 0:
        projected = places["projected"].median
        if projected > 1:
            return "worked", f"At the top rung S is above 1 in {describe_currency(currency)}."
        return "not decided", (
            f"S is above 1 at the top rung but falls with compute: {projected:.3f} at "
            f"{MAX_PROJECTION:g} times the top."
        )
    if top < 0 and _side(places["constant"]) < 0:
        return "did not work", f"S is below 1 in {describe_currency(currency)}."
    return "not decided", "The interval at the top rung contains 1, or its models disagree."


def describe_range(arms: Sequence[Arm]) -> str:
    """Returns the compute, tokens per parameter, widths and seeds that arms were trained at."""
    rungs = [rung for arm in arms for rung in arm.rungs]
    ratios = [rung.tokens_per_parameter for rung in rungs]
    widths = [rung.width for rung in rungs if rung.width is not None]
    seeds = [len(rung.losses) for rung in rungs]
    parts = [
        f"{min(rung.compute for rung in rungs):.3g} to {max(rung.compute for rung in rungs):.3g} "
        "FLOPs",
        f"{_range(ratios, '{:.3g}'.format)} tokens per parameter",
        f"{_range([rung.parameters for rung in rungs], short_count)} parameters",
    ]
    if widths:
        parts.append(f"widths {_range(widths, str)}")
    parts.append(f"{_range(seeds, str)} seeds per rung")
    return ", ".join(parts)


def _range(numbers: Sequence[float], formatted: Callable[[float], str]) -> str:
    low, high = formatted(min(numbers)), formatted(max(numbers))
    return low if low == high else f"{low} to {high}"


def warnings_of(arm: Arm) -> list[str]:
    """Returns what weakens an arm's law: unequal seeds, diverged runs, uneven spread of seeds."""
    lines = [
        f"{arm.label}: {len(rung.diverged)} of {len(rung.diverged) + len(rung.losses)} runs at "
        f"{rung.compute:.3g} FLOPs diverged; losses are those of the others."
        for rung in arm.rungs
        if rung.diverged
    ]
    counts = {len(rung.losses) for rung in arm.completed}
    if len(counts) > 1:
        lines.append(
            f"{arm.label}: rungs have {_range(sorted(counts), str)} completed seeds. Intervals "
            "assume the same number at each."
        )
    ratio = _spread_ratio(arm.completed)
    if ratio > _MAX_SPREAD:
        lines.append(
            f"{arm.label}: seeds spread {ratio:.1f} times as far at one end of the ladder as at "
            "the other. Intervals assume equal spread; leave out the smallest rungs, or add seeds."
        )
    return lines


def _spread_ratio(rungs: Sequence[Rung]) -> float:
    """Returns the ratio, at least 1, of the deviations of seeds of small and of large rungs.

    1 unless an F test at `_SPREAD_LEVEL` finds a difference: few seeds spread unevenly by chance.
    """
    half = len(rungs) // 2
    pooled = []
    for part in (rungs[:half], rungs[-half:] if half else ()):
        repeated = [list(rung.losses.values()) for rung in part if len(rung.losses) > 1]
        degrees = sum(len(losses) - 1 for losses in repeated)
        squares = sum(float(np.square(np.subtract(row, np.mean(row))).sum()) for row in repeated)
        if not degrees or not squares:
            return 1.0
        pooled.append((squares / degrees, degrees))
    (low, low_degrees), (high, high_degrees) = sorted(pooled)
    p_value = 2 * float(fdtrc(high_degrees, low_degrees, high / low))
    return math.sqrt(high / low) if p_value < _SPREAD_LEVEL else 1.0
