"""Which sample is the n-th: permutations, mixtures, batch plans and excluded samples."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from MaxText.config.training_sections import BatchConfig
from MaxText.input_pipeline.sequences.batch_schedule import ScheduleStage, schedule_batches
from MaxText.input_pipeline.sequences.batch_source import ExcludedRanges, split_to_length
from MaxText.input_pipeline.sequences.order import Concatenation, Mixture, OrderedSequences
from MaxText.input_pipeline.sequences.slicing import NO_SEQUENCE
from tests.input_pipeline.sequences.test_slicing import as_data, cut
from tests.input_pipeline.small_data import numbered_documents


def shuffled(num_windows, seed, numbers):
    order = OrderedSequences(range(num_windows), seed, shuffle=True, num_epoch=-1)
    return np.array([order.sequence_index(number) for number in numbers.tolist()])


def test_the_order_of_a_seed_stays_what_it_is():
    # Another version of Grain must not change it: a run would go on with other windows.
    expected = [5, 4, 0, 2, 6, 8, 3, 7, 1, 9, 1, 4, 0, 6, 5, 8, 2, 9, 3, 7]
    assert shuffled(10, 7, np.arange(20)).tolist() == expected
    assert shuffled(10**9, 7, 10**12 + np.arange(3)).tolist() == [366132735, 681748578, 327301016]


def test_each_epoch_of_each_seed_is_another_permutation():
    windows = np.arange(200).reshape(4, 50)
    seen = [tuple(shuffled(50, seed, epoch).tolist()) for seed in range(4) for epoch in windows]
    assert len(set(seen)) == len(seen)
    assert all(sorted(epoch) == list(range(50)) for epoch in seen)


@pytest.mark.parametrize("num_windows", [1000, 4 * 10**9])
def test_rows_that_follow_each_other_are_spread_evenly(num_windows):
    steps, chi_squared = [], []
    for seed in range(40):
        places = shuffled(num_windows, seed, 1000 * seed + np.arange(128)) / num_windows
        steps.append(np.abs(np.diff(places)).mean())
        counts = np.bincount((16 * places).astype(int), minlength=16)
        chi_squared.append(((counts - 8) ** 2 / 8).sum())
    assert abs(np.mean(steps) - 1 / 3) < 0.02
    assert np.mean(chi_squared) < 18  # 15 degrees of freedom: 15 +- 0.9


def source(first_id, num_tokens, kind="packed"):
    windows = cut(kind, as_data([np.arange(first_id, first_id + num_tokens)]), 4)
    return OrderedSequences(windows, seed=0, shuffle=False, num_epoch=-1)


@pytest.mark.parametrize("num_sequences", [2, 7, 40])
def test_the_halves_of_an_order_are_contiguous_and_make_up_the_whole(num_sequences):
    order = OrderedSequences(range(num_sequences), seed=0, shuffle=False, num_epoch=1)
    halves = [order.half(is_second=is_second) for is_second in (False, True)]
    visited = [[half.sequence_index(i) for i in range(half.num_sequences)] for half in halves]
    assert [*visited[0], *visited[1]] == list(range(num_sequences))
    assert len(visited[0]) == num_sequences // 2
    assert halves[0].sequence_index(halves[0].num_sequences) == NO_SEQUENCE


@pytest.mark.parametrize("weights", [[3, 1], [0.5, 0.2, 0.3], [1, 1, 1, 1], [1e-3, 1]])
def test_shares_of_a_mixture_are_exact_after_any_number_of_rows(weights):
    mixture = Mixture([source(1, 50) for _ in weights], weights)
    places = np.array([mixture.locate(row) for row in range(10_000)])
    for index, weight in enumerate(weights):
        of_source = places[:, 0] == index
        counts = np.cumsum(of_source)
        expected = np.arange(1, 10_001) * weight / sum(weights)
        assert np.abs(counts - expected).max() <= index + 1
        # Each source's rows come in order, none twice and none missing.
        assert places[of_source, 1].tolist() == list(range(counts[-1]))
    # A far row is found without counting.
    index, place = mixture.locate(10**12)
    assert place == pytest.approx(10**12 * weights[index] / sum(weights), abs=2)


def test_weights_may_differ_by_any_factor():
    mixture = Mixture([source(1, 50) for _ in range(3)], [1.0, 1e-17, 3e-17])
    assert {mixture.locate(row)[0] for row in range(1000)} == {0}
    mixture = Mixture([source(1, 50) for _ in range(3)], [1e17, 1.0, 1e17])
    assert [mixture.locate(row)[0] for row in range(4)] == [2, 0, 2, 0]


def test_sources_with_and_without_documents_give_one_kind_of_batch():
    sources = [source(1, 41), source(1001, 81, "single")]
    mixture = Mixture(sources, [1, 2])
    batch = mixture.read(np.arange(30))
    assert batch["segments"].tolist() == [[1] * 4] * 30
    assert batch["positions"].tolist() == [[0, 1, 2, 3]] * 30
    for row in range(30):
        index, place = mixture.locate(row)
        for name, values in Concatenation([sources[index]]).read(np.array([place])).items():
            np.testing.assert_array_equal(batch[name][row], values[0])


def test_first_window_of_each_document():
    data = as_data(numbered_documents([1, 9, 5]))
    assert cut("single", data, 4).first_sequences(np.arange(4)).tolist() == [0, 0, 2, 3]
    assert cut("packed", data, 4).first_sequences(np.arange(4)).tolist() == [0, 0, 2, 4]


def test_ramp_up_reads_its_samples_in_equal_shares():
    section = BatchConfig(
        per_device_batch_size=8,
        enable_rampup_batch_size=True,
        per_device_batch_size_start=2,
        per_device_batch_size_increment=2,
        global_rampup_samples=300,
    )
    plan = schedule_batches(section, 64, lambda size: int(size * 2))
    # 100 samples each by 4, 8 and 12: 25, 13 and 9 steps.
    assert plan.stages == (
        ScheduleStage(0, 4, 64), ScheduleStage(25, 8, 64),
        ScheduleStage(38, 12, 64), ScheduleStage(47, 16, 64),
    )  # fmt: skip
    assert plan.sequences_before(25) == 100
    assert plan.sequences_before(47) == 100 + 104 + 108
    assert plan.sequences_before(50) == 312 + 48
    for samples in (1, 99, 100, 101, 204, 205, 500):
        # The first step that has them all.
        steps = plan.steps_for(samples)
        assert plan.sequences_before(steps - 1) < samples <= plan.sequences_before(steps)


def test_stages_of_length_read_as_many_tokens():
    section = BatchConfig(
        per_device_batch_size=4, sequence_length_stages=((0, 8), (10, 16), (30, 64))
    )
    plan = schedule_batches(section, 64, int)
    assert [(stage.first_step, plan.batch_size(stage), stage.length) for stage in plan.stages] == [
        (0, 32, 8), (10, 16, 16), (30, 4, 64),
    ]  # fmt: skip
    assert plan.sequences_before(40) == 160
    assert plan.steps_of(plan.stages[1], 100) == (10, 30)
    assert plan.steps_of(plan.stages[1], 20) == (10, 20)
    assert plan.steps_of(plan.stages[2], 20) == (30, 30)


def test_rows_of_a_shorter_stage_hold_the_same_tokens_with_positions_from_zero():
    arrays = {
        "tokens": np.arange(8).reshape(1, 8),
        "segments": np.array([[1, 1, 1, 1, 1, 2, 2, 0]]),
        "positions": np.array([[0, 1, 2, 3, 4, 0, 1, 0]]),
    }
    folded = split_to_length(arrays, 4)
    assert folded["tokens"].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert folded["positions"].tolist() == [[0, 1, 2, 3], [0, 0, 1, 0]]
    assert folded["segments"].tolist() == [[1, 1, 1, 1], [1, 2, 2, 0]]


# First and end of some samples.
RANGES = st.tuples(st.integers(0, 60), st.integers(1, 12)).map(lambda pair: (pair[0], sum(pair)))


@given(st.lists(RANGES, max_size=6))
@settings(deadline=None)
def test_numbers_of_samples_are_those_of_counting(pairs):
    exclusions = ExcludedRanges(pairs)
    excluded = {number for first, end in pairs for number in range(first, end)}
    included = [number for number in range(200) if number not in excluded]
    assert exclusions.order_indices(np.arange(50)).tolist() == included[:50]
    assert exclusions.count() == len(excluded)
    inside = [range(*pair) for pair in exclusions.within(10, 40).ranges]
    assert {*itertools.chain(*inside)} == excluded & set(range(10, 40))
