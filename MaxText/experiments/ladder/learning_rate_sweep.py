"""Learning rate of an arm, from a sweep by factors of two at its smallest rungs.

The optimum is that of a parabola in ln(learning rate) through the losses around the best one. The
sweep has a seed of its own, so that the runs of the ladder are not those that were selected.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from MaxText.errors import UserError

# Of the learning rate by the rule; later rounds go on beyond the edge that was best.
FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)
SWEEP_SEED = 10_000
_MAX_ROUNDS = 3
_ADDED = 2  # factors of a later round
_NEIGHBORS = 2  # points on each side of the best one that the parabola is fitted to


class RateOptimum(NamedTuple):
    """The best factor of a learning rate."""

    factor: float
    edge: int  # -1 or 1 if the least loss is that of the smallest or largest factor, else 0


def find_optimum(losses: Mapping[float, float | None]) -> RateOptimum:
    """Returns the optimum of a parabola in ln(factor), fitted by least squares around the best.

    A diverged run has no loss, and no parabola reaches past it: beside one, the best factor that
    was tried is the optimum.

    Args:
      losses: Factor of the learning rate -> validation loss, None if the run diverged.

    Raises:
      UserError: All runs diverged.
    """
    factors = sorted(losses)
    completed = {factor: loss for factor in factors if (loss := losses[factor]) is not None}
    if not completed:
        raise UserError(
            f"all runs of a sweep of the learning rate diverged, by factors {factors[0]:g} to "
            f"{factors[-1]:g}. Set a smaller learning_rate=."
        )
    best = min(completed, key=lambda factor: completed[factor])
    index = factors.index(best)
    if index == 0:
        return RateOptimum(best, -1)
    if index == len(factors) - 1:
        return RateOptimum(best, 1)
    if losses[factors[index + 1]] is None or losses[factors[index - 1]] is None:
        return RateOptimum(best, 0)
    near = factors[max(index - _NEIGHBORS, 0) : index + _NEIGHBORS + 1]
    near = [factor for factor in near if factor in completed]
    x = np.log(near) - math.log(best)
    curvature, slope, _ = np.polyfit(x, [completed[factor] for factor in near], 2)
    if curvature <= 0:
        return RateOptimum(best, 0)
    # Within the tried neighbors: a flat parabola may have its minimum far away.
    low, high = math.log(factors[index - 1] / best), math.log(factors[index + 1] / best)
    vertex = min(max(-slope / (2 * curvature), low), high)
    return RateOptimum(best * math.exp(vertex), 0)


def factors_of_round(number: int, losses: Mapping[float, float | None]) -> Sequence[float]:
    """Returns the factors to try in a round, from 0; none if the optimum is not at an edge.

    Args:
      number: Of the round.
      losses: Of the rounds before.

    Raises:
      UserError: The best factor is still at an edge after the last round, or all runs diverged.
    """
    if number == 0:
        return FACTORS
    optimum = find_optimum(losses)
    if optimum.edge == 0:
        return ()
    if number == _MAX_ROUNDS:
        name = "largest" if optimum.edge > 0 else "smallest"
        raise UserError(
            f"the best learning rate of a sweep is the {name} one, {optimum.factor:g} times that "
            "of the configuration. Multiply learning_rate= by it."
        )
    return [optimum.factor * 2.0 ** (optimum.edge * step) for step in range(1, _ADDED + 1)]


def combine_rungs(optima: Sequence[RateOptimum]) -> float:
    """Returns the factor for all rungs: the geometric mean of those of the swept rungs."""
    return math.exp(float(np.mean([math.log(optimum.factor) for optimum in optima])))
