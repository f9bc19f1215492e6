"""Shares of a mixture, which row of which source comes when, and chains for evaluation."""

import sys

import numpy as np
import pytest

from MaxText.input_pipeline.rows.mixture import Chain, Mixture, Source, draws
from MaxText.input_pipeline.rows.window_order import WindowOrder
from MaxText.input_pipeline.rows.windows import Cutting, DocumentWindows, PackedWindows

from ..small_data import numbered_documents
from .test_windows import InMemory, as_data


def source(first_id, num_tokens, cut=PackedWindows, num_epoch=-1):
    document = np.arange(first_id, first_id + num_tokens)
    windows = cut(as_data(InMemory([document])), Cutting(4))
    return Source(windows, WindowOrder(len(windows), 0, True, num_epoch), seed=0)


@pytest.mark.parametrize("weights", [[3, 1], [0.5, 0.2, 0.3], [1, 1, 1, 1], [1e-3, 1]])
def test_shares_are_exact_after_any_number_of_rows(weights):
    mixture = Mixture([source(1, 50) for _ in weights], weights)
    places = np.array([mixture.place(row) for row in range(10_000)])
    for index, weight in enumerate(weights):
        of_source = places[:, 0] == index
        counts = np.cumsum(of_source)
        expected = np.arange(1, 10_001) * weight / sum(weights)
        assert np.abs(counts - expected).max() <= index + 1
        # Each source's rows come in order, none twice and none left out.
        assert places[of_source, 1].tolist() == list(range(counts[-1]))


def test_weights_may_differ_by_any_factor():
    mixture = Mixture([source(1, 50) for _ in range(3)], [1.0, 1e-17, 3e-17])
    assert {mixture.place(row)[0] for row in range(1000)} == {0}
    mixture = Mixture([source(1, 50) for _ in range(3)], [1e17, 1.0, 1e17])
    assert [mixture.place(row)[0] for row in range(4)] == [2, 0, 2, 0]


def test_a_far_row_is_found_without_counting():
    mixture = Mixture([source(1, 50), source(1, 50)], [1, 2])
    index, place = mixture.place(3 * 10**11)
    assert abs(place - (10**11, 2 * 10**11)[index]) <= 1


def test_rows_of_a_mixture_are_rows_of_its_sources():
    sources = [source(1, 41), source(1001, 81)]
    mixture = Mixture(sources, [1, 2])
    rows = np.arange(30)
    batch = mixture.read(rows)
    for row in rows.tolist():
        index, place = mixture.place(row)
        alone = sources[index].read(np.array([place]))
        for name, values in alone.items():
            np.testing.assert_array_equal(batch[name][row], values[0])
    assert mixture.num_rows == sys.maxsize


def test_sources_with_and_without_documents_give_one_kind_of_batch():
    mixture = Mixture([source(1, 41), source(1001, 41, DocumentWindows)], [1, 1])
    batch = mixture.read(np.arange(4))
    assert batch["segments"].tolist() == [[1] * 4] * 4
    assert batch["positions"].tolist() == [[0, 1, 2, 3]] * 4


def test_a_chain_reads_each_source_once():
    sources = [source(1, 9, num_epoch=1), source(101, 13, num_epoch=1)]
    chain = Chain(sources)
    assert chain.num_rows == 2 + 3
    batch = chain.read(np.arange(7))
    counted = np.sort(batch["targets"][batch["weights"] == 1])
    assert counted.tolist() == [*range(2, 10), *range(102, 114)]
    assert not batch["weights"][5:].any()
    assert chain.origin(3)[0][0] == "document 0"
    assert chain.origin(6) == []


def test_draws_look_random_and_depend_on_seed_and_row():
    numbers = draws(0, np.arange(100_000))
    assert len(set(numbers.tolist())) == 100_000
    shares = np.bincount((numbers >> np.uint64(60)).astype(int), minlength=16) / 100_000
    assert np.abs(shares - 1 / 16).max() < 0.004
    assert (draws(1, np.arange(100)) != numbers[:100]).all()
    np.testing.assert_array_equal(draws(0, np.arange(50, 60)), numbers[50:60])


def test_groups_are_visited_in_order_and_shuffled_inside():
    groups = np.array([0, 10, 30, 31])
    order = WindowOrder(31, 0, True, -1, groups)
    for epoch in range(3):
        windows = order[epoch * 31 + np.arange(31)]
        for first, end in ((0, 10), (10, 30), (30, 31)):
            assert sorted(windows[first:end].tolist()) == list(range(first, end))
        assert windows[:10].tolist() != list(range(10))
    assert order[np.arange(10)].tolist() != order[31 + np.arange(10)].tolist()


def test_windows_know_the_first_of_each_document():
    data = as_data(InMemory(numbered_documents([1, 9, 5])))
    documents = np.arange(4)
    assert DocumentWindows(data, Cutting(4)).first_window(documents).tolist() == [0, 0, 2, 3]
    assert PackedWindows(data, Cutting(4)).first_window(documents).tolist() == [0, 0, 2, 4]
