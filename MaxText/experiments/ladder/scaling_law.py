"""Loss as a function of compute, with intervals: the law of one arm of a ladder.

    L(C) = asymptote + scale (C / center)^-exponent

The error is the scatter of the rungs about the curve. The spread of seeds is not: it misses what a
rung's seeds share, such as a learning rate off its optimum or a rounded width, and intervals from
seeds alone cover far less than they say (docs/explanation/scaling_ladders.md has the table).
"""

import dataclasses
import math
from typing import NamedTuple

import numpy as np

from MaxText.errors import UserError
from MaxText.experiments.ladder.measurements import LEVEL, Arm, Interval

MIN_RUNGS = 4  # two more than the law has parameters for a given asymptote
MIN_RUNGS_TO_PROJECT = 5
MAX_PROJECTION = 10.0  # times the compute of the top rung

NUM_DRAWS = 4000
# Uniform prior of the asymptote, as a share of the smallest loss. Without a prior, a power law and
# its asymptote trade off and the interval is unbounded.
ASYMPTOTE_SHARES = np.linspace(0.05, 0.85, 41)
EXPONENTS = (0.005, 1.5)  # the prior is 0 outside
_GAUSS_NEWTON_STEPS = 8
_LOSS_RESOLUTION = 1e-7  # of a float32 loss; bounds the residual of losses without noise
_MIN_KEPT = 0.1  # share of draws with an admissible exponent


def fit_log_linear(
    log_compute: np.ndarray, losses: np.ndarray, asymptotes: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Fits ln(L - asymptote) = log_scale - exponent log_compute by least squares.

    Args:
      log_compute: Natural logarithms, float [R].
      losses: Nats per token, float [R].
      asymptotes: Smaller than all losses, float [G].

    Returns:
      log_scale and exponent, float [G] each.
    """
    centered = log_compute - log_compute.mean()
    log_reducible = np.log(losses - asymptotes[:, None])
    exponent = -(log_reducible @ centered) / (centered @ centered)
    return log_reducible.mean(1) + exponent * log_compute.mean(), exponent


class LawFits(NamedTuple):
    """Fits of the law for G asymptotes."""

    parameters: np.ndarray  # log_scale, exponent: [G, 2]
    information: np.ndarray  # J'J of the parameters: [G, 2, 2]
    squared_residuals: np.ndarray  # sums, [G]


def fit_given_asymptotes(
    log_compute: np.ndarray, losses: np.ndarray, asymptotes: np.ndarray
) -> LawFits:
    """Fits log_scale and exponent to losses by Gauss-Newton, for each asymptote.

    Args:
      log_compute: Natural logarithms, relative to the center: float [R].
      losses: Nats per token, float [R].
      asymptotes: Smaller than all losses, float [G].
    """
    parameters = np.stack(fit_log_linear(log_compute, losses, asymptotes), axis=1)
    for _ in range(_GAUSS_NEWTON_STEPS + 1):
        reducible = np.exp(parameters[:, :1] - parameters[:, 1:] * log_compute)
        jacobian = np.stack([reducible, -log_compute * reducible], axis=2)
        residuals = losses - asymptotes[:, None] - reducible
        information = np.einsum("gri,grj->gij", jacobian, jacobian)
        last = LawFits(parameters, information, (residuals**2).sum(1))
        gradient = np.einsum("gri,gr->gi", jacobian, residuals)
        parameters = parameters + np.linalg.solve(information, gradient[:, :, None])[:, :, 0]
    return last


@dataclasses.dataclass(frozen=True)
class LawPosterior:
    """K draws of the law of an arm."""

    label: str
    computes: np.ndarray  # FLOPs of the R fitted rungs, ascending: float [R]
    losses: np.ndarray  # their means over seeds: float [R]
    center: float  # geometric mean of `computes`
    asymptote: np.ndarray  # nats per token, [K]
    log_scale: np.ndarray  # [K]
    exponent: np.ndarray  # [K]
    variance: np.ndarray  # of a rung about the curve, [K]
    scatter: np.ndarray  # a draw of a new rung's distance from the curve, [K]
    is_pinned: bool = False  # whether the asymptote was given

    @property
    def top(self) -> float:
        """Compute of the largest fitted rung."""
        return float(self.computes[-1])

    def curve_draws(self, compute: float) -> np.ndarray:
        """Returns draws of the curve itself at a compute: float [K]."""
        distance = math.log(compute / self.center)
        return self.asymptote + np.exp(self.log_scale - self.exponent * distance)

    def curve(self, compute: float, level: float = LEVEL) -> Interval:
        """Returns the interval of the curve: where the mean of many rungs would be."""
        return Interval.of(self.curve_draws(compute), level)

    def predict(self, compute: float, level: float = LEVEL, *, beyond: bool = False) -> Interval:
        """Returns the interval of the loss of a new rung with as many seeds as the others.

        Args:
          compute: FLOPs of the rung.
          level: Probability of the interval.
          beyond: Whether to project further than the data support.

        Raises:
          UserError: `compute` is too far above the top rung.
        """
        if not beyond:
            check_projection(self.label, self.computes, compute)
        return Interval.of(self.curve_draws(compute) + self.scatter, level)

    @property
    def residuals(self) -> np.ndarray:
        """Losses minus the curve's median at each rung: float [R]."""
        medians = [self.curve(compute).median for compute in self.computes]
        return self.losses - np.array(medians)


def check_projection(label: str, computes: np.ndarray, compute: float) -> None:
    """Refuses what a ladder says nothing about.

    Args:
      label: Of the arm.
      computes: FLOPs of its rungs, ascending: float [R].
      compute: FLOPs to project to.

    Raises:
      UserError: It is above the top of fewer than `MIN_RUNGS_TO_PROJECT` rungs, or more than
        `MAX_PROJECTION` times the top.
    """
    top = computes[-1]
    if compute > top * (1 + 1e-9) and len(computes) < MIN_RUNGS_TO_PROJECT:
        raise UserError(
            f"{label}: {len(computes)} rungs support no projection to {compute:.3g} FLOPs, above "
            f"the top rung of {top:.3g}. Add rungs: at least {MIN_RUNGS_TO_PROJECT}."
        )
    if compute > MAX_PROJECTION * top * (1 + 1e-9):
        raise UserError(
            f"{label}: {compute:.3g} FLOPs are {compute / top:.3g} times the top rung of "
            f"{top:.3g}; projections end at {MAX_PROJECTION:g} times. Add a larger rung, or ask "
            "for the projection explicitly: beyond=True."
        )


def fit_law(
    arm: Arm,
    asymptote: float | None = None,
    *,
    num_draws: int = NUM_DRAWS,
    generator: np.random.Generator | None = None,
) -> LawPosterior:
    """Draws from the posterior of an arm's law, given the mean loss of each rung.

    For each asymptote on a grid, the other parameters are fitted by least squares. With R rungs, an
    asymptote's weight is scale^2 |J'J|^(-1/2) S^(-(R-2)/2), where S is the sum of squared
    residuals: the marginal likelihood for a prior uniform in scale, exponent and the logarithm of
    the variance, up to a constant. Given the asymptote, the variance is S / chi2(R - 2), and
    (log_scale, exponent) is normal with covariance variance (J'J)^-1.

    Args:
      arm: With at least `MIN_RUNGS` completed rungs.
      asymptote: Pins it, in nats per token.
      num_draws: Number of draws K; draws with an exponent outside `EXPONENTS` are dropped.
      generator: Of random numbers; a fixed one by default, so that a result can be repeated.

    Raises:
      UserError: Too few rungs, a loss below the pinned asymptote, or losses that do not fall.
    """
    generator = generator or np.random.default_rng(0)
    rungs = arm.completed
    if len(rungs) < MIN_RUNGS:
        raise UserError(
            f"{arm.label}: {len(rungs)} rungs with a completed run; a law needs {MIN_RUNGS}, a "
            f"projection {MIN_RUNGS_TO_PROJECT}. Add rungs: ladder={MIN_RUNGS_TO_PROJECT + 1}."
        )
    computes = np.array([rung.compute for rung in rungs])
    losses = np.array([rung.loss for rung in rungs])
    if asymptote is not None and asymptote >= losses.min():
        raise UserError(
            f"linf={asymptote:g} is not below the smallest loss of {arm.label}, "
            f"{losses.min():.4f}. Set a smaller one, or none."
        )
    center = float(np.exp(np.log(computes).mean()))
    log_compute = np.log(computes / center)
    grid = ASYMPTOTE_SHARES * losses.min() if asymptote is None else np.array([asymptote])
    fits = fit_given_asymptotes(log_compute, losses, grid)

    exponents = fits.parameters[:, 1]
    degrees = len(rungs) - 2
    floor = len(rungs) * _LOSS_RESOLUTION**2
    squared_residuals = np.maximum(fits.squared_residuals, floor)
    _, log_determinant = np.linalg.slogdet(fits.information)
    log_weight = 2 * fits.parameters[:, 0] - 0.5 * log_determinant
    log_weight -= 0.5 * degrees * np.log(squared_residuals)
    admissible = (exponents > EXPONENTS[0]) & (exponents < EXPONENTS[1])
    log_weight[~admissible] = -np.inf
    if not admissible.any():
        raise _not_falling(arm.label, losses)
    weight = np.exp(log_weight - log_weight.max())

    index = generator.choice(len(grid), num_draws, p=weight / weight.sum())
    variance = squared_residuals[index] / generator.chisquare(degrees, num_draws)
    factor = np.linalg.cholesky(np.linalg.inv(fits.information[admissible]))
    factors = np.zeros_like(fits.information)
    factors[admissible] = factor
    normal = generator.standard_normal((num_draws, 2)) * np.sqrt(variance)[:, None]
    parameters = fits.parameters[index] + np.einsum("kij,kj->ki", factors[index], normal)
    scatter = np.sqrt(variance) * generator.standard_normal(num_draws)

    kept = (parameters[:, 1] > EXPONENTS[0]) & (parameters[:, 1] < EXPONENTS[1])
    if kept.mean() < _MIN_KEPT:
        raise _not_falling(arm.label, losses)
    return LawPosterior(
        label=arm.label,
        computes=computes,
        losses=losses,
        center=center,
        asymptote=grid[index][kept],
        log_scale=parameters[kept, 0],
        exponent=parameters[kept, 1],
        variance=variance[kept],
        scatter=scatter[kept],
        is_pinned=asymptote is not None,
    )


def _not_falling(label: str, losses: np.ndarray) -> UserError:
    return UserError(
        f"{label}: losses {', '.join(f'{loss:.4f}' for loss in losses)} do not fall like a power "
        "of compute, so there is no law. Look for rungs that diverged or had a bad learning rate."
    )
