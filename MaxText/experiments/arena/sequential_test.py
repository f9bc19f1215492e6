"""Group-sequential test of candidates against one baseline, paired by seed.

A candidate and the baseline are trained with the same seeds, and after each seed from the third on
the mean of their paired differences is tested once more (a look), with Student's distribution and
the standard deviation of these differences alone. Two things would make such a test find effects
that do not exist, and each has its remedy:

- Looks: the error of a candidate is spent over its looks by a power family (Lan and DeMets 1983,
  Discrete sequential boundaries for clinical trials; Kim and DeMets 1987, Design and analysis of
  group sequential tests based on the type I error spending rate function). A look is tested at the
  share that is spent at it, so that the sum over the looks bounds the error (Bonferroni).
- Candidates: each has an equal share of the session's error (Bonferroni), whatever its results have
  in common with those of other candidates through the baseline's runs.

With normal noise both bounds are exact inequalities, whatever the noise of a candidate is. Other
candidates' runs say nothing about it: those of a key that hardly acts differ by a hundredth of what
those of another architecture do. Pooling both would hide small effects of the first, and would let
noise of the second pass as an effect; an author could lower the noise of all by quiet candidates.
Boundaries of normal variables that are turned into Student's by their nominal levels (Jennison and
Turnbull 2000, Group Sequential Methods with Applications to Clinical Trials, section 3.8) are not
used: with so few degrees of freedom, they exceed the level by a quarter (simulated).
benchmarks/arena_sessions.py simulates whole sessions with these functions.

Functions take numbers or arrays of them, so that simulated sessions run the code of real ones.
Improvements are positive: baseline's loss minus candidate's, in nats per token.
"""

import dataclasses
from typing import NamedTuple

import numpy as np
from scipy.special import stdtr, stdtrit

FIRST_LOOK = 3  # with fewer differences, Student's boundary is beyond any real effect
FUTILITY = 0.05  # predictive power below which a candidate is given up
_SPENDING_EXPONENT = 1.5  # of Kim and DeMets: 1 spends evenly, larger ones later
# Differences are means over float32 losses; smaller relative noise is rounding.
_ROUNDING = 1e-7


@dataclasses.dataclass(frozen=True)
class SequentialTest:
    """The test of one candidate.

    Attributes:
      level: Largest chance that it keeps a candidate that is no better, over all of its looks.
      max_seeds: Looks follow each pair of runs from the third to this one.
      min_effect: Improvement to be exceeded, in nats per token.
    """

    level: float
    max_seeds: int
    min_effect: float = 0.0

    def spent(self, num_seeds: int) -> float:
        """Returns the error that is spent up to a number of pairs; none before the first look."""
        if num_seeds < FIRST_LOOK:
            return 0.0
        return self.level * (num_seeds / self.max_seeds) ** _SPENDING_EXPONENT

    def nominal_level(self, num_seeds: int) -> float:
        """Returns the one-sided p-value that a look needs to keep."""
        return self.spent(num_seeds) - self.spent(num_seeds - 1)

    def critical_value(self, num_seeds: int) -> float:
        """Returns the boundary of the t statistic of a look."""
        return -float(stdtrit(num_seeds - 1, self.nominal_level(num_seeds)))


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


def standard_deviation(differences: np.ndarray, *, mean_loss: float = 0.0) -> float | np.ndarray:
    """Returns the standard deviation of paired differences, [...] of [..., seeds].

    Args:
      differences: FIRST_LOOK or more along the last axis.
      mean_loss: Size of the losses, in nats per token. The result is no less than their rounding.
    """
    return np.maximum(np.std(differences, axis=-1, ddof=1), _ROUNDING * mean_loss)


def take_look(
    test: SequentialTest, num_seeds: int, improvement: float | np.ndarray, std: float | np.ndarray
) -> Look:
    """Tests the mean improvement over the first `num_seeds` seeds.

    A candidate is kept if its improvement exceeds `min_effect` by more than the boundary. It is
    futile if the predictive power (Spiegelhalter, Freedman and Blackburn 1986, Monitoring clinical
    trials: conditional or predictive power?) is below 5 %: the chance that the last look keeps it,
    if its true improvement is uncertain as the differences so far say.

    Args:
      test: Of the candidate.
      num_seeds: Number of pairs, from FIRST_LOOK to `test.max_seeds`.
      improvement: Mean of the paired differences, positive if the candidate is better.
      std: Their standard deviation.
    """
    half = test.critical_value(num_seeds) * std / np.sqrt(num_seeds)
    low = improvement - half
    keeps = low > test.min_effect

    remaining = test.max_seeds - num_seeds
    final_boundary = test.min_effect + test.critical_value(test.max_seeds) * std / np.sqrt(
        test.max_seeds
    )
    # The final mean, given that of the first seeds, scatters by the remaining ones and by what the
    # first ones leave open about the true improvement.
    final_error = std * np.sqrt(remaining / (num_seeds * test.max_seeds))
    with np.errstate(divide="ignore", invalid="ignore"):
        excess = (improvement - final_boundary) / final_error
    predictive_power = stdtr(num_seeds - 1, excess)
    return Look(
        improvement=improvement,
        low=low,
        high=improvement + half,
        predictive_power=predictive_power,
        keeps=keeps,
        is_futile=~keeps & (predictive_power < FUTILITY),
    )
