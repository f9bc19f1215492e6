"""Means, intervals and sentences, against figures from elsewhere."""

import math

import numpy as np
import pytest
import scipy.stats

from MaxText.comparison.seed_statistics import Difference, Summary, in_words, paired_difference


def test_summaries():
    assert Summary.of([]) == Summary(0, None, None)
    assert Summary.of([3.0]) == Summary(1, 3.0, None)
    summary = Summary.of([1.0, 2.0, 4.0])
    assert summary.mean == pytest.approx(7 / 3)
    assert summary.deviation == pytest.approx(math.sqrt(7 / 3))


def test_an_interval_by_hand():
    # Differences 1, 2, 3: mean 2, standard deviation 1, and the 97.5 % quantile of Student's t with
    # two degrees of freedom is 4.30265 in printed tables.
    difference = paired_difference({0: 0.0, 1: 0.0, 2: 0.0}, {0: 1.0, 1: 2.0, 2: 3.0})
    assert difference.mean == 2
    assert difference.high - 2 == pytest.approx(4.30265 / math.sqrt(3), rel=1e-5)
    assert 2 - difference.low == pytest.approx(4.30265 / math.sqrt(3), rel=1e-5)
    assert not difference.is_seen


@pytest.mark.parametrize("count", [2, 3, 5, 30])
def test_intervals_equal_those_of_scipy(count):
    generator = np.random.default_rng(count)
    first, other = generator.normal(4.0, 0.1, (2, count))
    ours = paired_difference(dict(enumerate(first)), dict(enumerate(other)))
    theirs = scipy.stats.ttest_rel(other, first).confidence_interval(0.95)
    assert ours.low == pytest.approx(theirs.low, rel=1e-10)
    assert ours.high == pytest.approx(theirs.high, rel=1e-10)


def test_intervals_hold_the_truth_as_often_as_they_say():
    generator = np.random.default_rng(0)
    held = 0
    for _ in range(2000):
        noise = generator.normal(0.0, 1.0, 4)
        found = paired_difference(dict.fromkeys(range(4), 0.0), dict(enumerate(0.3 + noise)))
        held += found.low <= 0.3 <= found.high
    assert 0.93 < held / 2000 < 0.97


def test_only_seeds_of_both_count():
    difference = paired_difference({0: 1.0, 1: 5.0, 3: 2.0}, {0: 2.0, 2: 9.0, 3: 3.5})
    assert (difference.count, difference.mean) == (2, 1.25)


def test_what_the_noise_of_a_seed_does_to_both_drops_out():
    first = {0: 1.0, 1: 3.0, 2: 2.0}
    difference = paired_difference(first, {seed: loss - 0.5 for seed, loss in first.items()})
    assert (difference.low, difference.high) == (-0.5, -0.5)
    assert difference.is_seen


def test_sentences():
    assert in_words("a", "b", Difference(3, -0.021, -0.032, -0.010)) == (
        "b is lower than a by 0.0210 nats/token (95 % interval 0.0100 to 0.0320, 3 seeds)."
    )
    assert in_words("a", "b", Difference(2, 0.021, 0.010, 0.032)) == (
        "b is higher than a by 0.0210 nats/token (95 % interval 0.0100 to 0.0320, 2 seeds)."
    )
    assert in_words("a", "b", Difference(3, -0.01, -0.03, 0.01)) == (
        "No difference can be seen between b and a: -0.0100 nats/token "
        "(95 % interval -0.0300 to +0.0100, 3 seeds)."
    )
    assert "One seed cannot tell" in in_words("a", "b", Difference(1, -0.01))
    assert "no seed that both finished" in in_words("a", "b", Difference(0, None))
