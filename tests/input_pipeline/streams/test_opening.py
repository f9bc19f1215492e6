"""Opening whatever lies at a location: formats, splits, rows, and what is refused."""

import builtins
import dataclasses
import gzip
import os
import re
import sys
import types
from pathlib import Path

import numpy as np
import pytest

from MaxText.configuration.data_sections import Data, Preparation
from MaxText.errors import UserError
from MaxText.input_pipeline.formats import tf_example
from MaxText.input_pipeline.formats.tfrecord import TFRecordWriter
from MaxText.input_pipeline.streams.bad_record import BadRecord
from MaxText.input_pipeline.streams.opening import open_token_data
from MaxText.input_pipeline.streams.record_index import is_rows
from MaxText.input_pipeline.streams.token_data import TokenData

from ..small_data import random_documents, write_data_set
from . import token_files
from .token_files import documents


@pytest.fixture
def opened(tmp_path):
    """Opens a location with the keys of data and preparation that a test sets."""

    def silent(line: str) -> None:
        pass

    def open_it(
        location, *, key="dataset_path", split="train", for_training=True, show=silent, **keys
    ):
        preparation = {k: keys.pop(k) for k in list(keys) if k in Preparation.model_fields}
        data = Data(data_cache_dir=str(tmp_path / "cache"), **keys)
        return open_token_data(
            str(location),
            key=key,
            data=data,
            preparation=Preparation(**preparation),
            split=split,
            for_training=for_training,
            show=show,
        )

    return open_it


def tokens_of(data: TokenData) -> list[int]:
    return data.stream.ranges([(0, len(data.stream))])[0].tolist()


def joined(ids) -> list[int]:
    return np.concatenate(ids).tolist()


def write_compressed_tfrecord(path, ids):
    plain = path.with_suffix("")
    token_files.write_tfrecord(plain, ids)
    path.write_bytes(gzip.compress(plain.read_bytes()))
    plain.unlink()


WRITERS = {
    "b.tfrecord.gz": write_compressed_tfrecord,
    "a.tfrecord": token_files.write_tfrecord,
    "pile.tfrecord.b500": token_files.write_tfrecord,
    "owt_3_100.tfrecords": token_files.write_tfrecord,
    "c4-train.tfrecord-00000-of-00001": token_files.write_tfrecord,
    "a.array_record": token_files.write_array_record,
    "c4.arrayrecord-00000-of-00001": token_files.write_array_record,
    "a.parquet": token_files.write_parquet,
    "wikitext.train-00000-of-00001": token_files.write_parquet,
    "data-00000-of-00001.arrow": token_files.write_arrow,
    "shard-000000.tar": token_files.write_tar,
    "shard-000000.tar.gz": token_files.write_tar,
    "shard.tgz": token_files.write_tar,
    "nameless": token_files.write_tfrecord,
    "nameless2": token_files.write_array_record,
    "nameless3": token_files.write_arrow,
    "nameless4": token_files.write_tar,
}


@pytest.mark.parametrize("name", WRITERS)
def test_the_format_is_told_by_name_or_content(tmp_path, opened, name):
    ids = documents(0, [3, 14, 15])
    (tmp_path / "d").mkdir()
    WRITERS[name](tmp_path / "d" / name, ids)
    data = opened(tmp_path / "d" / name)
    assert tokens_of(data) == joined(ids)
    assert data.stream.document_offsets.tolist() == [0, 3, 17, 32]
    assert (data.rows, data.labels, data.file_of_document) == (False, None, None)
    assert "32 tokens in 3 documents of 1" in data.description
    # In a folder, beside what programs leave there.
    for beside in ("README.md", "dataset_info.json", "state.json", "LICENSE"):
        (tmp_path / "d" / beside).write_text("{}")
    assert tokens_of(opened(tmp_path / "d")) == joined(ids)


@pytest.mark.parametrize("file_format", ["array_record", "bin"])
def test_prepared_data_is_described_by_its_manifest(tmp_path, opened, file_format):
    ids = random_documents(0, count=20, longest=30)
    manifest = write_data_set(
        tmp_path / "d", {"train": ids, "validation": ids[:3]}, file_format=file_format
    )
    data = opened(tmp_path / "d")
    assert tokens_of(data) == joined(ids)
    assert (data.eos_id, data.filler_id, data.vocab_size) == (0, 0, 50_000)
    assert data.largest_id == max(joined(ids))
    assert data.unigram_entropy == manifest.splits["train"].unigram_entropy
    assert data.tokenizer_folder == tmp_path / "d"
    assert data.description.startswith(f"Data set {manifest.fingerprint}: random ids")
    assert not data.rows
    validation = opened(tmp_path / "d", split="validation", for_training=False)
    assert tokens_of(validation) == joined(ids[:3])
    assert validation.fingerprint != data.fingerprint
    with pytest.raises(UserError, match="eval_split=test: this split does not exist"):
        opened(tmp_path / "d", split="test", for_training=False)


def test_the_order_of_the_pile_is_that_of_its_steps(tmp_path, opened):
    steps = [19500, 0, 1000, 500, 10000]
    for step in steps:
        token_files.write_tfrecord(tmp_path / f"pile.tfrecord.b{step}", [np.array([step, 1])] * 2)
    data = opened(tmp_path)
    assert tokens_of(data)[::4] == sorted(steps)
    assert data.rows
    assert data.file_of_document is not None
    assert data.file_of_document.tolist() == [0, 2, 4, 6, 8, 10]


def test_files_for_evaluation_are_those_with_its_name(tmp_path, opened):
    folder = tmp_path / "validated_corpus"  # contains "valid" too, which must not count
    folder.mkdir()
    for name, value in [("train_0", 1), ("train_1", 2), ("valid_0", 3)]:
        token_files.write_tfrecord(folder / f"{name}.tfrecord", [np.array([value])])
    keys = {"eval_split": "valid"}
    assert tokens_of(opened(folder, **keys)) == [1, 2]
    assert tokens_of(opened(folder, split="valid", for_training=False, **keys)) == [3]
    # What grain_eval_files names is for evaluation whatever it is called.
    data = opened(
        folder / "train_1.tfrecord", key="grain_eval_files", split="valid", for_training=False
    )
    assert tokens_of(data) == [2]


def test_folders_name_splits_too(tmp_path, opened):
    for split, value in [("train", 1), ("validation", 2)]:
        (tmp_path / "d" / split).mkdir(parents=True)
        token_files.write_arrow(
            tmp_path / "d" / split / "data-00000-of-00001.arrow", [np.array([value])]
        )
    assert tokens_of(opened(tmp_path / "d")) == [1]
    assert tokens_of(opened(tmp_path / "d", split="validation", for_training=False)) == [2]


def test_a_missing_split_is_said_to_be_missing(tmp_path, opened):
    token_files.write_tfrecord(tmp_path / "train.tfrecord", [np.array([1])])
    with pytest.raises(UserError, match=r"no file has eval_split=validation .*train\.tfrecord"):
        opened(tmp_path, split="validation", for_training=False)
    with pytest.raises(UserError, match="none is left to train on"):
        opened(tmp_path, eval_split="train")


@pytest.mark.parametrize(
    ("sizes", "rows"),
    [
        ([], False), ([5], False), ([5, 5], True), ([5, 4], False), ([4, 5], False),
        ([5, 5, 5], True), ([5, 5, 3], True), ([5, 3, 5], False), ([5, 5, 6], False),
        ([5, 5, 0], False),
    ],
)  # fmt: skip
def test_what_counts_as_rows(sizes, rows):
    assert is_rows(np.array(sizes, np.int64)) is rows


def test_the_field_of_the_ids(tmp_path, opened):
    path = tmp_path / "x.tfrecord"
    with TFRecordWriter(path) as writer:
        writer.write(tf_example.encode({"text": [1, 2], "other": [3]}))
    assert tokens_of(opened(path)) == [1, 2]
    assert tokens_of(opened(path, tokens_field="other")) == [3]
    with pytest.raises(
        UserError, match=r"no integer feature nothing .*features there: other \(integers\), text"
    ):
        opened(path, tokens_field="nothing")


def test_an_id_at_the_end_of_each_record(tmp_path, opened):
    token_files.write_tfrecord(tmp_path / "x.tfrecord", [np.array([5, 6]), np.array([7, 8])])
    plain = opened(tmp_path / "x.tfrecord")
    data = opened(tmp_path / "x.tfrecord", records_eos_id=9)
    assert tokens_of(data) == [5, 6, 9, 7, 8, 9]
    assert (data.eos_id, data.filler_id) == (9, 9)
    assert (plain.eos_id, plain.filler_id) == (None, 0)
    assert plain.fingerprint != data.fingerprint


def test_equal_data_elsewhere_has_the_same_fingerprint(tmp_path, opened):
    for folder in ("a", "b", "c"):
        (tmp_path / folder).mkdir()
        ids = documents(0, [5, 6] if folder != "c" else [5, 7])
        token_files.write_tfrecord(tmp_path / folder / "x.tfrecord", ids)
    prints = [opened(tmp_path / folder).fingerprint for folder in "abc"]
    assert prints[0] == prints[1] != prints[2]


def test_compressed_data_elsewhere_has_the_same_fingerprint(tmp_path, opened):
    prints = []
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        for number in range(2):
            path = tmp_path / folder / f"{number}.tfrecord.gz"
            write_compressed_tfrecord(path, documents(number, [5, 6]))
        prints.append(opened(tmp_path / folder).fingerprint)
    assert prints[0] == prints[1]


def test_documents_in_another_order_have_another_fingerprint(tmp_path, opened):
    # Names, sizes and number of tokens are the same.
    prints = []
    for folder, sizes in (("a", [3, 20, 9]), ("b", [9, 3, 20])):
        (tmp_path / folder).mkdir()
        token_files.write_megatron(tmp_path / folder / "corpus", documents(0, sizes))
        ids = [np.arange(size) for size in sizes]
        token_files.write_tfrecord(tmp_path / folder / "corpus.tfrecord", ids)
        prints.append([opened(tmp_path / folder / f"corpus.{end}") for end in ("idx", "tfrecord")])
    for first, second in zip(*prints, strict=True):
        assert len(first.stream) == len(second.stream)
        assert first.fingerprint != second.fingerprint


def test_labels_beside_ids(tmp_path, opened):
    import pyarrow

    labels = pyarrow.array([[6, 7, -100], [9, -100, -100]], pyarrow.list_(pyarrow.int64()))
    ids = [np.array([5, 6, 7]), np.array([8, 9, 0])]
    token_files.write_parquet(tmp_path / "x.parquet", ids, labels=labels)
    data = opened(tmp_path / "x.parquet")
    assert tokens_of(data) == [5, 6, 7, 8, 9, 0]
    assert data.labels is not None
    assert data.labels.ranges([(0, 6)])[0].tolist() == [6, 7, -100, 9, -100, -100]
    assert data.rows
    with pytest.raises(UserError, match="has labels, which a further token"):
        opened(tmp_path / "x.parquet", records_eos_id=1)


@pytest.mark.parametrize("name", ["corpus", "corpus.bin", "corpus.idx", ""])
def test_megatron_data_by_any_of_its_names(tmp_path, opened, name):
    ids = documents(0, [3, 14, 15])
    (tmp_path / "d").mkdir()
    token_files.write_megatron(tmp_path / "d" / "corpus", ids)
    data = opened(tmp_path / "d" / name)
    assert tokens_of(data) == joined(ids)
    assert data.stream.document_offsets.tolist() == [0, 3, 17, 32]
    assert not data.rows
    assert opened(tmp_path / "d" / name, megatron_order="gpt_neox").fingerprint == data.fingerprint


def test_rows_of_a_shuffled_megatron_data_set_in_parts(tmp_path, opened):
    # As Pythia's were published: one index, data in parts that do not end with a row.
    ids = documents(0, [9, 9, 9, 9])
    token_files.write_megatron(tmp_path / "document", ids)
    content = (tmp_path / "document.bin").read_bytes()
    (tmp_path / "document.bin").unlink()
    for number in range(3):
        part = content[number * 28 : (number + 1) * 28]
        (tmp_path / f"document-{number:05d}-of-00002.bin").write_bytes(part)
    for location in (tmp_path, tmp_path / "document.idx", f"{tmp_path}/document-*.bin"):
        data = opened(location)
        assert tokens_of(data) == joined(ids)
        assert data.rows
        assert "rows of 9" in data.description


def test_megatron_data_that_is_incomplete(tmp_path, opened):
    token_files.write_megatron(tmp_path / "a", documents(0, [9]))
    (tmp_path / "a.bin").write_bytes(b"12")
    with pytest.raises(UserError, match=r"a\.bin has 2 bytes, where its 9 tokens take 18"):
        opened(tmp_path)
    (tmp_path / "a.bin").unlink()
    with pytest.raises(UserError, match=r"the data of .*a\.idx.*no such file"):
        opened(tmp_path)
    (tmp_path / "b.bin").write_bytes(b"12")
    with pytest.raises(UserError, match=r"b\.idx cannot be read"):
        opened(tmp_path / "b.bin")
    token_files.write_megatron(tmp_path / "c", documents(0, [9]))
    with pytest.raises(UserError, match="holds 2 Megatron data sets"):
        opened(tmp_path)


@pytest.mark.parametrize("place", [30, -20])  # in the first record, in the last
def test_damage_is_skipped_only_where_asked(tmp_path, opened, place):
    path = tmp_path / "x.tfrecord"
    token_files.write_tfrecord(path, [np.arange(50)] * 3)
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)
    with pytest.raises(BadRecord, match="the CRC of the record is wrong"):
        opened(path)
    data = opened(path, on_bad_record="skip")
    assert data.stream.document_offsets.tolist() == [0, 50, 100, 150]
    assert data.rows


def test_the_kind_of_records_is_told_by_the_first_sound_one(tmp_path, opened):
    path = tmp_path / "x.array_record"
    ids = documents(0, [400] * 3)
    token_files.write_array_record(path, ids, options="group_size:1,uncompressed")
    content = bytearray(path.read_bytes())
    content[bytes(content).index(tf_example.encode({"input_ids": ids[0]})) + 200] ^= 4
    path.write_bytes(content)
    with pytest.raises(BadRecord, match="the record is damaged"):
        opened(path)
    data = opened(path, on_bad_record="skip")
    assert data.stream.ranges([(400, 1200)])[0].tolist() == joined(ids[1:])


@pytest.mark.parametrize("kind", ["tfrecord", "array_record", "plain", "parquet", "jsonl"])
def test_text_is_handed_to_the_tokenizer(tmp_path, opened, monkeypatch, kind):
    import pyarrow
    import pyarrow.parquet
    from array_record.python import array_record_module

    names = {"plain": "x.array_record"}
    path = tmp_path / names.get(kind, f"x.{kind}")
    record = tf_example.encode({"content": "zwölf"})
    if kind == "tfrecord":
        with TFRecordWriter(path) as writer:
            writer.write(record)
    elif kind == "parquet":
        pyarrow.parquet.write_table(pyarrow.table({"content": ["zwölf"]}), path)
    elif kind == "jsonl":
        path.write_text('{"content": "x"}\n')
    else:
        writer = array_record_module.ArrayRecordWriter(str(path), "group_size:1")
        writer.write("zwölf".encode() if kind == "plain" else record)
        writer.close()
    with pytest.raises(UserError, match="holds text, and tokenizer_path is not set"):
        opened(path, text_field="content")
    asked = {}

    def open_text(files, **keys):
        asked.update(keys, files=files)
        raise UserError("far enough")

    module = types.ModuleType("text_cache")
    module.open_text = open_text  # pyright: ignore[reportAttributeAccessIssue]
    name = "MaxText.input_pipeline.preparation.text_cache"
    monkeypatch.setitem(sys.modules, name, module)
    with pytest.raises(UserError, match="far enough"):
        opened(path, text_field="content", tokenizer_path="byte", add_eos=False)
    show = asked.pop("show")
    assert callable(show)
    assert asked == {
        "files": [str(path)],
        "tokenizer_path": "byte",
        "tokenizer_type": "auto",
        "text_field": "content",
        "add_bos": False,
        "add_eos": False,
        "cache_dir": tmp_path / "cache",
    }


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"x.pt": b"abc"}, r"x\.pt is of no known format\. Accepted: a folder"),
        ({"x.tfrecord": b""}, "1 tfrecord files hold no tokens"),
        ({"x.tfrecord": b"", "y.parquet": b""}, "1 tfrecord .*, 1 parquet .* grain_file_type"),
        ({"x.tfrecord": b"hello world, no CRC"}, "not a TFRecord, or damaged"),
        ({"x.array_record": b"hello world"}, "no ArrayRecord file, damaged"),
        ({"x.parquet": b"hello world"}, "no table, damaged"),
        ({"x.parquet": b"PAR1PAR1"}, "no table, damaged"),
        ({"x.arrow": b""}, "no table, damaged"),
        ({"x.tar": b""}, "no tar archive"),
        ({"x.tar.gz": b""}, "no tar archive|compressed file is"),
    ],
)
def test_what_cannot_be_trained_on(tmp_path, opened, files, message):
    (tmp_path / "d").mkdir()
    for name, content in files.items():
        (tmp_path / "d" / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        opened(tmp_path / "d")


def test_columns_without_ids_are_named(tmp_path, opened):
    import pyarrow
    import pyarrow.parquet

    content = pyarrow.table({"input_ids": [[0.5]], "number": [1]})
    pyarrow.parquet.write_table(content, tmp_path / "x.parquet")
    with pytest.raises(UserError, match=r"columns there: input_ids \(list<.*double>\), number"):
        opened(tmp_path / "x.parquet")


def test_nothing_at_the_location(opened):
    with pytest.raises(UserError, match="dataset_path=/no/such/place: no such file"):
        opened("/no/such/place")
    with pytest.raises(UserError, match="dataset_path is not set"):
        opened("")


def test_a_format_that_is_said_overrules_names(tmp_path, opened):
    path = tmp_path / "x.parquet"
    token_files.write_tfrecord(path, [np.array([1, 2])])
    assert tokens_of(opened(path, grain_file_type="tfrecord")) == [1, 2]


def test_everything_opened_can_be_pickled(tmp_path, opened):
    import pickle

    token_files.write_tfrecord(tmp_path / "x.tfrecord", [np.array([1, 2])])
    data = opened(tmp_path / "x.tfrecord")
    copy = pickle.loads(pickle.dumps(data))
    assert tokens_of(copy) == [1, 2]
    assert Path(tmp_path / "cache").is_dir()
    assert dataclasses.is_dataclass(copy)


@pytest.mark.parametrize("where", ["manifest.json", "x.tfrecord"])
def test_what_may_not_be_looked_at_is_named(tmp_path, opened, monkeypatch, where):
    # chmod does not stop root: what os.stat says of a folder without permission is imitated.
    token_files.write_tfrecord(tmp_path / "x.tfrecord", [np.array([1, 2])])
    look = os.stat

    def denied(path, *arguments, **keys):
        if str(path).endswith(where):
            raise PermissionError(13, "Permission denied", str(path))
        return look(path, *arguments, **keys)

    location = tmp_path if where == "manifest.json" else tmp_path / where
    monkeypatch.setattr(os, "stat", denied)
    message = rf"dataset_path={location} cannot be looked at \(Permission denied\)"
    with pytest.raises(UserError, match=message):
        opened(location)


@pytest.mark.parametrize("name", ["a.array_record", "a.parquet", "a.tfrecord.gz", "a.tar.gz"])
def test_files_that_may_not_be_read_are_named(tmp_path, opened, monkeypatch, name):
    WRITERS.get(name, token_files.write_tar)(tmp_path / name, [np.array([1, 2])])
    look = builtins.open

    def denied(path, *arguments, **keys):
        if str(path) == str(tmp_path / name):
            raise PermissionError(13, "Permission denied", str(path))
        return look(path, *arguments, **keys)

    monkeypatch.setattr(builtins, "open", denied)
    with pytest.raises(UserError, match=rf"{name}.* cannot be read \(Permission denied\)"):
        opened(tmp_path / name)


@pytest.mark.parametrize(
    ("name", "said", "message"),
    [
        ("a.tfrecord", "parquet", "is tfrecord by its first bytes. Set grain_file_type=tfrecord"),
        ("a.tfrecord", "arrayrecord", "is tfrecord by its first bytes"),
        ("a.tfrecord", "megatron", "is tfrecord by its first bytes"),
        ("a.array_record", "webdataset", "is arrayrecord by its first bytes"),
        ("a.parquet", "tfrecord", "is parquet by its first bytes"),
        ("shard-000000.tar", "arrow", "is webdataset by its first bytes"),
        ("text", "parquet", "does not begin as one"),
    ],
)
def test_a_wrong_format_that_is_said_is_named(tmp_path, opened, name, said, message):
    writers = {**WRITERS, "text": lambda path, ids: path.write_text("some words")}
    writers[name](tmp_path / name, [np.array([1, 2])])
    asked = f"dataset_path={tmp_path / name}: grain_file_type={said} is set, and {tmp_path / name}"
    with pytest.raises(UserError, match=re.escape(f"{asked} ") + ".*" + message):
        opened(tmp_path / name, grain_file_type=said)


def test_tables_of_the_other_kind_are_read_where_one_is_said(tmp_path, opened):
    token_files.write_arrow(tmp_path / "x.arrow", [np.array([1, 2])])
    assert tokens_of(opened(tmp_path / "x.arrow", grain_file_type="parquet")) == [1, 2]


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
def test_the_tokenizer_of_records_lies_beside_them(tmp_path, opened, place, tokenizer, expected):
    (tmp_path / place).mkdir(parents=True)
    (tmp_path / tokenizer).parent.mkdir(exist_ok=True)
    (tmp_path / tokenizer).write_text("{}")
    token_files.write_tfrecord(tmp_path / place / "x.tfrecord", [np.array([1, 2])])
    asked = str(tmp_path / tokenizer) if tokenizer.startswith("elsewhere") else "gpt2"
    data = opened(tmp_path / place.split("/")[0], tokenizer_path=asked)
    assert data.tokenizer_folder == (None if expected is None else tmp_path / expected)


def test_keys_without_effect_on_prepared_data(tmp_path, opened):
    manifest = write_data_set(tmp_path / "d", {"train": [np.arange(1, 30)]})
    with pytest.raises(UserError, match=r"records_eos_id=3 has no effect: dataset_path=.*/d is a"):
        opened(tmp_path / "d", records_eos_id=3)
    # In a mixture other sources may be records.
    assert len(opened(tmp_path / "d", key="dataset_mix", records_eos_id=3).stream) == 29
    lines: list[str] = []
    opened(tmp_path / "d", tokenizer_path="other", show=lines.append)
    assert lines == [
        f"tokenizer_path=other is not used: {tmp_path / 'd'} has a tokenizer of its own "
        f"({manifest.tokenizer.origin})."
    ]
    lines.clear()
    opened(tmp_path / "d", tokenizer_path="other", prepare_source="x", show=lines.append)
    opened(tmp_path / "d", tokenizer_path=str(tmp_path / "d"), show=lines.append)
    opened(tmp_path / "d", tokenizer_path=str(tmp_path / "d" / "x.json"), show=lines.append)
    assert lines == []
