"""Compute-optimal model size from runs of several sizes at equal FLOPs: Chinchilla's approach 2.

A parabola in ln N is fitted near the optimum only: wide or off-center grids bias it, because the
loss is not symmetric in ln N.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from MaxText.errors import UserError
from MaxText.experiments.ladder.measurements import Interval, Rung

MIN_SIZES = 5
MAX_SPAN = 4.0  # ratio of the largest to the smallest fitted size
_NUM_DRAWS = 4000
_MIN_KEPT = 0.975  # share of draws that curve upwards


@dataclasses.dataclass(frozen=True)
class IsoFlopOptimum:
    """The size of least loss at one compute."""

    compute: float  # FLOPs
    parameters: Interval
    tokens: Interval  # at that size, from the runs' FLOPs per parameter and token
    loss: Interval  # nats per token
    num_sizes: int  # that were fitted


def fit_iso_flop(
    rungs: Sequence[Rung], generator: np.random.Generator | None = None
) -> IsoFlopOptimum:
    """Fits a parabola to the losses of sizes around the best one.

    Args:
      rungs: Of equal compute, one per size.
      generator: Of random numbers; a fixed one by default.

    Raises:
      UserError: Too few sizes within a factor of `MAX_SPAN`, or an optimum at the edge of the grid.
    """
    generator = generator or np.random.default_rng(3)
    completed = sorted((rung for rung in rungs if rung.losses), key=lambda rung: rung.parameters)
    sizes = np.array([rung.parameters for rung in completed], dtype=float)
    losses = np.array([rung.loss for rung in completed])
    half = MAX_SPAN**0.5 * (1 + 1e-9)
    best = sizes[losses.argmin()] if len(sizes) else 1.0
    near = (sizes >= best / half) & (sizes <= best * half)
    if near.sum() < MIN_SIZES:
        raise UserError(
            f"{near.sum()} sizes within a factor of {MAX_SPAN:g} around the best, {best:.3g} "
            f"parameters; a parabola needs {MIN_SIZES}. Add sizes between {best / 2:.3g} and "
            f"{best * 2:.3g}."
        )
    sizes = sizes[near]
    losses = losses[near]
    if best in (sizes[0], sizes[-1]):
        raise _edge(sizes, best)

    center = np.log(sizes).mean()
    x = np.log(sizes) - center
    design = np.stack([np.ones_like(x), x, x**2], axis=1)
    coefficients, *_ = np.linalg.lstsq(design, losses, rcond=None)
    degrees = len(x) - 3
    variance = ((losses - design @ coefficients) ** 2).sum() / degrees
    factor = np.linalg.cholesky(np.linalg.inv(design.T @ design)) * np.sqrt(variance)
    student = generator.standard_normal((_NUM_DRAWS, 3))
    student *= np.sqrt(degrees / generator.chisquare(degrees, _NUM_DRAWS))[:, None]
    draws = coefficients + student @ factor.T
    draws = draws[draws[:, 2] > 0]
    if len(draws) < _MIN_KEPT * _NUM_DRAWS or coefficients[2] <= 0:
        raise UserError(
            f"losses {', '.join(f'{loss:.4f}' for loss in losses)} at sizes from {sizes[0]:.3g} to "
            f"{sizes[-1]:.3g} parameters do not curve upwards beyond their scatter, so there is no "
            "optimum. Add seeds."
        )
    optimum = -coefficients[1] / (2 * coefficients[2])
    if not x[0] < optimum < x[-1]:
        raise _edge(sizes, float(np.exp(center + optimum)))
    constant, slope, curvature = draws.T
    parameters = np.exp(center - slope / (2 * curvature))
    fitted = [rung for rung, is_near in zip(completed, near, strict=True) if is_near]
    compute = float(np.exp(np.mean(np.log([rung.compute for rung in fitted]))))
    products = [rung.tokens * rung.parameters for rung in fitted]
    # N D changes little at equal compute, so at the optimum it is the runs' own.
    log_product = np.mean(np.log(products))
    return IsoFlopOptimum(
        compute=compute,
        parameters=Interval.of(parameters),
        tokens=Interval.of(np.exp(log_product) / parameters),
        loss=Interval.of(constant - slope**2 / (4 * curvature)),
        num_sizes=len(sizes),
    )


def _edge(sizes: np.ndarray, optimum: float) -> UserError:
    edge = "larger" if optimum >= sizes[-1] else "smaller"
    return UserError(
        f"the optimum of {optimum:.3g} parameters is at the edge of the grid, {sizes[0]:.3g} to "
        f"{sizes[-1]:.3g}: the parabola would extrapolate. Add {edge} sizes."
    )
