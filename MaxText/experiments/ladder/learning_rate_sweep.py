"""Learning rate or weight decay of a configuration, from a sweep by factors of two.

The optimum is that of a parabola in the logarithm of the value through the losses around the best
one. The sweep has a seed of its own, so that the runs that are compared are not those that were
selected.
"""

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from MaxText.errors import UserError
from MaxText.experiments.ladder.ladder_args import DECAY_KEY, RATE_KEY

# Of the configuration's value; later rounds go on beyond the edge that was best.
FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)
_MAX_ROUNDS = 3
_ADDED = 2  # factors of a later round
_NEIGHBORS = 2  # points on each side of the best one that the parabola is fitted to


_Sweep = TypeVar("_Sweep", bound=Hashable)
_Run = TypeVar("_Run")


class RateOptimum(NamedTuple):
    """The best factor of a swept value."""

    factor: float
    edge: int  # -1 or 1 if the least loss is that of the smallest or largest factor, else 0


def find_optimum(losses: Mapping[float, float | None], key: str = RATE_KEY) -> RateOptimum:
    """Returns the optimum of a parabola in ln(factor), fitted by least squares around the best.

    A diverged run has no loss, and no parabola reaches past it: beside one, the best factor that
    was tried is the optimum.

    Args:
      losses: Factor of the value -> validation loss, None if the run diverged.
      key: That is swept.

    Raises:
      UserError: All runs diverged.
    """
    factors = sorted(losses)
    completed = {factor: loss for factor in factors if (loss := losses[factor]) is not None}
    if not completed:
        raise UserError(
            f"all runs of a sweep of {key} diverged, by factors {factors[0]:g} to "
            f"{factors[-1]:g}. Set a smaller {RATE_KEY}=."
        )
    best = min(completed, key=lambda factor: completed[factor])
    index = factors.index(best)
    if index == 0:
        return RateOptimum(best, -1)
    if index == len(factors) - 1:
        return RateOptimum(best, 1)
    if losses[factors[index + 1]] is None or losses[factors[index - 1]] is None:
        return RateOptimum(best, 0)
    # The minimum of a parabola through three points lies nearer to the best of them than to the
    # others. That of a fit to more may lie anywhere, at a neighbor that was tried and is worse.
    low, high = math.log(factors[index - 1] / best) / 2, math.log(factors[index + 1] / best) / 2
    for num_neighbors in (_NEIGHBORS, 1):
        near = factors[max(index - num_neighbors, 0) : index + num_neighbors + 1]
        near = [factor for factor in near if factor in completed]
        x = np.log(near) - math.log(best)
        curvature, slope, _ = np.polyfit(x, [completed[factor] for factor in near], 2)
        if curvature <= 0:
            continue
        vertex = -slope / (2 * curvature)
        if low <= vertex <= high:
            return RateOptimum(best * math.exp(vertex), 0)
    return RateOptimum(best, 0)  # equal losses


def factors_of_round(
    number: int, losses: Mapping[float, float | None], key: str = RATE_KEY
) -> Sequence[float]:
    """Returns the factors to try in a round, from 0; none if the sweep has ended.

    It has if the optimum is not at an edge. A weight decay may be best at an edge after the last
    round, too: losses of short runs often fall, however small it gets.

    Args:
      number: Of the round.
      losses: Of the rounds before.
      key: That is swept.

    Raises:
      UserError: The best learning rate is still at an edge after the last round, or all runs
        diverged.
    """
    if number == 0:
        return FACTORS
    optimum = find_optimum(losses, key)
    if optimum.edge == 0:
        return ()
    if number == _MAX_ROUNDS:
        if key == DECAY_KEY:
            return ()
        name = "largest" if optimum.edge > 0 else "smallest"
        raise UserError(
            f"the best learning rate of a sweep is the {name} one, {optimum.factor:g} times that "
            "of the configuration. Multiply learning_rate= by it."
        )
    return [optimum.factor * 2.0 ** (optimum.edge * step) for step in range(1, _ADDED + 1)]


def run_sweeps(
    sweeps: Mapping[_Sweep, Callable[[float], _Run]],
    run: Callable[[Sequence[_Run]], None],
    loss_of: Callable[[_Run], float | None],
    key: str = RATE_KEY,
) -> dict[_Sweep, dict[float, float | None]]:
    """Runs sweeps side by side, round by round; returns the losses of each by factor.

    Args:
      sweeps: Each makes its run from a factor.
      run: Runs those of a round that are not over.
      loss_of: Loss of a run that is over; None if it diverged.
      key: That is swept.

    Raises:
      UserError: A sweep found no optimum, or a run failed.
    """
    losses: dict[_Sweep, dict[float, float | None]] = {sweep: {} for sweep in sweeps}
    round_number = 0
    while True:
        tried = [
            (sweep, factor, make_run(factor))
            for sweep, make_run in sweeps.items()
            for factor in factors_of_round(round_number, losses[sweep], key)
        ]
        if not tried:
            return losses
        run([new_run for _, _, new_run in tried])
        for sweep, factor, finished in tried:
            losses[sweep][factor] = loss_of(finished)
        round_number += 1


def combine_rungs(optima: Sequence[RateOptimum]) -> float:
    """Returns the factor for all rungs: the geometric mean of those of the swept rungs."""
    return math.exp(float(np.mean([math.log(optimum.factor) for optimum in optima])))
