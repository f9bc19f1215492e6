"""Error and power of the sequential test, against other computations and by simulated sessions."""

import numpy as np
import pytest
from scipy import stats

from benchmarks.arena_sessions import SimulatedSessions, simulate
from MaxText.experiments.arena.arena_args import parse_args
from MaxText.experiments.arena.sequential_test import (
    FIRST_LOOK,
    SequentialTest,
    standard_deviation,
    take_look,
)

_NUM_SESSIONS = 2000


def test_the_shares_of_the_looks_add_up_to_the_level():
    test = SequentialTest(level=0.0025, max_seeds=10)
    levels = [test.nominal_level(num_seeds) for num_seeds in range(FIRST_LOOK, 11)]
    assert sum(levels) == pytest.approx(0.0025)
    assert sum(levels[:4]) == pytest.approx(0.0025 * 0.6**1.5)
    assert min(levels) > 0


def test_a_session_allows_the_seeds_of_one_look():
    assert parse_args(["output=out", f"max_seeds={FIRST_LOOK}"]).options.max_seeds == FIRST_LOOK
    with pytest.raises(ValueError, match="max_seeds"):
        parse_args(["output=out", f"max_seeds={FIRST_LOOK - 1}"])


def test_the_interval_of_a_look_is_students_at_its_nominal_level():
    differences = np.array([0.1, 0.3, 0.2, 0.25])
    test = SequentialTest(level=0.03, max_seeds=4)
    look = take_look(test, 4, float(differences.mean()), standard_deviation(differences))
    level = test.nominal_level(4)
    interval = stats.t.interval(1 - 2 * level, 3, differences.mean(), stats.sem(differences))
    assert (look.low, look.high) == pytest.approx(interval)
    p_value = stats.ttest_1samp(differences, 0, alternative="greater").pvalue
    assert bool(look.keeps) == (p_value < level)
    assert look.predictive_power == float(look.keeps)


def test_predictive_power_is_the_share_of_simulated_continuations():
    """Of a mean whose uncertainty is Student's, with the standard deviation so far."""
    test = SequentialTest(level=0.05, max_seeds=8, min_effect=0.1)
    std, num_seeds, improvement = 0.7, 4, 0.7
    look = take_look(test, num_seeds, improvement, std)
    generator = np.random.default_rng(0)
    count = 200_000
    # The noise that four differences with this standard deviation leave possible.
    true_std = std * np.sqrt(3 / generator.chisquare(3, count))
    true = improvement + true_std / np.sqrt(num_seeds) * generator.standard_normal(count)
    remaining = test.max_seeds - num_seeds
    rest = true + true_std / np.sqrt(remaining) * generator.standard_normal(count)
    final = (num_seeds * improvement + remaining * rest) / test.max_seeds
    kept = final - test.critical_value(8) * std / np.sqrt(8) > test.min_effect
    assert 0.1 < kept.mean() < 0.9
    assert look.predictive_power == pytest.approx(kept.mean(), abs=0.005)


def test_equal_losses_are_not_without_noise():
    std = standard_deviation(np.zeros(3), mean_loss=4.0)
    look = take_look(SequentialTest(level=0.0025, max_seeds=10), 3, 0.0, std)
    assert std > 0
    assert not look.keeps


def test_a_quiet_candidate_is_judged_by_its_own_noise():
    """A candidate that shares nearly all weights with the baseline, so that pairing is close."""
    differences = np.array([0.013, 0.019, 0.017, 0.020, 0.017])
    test = SequentialTest(level=0.0025, max_seeds=7)
    look = take_look(test, 4, differences[:4].mean(), standard_deviation(differences[:4]))
    assert not look.keeps
    assert look.predictive_power > 0.99
    assert take_look(test, 5, differences.mean(), standard_deviation(differences)).keeps
    # As noisy as the baseline with other initial weights, it would not be.
    assert not take_look(test, 5, differences.mean(), 0.027).keeps


# Refused if so many would be less likely than 1 in 1,000 at a true 5 %.
@pytest.mark.parametrize(
    "kind",
    [
        SimulatedSessions(pairing=0.75),
        SimulatedSessions(pairing=0.75, noise_spread=0.5),
        SimulatedSessions(pairing=0.75, quiet_share=0.5),
        SimulatedSessions(pairing=0.75, gives_up=False),
    ],
)
def test_few_sessions_without_effect_keep_any_candidate(kind):
    results = simulate(kind, _NUM_SESSIONS, seed=1)
    num_sessions = int(results.kept_SK.any(axis=1).sum())
    assert num_sessions <= stats.binom.isf(1e-3, _NUM_SESSIONS, 0.05)
    assert results.covered_SK.mean() > 0.995


def test_an_effect_of_one_sd_is_found_with_six_seeds():
    effects = tuple(float(index % 4 == 0) for index in range(20))
    results = simulate(SimulatedSessions(pairing=0.96, effects=effects), 300, seed=1)
    is_good = np.array(effects) > 0
    assert results.kept_SK[:, is_good].mean() > 0.8
    assert results.seeds_SK[:, is_good].mean() < 6.2
    assert results.seeds_SK[:, ~is_good].mean() < 4
