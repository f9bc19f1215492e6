"""Which runs end as diverged although their loss is a number."""

import json

import numpy as np
import pytest

from MaxText.monitoring.loss_trend import LossTrend


def falling(start, end, count, noise=0.1):
    rng = np.random.default_rng(0)
    return list(
        end
        + (start - end) * np.exp(-np.arange(count) / (count / 5))
        + noise * rng.normal(size=count)
    )


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


def test_what_a_run_went_back_behind_is_forgotten():
    trend = LossTrend(6.4)
    for loss in [8.0, 5.0, 5.0, 40.0, 40.0, 40.0, 40.0]:
        trend.add(loss)
    trend.go_back()
    for loss in [5.0, 4.9]:
        trend.add(loss)
    assert not trend.diverged
