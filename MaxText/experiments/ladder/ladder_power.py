"""Power of a planned ladder: the smallest speed-up that it will probably find."""

import math
from collections.abc import Sequence

import numpy as np

from MaxText.experiments.ladder.effective_speedup import measure_speedup
from MaxText.experiments.ladder.measurements import LEVEL
from MaxText.experiments.ladder.scaling_law import MAX_PROJECTION, fit_law
from MaxText.experiments.ladder.simulated_ladder import (
    LadderNoise,
    draw_law,
    draw_noise,
    simulate_ladder,
)

POWER = 0.8
_NUM_LADDERS = 400  # the quantile's standard error is about 3 % of ln S
_NUM_DRAWS = 1000


def smallest_speedup(
    computes: Sequence[float] | np.ndarray,
    num_seeds: int,
    noise: LadderNoise | None = None,
    *,
    power: float = POWER,
    level: float = LEVEL,
    num_ladders: int = _NUM_LADDERS,
) -> float:
    """Returns the smallest speed-up in FLOPs that a ladder calls "worked" with probability `power`.

    Simulates ladders whose arms are equal. A true speed-up S would move the line of each by ln S,
    so a ladder finds every S that lifts its lower end at the top rung, and its value at ten times
    the top, above 1. In time the smallest speed-up is larger by the variant's loss of throughput.

    Args:
      computes: FLOPs of the planned rungs, ascending.
      num_seeds: Runs per rung and arm.
      noise: Of the losses, as measured in an earlier ladder by `measure_noise`; by default drawn
        from what published ladders have, with rungs as noisy as seeds.
      power: Probability of finding it.
      level: Of the verdict's interval.
      num_ladders: To simulate.
    """
    generator = np.random.default_rng(0)
    needed = []
    for _ in range(num_ladders):
        baseline, variant = simulate_ladder(
            generator,
            computes,
            num_seeds,
            law=draw_law(generator, speedup=1.0),
            noise=noise or draw_noise(generator),
        )
        fitted = fit_law(baseline, num_draws=_NUM_DRAWS, generator=generator)
        speedup = measure_speedup(baseline, variant, fitted, generator)
        low = np.quantile(speedup.line_draws(speedup.top), (1 - level) / 2)
        beyond = np.median(speedup.line_draws(MAX_PROJECTION * speedup.top))
        needed.append(max(-low, -beyond))
    return math.exp(float(np.quantile(needed, power)))
