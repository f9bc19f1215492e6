"""Sliding windows: every target exactly once, with as much before it as a window holds."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from MaxText.input_pipeline.rows.sliding_windows import SlidingWindows
from MaxText.input_pipeline.rows.windows import (
    EMPTY,
    Cutting,
    DocumentWindows,
    PackedWindows,
    Windows,
)

from ..small_data import numbered_documents
from .test_windows import InMemory, as_data


def read(windows: Windows, order=None) -> dict[str, np.ndarray]:
    order = np.arange(len(windows)) if order is None else np.array(order)
    return windows.read(order, np.zeros(len(order), np.uint64))


def counted(rows: dict[str, np.ndarray]) -> list[int]:
    """The targets that count, once for each time."""
    return rows["targets"][rows["weights"] > 0].tolist()


@st.composite
def cases(draw):
    """Documents of different ids, T, S, and whether documents attend to each other."""
    sizes = draw(st.lists(st.integers(0, 40), min_size=1, max_size=12))
    length = draw(st.integers(1, 16))
    return numbered_documents(sizes), length, draw(st.integers(1, length)), draw(st.booleans())


@settings(max_examples=150, deadline=None)
@given(cases())
def test_every_target_counts_once_with_its_context(case):
    documents, length, stride, joined = case
    windows = SlidingWindows(as_data(InMemory(documents)), Cutting(length, joined), stride)
    if joined:
        documents = [np.concatenate(documents)]
    expected = [int(i) for document in documents for i in document[1:]]
    rows = read(windows)
    assert sorted(counted(rows)) == expected
    assert windows.num_targets == len(expected)

    place_of = {int(i): place for document in documents for place, i in enumerate(document)}
    segments = rows.get("segments", np.ones_like(rows["tokens"]))
    for row, place in np.argwhere(rows["weights"] > 0):
        same = np.flatnonzero(segments[row, : place + 1] == segments[row, place])
        seen = rows["tokens"][row, same]
        target = rows["targets"][row, place]
        # Ids are numbered in the order of the text: what is seen is what stands before.
        np.testing.assert_array_equal(seen, np.arange(target - len(seen), target))
        assert len(seen) <= min(place_of[int(target)], length)
        assert len(seen) >= min(place_of[int(target)], length - stride + 1)
        if "positions" in rows:
            np.testing.assert_array_equal(rows["positions"][row, same], np.arange(len(seen)))


@settings(max_examples=60, deadline=None)
@given(cases())
def test_a_stride_of_the_whole_window_has_the_targets_of_ordinary_windows(case):
    documents, length, _, joined = case
    data = as_data(InMemory(documents))
    cutting = Cutting(length, joined)
    ordinary = PackedWindows(data, cutting) if joined else DocumentWindows(data, cutting)
    sliding = SlidingWindows(data, cutting, length)
    assert sorted(counted(read(sliding))) == sorted(counted(read(ordinary)))


def test_rows_by_hand():
    windows = SlidingWindows(as_data(InMemory(numbered_documents([7, 3, 1, 2]))), Cutting(4), 2)
    rows = read(windows)
    # 1..7 needs two windows, the second one with two targets of context; 8..10 and 12, 13 share
    # a row; 11 alone predicts nothing.
    assert rows["tokens"].tolist() == [[1, 2, 3, 4], [3, 4, 5, 6], [8, 9, 12, 0]]
    assert rows["targets"].tolist() == [[2, 3, 4, 5], [4, 5, 6, 7], [9, 10, 13, 0]]
    assert rows["weights"].tolist() == [[1, 1, 1, 1], [0, 0, 1, 1], [1, 1, 1, 0]]
    assert rows["segments"].tolist() == [[1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 2, 0]]
    assert rows["positions"].tolist() == [[0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 0, 0]]
    assert windows.first_window(np.arange(5)).tolist() == [0, 2, 2, 2, 3]
    assert windows.origin(2, 0) == [(1, 0, 3), (3, 0, 2)]


def test_the_last_window_of_a_document_is_a_full_one():
    windows = SlidingWindows(as_data(InMemory(numbered_documents([8]))), Cutting(4), 3)
    rows = read(windows)
    assert rows["tokens"].tolist() == [[1, 2, 3, 4], [4, 5, 6, 7]]
    assert rows["weights"].tolist() == [[1, 1, 1, 1], [0, 1, 1, 1]]
    rows = read(SlidingWindows(as_data(InMemory(numbered_documents([7]))), Cutting(4), 3))
    assert rows["tokens"].tolist() == [[1, 2, 3, 4], [3, 4, 5, 6]]
    assert rows["weights"].tolist() == [[1, 1, 1, 1], [0, 0, 1, 1]]


def test_rows_past_the_end_and_in_any_order():
    windows = SlidingWindows(as_data(InMemory(numbered_documents([7, 3, 1, 2]))), Cutting(4), 2)
    forward, other = read(windows), read(windows, [2, EMPTY, 0])
    for name in forward:
        np.testing.assert_array_equal(other[name][[0, 2]], forward[name][[2, 0]])
    assert not other["weights"][1].any()
    assert not other["segments"][1].any()


@pytest.mark.parametrize("joined", [False, True])
def test_nothing_to_predict_makes_no_window(joined):
    documents = [np.arange(1), np.arange(0)]
    assert len(SlidingWindows(as_data(InMemory(documents)), Cutting(4, joined), 2)) == 0


def test_targets_with_id_0_can_be_left_out():
    documents = [np.array([3, 0, 4, 0, 5])]
    rows = read(SlidingWindows(as_data(InMemory(documents)), Cutting(2, zero_loss=False), 1))
    assert counted(rows) == [4, 5]
