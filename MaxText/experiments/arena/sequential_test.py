"""Group-sequential test of candidates against one baseline, paired by seed.

A candidate and the baseline are trained with the same seeds, and after each seed the mean of their
paired differences is tested once more (a look). Two things would make such a test find effects that
do not exist, and each has its remedy:

- Looks: the error of a candidate is spent over its looks (Lan and DeMets 1983, Discrete sequential
  boundaries for clinical trials) by a power family (Kim and DeMets 1987, Design and analysis of
  group sequential tests based on the type I error spending rate function). The boundaries follow by
  recursive numerical integration (Armitage, McPherson and Rowe 1969, Repeated significance tests on
  accumulating data).
- Candidates: each has an equal share of the session's error (Bonferroni), whatever its results have
  in common with those of other candidates through the baseline's runs.

The noise is unknown. Boundaries of a normal variable become those of Student's distribution with
the same nominal one-sided levels (Jennison and Turnbull 2000, Group Sequential Methods with
Applications to Clinical Trials, section 3.8), and the variance is pooled over the session.
benchmarks/arena_sessions.py simulates whole sessions with these functions.

Functions take numbers or arrays of them, so that simulated sessions run the code of real ones.
Improvements are positive: baseline's loss minus candidate's, in nats per token.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

import numpy as np
from scipy.optimize import brentq
from scipy.special import ndtr, ndtri, stdtrit

FIRST_LOOK = 2  # one difference has no variance
_SPENDING_EXPONENT = 1.5  # of Kim and DeMets: 1 spends evenly, larger ones later
FUTILITY = 0.01  # predictive power below which a candidate is given up
# Differences are means over float32 losses; smaller relative noise is rounding.
_ROUNDING = 1e-7

_NODES = 160  # of Gauss-Legendre quadrature; 10 digits at 20 looks
_TAIL = 9.0  # standard deviations of a sum that are integrated


@dataclasses.dataclass(frozen=True)
class SequentialTest:
    """The test of one candidate.

    Attributes:
      level: Largest chance that it keeps a candidate that is no better, over all of its looks.
      max_seeds: Looks follow each pair of runs from the second to this one.
      min_effect: Improvement to be exceeded, in nats per token.
    """

    level: float
    max_seeds: int
    min_effect: float = 0.0

    def nominal_level(self, num_seeds: int) -> float:
        """Returns the one-sided p-value that a look needs to keep."""
        return nominal_levels(self.level, self.max_seeds)[num_seeds - FIRST_LOOK]

    def critical_value(self, num_seeds: int, degrees_of_freedom: float | np.ndarray) -> np.ndarray:
        """Returns the boundary of the t statistic of a look."""
        return -stdtrit(degrees_of_freedom, self.nominal_level(num_seeds))


class Noise(NamedTuple):
    """Estimated variance of a paired difference, by Student's degrees of freedom."""

    variance: float | np.ndarray
    degrees_of_freedom: float | np.ndarray


class Look(NamedTuple):
    """The result of a look. Arrays in simulations.

    `low` and `high` are the ends of the repeated confidence interval of the improvement (Jennison
    and Turnbull 1989, Interim analyses: the repeated confidence interval approach): all intervals
    of a candidate contain its true improvement with a probability of 1 - 2 * level at least, also
    the one at which it stopped. `predictive_power` is the chance that the last look would keep,
    given the improvement so far.
    """

    improvement: float | np.ndarray
    low: float | np.ndarray
    high: float | np.ndarray
    predictive_power: float | np.ndarray
    keeps: bool | np.ndarray
    is_futile: bool | np.ndarray


@functools.cache
def nominal_levels(level: float, max_seeds: int) -> tuple[float, ...]:
    """Returns the one-sided p-value of each look, from FIRST_LOOK to `max_seeds` pairs.

    With them, the error spent up to n of N pairs is level * (n / N) ** 1.5. The boundaries ignore
    that candidates are also given up: doing so, for whatever reason, can only lower the error.

    Args:
      level: Error of all looks, between 0 and 1.
      max_seeds: Number of pairs at the last look, FIRST_LOOK or more.
    """
    paths = _Paths()
    levels: list[float] = []
    spent = 0.0
    for num_seeds in range(FIRST_LOOK, max_seeds + 1):
        to_spend = level * (num_seeds / max_seeds) ** _SPENDING_EXPONENT - spent
        spent += to_spend
        bound = _TAIL * np.sqrt(num_seeds)
        boundary = _solve(lambda sum_, to_spend=to_spend: paths.above(sum_) - to_spend, bound)
        levels.append(float(ndtr(-boundary / np.sqrt(num_seeds))))
        paths.cross(boundary)
    return tuple(levels)


def _solve(function: Callable[[float], float], bound: float) -> float:
    """Returns the zero between -`bound` and `bound` of a function that falls."""
    return cast(float, brentq(function, -bound, bound))


def keep_probability(test: SequentialTest, effect: float) -> float:
    """Returns the chance that a candidate is kept, if it is given up at the last look only.

    Args:
      test: With a `min_effect` of 0.
      effect: Its improvement, in standard deviations of a paired difference, which are known.
    """
    paths = _Paths(effect)
    probability = 0.0
    for num_seeds in range(FIRST_LOOK, test.max_seeds + 1):
        boundary = -float(ndtri(test.nominal_level(num_seeds))) * np.sqrt(num_seeds)
        probability += paths.above(boundary)
        paths.cross(boundary)
    return min(probability, 1.0)


class _Paths:
    """Sums of independent normal differences that have crossed no boundary so far.

    Their density is known at the nodes of a quadrature (Armitage, McPherson and Rowe 1969).
    """

    def __init__(self, drift: float = 0.0):
        """Begins at a sum of 0, FIRST_LOOK differences before the first look.

        Args:
          drift: Mean of a difference, whose standard deviation is 1.
        """
        self._drift = drift
        self._sums = np.zeros(1)
        self._masses = np.ones(1)  # density times the weight of the node
        self._num_seeds = 0
        self._num_new = FIRST_LOOK  # differences up to the next look

    def above(self, boundary: float) -> float:
        """Returns the chance of no crossing before the next look, and a sum above this there."""
        ends = self._sums + self._drift * self._num_new
        return float(self._masses @ ndtr((ends - boundary) / np.sqrt(self._num_new)))

    def cross(self, boundary: float) -> None:
        """Takes the next look, and drops what is above the boundary."""
        nodes, weights = np.polynomial.legendre.leggauss(_NODES)
        self._num_seeds += self._num_new
        mean = self._drift * self._num_seeds
        lowest = min(mean, boundary) - _TAIL * np.sqrt(self._num_seeds)
        half_width = (boundary - lowest) / 2
        sums = lowest + half_width * (nodes + 1)
        std = np.sqrt(self._num_new)
        steps = (sums[:, None] - self._sums - self._drift * self._num_new) / std
        transitions = np.exp(-(steps**2) / 2) / (std * np.sqrt(2 * np.pi))
        self._masses = (transitions @ self._masses) * weights * half_width
        self._sums = sums
        self._num_new = 1


def noise_of(differences: Sequence[float]) -> Noise:
    """Returns the variance of paired differences around their mean."""
    count = len(differences)
    return Noise(float(np.var(differences, ddof=1)) if count > 1 else 0.0, max(count - 1, 0))


def pool(noises: Sequence[Noise]) -> Noise:
    """Returns the mean of variances, weighted by their degrees of freedom."""
    degrees_of_freedom = sum(noise.degrees_of_freedom for noise in noises)
    total = sum(noise.variance * noise.degrees_of_freedom for noise in noises)
    return Noise(total / np.maximum(degrees_of_freedom, 1), degrees_of_freedom)


def pool_session(calibration: Noise, candidates: Sequence[Noise]) -> Noise:
    """Returns the noise that a session knows besides that of the candidate it judges.

    A candidate counts with no less than the variance of the calibration. One that draws the same
    initial weights as the baseline can have a hundredth of it, and would make others look certain.

    Args:
      calibration: Of the baseline against itself with other initial weights.
      candidates: Of the other candidates.
    """
    floored = [
        Noise(np.maximum(noise.variance, calibration.variance), noise.degrees_of_freedom)
        for noise in candidates
    ]
    return pool([calibration, *floored])


def estimate_noise(own: Noise, others: Noise, *, mean_loss: float = 0.0) -> Noise:
    """Returns the variance with which a candidate is judged.

    It is pooled with that of the others, because two or three differences say little about their
    variance. It is the candidate's own if that is larger: an unstable candidate is not judged by
    the noise of stable ones.

    Args:
      own: Of the candidate's paired differences, with at least one degree of freedom.
      others: Of the calibration and of the other candidates (`pool_session`).
      mean_loss: Size of the losses, in nats per token, which bounds their rounding.
    """
    pooled = pool([own, others])
    rounding = (_ROUNDING * mean_loss) ** 2
    variance = np.maximum(np.maximum(own.variance, pooled.variance), rounding)
    return Noise(variance, pooled.degrees_of_freedom)


def take_look(
    test: SequentialTest, num_seeds: int, improvement: float | np.ndarray, noise: Noise
) -> Look:
    """Tests the mean improvement over the first `num_seeds` seeds.

    A candidate is kept if its improvement exceeds `min_effect` by more than the boundary. It is
    futile if the predictive power (Spiegelhalter, Freedman and Blackburn 1986, Monitoring clinical
    trials: conditional or predictive power?) is below 1 %: the chance that the last look keeps it,
    if its true improvement is uncertain as the differences so far say.

    Args:
      test: Of the candidate.
      num_seeds: Number of pairs, from FIRST_LOOK to `test.max_seeds`.
      improvement: Mean of the paired differences, positive if the candidate is better.
      noise: Of a paired difference.
    """
    std = np.sqrt(noise.variance)
    error = std / np.sqrt(num_seeds)
    half = test.critical_value(num_seeds, noise.degrees_of_freedom) * error
    low = improvement - half
    keeps = low > test.min_effect

    remaining = test.max_seeds - num_seeds
    final_critical = test.critical_value(test.max_seeds, noise.degrees_of_freedom + remaining)
    final_boundary = test.min_effect + final_critical * std / np.sqrt(test.max_seeds)
    # The final mean, given that of the first seeds, scatters by the remaining ones and by what the
    # first ones leave open about the true improvement.
    final_error = std * np.sqrt(remaining / (num_seeds * test.max_seeds))
    with np.errstate(divide="ignore", invalid="ignore"):
        predictive_power = ndtr((improvement - final_boundary) / final_error)
    is_futile = ~keeps & (predictive_power < FUTILITY)
    return Look(
        improvement=improvement,
        low=low,
        high=improvement + half,
        predictive_power=predictive_power,
        keeps=keeps,
        is_futile=is_futile,
    )
