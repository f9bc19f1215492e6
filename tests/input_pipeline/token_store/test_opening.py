"""Opening what lies at a location: its format, split, fields and tokenizer, and mistakes."""

import builtins
import os
import tracemalloc

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from MaxText.input_pipeline.document_sources.tables import TokenDocument
from MaxText.input_pipeline.formats import tf_example
from MaxText.input_pipeline.token_store import opening
from MaxText.input_pipeline.token_store.token_dataset import record_length
from MaxText.storage.tfrecord import frame
from tests.input_pipeline.small_data import data_keys, denying, open_train, take, write_data_set
from tests.input_pipeline.token_store import token_files
from tests.input_pipeline.token_store.token_files import documents, open_data, tokens_of
from tests.refusals import refused


@pytest.fixture
def opened(tmp_path):
    return lambda location, **keys: open_data(location, tmp_path / "cache", **keys)


NAMES = {
    token_files.write_tfrecord: "a.tfrecord pile.tfrecord.b500 owt_3_100.tfrecords"
    " c4-train.tfrecord-00000-of-00001",
    token_files.write_compressed_tfrecord: "b.tfrecord.gz",
    token_files.write_array_record: "a.array_record c4.arrayrecord-00000-of-00001",
    token_files.write_parquet: "a.parquet wikitext.parquet-00000-of-00001",
    token_files.write_arrow: "data-00000-of-00001.arrow",
    token_files.write_tar: "shard-000000.tar shard-000000.tar.gz shard.tgz",
}
WRITERS = {name: write for write, names in NAMES.items() for name in names.split()}


@pytest.mark.parametrize("name", WRITERS)
def test_the_name_decides_the_format(tmp_path, opened, name):
    ids, prints = documents(0, [3, 14, 15]), []
    for folder in ("d", "e"):
        (tmp_path / folder).mkdir()
        WRITERS[name](tmp_path / folder / name, ids)
        data = opened(tmp_path / folder / name)
        assert tokens_of(data) == np.concatenate(ids).tolist()
        assert data.store.document_offsets.tolist() == [0, 3, 17, 32]
        assert (data.record_length, data.labels) == (None, None)
        prints.append(data.fingerprint)
    assert prints[0] == prints[1]
    # In a folder, next to what programs leave there.
    for other in ("README.md", "dataset_info.json", "state.json", "LICENSE"):
        (tmp_path / "d" / other).write_text("{}")
    assert tokens_of(opened(tmp_path / "d")) == tokens_of(data)


def test_other_data_have_another_fingerprint(tmp_path, opened):
    prints = set()
    # Of the last two, names, sizes and number of tokens are the same.
    for folder, sizes in (("a", [5, 6]), ("b", [3, 20, 9]), ("c", [9, 3, 20])):
        (tmp_path / folder).mkdir()
        token_files.write_megatron(tmp_path / folder / "corpus", documents(0, sizes))
        ids = [np.arange(size) for size in sizes]
        token_files.write_tfrecord(tmp_path / folder / "x.tfrecord", ids)
        for name in ("corpus.idx", "x.tfrecord"):
            prints.add(opened(tmp_path / folder / name).fingerprint)
        write_data_set(tmp_path / f"{folder}p", {"train": ids})
        prints.add(opened(tmp_path / f"{folder}p").fingerprint)
    assert len(prints) == 9
    write_data_set(tmp_path / "moved" / "ap", {"train": [np.arange(5), np.arange(6)]})
    assert opened(tmp_path / "moved" / "ap").fingerprint in prints


def test_the_order_of_the_pile_is_that_of_its_steps(tmp_path, opened):
    steps = [19500, 0, 1000, 500, 10000]
    for step in steps:
        token_files.write_tfrecord(tmp_path / f"pile.tfrecord.b{step}", [np.array([step, 1])] * 2)
    data = opened(tmp_path)
    assert tokens_of(data)[::4] == sorted(steps)
    assert data.record_length == 2
    assert [*data.store.file_of_document] == [0, 2, 4, 6, 8, 10]


def test_the_split_is_in_names_of_files_or_folders(tmp_path, opened):
    folder = tmp_path / "validated_corpus"  # contains "valid" too, which must not count
    folder.mkdir()
    for value, name in enumerate(("train_0", "train_1", "valid_0"), 1):
        token_files.write_tfrecord(folder / f"{name}.tfrecord", [np.array([value])])
    evaluation = {"for_training": False, "split": "valid"}
    assert tokens_of(opened(folder, eval_split="valid")) == [1, 2]
    assert tokens_of(opened(folder, **evaluation)) == [3]
    # What grain_eval_files names is for evaluation whatever it is called.
    data = opened(folder / "train_1.tfrecord", key="grain_eval_files", **evaluation)
    assert tokens_of(data) == [2]
    for value, split in enumerate(("train", "validation"), 1):
        (tmp_path / "d" / split).mkdir(parents=True)
        token_files.write_arrow(tmp_path / "d" / split / "data-0.arrow", [np.array([value])])
    assert tokens_of(opened(tmp_path / "d")) == [1]
    assert tokens_of(opened(tmp_path / "d", split="validation", for_training=False)) == [2]
    refused("eval_split=test", opened, folder, split="test", for_training=False)
    refused("eval_split=train", opened, folder.rename(tmp_path / "x") / "t*", eval_split="train")


@pytest.mark.parametrize(
    ("sizes", "length"),
    [
        ([], None), ([5], None), ([5, 5], 5), ([5, 4], None), ([4, 5], None), ([5, 5, 5], 5),
        ([5, 5, 3], 5), ([5, 3, 5], None), ([5, 5, 6], None), ([5, 5, 0], None),
    ],
)  # fmt: skip
def test_the_common_length_of_records(sizes, length):
    assert record_length(np.cumsum([0, *sizes])) == length


def test_the_field_of_the_ids(tmp_path, opened):
    path = tmp_path / "x.tfrecord"
    path.write_bytes(frame(tf_example.encode({"text": [1, 2], "other": [3]})))
    assert tokens_of(opened(path)) == [1, 2]
    assert tokens_of(opened(path, **{"token_records.field": "other"})) == [3]
    refused(r"nothing .*other .*text", opened, path, **{"token_records.field": "nothing"})
    content = pyarrow.table({"input_ids": [[0.5]], "number": [1]})
    parquet.write_table(content, tmp_path / "x.parquet")
    refused(r"input_ids \(list<.*double>\), number", opened, tmp_path / "x.parquet")


def test_an_id_at_the_end_of_each_record(tmp_path, opened):
    token_files.write_tfrecord(tmp_path / "x.tfrecord", [np.array([5, 6]), np.array([7, 8])])
    plain = opened(tmp_path / "x.tfrecord")
    data = opened(tmp_path / "x.tfrecord", **{"token_records.eos_id": 9})
    assert tokens_of(data) == [5, 6, 9, 7, 8, 9]
    assert (data.eos_id, data.pad_id) == (9, 9)
    assert (plain.eos_id, plain.pad_id) == (None, 0)
    assert plain.fingerprint != data.fingerprint


@pytest.mark.parametrize(
    "name", ["x.tfrecord", "x.array_record", "plain.array_record", "x.parquet", "x.jsonl"]
)
def test_text_is_tokenized(tmp_path, opened, name):
    path = tmp_path / name
    record = tf_example.encode({"content": "zwölf"})
    if name.endswith("tfrecord"):
        path.write_bytes(frame(record))
    elif name.endswith("parquet"):
        parquet.write_table(pyarrow.table({"content": ["zwölf"]}), path)
    elif name.endswith("jsonl"):
        path.write_text('{"content": "zwölf"}\n')
    else:
        token_files.write_records(path, ["zwölf".encode() if name.startswith("plain") else record])
    refused(rf"{path.name} .*tokenizer_path", opened, path, text_field="content")
    keys = {"text_field": "content", "tokenizer_path": "byte", "add_bos": True, "add_eos": False}
    assert tokens_of(opened(path, **keys)) == [257, *"zwölf".encode()]


@pytest.mark.parametrize(
    ("files", "named"),
    [
        ({"x.pt": b"abc"}, r"x\.pt"),
        ({"x.tfrecord": b""}, "1 tfrecord"),
        ({"x.tfrecord": b"", "y.parquet": b""}, "1 tfrecord .*, 1 parquet .* grain_file_type"),
        ({"x.tfrecord": b"hello world, no CRC"}, r"x\.tfrecord.*TFRecord"),
        ({"x.array_record": b"hello world"}, r"x\.array_record.*ArrayRecord"),
        ({"x.parquet": b"PAR1PAR1"}, r"x\.parquet cannot be read"),
        ({"x.arrow": b""}, r"x\.arrow cannot be read"),
        ({"x.tar": b""}, r"x\.tar.*empty"),
        ({"x.tar.gz": b""}, r"x\.tar\.gz.*empty"),
    ],
)
def test_files_without_tokens_are_refused(tmp_path, opened, files, named):
    (tmp_path / "d").mkdir()
    for name, content in files.items():
        (tmp_path / "d" / name).write_bytes(content)
    refused(named, opened, tmp_path / "d")


@pytest.mark.parametrize("name", ["a.array_record", "a.parquet", "b.tfrecord.gz", "shard.tgz"])
def test_files_without_permission_are_named(tmp_path, opened, monkeypatch, name):
    WRITERS[name](tmp_path / name, [np.array([1, 2])])
    with monkeypatch.context() as patch:
        patch.setattr(builtins, "open", denying(builtins.open, name))
        refused(rf"{name}.*Permission denied", opened, tmp_path / name)
    monkeypatch.setattr(os, "stat", denying(os.stat, "manifest.json", name))
    for location in (tmp_path, tmp_path / name):
        refused(rf"dataset_path={location} .*\(Permission denied\)", opened, location)


def test_grain_file_type_overrules_names(tmp_path, opened):
    for write, name, kind in (
        (token_files.write_tfrecord, "x.parquet", "tfrecord"),
        (token_files.write_array_record, "nameless", "arrayrecord"),
    ):
        write(tmp_path / name, [np.array([1, 2])])
        assert tokens_of(opened(tmp_path / name, grain_file_type=kind)) == [1, 2]


@pytest.mark.parametrize(
    ("place", "tokenizer", "expected"),
    [
        ("d", "d/tokenizer.json", "d"),
        ("d/train", "d/tokenizer.model", "d"),
        ("d/deep/er", "d/tokenizer.json", "d"),
        ("d", "tokenizer.json", None),  # of whatever else lies there
        ("train", "tokenizer.json", ""),
        ("d", "elsewhere/tokenizer.json", "elsewhere/tokenizer.json"),
    ],
)
def test_the_tokenizer_of_records_lies_next_to_them(tmp_path, opened, place, tokenizer, expected):
    (tmp_path / place).mkdir(parents=True)
    (tmp_path / tokenizer).parent.mkdir(exist_ok=True)
    (tmp_path / tokenizer).write_text("{}")
    token_files.write_tfrecord(tmp_path / place / "x.tfrecord", [np.array([1, 2])])
    asked = str(tmp_path / tokenizer) if tokenizer.startswith("elsewhere") else "gpt2"
    data = opened(tmp_path / place.split("/")[0], tokenizer_path=asked)
    assert data.tokenizer_folder == (None if expected is None else tmp_path / expected)


@pytest.mark.parametrize("kind", ["prepared", "imported"])
def test_memory_does_not_grow_with_the_documents(tmp_path, monkeypatch, kind):
    ids, peaks = np.array([5]), []
    for count in (20_000, 100_000):
        path = tmp_path / f"{count}.tfrecord"
        if kind == "prepared":
            write_data_set(path, {"train": [ids] * count}, chunk_length=count)
        else:
            token_files.write_tfrecord(path, [ids])
        many = [TokenDocument(ids)] * count
        monkeypatch.setattr(opening, "read_ids", lambda path, many=many, **keys: iter(many))
        tracemalloc.start()
        take(open_train(data_keys(path, data_cache_dir=str(tmp_path / "cache"))), 2)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] - peaks[0] < 80_000  # a byte a document
