"""Fewer points: nothing that a person would see may be missing."""

import numpy as np
import pytest

from MaxText.monitoring.report.thinning import MOST_POINTS, MOST_SMOOTH_POINTS, running_median, thin


def test_few_points_stay_as_they_are():
    assert thin(np.arange(7.0)).tolist() == list(range(7))
    assert thin(np.zeros(0)).size == 0


def test_spikes_gaps_and_both_ends_are_kept():
    values = np.sin(np.arange(1_000_000) / 1e4)
    values[123_456], values[700_001] = 50.0, -50.0
    values[400_000:400_003] = np.nan
    kept = thin(values)
    assert kept.size <= MOST_POINTS
    assert {0, 123_456, 400_000, 700_001, 999_999} <= set(kept.tolist())
    assert (np.diff(kept) > 0).all()


def test_nothing_but_gaps():
    kept = thin(np.full(10_000, np.nan))
    assert {0, 9_999} <= set(kept.tolist())


def test_running_median_does_not_lag_and_ignores_spikes():
    line = 9.0 - np.arange(500) / 100
    spiked = line.copy()
    spiked[250], spiked[100] = 99.0, np.nan
    indices, medians = running_median(spiked)
    there = ~np.isnan(medians)
    assert medians[there] == pytest.approx(line[indices[there]], abs=0.06)
    assert indices[~there].tolist() == [100]


def test_running_median_of_few_and_of_many():
    assert [part.tolist() for part in running_median(np.array([4.0]))] == [[0], [4.0]]
    assert running_median(np.zeros(0))[0].size == 0
    indices, medians = running_median(np.ones(100_000))
    assert indices.size <= MOST_SMOOTH_POINTS
    assert indices[-1] == 99_999
    assert set(medians.tolist()) == {1.0}
