"""Data sources of users: the batches of each form, resuming, hosts, processes, messages."""

import contextlib
import itertools
import json
import sys
from typing import Any

import grain
import numpy as np
import pytest

from MaxText.config import import_modules, registry
from MaxText.config.loading import load_config
from MaxText.config.registry import lookup, register
from MaxText.errors import UserError
from MaxText.input_pipeline.data_source import StreamSource
from MaxText.input_pipeline.inspect_dataset import Inspection
from MaxText.input_pipeline.loader import make_eval_iterator, make_train_iterator
from MaxText.input_pipeline.registered_sources.opening_sources import make_reader
from MaxText.input_pipeline.registered_sources.source_reader import SourceReader
from MaxText.input_pipeline.sequences.batch_schedule import BatchSchedule
from MaxText.input_pipeline.sequences.batch_source import BatchShard
from tests.input_pipeline.registered_sources.known_documents import (
    NUM_DOCUMENTS,
    document_of,
    mask_of,
)
from tests.input_pipeline.small_data import (
    LENGTH,
    assert_same,
    data_keys,
    join,
    open_eval,
    open_train,
    quiet,
    take,
    write_data_set,
)

MODULE = "tests/input_pipeline/registered_sources/numbered.py"
FORMS = ["numbered", "masked", "numbered_records", "stateless", "stateful"]
STREAMS = ["stateless", "stateful"]
DOCUMENTS = [document_of(index) for index in range(NUM_DOCUMENTS)]


@pytest.fixture(autouse=True)
def _sources(monkeypatch, tmp_path):
    """Registers the sources as a run does, without a fault."""
    monkeypatch.delenv("FAULT", raising=False)
    monkeypatch.setenv("M_DATA_CACHE_DIR", str(tmp_path / "cache"))


def config_of(name, **keys):
    keys = {"vocab_size": 50_000, "max_target_length": LENGTH, "dataset_type": name} | keys
    return load_config(import_modules=[MODULE], **keys)


def batches_of(name, batch=8, host=0, hosts=1, log=quiet, **keys):
    schedule = BatchSchedule.constant(batch, LENGTH)
    return make_train_iterator(config_of(name, **keys), schedule, BatchShard(host, hosts), log)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The same documents as the sources, prepared."""
    folder = tmp_path_factory.mktemp("prepared")
    write_data_set(folder, {"train": DOCUMENTS, "validation": DOCUMENTS[:5]})
    return folder


PACKINGS = [
    {},
    {"enable_data_shuffling": False},
    {"grain_packing_type": "first_fit"},
    {"grain_packing_type": "best_fit"},
    {"packing": False},
    {"packing": False, "use_truncation": True},
    {"cross_document_attention": True},
]


@pytest.mark.parametrize("keys", PACKINGS, ids=str)
def test_documents_give_the_batches_of_the_same_documents_on_disk(keys, folder, tmp_path):
    expected = take(open_train(data_keys(folder, data_cache_dir=str(tmp_path), **keys)), 7)
    assert_same(take(batches_of("numbered", **keys), 7), expected)


def test_evaluation_reads_the_split_of_the_source(folder):
    batches = make_eval_iterator(config_of("numbered"), 4, log=quiet)
    assert_same(list(batches), list(open_eval(data_keys(folder), 4)))


def test_evaluation_may_read_files(folder):
    config = config_of("stateless", grain_eval_files=str(folder))
    assert_same(
        list(make_eval_iterator(config, 4, log=quiet)), list(open_eval(data_keys(folder), 4))
    )


@pytest.mark.parametrize("name", STREAMS)
def test_a_stream_gives_the_documents_in_order_again_and_again(name, folder):
    keys = {"enable_data_shuffling": False, "data_cache_dir": "/nowhere"}
    expected = take(open_train(data_keys(folder, **keys)), 3)
    batches = take(batches_of(name), 20)
    assert_same(batches[:3], expected)
    targets = np.concatenate([batch.targets_BT.ravel() for batch in batches])
    tokens = np.concatenate(DOCUMENTS * 10)
    np.testing.assert_array_equal(targets, tokens[1 : len(targets) + 1])


@pytest.mark.parametrize("keys", PACKINGS[:1] + PACKINGS[2:5], ids=str)
def test_a_loss_mask_goes_with_its_tokens(keys):
    masks = {}
    for index, document in enumerate(DOCUMENTS):
        for place, token in enumerate(document.tolist()[1:], 1):
            masks[document[place - 1], token] = mask_of(index)[place]
    num_masked = 0
    plain = take(batches_of("numbered", **keys), 6)
    for batch, reference in zip(take(batches_of("masked", **keys), 6), plain, strict=True):
        np.testing.assert_array_equal(batch.tokens_BT, reference.tokens_BT)
        for row, column in np.argwhere(reference.loss_mask_BT):
            pair = batch.tokens_BT[row, column], batch.targets_BT[row, column]
            assert batch.loss_mask_BT[row, column] == masks[pair]
            num_masked += not masks[pair]
        assert (batch.loss_mask_BT <= reference.loss_mask_BT).all()
    assert num_masked > 50


def test_records_are_sequences_with_padding_and_their_loss_mask():
    (batch,) = take(batches_of("numbered_records", enable_data_shuffling=False), 1)
    assert batch.segments_BT is None
    source = config_source("numbered_records")
    for index in range(8):
        tokens, loss_mask, _ = source.record(index)
        size = len(tokens)
        ids = np.append(tokens, [9] * (LENGTH + 1 - size))
        np.testing.assert_array_equal(batch.tokens_BT[index], ids[:-1])
        np.testing.assert_array_equal(batch.targets_BT[index], ids[1:])
        weights = np.append(loss_mask, [False] * (LENGTH + 1 - size))[1:]
        np.testing.assert_array_equal(batch.loss_mask_BT[index], weights)


def config_source(name) -> Any:
    return make_reader(config_of(name), name, for_training=True).source


def test_there_may_be_2_to_the_32_records(monkeypatch):
    monkeypatch.setattr(numbered_module(), "FAULT", "many")
    batches = batches_of("numbered_records")
    batches.seek(10**7)
    (batch,) = take(batches, 1)
    assert batch.tokens_BT.shape == (8, LENGTH)


def numbered_module():
    """The module as import_modules executed it."""
    load_config(import_modules=[MODULE])
    return sys.modules[lookup("data_source", "numbered").__module__]


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("step", [1, 5, 12])
def test_a_resumed_run_reads_the_batches_of_an_uninterrupted_one(name, step):
    expected = take(batches_of(name), 16)
    interrupted = batches_of(name)
    take(interrupted, step)
    position = json.loads(json.dumps(interrupted.get_state()))
    resumed = batches_of(name)
    resumed.set_state(position)
    assert_same(take(resumed, 16 - step), expected[step:])
    # on two hosts, with half of the sequences each
    halves = [batches_of(name, host=host, hosts=2) for host in range(2)]
    for half in halves:
        half.set_state(position)
    parts = [take(half, 3) for half in halves]
    assert_same(map(join, zip(*parts, strict=True)), expected[step : step + 3])


def test_a_state_saves_reading_again(monkeypatch):
    batches = batches_of("stateful")
    take(batches, 12)
    position = batches.get_state()
    # An iterator with a state begins at the document of the step.
    positions = numbered_module().Positions
    monkeypatch.setattr(positions, "num_read", 0)
    resumed = batches_of("stateful")
    resumed.set_state(position)
    take(resumed, 1)
    num_tokens = 8 * LENGTH * 6  # of the batches that are read ahead
    assert positions.num_read < num_tokens / np.mean([len(ids) for ids in DOCUMENTS]) * 2
    lines = []
    other = batches_of("stateless")
    take(other, 12)
    resumed = batches_of("stateless", log=lines.append)
    resumed.set_state(other.get_state())
    assert [line for line in lines if "no state" in line]


@pytest.mark.parametrize("name", FORMS)
def test_any_step_may_be_read_in_any_order(name):
    expected = take(batches_of(name), 80)
    batches = batches_of(name)
    for step in (5, 70, 3, 79, 0):
        batches.seek(step)
        assert_same(take(batches, 1), [expected[step]])


@pytest.mark.parametrize("name", STREAMS)
def test_a_rollback_excludes_sequences_of_a_stream(name):
    expected = take(batches_of(name), 8)
    batches = batches_of(name)
    take(batches, 4)
    batches.exclude(16, 24)  # step 2
    batches.seek(2)
    assert_same(take(batches, 5), expected[3:])


@pytest.mark.parametrize("name", FORMS)
def test_hosts_read_disjoint_shards(name):
    expected = take(batches_of(name), 4)
    parts = [take(batches_of(name, host=host, hosts=2), 4) for host in range(2)]
    assert_same(map(join, zip(*parts, strict=True)), expected)


@pytest.mark.parametrize("name", ["masked", "numbered_records"])
def test_reader_processes_construct_the_source_again(name):
    expected = take(batches_of(name), 3)
    assert_same(take(batches_of(name, grain_worker_count=2), 3), expected)


def test_a_thread_reads_a_stream():
    lines = []
    batches = batches_of("stateful", grain_worker_count=2, log=lines.append)
    assert_same(take(batches, 2), take(batches_of("stateful"), 2))
    assert [line for line in lines if "grain_worker_count=2 is not used" in line]


def test_a_mixture_of_sources_and_files(folder):
    keys = {
        "data_mixture_weights": [["source:stateful", 1], [str(folder), 2], ["source:masked", 1]],
        "max_target_length": LENGTH,
    }
    expected = take(batches_of("grain", **keys), 10)
    tokens = np.concatenate([batch.tokens_BT for batch in expected])
    rows_of_stream = np.concatenate(DOCUMENTS * 3)[: 20 * LENGTH].reshape(-1, LENGTH)
    rows = [np.flatnonzero((tokens == row).all(axis=1)) for row in rows_of_stream]
    assert all(len(found) for found in rows)
    interrupted = batches_of("grain", **keys)
    take(interrupted, 6)
    resumed = batches_of("grain", **keys)
    resumed.set_state(json.loads(json.dumps(interrupted.get_state())))
    assert_same(take(resumed, 4), expected[6:])


def test_the_keys_are_part_of_the_identity():
    position = batches_of("numbered").get_state()
    with pytest.raises(UserError, match="is of other data"):
        batches_of("numbered", numbered_longest=30).set_state(position)


def test_an_iterator_of_grain_is_a_stream():
    @register("data_source", "of_grain")
    class OfGrain(StreamSource):
        def __iter__(self):
            dataset = grain.MapDataset.range(NUM_DOCUMENTS).shuffle(seed=1)
            return iter(dataset.map(document_of).to_iter_dataset())

    expected = take(batches_of("of_grain"), 12)
    interrupted = batches_of("of_grain")
    take(interrupted, 5)
    position = json.loads(json.dumps(interrupted.get_state()))
    assert position["streams"]["0"]["state"] is not None
    resumed = batches_of("of_grain")
    resumed.set_state(position)
    assert_same(take(resumed, 7), expected[5:])


MISTAKES = {
    "raises": ("numbered", "Data source numbered: document(3) raised KeyError: 'no such thing'"),
    "floats": ("numbered", "document(0) returned ndarray of float64 [3]. Return token ids"),
    "two dimensions": ("numbered", "document(0) returned list of int64 [1, 2]"),
    "negative": ("numbered", "document(0) returned the ids -2 to 1"),
    "a mask": ("numbered", "returned a loss_mask. Set has_loss_mask = True"),
    "random": ("numbered", "when documents were counted. A document must depend on its index"),
    "wrong lengths": ("numbered", "and 4 when documents were counted"),
    "too long": ("numbered_records", "A record has at most max_target_length + 1 = 17"),
    "a set": ("stateful", "get_state() returned set, which is not a value of JSON"),
}


@pytest.mark.parametrize("fault", MISTAKES)
def test_errors_name_the_source_and_the_index(fault, monkeypatch):
    name, message = MISTAKES[fault]
    monkeypatch.setattr(numbered_module(), "FAULT", fault)
    with pytest.raises(UserError) as raised, contextlib.closing(batches_of(name)) as batches:
        list(itertools.islice(batches, 3))
    assert message in str(raised.value)
    if fault == "raises":
        assert "(numbered.py:" in str(raised.value)


REFUSED = [
    ("stateful", {"packing": False}, "A stream is packed by"),
    ("stateful", {"num_epoch": 1}, "the length of a stream is unknown"),
    ("numbered", {"vocab_size": 100}, "vocab_size=100 is too small"),
]


@pytest.mark.parametrize(("name", "keys", "message"), REFUSED)
def test_what_a_form_cannot_do_is_refused(name, keys, message):
    with (
        pytest.raises(UserError, match=message),
        contextlib.closing(batches_of(name, **keys)) as batches,
    ):
        next(batches)


def test_an_unknown_source_of_a_mixture():
    with pytest.raises(UserError, match="no data source is called 'none_such'"):
        batches_of("grain", data_mixture_weights=[["source:none_such", 1]])


def test_a_source_of_no_module_cannot_be_read_by_processes():
    reader = SourceReader("numbered", {}, config_source("numbered").context, ())
    construct, arguments = reader.__reduce__()
    registry.remove(registry.registration("data_source", "numbered"))
    with pytest.raises(UserError, match="registered in no module of import_modules"):
        construct(*arguments)
    import_modules.forget(registry.registrations())  # so that the next test imports it again


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("numbered", "Documents: 60 of "),
        ("numbered_records", "The first 50 records of 50"),
        ("stateful", "The first 60 documents of a stream"),
    ],
)
def test_inspect_data_shows_a_source(name, line):
    lines = []
    inspection = Inspection(config_of(name), 1, True, lines.append)
    inspection.show_statistics(10**6)
    inspection.show_batch(2)
    assert line in "\n".join(lines)
    unit = "record" if name == "numbered_records" else "document"
    assert f"  {unit} " in "\n".join(lines)
