"""What must hold for every configuration: hosts, resuming, batch sizes, nothing lost."""

import dataclasses
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from MaxText.configuration.data_sections import Masking
from MaxText.input_pipeline.rows.batch_plan import BatchPlan, Stage
from MaxText.input_pipeline.rows.masked_lm import MaskedLanguageModel
from MaxText.input_pipeline.rows.mixture import Mixture, Source
from MaxText.input_pipeline.rows.packing import PackedDocuments
from MaxText.input_pipeline.rows.row_batches import RowBatches
from MaxText.input_pipeline.rows.window_order import WindowOrder
from MaxText.input_pipeline.rows.windows import (
    Cutting,
    DocumentWindows,
    PackedWindows,
    StitchedWindows,
)

from ..small_data import numbered_documents
from .test_windows import InMemory, as_data

KINDS = ("packed", "single", "first_fit", "best_fit", "stitched")


def cut(kind, data, cutting):
    if kind == "stitched":
        return StitchedWindows(data, cutting, stitch=2, random=True)
    if kind in ("first_fit", "best_fit"):
        return PackedDocuments(data, cutting, kind == "best_fit", Path(tempfile.gettempdir()))
    return {"packed": PackedWindows, "single": DocumentWindows}[kind](data, cutting)


@st.composite
def runs(draw):
    """The rows of a run, the length of a row and whether tokens are hidden."""
    length = draw(st.integers(1, 12))
    sources = []
    for _ in range(draw(st.integers(1, 3))):
        sizes = draw(st.lists(st.integers(1, 30), min_size=1, max_size=12))
        sizes[0] = max(sizes[0], 2)
        data = as_data(InMemory(numbered_documents(sizes)))
        windows = cut(draw(st.sampled_from(KINDS)), data, Cutting(length, draw(st.booleans())))
        seed = draw(st.integers(0, 5))
        order = WindowOrder(len(windows), seed, draw(st.booleans()), num_epoch=-1)
        sources.append(Source(windows, order, seed))
    weights = draw(st.lists(st.floats(0.1, 9), min_size=len(sources), max_size=len(sources)))
    rows = sources[0] if len(sources) == 1 else Mixture(sources, weights)
    masked = None
    if draw(st.booleans()):
        masked = MaskedLanguageModel(Masking(mlm_training=True, mlm_mask_id=999), 1000)
    return rows, length, masked


def batches(run, plan, hosts, steps, begin=None):
    """Global batches, put together from what each host reads."""
    rows, _, masked = run
    joined = []
    for step in steps:
        parts = []
        for host in range(hosts):
            source = RowBatches(rows, plan, host, hosts, masked=masked)
            if begin is not None:
                source.begin_at(*begin)
            parts.append(source[step])
        joined.append({name: np.concatenate([part[name] for part in parts]) for name in parts[0]})
    return joined


def assert_same(first, second):
    for one, other in zip(first, second, strict=True):
        assert one.keys() == other.keys()
        for name, values in one.items():
            np.testing.assert_array_equal(values, other[name], err_msg=name)


@settings(max_examples=25, deadline=None)
@given(runs(), st.integers(1, 3), st.integers(0, 30), st.sampled_from([1, 2, 4]))
def test_hosts_may_change_at_any_step(run, share, stop, hosts):
    plan = BatchPlan.constant(4 * share, run[1])
    whole = batches(run, plan, 1, range(stop, stop + 3))
    assert_same(whole, batches(run, plan, hosts, range(stop, stop + 3)))
    # Two hosts wrote the position, and any number of hosts goes on from it.
    position = RowBatches(run[0], plan, 1, 2).samples_before(stop)
    resumed = batches(run, plan, hosts, range(stop, stop + 3), begin=(stop, position))
    assert_same(whole, resumed)


@settings(max_examples=60, deadline=None)
@given(runs(), st.integers(1, 6), st.integers(1, 6), st.integers(0, 10**9))
def test_a_change_of_batch_size_goes_on_with_the_next_sample(run, before, after, stop):
    first = BatchPlan.constant(before, run[1])
    position = RowBatches(run[0], first).samples_before(stop)
    assert position == stop * before
    rows = batches(run, BatchPlan.constant(1, run[1]), 1, range(position, position + 3 * after))
    resumed = batches(
        run, BatchPlan.constant(after, run[1]), 1, range(stop, stop + 3), begin=(stop, position)
    )
    for name in rows[0]:
        np.testing.assert_array_equal(
            np.concatenate([row[name] for row in rows]),
            np.concatenate([batch[name] for batch in resumed]),
        )


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=20),
    st.sampled_from(KINDS[:4]),
    st.sampled_from([2, 4, 8]),
    st.integers(1, 4),
    st.booleans(),
)
def test_each_target_counts_once_per_epoch(sizes, kind, length, batch, staged):
    sizes = [2, *sizes]
    documents = numbered_documents(sizes)
    windows = cut(kind, as_data(InMemory(documents)), Cutting(length))
    rows = Source(windows, WindowOrder(len(windows), 3, True, num_epoch=2), 3)
    plan = BatchPlan.constant(batch, length)
    if staged:
        stages = (Stage(0, batch, length // 2), Stage(2, batch + 1, length), Stage(5, 1, length))
        plan = BatchPlan(stages, length)
    source = RowBatches(rows, plan)
    assert len(source) < sys.maxsize
    counted = np.concatenate(
        [
            batch["targets"][batch["weights"] == 1]
            for batch in map(source.__getitem__, range(len(source)))
        ]
    )
    expected = np.concatenate([document[1:] for document in documents])
    np.testing.assert_array_equal(np.sort(counted), np.repeat(expected, 2))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(2, 20), min_size=2, max_size=8), st.sampled_from(KINDS[:4]))
def test_changing_one_document_changes_no_other_ones_rows(sizes, kind):
    documents = numbered_documents(sizes)
    changed = [document.copy() for document in documents]
    changed[1] = changed[1] + 500

    def pairs(documents):
        windows = cut(kind, as_data(InMemory(documents)), Cutting(7))
        windows.has_documents = True
        rows = windows.read(np.arange(len(windows)), np.zeros(len(windows), np.uint64))
        counts = rows["weights"] == 1
        names = ("tokens", "targets", "positions")
        return set(zip(*(rows[name][counts].tolist() for name in names), strict=True))

    different = pairs(documents) ^ pairs(changed)
    ids = {token for token, _, _ in different}
    assert ids <= set(documents[1].tolist()) | set(changed[1].tolist())


@pytest.mark.parametrize("step", [0, 10**6, 10**9])
def test_any_step_reads_as_much(step):
    reads = []

    @dataclasses.dataclass
    class Counting:
        inner: InMemory

        def __len__(self):
            return len(self.inner)

        def ranges(self, places):
            reads.extend(places)
            return self.inner.ranges(places)

        @property
        def document_offsets(self):
            return self.inner.document_offsets

    data = as_data(Counting(InMemory(numbered_documents([300, 500]))))
    windows = PackedWindows(data, Cutting(16))
    rows = Source(windows, WindowOrder(len(windows), 0, True, -1), 0)
    RowBatches(rows, BatchPlan.constant(8, 16))[step]
    assert len(reads) == 8
