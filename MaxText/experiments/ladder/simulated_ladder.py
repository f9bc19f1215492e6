"""Ladders simulated from laws that are known, for power, coverage and tests."""

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from MaxText.experiments.ladder.effective_speedup import match_rungs
from MaxText.experiments.ladder.measurements import Arm, Rung
from MaxText.experiments.ladder.scaling_law import LawPosterior

# What published ladders of language models span; uniform unless told.
ASYMPTOTES = (1.0, 2.2)  # nats per token
EXPONENTS = (0.05, 0.16)
SCALES = (1.2, 2.5)  # nats per token above the asymptote, at the ladder's center
SEED_DEVIATIONS = (0.002, 0.01)  # log-uniform, nats per token
SPEEDUPS = (0.8, 1.4)  # log-uniform

_TOKENS_PER_PARAMETER = 20.0


@dataclasses.dataclass(frozen=True)
class LadderNoise:
    """Normal noise of a ladder's losses, in nats per token."""

    seed_deviation: float  # of a run about its rung's mean
    # Of a rung about the curve: what its seeds share, such as a learning rate off its optimum.
    rung_deviation: float
    shared: float = 0.5  # share of either variance that is common to both arms

    def __post_init__(self) -> None:
        if min(self.seed_deviation, self.rung_deviation) < 0 or not 0 <= self.shared <= 1:
            raise ValueError(f"deviations must not be negative and `shared` in [0, 1]: {self}")


class SimulatedLaw(NamedTuple):
    """The law that a simulated ladder follows."""

    asymptote: float
    exponent: float
    scale: float  # nats per token above the asymptote, at the ladder's center
    log_speedup: float = 0.0  # of the variant, at the top rung
    drift: float = 0.0  # of log_speedup per e-fold of compute
    bend: float = 0.0  # nats per token added to the lowest rung, falling by e per e-fold

    def losses(self, x: np.ndarray, *, variant: bool) -> np.ndarray:
        """Returns losses without noise at x = ln(C / center), ascending: float [R]."""
        bend = self.bend * np.exp(x[0] - x)
        if variant:
            x = x + self.log_speedup + self.drift * (x - x[-1])
        return self.asymptote + self.scale * np.exp(-self.exponent * x) + bend


def draw_law(
    generator: np.random.Generator,
    *,
    asymptote: float | None = None,
    speedup: float | None = None,
    drift_deviation: float = 0.0,
    bend: float = 0.0,
) -> SimulatedLaw:
    """Draws a law from the ranges above; given values replace draws."""
    log_low, log_high = np.log(SPEEDUPS)
    return SimulatedLaw(
        asymptote=generator.uniform(*ASYMPTOTES) if asymptote is None else asymptote,
        exponent=generator.uniform(*EXPONENTS),
        scale=generator.uniform(*SCALES),
        log_speedup=generator.uniform(log_low, log_high) if speedup is None else math.log(speedup),
        drift=generator.normal(0.0, drift_deviation),
        bend=bend,
    )


def draw_noise(generator: np.random.Generator, rung_to_seed: float = 1.0) -> LadderNoise:
    """Draws the deviation of seeds; that of rungs is `rung_to_seed` times as large."""
    log_low, log_high = np.log(SEED_DEVIATIONS)
    seed_deviation = math.exp(generator.uniform(log_low, log_high))
    return LadderNoise(seed_deviation, rung_to_seed * seed_deviation)


def simulate_ladder(
    generator: np.random.Generator,
    computes: Sequence[float] | np.ndarray,
    num_seeds: int,
    *,
    law: SimulatedLaw,
    noise: LadderNoise,
    bottom_noise: float = 1.0,
) -> tuple[Arm, Arm]:
    """Returns the baseline and the variant of a ladder that follows a law.

    Args:
      generator: Of random numbers.
      computes: FLOPs of the rungs, ascending.
      num_seeds: Runs per rung and arm.
      law: Of the losses.
      noise: About the law.
      bottom_noise: Factor of the noise at the lowest rung, falling to 1 at the top.
    """
    log_computes = np.log(computes)
    x = log_computes - log_computes.mean()
    growth = bottom_noise ** ((x[-1] - x) / (x[-1] - x[0]))
    common, own = math.sqrt(noise.shared), math.sqrt(1 - noise.shared)
    count = len(x)
    shared_rungs = generator.standard_normal((count, 1))
    shared_seeds = generator.standard_normal((count, num_seeds))
    arms = []
    for label in ("baseline", "variant"):
        rungs = common * shared_rungs + own * generator.standard_normal((count, 1))
        seeds = common * shared_seeds + own * generator.standard_normal((count, num_seeds))
        errors = noise.rung_deviation * rungs + noise.seed_deviation * seeds
        means = law.losses(x, variant=label == "variant")
        arms.append(_arm(label, computes, means[:, None] + growth[:, None] * errors))
    return arms[0], arms[1]


def _arm(label: str, computes: Sequence[float] | np.ndarray, losses: np.ndarray) -> Arm:
    """Returns an arm from losses [R, seeds], sized at 6 FLOPs per parameter and token."""
    rungs = []
    for compute, row in zip(computes, losses, strict=True):
        parameters = math.sqrt(compute / (6 * _TOKENS_PER_PARAMETER))
        rungs.append(
            Rung(
                compute=float(compute),
                tokens=_TOKENS_PER_PARAMETER * parameters,
                parameters=round(parameters),
                losses=dict(enumerate(map(float, row))),
            )
        )
    return Arm(label, tuple(rungs))


def measure_noise(baseline: Arm, law: LawPosterior, variant: Arm | None = None) -> LadderNoise:
    """Estimates the noise of a finished ladder, to plan the next one with.

    The variance of seeds is pooled over the rungs. That of a rung is what the scatter about the
    law has beyond the seeds' share. The part common to both arms is the correlation of their seeds
    within rungs, or 0.5 without a variant.

    Args:
      baseline: With several seeds per rung.
      law: Of the baseline.
      variant: Another arm with the same rungs and seeds.

    Raises:
      ValueError: No rung has two seeds.
    """
    deviations = [_centered(rung) for rung in baseline.completed if len(rung.losses) > 1]
    degrees = sum(len(values) - 1 for values in deviations)
    if not degrees:
        raise ValueError(f"{baseline.label}: noise between seeds needs two seeds at a rung")
    seed_variance = sum(float(np.square(values).sum()) for values in deviations) / degrees
    seeds_per_rung = np.mean([len(rung.losses) for rung in baseline.completed])
    rung_variance = max(float(np.median(law.variance)) - seed_variance / seeds_per_rung, 0.0)
    shared = 0.5
    if variant is not None:
        shared = _correlation(baseline, variant)
    return LadderNoise(math.sqrt(seed_variance), math.sqrt(rung_variance), shared)


def _centered(rung: Rung) -> np.ndarray:
    """Returns losses minus their mean, by ascending seed."""
    losses = np.array([rung.losses[seed] for seed in sorted(rung.losses)])
    return losses - losses.mean()


def _correlation(baseline: Arm, variant: Arm) -> float:
    """Returns the correlation of two arms' seeds within rungs, at least 0; 0.5 if unknown."""
    pairs = [
        (_centered(first), _centered(other))
        for first, other in match_rungs(baseline, variant)
        if first.losses.keys() == other.losses.keys() and len(first.losses) > 1
    ]
    if not pairs:
        return 0.5
    first, other = (np.concatenate(values) for values in zip(*pairs, strict=True))
    norm = math.sqrt(float(first @ first) * float(other @ other))
    return max(float(first @ other) / norm, 0.0) if norm else 0.5
