"""The verdict on a loss, by its definition: losses without noise, one step around each limit."""

import json

import pytest

from MaxText.metrics.loss_trend import LossTrend

BASELINE = 6.4


def continued(trend, losses, baseline=BASELINE):
    """The trend after more reports, saved and read again after each."""
    for loss in losses:
        trend.add(loss)
        trend = LossTrend(baseline, json.loads(json.dumps(trend.state, allow_nan=False)))
    return trend


def has_diverged(*losses, baseline=None):
    return bool(continued(LossTrend(baseline), losses, baseline).diverged)


LEARNED = [8.0, *[3.0] * 59]


@pytest.mark.parametrize("spike", [20.0, float("nan"), None])
def test_the_current_loss_is_the_median_of_the_last_nine_reports(spike):
    assert not has_diverged(*LEARNED, *[spike] * 4)
    assert has_diverged(*LEARNED, *[spike] * 5)
    # Wherever they are among the nine.
    assert not has_diverged(*LEARNED, spike, 3.0, spike, spike, 3.0, 3.0, spike, 3.0, 3.0)
    assert has_diverged(*LEARNED, spike, 3.0, spike, spike, 3.0, spike, spike, 3.0, 3.0)
    # Those before the nine are over.
    assert not has_diverged(*LEARNED, *[spike] * 30, *[3.0] * 5)
    assert has_diverged(*LEARNED, *[spike] * 30, *[3.0] * 4)


@pytest.mark.parametrize(
    ("losses", "diverged"),
    [
        ([8, 20], True),
        ([8, 20, 20], True),
        ([8, 20, 20, 8, 8], False),
        ([8, 8, 8, 20, 20], True),
        ([8, 20, 20, 20, 8, 8, 8], False),
        ([8, 8, 8, 8, 20, 20, 20], True),
        ([8, *[20] * 7, *[8] * 3], True),  # three of the newer six are above
        ([8, *[20] * 6, *[8] * 4], False),
        ([8, *[20] * 8, *[8] * 8], False),  # of seventeen the newer nine
    ],
)
def test_of_fewer_reports_than_eighteen_it_is_that_of_the_newer_half(losses, diverged):
    assert has_diverged(*losses) == diverged


@pytest.mark.parametrize(("first", "margin"), [(8.0, 0.4), (4.0, 0.25), (20.0, 1.0)])
def test_the_margin_above_the_first_loss(first, margin):
    assert not has_diverged(first, *[first + 0.95 * margin] * 30)
    assert has_diverged(first, *[first + 1.05 * margin] * 30)


@pytest.mark.parametrize(
    ("losses", "diverged"),
    [
        ([8.0, *[3.0] * 20, *[6.9] * 9], True),  # had been below, and is above by the margin
        ([8.0, *[3.0] * 20, *[6.7] * 9], False),
        ([8.0, *[6.3] * 20, *[7.0] * 9], True),
        ([8.0, *[6.5] * 20, *[7.0] * 9], False),  # has never been below
        ([8.0, *[7.5] * 20, 1.0, *[7.5] * 20], False),  # one report below says little
        ([8.0, *[30.0] * 12, *[7.0] * 9], True),  # had been above the first loss
        ([8.0, *[30.0] * 12, *[6.7] * 9], False),
        ([8.0, *[8.3] * 12, *[7.0] * 9], False),
        ([8.0, *[7.5] * 20, 30.0, *[7.5] * 20], False),  # one report above says little
    ],
)
def test_the_unigram_baseline(losses, diverged):
    assert has_diverged(*losses, baseline=BASELINE) == diverged
    assert not has_diverged(*losses)  # without one, only the first loss counts


def test_a_rollback_forgets_that_the_loss_had_risen_but_not_that_it_had_fallen():
    # Enough reports to measure their scatter, which is 0: until then, one of 0.3 nats is assumed.
    risen = continued(LossTrend(BASELINE), [8.0, *[30.0] * 12])
    assert continued(risen, [7.0] * 20).diverged
    risen.roll_back()
    assert not continued(risen, [7.0] * 20).diverged
    fallen = continued(LossTrend(BASELINE), [8.0, *[3.0] * 20])
    fallen.roll_back()
    assert not fallen.diverged
    assert continued(fallen, [7.0] * 9).diverged
    # What came before it is not among the last nine.
    again = continued(LossTrend(BASELINE), [8.0, *[3.0] * 20, *[30.0] * 8])
    again.roll_back()
    assert not continued(again, [3.0, 3.0, 3.0]).diverged


def test_after_a_rollback_all_reports_since_are_judged_up_to_nine():
    # The newer half is that of all reports of the run, so it has more than there are since.
    trend = continued(LossTrend(), LEARNED, None)
    trend.roll_back()
    since = continued(trend, [3.0, 3.0, 3.0, 20.0, 20.0], None)
    assert not since.diverged
    assert continued(since, [20.0], None).diverged
