"""Effective speed-up of a variant: compute or time that the baseline would need for its loss.

S = 1.2 says that the baseline reaches the variant's loss with 1.2 times the variant's FLOPs. In
time, each arm's FLOPs are divided by its FLOPs per second.
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from scipy.special import stdtrit  # scipy.stats takes a second to import

from MaxText.errors import UserError
from MaxText.experiments.ladder.measurements import LEVEL, Arm, Interval, Rung
from MaxText.experiments.ladder.scaling_law import LawPosterior, check_projection
from MaxText.experiments.seed_statistics import Estimate

FLOPS = "flops"  # currencies; others are names of hardware with estimated times
TIME = "time"
MIN_TIMINGS = 5
_MAX_MISMATCH = 1.5  # ratio of the computes of two arms at a rung
_MIN_PAIRS = 3  # one more than the line has parameters
_MIN_KEPT = 0.5  # share of the law's draws below all losses of the variant


def compute_ratio(
    baseline_loss: float, variant_loss: float, asymptote: float, exponent: float
) -> float:
    """Returns the factor of compute that takes the baseline to the variant's loss.

    On L(C) = asymptote + A C^-exponent through the baseline's point, C grows by this factor. With
    the asymptote and the exponent pinned it is the speed-up in FLOPs of marin's
    experiments/grug/moe/agent.md, from a single pair of runs and without an interval.

    Raises:
      UserError: A loss is not above the asymptote.
    """
    if min(baseline_loss, variant_loss) <= asymptote:
        raise UserError(
            f"losses {baseline_loss:g} and {variant_loss:g} must be above the asymptote "
            f"{asymptote:g}. Set a smaller one."
        )
    return ((baseline_loss - asymptote) / (variant_loss - asymptote)) ** (1 / exponent)


def log_throughput_ratio(baseline: Rung, variant: Rung, currency: str = TIME) -> Estimate:
    """Returns ln of the variant's FLOPs per second over the baseline's, at a rung.

    FLOPs, not tokens, per second: the arms may need different FLOPs per token, and the speed-up in
    FLOPs already accounts for that.

    Args:
      baseline: Rung of the baseline.
      variant: The same rung of the variant.
      currency: TIME for measured time, or hardware with estimated times, whose Estimate has no
        interval.

    Raises:
      UserError: The times are missing, or measured fewer than `MIN_TIMINGS` times.
    """
    log_flops = math.log(variant.flops_per_token / baseline.flops_per_token)
    if currency != TIME:
        times = [rung.estimated_token_seconds.get(currency) for rung in (baseline, variant)]
        if times[0] is None or times[1] is None:
            known = sorted(
                baseline.estimated_token_seconds.keys() & variant.estimated_token_seconds.keys()
            )
            raise UserError(
                f"no estimated step time for {currency} at {baseline.compute:.3g} FLOPs in both "
                f"arms; estimated are: {', '.join(known) or 'none'}. Add target={currency}."
            )
        return Estimate.of([log_flops + math.log(times[0] / times[1])])
    count = min(len(baseline.token_seconds), len(variant.token_seconds))
    if count < MIN_TIMINGS or len(baseline.token_seconds) != len(variant.token_seconds):
        raise UserError(
            f"{len(baseline.token_seconds)} and {len(variant.token_seconds)} timings of the rung "
            f"at {baseline.compute:.3g} FLOPs; a speed-up in time needs {MIN_TIMINGS} interleaved "
            "timings of both arms. Run the same command again to time the rungs."
        )
    pairs = zip(baseline.token_seconds, variant.token_seconds, strict=True)
    return Estimate.of([log_flops + math.log(first / other) for first, other in pairs])


def has_times(baseline: Arm, variant: Arm, currency: str) -> bool:
    """Whether all rungs that both arms completed have the times of a currency."""
    try:
        for first, other in match_rungs(baseline, variant):
            log_throughput_ratio(first, other, currency)
    except UserError:
        return False
    return True


def match_rungs(baseline: Arm, variant: Arm) -> list[tuple[Rung, Rung]]:
    """Returns the rungs that both arms completed.

    Raises:
      UserError: The arms have different rungs.
    """
    if len(baseline.rungs) != len(variant.rungs):
        raise UserError(
            f"{baseline.label} has {len(baseline.rungs)} rungs and {variant.label} has "
            f"{len(variant.rungs)}. Run both at the same rungs."
        )
    pairs = list(zip(baseline.rungs, variant.rungs, strict=True))
    for first, other in pairs:
        ratio = other.compute / first.compute
        if not 1 / _MAX_MISMATCH <= ratio <= _MAX_MISMATCH:
            raise UserError(
                f"a rung has {first.compute:.3g} FLOPs in {baseline.label} and "
                f"{other.compute:.3g} in {variant.label}; they may differ by a factor of "
                f"{_MAX_MISMATCH:g}. Plan both arms with the same rungs."
            )
    return [(first, other) for first, other in pairs if first.losses and other.losses]


@dataclasses.dataclass(frozen=True)
class Speedup:
    """K draws of the speed-up of a variant: a constant, and a line over ln compute.

    The constant says how large the speed-up is if it does not change with compute; verdicts use the
    line, which does not assume so.
    """

    label: str  # of the variant
    pairs: tuple[tuple[Rung, Rung], ...]  # rungs of the baseline and of the variant, R of them
    computes: np.ndarray  # geometric means of the arms' FLOPs, ascending: float [R]
    center: float  # FLOPs at which `intercept` is
    rung_draws: np.ndarray  # ln S of each rung with the scatter about the line: float [K, R]
    intercept: np.ndarray  # ln S at `center`, [K]
    slope: np.ndarray  # of ln S per e-fold of compute, [K]
    constant_draws: np.ndarray  # ln S, [K]
    timing_quantiles: np.ndarray  # uniform, of Student's t for the ratio of throughputs: [K]

    @property
    def top(self) -> float:
        return float(self.computes[-1])

    @property
    def bottom(self) -> float:
        return float(self.computes[0])

    def log_throughput(self, currency: str, rung: int) -> np.ndarray | float:
        """Returns draws of ln of the ratio of throughputs at a rung; 0 in FLOPs."""
        if currency == FLOPS:
            return 0.0
        ratio = log_throughput_ratio(*self.pairs[rung], currency)
        if ratio.mean is None:
            raise AssertionError("an estimate of at least one timing has a mean")
        if ratio.std is None:
            return ratio.mean
        error = ratio.std / math.sqrt(ratio.count)
        return ratio.mean + error * stdtrit(ratio.count - 1, self.timing_quantiles)

    def line_draws(self, compute: float, currency: str = FLOPS) -> np.ndarray:
        """Returns draws of ln S on the line: float [K].

        In time, with the ratio of throughputs of the rung nearest to `compute`, which holds beyond
        the ladder only as long as that ratio stays.
        """
        rung = int(np.abs(np.log(self.computes / compute)).argmin())
        line = self.intercept + self.slope * math.log(compute / self.center)
        return line + self.log_throughput(currency, rung)

    def at(
        self,
        compute: float,
        currency: str = FLOPS,
        level: float = LEVEL,
        *,
        beyond: bool = False,
    ) -> Interval:
        """Returns the interval of S on the line.

        Raises:
          UserError: `compute` is too far above the top rung, or times are missing.
        """
        if not beyond:
            check_projection(self.label, self.computes, compute)
        return _exponential(Interval.of(self.line_draws(compute, currency), level))

    def constant(self, currency: str = FLOPS, level: float = LEVEL) -> Interval:
        """Returns the interval of S as a constant; in time, with the throughput of the top rung."""
        draws = self.constant_draws + self.log_throughput(currency, -1)
        return _exponential(Interval.of(draws, level))

    def at_rungs(self, currency: str = FLOPS, level: float = LEVEL) -> list[Interval]:
        """Returns the interval of S of each rung alone, given the scatter of all about the line."""
        return [
            _exponential(Interval.of(draws + self.log_throughput(currency, rung), level))
            for rung, draws in enumerate(self.rung_draws.T)
        ]


def _exponential(interval: Interval) -> Interval:
    return Interval(*map(math.exp, interval))


def measure_speedup(
    baseline: Arm,
    variant: Arm,
    law: LawPosterior,
    generator: np.random.Generator | None = None,
) -> Speedup:
    """Measures a variant's speed-up over a baseline.

    For each draw of the baseline's asymptote and exponent, rung r has
    s_r = ln[(L_baseline - asymptote) / (L_variant - asymptote)] / exponent, plus ln of the ratio of
    the arms' FLOPs where they differ, with weight (exponent (L - asymptote))^2: an error of the
    loss moves s_r by its inverse. A constant and a line in ln compute are fitted by weighted least
    squares, with R - 1 and R - 2 degrees of freedom for the scatter about them.

    Args:
      baseline: Arm that `law` was fitted to.
      variant: Arm with the same rungs.
      law: Of the baseline.
      generator: Of random numbers; a fixed one by default.

    Raises:
      UserError: The arms have different rungs, too few in common, or the variant's losses are
        lower than the baseline could reach with any compute.
    """
    generator = generator or np.random.default_rng(1)
    pairs = match_rungs(baseline, variant)
    if len(pairs) < _MIN_PAIRS:
        raise UserError(
            f"{baseline.label} and {variant.label} completed {len(pairs)} rungs in common; the "
            f"line of a speed-up needs {_MIN_PAIRS}. Look at the runs that diverged."
        )
    base_losses, losses = _losses(pairs)
    reachable = law.asymptote < losses.min()
    if reachable.mean() < _MIN_KEPT:
        raise UserError(
            f"{variant.label}: its loss of {losses.min():.4f} is below what {baseline.label} would "
            f"reach with unlimited compute (median {np.median(law.asymptote):.4f}), so it has no "
            "finite speed-up. Check that both arms are evaluated on the same text."
        )
    asymptote = law.asymptote[reachable, None]
    exponent = law.exponent[reachable, None]
    log_computes = np.log([[rung.compute for rung in pair] for pair in pairs])
    x = log_computes.mean(1)
    center = x.mean()
    x = x - center

    log_speedup = np.log((base_losses - asymptote) / (losses - asymptote)) / exponent
    log_speedup += log_computes[:, 0] - log_computes[:, 1]
    weights = (exponent * ((base_losses + losses) / 2 - asymptote)) ** 2

    num_draws = len(asymptote)
    line, variance, degrees = _weighted_draws(
        np.stack([np.ones_like(x), x], axis=1), log_speedup, weights, generator
    )
    constant, _, _ = _weighted_draws(np.ones((len(x), 1)), log_speedup, weights, generator)
    rung_errors = np.sqrt(variance[:, None] / weights)
    rung_errors = rung_errors * generator.standard_t(degrees, (num_draws, len(x)))
    return Speedup(
        label=variant.label,
        pairs=tuple(pairs),
        computes=np.exp(x + center),
        center=math.exp(center),
        rung_draws=log_speedup + rung_errors,
        intercept=line[:, 0],
        slope=line[:, 1],
        constant_draws=constant[:, 0],
        timing_quantiles=generator.uniform(size=num_draws),
    )


def _losses(pairs: Sequence[tuple[Rung, Rung]]) -> tuple[np.ndarray, np.ndarray]:
    """Returns mean losses of the baseline and of the variant, over common seeds if there are any.

    A seed gives both arms the same data order, so the noise that it shares cancels in a pair.
    """
    means = []
    for first, other in pairs:
        common = first.losses.keys() & other.losses.keys()
        pair = [
            np.mean([rung.losses[seed] for seed in common or rung.losses])
            for rung in (first, other)
        ]
        means.append(pair)
    base_losses, losses = np.array(means).T
    return base_losses, losses


def _weighted_draws(
    design: np.ndarray, y: np.ndarray, weights: np.ndarray, generator: np.random.Generator
) -> tuple[np.ndarray, np.ndarray, int]:
    """Draws the coefficients of weighted least squares, once for each of K rows.

    Args:
      design: Float [R, P].
      y: Float [K, R].
      weights: Inverse variances up to a common factor, float [K, R].
      generator: Of random numbers.

    Returns:
      Student draws of the coefficients [K, P], estimates of the common factor [K], and the degrees
      of freedom R - P.
    """
    count, size = design.shape
    information = np.einsum("kr,ri,rj->kij", weights, design, design)
    covariance = np.linalg.inv(information)
    coefficients = np.einsum("kij,kr,rj,kr->ki", covariance, weights, design, y)
    degrees = count - size
    variance = (weights * (y - coefficients @ design.T) ** 2).sum(1) / degrees
    factor = np.linalg.cholesky(covariance) * np.sqrt(variance)[:, None, None]
    normal = generator.standard_normal((len(y), size))
    student = normal * np.sqrt(degrees / generator.chisquare(degrees, len(y)))[:, None]
    return coefficients + np.einsum("kij,kj->ki", factor, student), variance, degrees
