"""Sequences sliced from a token dataset: segments, positions, targets, weights and padding."""

import hashlib
import pickle
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from MaxText.input_pipeline import local_cache
from MaxText.input_pipeline.sequences import packing
from MaxText.input_pipeline.sequences.batch_arrays import BatchPart, fill_batch
from MaxText.input_pipeline.sequences.order import Concatenation, OrderedSequences
from MaxText.input_pipeline.sequences.packing import FirstFitPacking, pack_groups
from MaxText.input_pipeline.sequences.random_bits import random_bits
from MaxText.input_pipeline.sequences.slicing import (
    NO_SEQUENCE,
    ConcatThenSplit,
    SequenceOptions,
    SplitDocuments,
    StitchedDocuments,
)
from MaxText.input_pipeline.sequences.sliding_windows import SlidingWindows
from MaxText.input_pipeline.token_store.token_dataset import TokenDataset
from tests.input_pipeline.small_data import numbered_documents, random_documents
from tests.refusals import refused

PAD = 0


class InMemory:
    """A token store of a few documents."""

    def __init__(self, documents):
        self._tokens = np.concatenate([*documents, np.zeros(0, int)]).astype(np.int32)
        self.document_offsets = np.cumsum([0, *map(len, documents)])
        self.file_of_document = None

    def __len__(self):
        return len(self._tokens)

    def read(self, starts, stops):
        pairs = zip(starts.tolist(), stops.tolist(), strict=True)
        return np.concatenate([self._tokens[:0], *(self._tokens[a:b] for a, b in pairs)])

    def document_name(self, document):
        return f"document {document}"


def as_data(documents, **facts) -> TokenDataset:
    # The fingerprint is what plans are kept under.
    digest = hashlib.sha256(repr([document.tolist() for document in documents]).encode())
    return TokenDataset(InMemory(documents), "", digest.hexdigest(), pad_id=PAD, **facts)


def read(slicer, order=None, has_documents=None):
    """Arrays of sequences, in the order of the store by default."""
    order = np.arange(len(slicer)) if order is None else np.array(order)
    ranges = slicer.token_ranges(order, random_bits(0, order))
    part = BatchPart(slicer, np.arange(len(order)), ranges)
    documents = slicer.has_documents if has_documents is None else has_documents
    return fill_batch([part], documents)


def cut(kind, data, length, cache_dir=Path("unused"), stride=1):
    options = SequenceOptions(length, truncate=kind == "truncated")
    if kind in ("first_fit", "best_fit"):
        return FirstFitPacking(data, options, kind == "best_fit", cache_dir)
    if kind == "sliding":
        return SlidingWindows(data, options, stride)
    if kind == "stitched":
        return StitchedDocuments(data, options, stitch=2, random=True)
    if kind == "packed":
        return ConcatThenSplit(data, options)
    return SplitDocuments(data, options, cache_dir)


# Documents of one token have no target, those of two have one.
SIZES = st.lists(st.integers(0, 3) | st.integers(0, 40), min_size=1, max_size=12)
KINDS = ("packed", "single", "truncated", "first_fit", "best_fit", "sliding", "stitched")


@settings(max_examples=150, deadline=None)
@given(SIZES, st.sampled_from(KINDS), st.data())
def test_each_segment_is_a_part_of_one_document(sizes, kind, data):
    documents = numbered_documents(sizes)
    length = data.draw(st.integers(1, 16))
    stride = data.draw(st.integers(1, length))
    slicer = cut(kind, as_data(documents), length, stride=stride)
    rows = read(slicer, has_documents=True)
    last = {int(document[-1]) for document in documents if document.size}
    names = ("tokens", "targets", "weights", "segments", "positions")
    for row in range(len(slicer)):
        tokens, targets, weights, segments, positions = (rows[name][row] for name in names)
        used = np.count_nonzero(segments)
        assert segments[:used].tolist() == sorted(segments[:used])
        # Padding follows; it counts nowhere.
        for values in (segments, positions, weights):
            assert not values[used:].any()
        assert (tokens[used:] == PAD).all()
        for segment in range(1, segments.max() + 1):
            (places,) = np.nonzero(segments == segment)
            assert positions[places].tolist() == list(range(places.size))
            ids = tokens[places]
            assert (np.diff(ids) == 1).all()
            assert not last & set(ids[:-1].tolist())
        counted = weights > 0
        assert (targets[counted] == tokens[counted] + 1).all()
        assert not last & set(tokens[counted].tolist())
    sizes = [document.size - 1 for document in documents if document.size > 1]
    begun = np.count_nonzero((rows["positions"] == 0) & (rows["segments"] > 0))
    if kind.endswith("fit"):  # no document is cut that fits into a row
        assert begun == sum(-(-size // length) for size in sizes)
    elif kind == "truncated":
        assert begun == len(slicer) == len(sizes)
        assert rows["weights"].sum() == np.minimum(sizes, length).sum()


@settings(max_examples=100, deadline=None)
@given(SIZES, st.integers(1, 16), st.booleans(), st.data())
def test_sliding_windows_count_each_target_once_with_its_context(sizes, length, joined, data):
    documents, stride = numbered_documents(sizes), data.draw(st.integers(1, length))
    slicer = SlidingWindows(as_data(documents), SequenceOptions(length, joined), stride)
    if joined:
        documents = [np.concatenate(documents)]
    expected = [int(i) for document in documents for i in document[1:]]
    rows = read(slicer)
    assert sorted(rows["targets"][rows["weights"] > 0].tolist()) == expected
    place_of = {int(i): place for document in documents for place, i in enumerate(document)}
    segments = rows.get("segments", np.ones_like(rows["tokens"]))
    for row, place in np.argwhere(rows["weights"] > 0):
        context = np.count_nonzero(segments[row, : place + 1] == segments[row, place])
        before = place_of[int(rows["targets"][row, place])]
        assert min(before, length - stride + 1) <= context <= min(before, length)


@pytest.mark.parametrize("kind", KINDS)
def test_empty_rows_and_any_order(tmp_path, kind):
    slicer = cut(kind, as_data(numbered_documents([30, 5, 12])), 8, tmp_path)
    forward, other = read(slicer), read(slicer, [1, NO_SEQUENCE, 0])
    for name in forward:
        np.testing.assert_array_equal(other[name][[0, 2]], forward[name][[1, 0]])
    for name in other.keys() & {"weights", "segments", "positions"}:
        assert not other[name][1].any()


def plain_fit(sizes, length, best):
    free, rows = [], []
    for size in sizes:
        fitting = [row for row, space in enumerate(free) if space >= size]
        if not fitting:
            free.append(length)
            fitting = [len(free) - 1]
        row = min(fitting, key=lambda r: (free[r], r)) if best else fitting[0]
        free[row] -= size
        rows.append(row)
    return rows


@pytest.mark.parametrize("best", [False, True])
def test_fit_equals_the_plain_algorithm(best):
    sizes = np.random.default_rng(0).integers(1, 33, (20, 60)).astype(np.int32)
    rows = pack_groups(sizes, 32, best)
    for group in range(20):
        assert rows[group].tolist() == plain_fit(sizes[group].tolist(), 32, best)


def test_a_packing_plan_is_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(local_cache, "MIN_ITEMS", 1)
    first, second = random_documents(3, 40, 30), random_documents(4, 40, 30)

    def tokens(documents, cache="cache"):
        slicer = cut("first_fit", as_data(documents), 16, tmp_path / cache)
        # Another process maps the same files.
        assert len(pickle.dumps(slicer._plan)) < 500
        return read(slicer)["tokens"]

    expected = tokens(first)
    assert tokens(second).tolist() != expected.tolist()
    assert len(list((tmp_path / "cache").iterdir())) == 2
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "pack_groups", pytest.fail)
        np.testing.assert_array_equal(tokens(first), expected)
    (tmp_path / "file").write_text("")
    refused(r"data_cache_dir=.*file", tokens, first, "file")


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 30), min_size=1, max_size=40), st.booleans())
def test_a_plan_in_blocks_is_that_of_all_documents(sizes, best_fit):
    offsets = np.cumsum([0, *sizes])

    def plan(block):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(packing, "GROUP", 4)
            blocks = list(packing.plan_packing(offsets, 8, best_fit, block))
        return [np.concatenate([b[name] for b in blocks]).tolist() for name in blocks[0]]

    assert plan(8) == plan(1000)


def test_segments_of_rows_that_are_one_sequence_show_padding_only(tmp_path):
    slicer = FirstFitPacking(
        as_data(numbered_documents([5, 6, 4])),
        SequenceOptions(10, True),
        best_fit=False,
        cache_dir=tmp_path,
    )
    slicer.has_documents = True
    rows = read(slicer)
    assert rows["segments"].tolist() == [[1] * 9 + [0], [1] * 3 + [0] * 7]
    assert rows["positions"].tolist() == [[*range(9), 0], [0, 1, 2] + [0] * 7]
    assert rows["weights"].tolist() == rows["segments"].tolist()


def test_stitched_windows_begin_evenly_in_joined_documents():
    documents = numbered_documents([10, 12, 9, 7, 3])
    slicer = StitchedDocuments(as_data(documents), SequenceOptions(8), stitch=2, random=True)
    assert len(slicer) == 3
    order = OrderedSequences(slicer, seed=0, shuffle=False, num_epoch=-1)
    rows = Concatenation([order]).read(3 * np.arange(14_000))
    # 22 tokens, rows of 8 + 1: begin at 0..13.
    counts = np.bincount(rows["tokens"][:, 0] - 1, minlength=14)
    assert counts.size == 14
    assert ((counts - 1000) ** 2 / 1000).sum() < 34.5  # 13 degrees of freedom, p = 0.001
    # Too little text for a whole window: all of it, padded.
    assert read(slicer, [2])["tokens"].tolist() == [[39, 40, 41, *[PAD] * 5]]
    fixed = StitchedDocuments(as_data(documents), SequenceOptions(8), stitch=2, random=False)
    assert read(fixed)["tokens"][:, 0].tolist() == [1, 23, 39]


def test_labels_are_the_targets():
    records = [np.array([7, 8, 9, 0]), np.array([5, 6])]
    labels = [np.array([8, -100, 0, -100]), np.array([6, 1])]
    rows = read(cut("single", as_data(records, labels=InMemory(labels)), 4))
    assert rows["tokens"].tolist() == [[7, 8, 9, 0], [5, 6, PAD, PAD]]
    assert rows["targets"].tolist() == [[8, 0, 0, 0], [6, 1, PAD, PAD]]
    assert rows["weights"].tolist() == [[1, 0, 1, 0], [1, 1, 0, 0]]


def test_targets_with_id_0_can_be_excluded():
    data = as_data([np.array([3, 0, 4, 0, 0, 5])])
    for zero_loss, weights in ((True, [1] * 5), (False, [0, 1, 0, 0, 1])):
        options = SequenceOptions(5, zero_loss=zero_loss)
        for slicer in (ConcatThenSplit(data, options), SlidingWindows(data, options, 1)):
            assert read(slicer)["weights"].tolist() == [weights]
