"""The verdict on the training loss at the end of a run."""

import json

import numpy as np
import pytest

from MaxText.metrics.loss_trend import LossTrend


def falling(start, end, count, noise=0.1):
    mean = end + (start - end) * np.exp(-np.arange(count) / (count / 5))
    return list(mean + noise * np.random.default_rng(0).normal(size=count))


@pytest.mark.parametrize(
    ("losses", "baseline", "diverged"),
    [
        (falling(10.8, 3.0, 60), 6.4, False),
        (falling(8.3, 5.0, 3), 6.4, False),
        ([8.3, 8.1], 6.4, False),  # short: it has not come below the baseline yet
        ([8.3], 6.4, False),
        ([5.56, 5.61, 5.58, 5.63], None, False),  # random tokens
        ([*falling(8.0, 3.0, 60), 70.0, 3.0], 6.4, False),  # a spike
        ([*falling(8.0, 3.0, 60), 70.0], 6.4, False),
        ([8.3, 1290.0, 400.0, 200.0, 100.0, 90.0, 80.0, 74.5], 6.4, True),
        ([*falling(8.0, 3.0, 60), *[7.2] * 9], 6.4, True),  # back above the baseline
        ([8.3, *[30.0] * 8, *[7.4] * 9], 6.4, True),
        ([8.3, *[30.0] * 8, *[6.0] * 9], 6.4, False),  # recovered
        ([8.3, *[30.0] * 8, *[7.4] * 9], None, False),
        ([8.0, None, None, None], None, True),
        ([8.0, float("nan"), float("inf")], None, True),
    ],
)
def test_the_end_of_a_run_that_blew_up(losses, baseline, diverged):
    trend = LossTrend(baseline)
    for loss in losses:
        # As each checkpoint saves it and each restart reads it.
        trend = LossTrend(baseline, json.loads(json.dumps(trend.state, allow_nan=False)))
        trend.add(loss)
    assert bool(trend.diverged) == diverged, trend.diverged


def test_a_rollback_forgets_later_steps():
    trend = LossTrend(6.4)
    for loss in [8.0, 5.0, 5.0, 40.0, 40.0, 40.0, 40.0]:
        trend.add(loss)
    trend.roll_back()
    for loss in [5.0, 4.9]:
        trend.add(loss)
    assert not trend.diverged


def reports_of(losses, period):
    """As MetricLogger reports them: the first step, then means of `period` steps."""
    starts = [0, *range(1, len(losses), period)]
    parts = [losses[start:end] for start, end in zip(starts, [*starts[1:], None], strict=True)]
    return [(float(np.mean(part)), len(part)) for part in parts]


def trend_of(losses, baseline=None, period=1):
    trend = LossTrend(baseline)
    for loss, steps in reports_of(losses, period):
        trend.add(loss, steps)
    return trend


@pytest.mark.parametrize("period", [1, 10])
@pytest.mark.parametrize("baseline", [None, 5.22, 6.5, 6.9])
@pytest.mark.parametrize(
    ("num_steps", "num_runs"),
    [(2, 800), (3, 800), (6, 800), (9, 800), (17, 400), (18, 400), (20, 400), (40, 400),
     (100, 200), (1000, 100)],
)  # fmt: skip
def test_pure_noise_has_not_diverged(num_steps, num_runs, baseline, period):
    random = np.random.default_rng(num_steps)
    diverged = [
        bool(trend_of(random.normal(6.9, 0.3, num_steps), baseline, period).diverged)
        for _ in range(num_runs)
    ]
    assert sum(diverged) <= 0.01 * num_runs


def rising(num_steps):
    """Learns for half of the run, then explodes."""
    half = num_steps // 2
    return np.array([*falling(8.0, 4.0, half, noise=0), *np.linspace(4.0, 14.0, num_steps - half)])


def exploded_at_once(num_steps):
    return np.array([6.9] + [11.0] * (num_steps - 1))


def collapsed(num_steps):
    """Had learned, and ends as a model that knows only that all tokens are equally likely."""
    half = num_steps // 2
    return np.array([*falling(8.0, 3.0, half, noise=0), *([7.9] * (num_steps - half))])


def creeping(num_steps):
    """Rises slowly from the start."""
    return np.linspace(6.9, 9.5, num_steps)


@pytest.mark.parametrize(
    ("num_steps", "period"), [(40, 1), (200, 1), (200, 10), (1000, 1), (1000, 10)]
)
@pytest.mark.parametrize("course", [rising, exploded_at_once, collapsed, creeping])
def test_a_real_divergence_is_detected(course, num_steps, period):
    random = np.random.default_rng(num_steps)
    runs = [course(num_steps) + random.normal(0, 0.2, num_steps) for _ in range(20)]
    assert all(trend_of(run, 6.4, period).diverged for run in runs)


@pytest.mark.parametrize("num_steps", [2, 3, 5])
def test_an_explosion_within_a_few_steps_is_detected(num_steps):
    random = np.random.default_rng(0)
    runs = [exploded_at_once(num_steps) + random.normal(0, 0.3, num_steps) for _ in range(100)]
    assert all(trend_of(run).diverged for run in runs)


def test_noise_of_long_reports_counts_for_the_first_step():
    """The first report is of one step, later ones are means of 20 with less noise."""
    random = np.random.default_rng(1)
    runs = [random.normal(6.9, 0.3, 400) for _ in range(200)]
    assert sum(bool(trend_of(run, 5.22, 20).diverged) for run in runs) <= 2


def test_the_limit_of_a_single_loss():
    assert LossTrend().outlier_limit == float("inf")
    limit = trend_of([*falling(8.0, 3.0, 60, noise=0.02)]).outlier_limit
    assert 3.2 < limit < 4.0
