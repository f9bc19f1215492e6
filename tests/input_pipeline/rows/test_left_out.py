"""Holes in the numbering of samples, against counting one by one."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from MaxText.errors import UserError
from MaxText.input_pipeline.rows.batch_plan import BatchPlan, Stage
from MaxText.input_pipeline.rows.left_out import Holes
from MaxText.input_pipeline.rows.row_batches import RowBatches
from MaxText.input_pipeline.rows.synthetic import SyntheticRows

PAIRS = st.lists(
    st.tuples(st.integers(0, 60), st.integers(1, 12)).map(lambda pair: (pair[0], sum(pair))),
    max_size=6,
)
PLAN = BatchPlan((Stage(0, 4, 8), Stage(3, 8, 4), Stage(7, 12, 8)), window=8)


def batches(holes=(), host=0, hosts=1, plan=PLAN):
    rows = SyntheticRows(8, 100, seed=0)
    return RowBatches(rows, plan, host, hosts, holes=Holes(holes))


def same(first, second):
    assert first.keys() == second.keys()
    return all(np.array_equal(first[name], second[name]) for name in first)


@given(PAIRS, st.integers(0, 70))
@settings(deadline=None)
def test_numbers_are_those_of_counting(pairs, start):
    holes = Holes(pairs)
    left_out = {number for first, end in pairs for number in range(first, end)}
    ahead = [number for number in range(start, start + 200) if number not in left_out]
    count = np.arange(50)
    assert holes.ahead(start, count).tolist() == ahead[:50]
    behind = [number for number in range(start - 1, -1, -1) if number not in left_out]
    assert holes.behind(start, np.arange(1, len(behind) + 1)).tolist() == behind
    assert holes.count() == len(left_out)
    inside = {number for first, end in holes.within(10, 40).pairs for number in range(first, end)}
    assert inside == left_out & set(range(10, 40))


def test_ranges_that_overlap_or_touch_are_one():
    assert Holes([(5, 9), (1, 3), (3, 4), (7, 12)]).pairs == ((1, 4), (5, 12))
    assert (Holes([(1, 2)]) | Holes([(2, 5)])) == Holes([(1, 5)])
    assert str(Holes([(1, 4), (5, 6)])) == "1 to 3, 5 to 5"


@pytest.mark.parametrize("pair", [(3, 3), (4, 2), (-1, 2), (0, 2**62)])
def test_what_is_no_range_is_refused(pair):
    with pytest.raises(UserError, match=r"excluded_samples: \[.*\] is no range of samples"):
        Holes([pair])


@given(PAIRS, st.integers(0, 12), st.integers(1, 4))
@settings(deadline=None, max_examples=50)
def test_each_step_reads_the_next_samples_that_are_left(pairs, made_at, hosts):
    hosts = {3: 4}.get(hosts, hosts)
    left_out = {number for first, end in pairs for number in range(first, end)}
    read, position = [], 0
    source = batches()
    parts = [batches(host=host, hosts=hosts) for host in range(hosts)]
    for step in range(12):
        if step == made_at:
            for one in (source, *parts):
                one.leave_out(Holes(pairs), step)
        numbers = []
        while len(numbers) < PLAN.at(step).samples:
            if step < made_at or position not in left_out:
                numbers.append(position)
            position += 1
        read.append(numbers)
        assert source._rows_of(step).tolist() == numbers
        assert np.concatenate([part._rows_of(step) for part in parts]).tolist() == numbers
        assert source.sample_range(step) == (numbers[0], numbers[-1] + 1)
    # What was read before the holes were made is still known.
    assert [source._rows_of(step).tolist() for step in range(12)] == read
    effective = {n for first, end in source.left_out.pairs for n in range(first, end)}
    assert not effective & {n for numbers in read for n in numbers}


def test_a_hole_made_late_is_one_that_was_always_there():
    always, late = batches([(30, 50), (70, 71)]), batches()
    assert same(late[1], always[1])
    late.leave_out(Holes([(70, 71), (30, 50)]), 4)
    for step in range(4, 10):
        assert same(late[step], always[step])
        assert late.origin(step) == always.origin(step)
    assert not same(late[9], batches()[9])
    behind = batches()
    behind.leave_out(Holes([(3, 12)]), 5)
    assert same(behind[6], batches()[6])
    assert not behind.left_out
