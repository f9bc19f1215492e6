"""Error and power of the sequential test, against other computations and by simulated sessions."""

import numpy as np
import pytest
from scipy import stats

from benchmarks.arena_sessions import SimulatedSessions, simulate
from MaxText.experiments.arena.sequential_test import (
    Noise,
    SequentialTest,
    estimate_noise,
    keep_probability,
    noise_of,
    nominal_levels,
    pool_session,
    take_look,
)

_NUM_SESSIONS = 600


def test_boundaries_spend_the_error_over_the_looks():
    """Against an integration over a fine grid by convolution."""
    level, max_seeds = 0.1, 5
    step = 0.005
    grid = np.arange(-24, 24, step)
    density = stats.norm.pdf(grid, scale=np.sqrt(2))
    kernel = stats.norm.pdf(np.arange(-1600, 1601) * step) * step
    for num_seeds, nominal in enumerate(nominal_levels(level, max_seeds), 2):
        boundary = stats.norm.isf(nominal) * np.sqrt(num_seeds)
        crossed = density[grid >= boundary].sum() * step
        before = ((num_seeds - 1) / max_seeds) ** 1.5 if num_seeds > 2 else 0
        spent = level * ((num_seeds / max_seeds) ** 1.5 - before)
        assert crossed == pytest.approx(spent, rel=0.01)
        density[grid >= boundary] = 0
        density = np.convolve(density, kernel, mode="same")


def test_the_interval_of_a_look_is_students_at_its_nominal_level():
    differences = np.array([0.1, 0.3, 0.2, 0.25])
    test = SequentialTest(level=0.03, max_seeds=4)
    noise = noise_of(list(differences))
    look = take_look(test, 4, float(differences.mean()), noise)
    level = test.nominal_level(4)
    interval = stats.t.interval(1 - 2 * level, 3, differences.mean(), stats.sem(differences))
    assert (look.low, look.high) == pytest.approx(interval)
    p_value = stats.ttest_1samp(differences, 0, alternative="greater").pvalue
    assert bool(look.keeps) == (p_value < level)
    assert look.predictive_power == float(look.keeps)


def test_keep_probability_is_the_level_without_an_effect_and_grows_to_one():
    test = SequentialTest(level=0.0025, max_seeds=10)
    powers = [keep_probability(test, effect) for effect in (0, 1, 2, 100)]
    assert powers[0] == pytest.approx(0.0025, rel=1e-6)
    assert powers == sorted(powers)
    assert powers[-1] == pytest.approx(1)


def test_predictive_power_is_the_share_of_simulated_continuations():
    test = SequentialTest(level=0.05, max_seeds=8, min_effect=0.1)
    variance, num_seeds, improvement = 0.5, 3, 0.6
    look = take_look(test, num_seeds, improvement, Noise(variance, 1e9))
    generator = np.random.default_rng(0)
    true = improvement + np.sqrt(variance / num_seeds) * generator.standard_normal(100_000)
    remaining = test.max_seeds - num_seeds
    rest = true + np.sqrt(variance / remaining) * generator.standard_normal(len(true))
    final = (num_seeds * improvement + remaining * rest) / test.max_seeds
    kept = final - test.critical_value(8, 1e9) * np.sqrt(variance / 8) > test.min_effect
    assert look.predictive_power == pytest.approx(kept.mean(), abs=0.01)


def test_noise_is_pooled_but_never_below_a_candidates_own_or_the_calibration():
    calibration = Noise(1.0, 3)
    pooled = pool_session(calibration, [Noise(4.0, 3), Noise(0.01, 6)])
    assert pooled == (pytest.approx((3 + 12 + 6) / 12), 12)
    quiet = estimate_noise(Noise(0.01, 2), calibration)
    assert quiet == (pytest.approx((0.02 + 3) / 5), 5)
    unstable = estimate_noise(Noise(9.0, 2), calibration)
    assert unstable == (pytest.approx(9.0), 5)
    same_losses = estimate_noise(noise_of([0.0, 0.0]), Noise(0.0, 0), mean_loss=4.0)
    assert same_losses.variance > 0


@pytest.mark.parametrize("quiet_share", [0.0, 0.5])
def test_few_sessions_without_effect_keep_any_candidate(quiet_share):
    kind = SimulatedSessions(pairing=0.75, quiet_share=quiet_share)
    results = simulate(kind, _NUM_SESSIONS, seed=1)
    num_sessions = int(results.kept_SK.any(axis=1).sum())
    # Refused if so many would be less likely than 1 in 1,000 at a true 5 %.
    assert num_sessions <= stats.binom.isf(1e-3, _NUM_SESSIONS, 0.05)
    assert results.covered_SK.mean() > 0.99


def test_an_effect_of_one_sd_is_found_with_six_seeds():
    effects = tuple(float(index % 4 == 0) for index in range(20))
    results = simulate(SimulatedSessions(pairing=0.85, effects=effects), 300, seed=1)
    is_good = np.array(effects) > 0
    assert results.kept_SK[:, is_good].mean() > 0.8
    assert results.seeds_SK[:, is_good].mean() < 6.3
    assert results.seeds_SK[:, ~is_good].mean() < 5
