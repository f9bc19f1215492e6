"""Token records for other programs: contents of the files, and what an export may overwrite."""

import hashlib
import itertools
import json
import os
import sys
import tempfile
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from MaxText.config.data_sections import PreparationConfig
from MaxText.input_pipeline.formats import tf_example
from MaxText.input_pipeline.prepare import record_export
from MaxText.input_pipeline.prepare.record_export import export_records, strided_windows
from MaxText.storage import tfrecord
from tests.input_pipeline.document_sources.written_corpora import tfrecord_contents
from tests.input_pipeline.small_data import (
    EOS,
    contents,
    numbered_documents,
    random_documents,
    write_data_set,
)
from tests.refusals import refused


def export(prepared: Path, output: Path, **keys) -> list[str]:
    """Exports in this process; the lines that were shown."""
    lines: list[str] = []
    keys = {"prepare_output_format": "tfrecord", "prepare_num_workers": 1, **keys}
    export_records(prepared, PreparationConfig(**keys), output, lines.append)
    return lines


def prepared_set(folder: Path, documents: list[np.ndarray], **other_splits) -> Path:
    write_data_set(folder, {"train": documents, **other_splits}, file_format="bin")
    (folder / "tokenizer.json").write_text('{"a": "tokenizer"}', encoding="utf-8")
    return folder


def ids_of(path: Path, field: str) -> list[list[int]]:
    """Ids of each record; checks that a record holds nothing else."""
    if path.suffix == ".parquet":
        return parquet.read_table(path).to_pydict()[field]
    records = [tf_example.decode(record) for record in tfrecord_contents(path)]
    assert all(list(record) == [field] for record in records)
    return [np.asarray(record[field]).tolist() for record in records]


@settings(deadline=None, max_examples=20)
@given(
    sizes=st.lists(st.integers(1, 60), min_size=1, max_size=12),
    num_shards=st.integers(1, 15),
    chunk_length=st.integers(2, 40),
    output_format=st.sampled_from(["tfrecord", "parquet"]),
)
def test_no_token_is_lost_or_repeated(sizes, num_shards, chunk_length, output_format):
    documents = numbered_documents(sizes)
    stream = np.concatenate(documents).tolist()
    keys = {
        "prepare_output_format": output_format,
        "records.num_shards": num_shards,
        "records.chunk_length": chunk_length,
        "records.name": "text8",
    }
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # most of the time
        monkeypatch.setattr(record_export, "_BATCH_TOKENS", 50)
        prepared = prepared_set(Path(name, "set"), documents)
        for kind in ("documents", "chunks"):
            output = Path(name, kind)
            export(prepared, output, **{"records.content": kind}, **keys)
            files = sorted(output.glob("text8*"))
            field = "text" if output_format == "tfrecord" else "input_ids"
            in_files = [ids_of(file, field) for file in files]
            assert all(in_files)
            for index, (file, records) in enumerate(zip(files, in_files, strict=True)):
                # GPT-Neo's reader believes the number in a file's name.
                names = {
                    "tfrecord": f"text8_{index:05d}_{len(records)}.tfrecords",
                    "parquet": f"text8-{index:05d}-of-{len(files):05d}.parquet",
                }
                assert file.name == names[output_format]
            records = [record for file in in_files for record in file]
            if kind == "documents":
                assert records == [document.tolist() for document in documents]
                assert len(files) == min(num_shards, len(documents))
            else:
                joined = records[0] + [token for record in records[1:] for token in record[1:]]
                assert joined == stream
                assert all(len(record) == chunk_length for record in records[:-1])
                assert len(files) == min(num_shards, len(records))


def test_splits_field_and_ledger(tmp_path):
    documents = numbered_documents([3, 4, 5])
    prepared = prepared_set(tmp_path / "set", documents, validation=documents[:1])
    output = tmp_path / "out"
    lines = export(prepared, output, **{"records.num_shards": 2, "records.field": "input_ids"})
    assert lines[-2].startswith("  train: 3 documents of 12 tokens in 2 files")
    ledger = json.loads((output / "records.json").read_text())
    assert [(f["file"], f["num_records"], f["num_tokens"]) for f in ledger["files"]] == [
        ("train_00000_1.tfrecords", 1, 3),
        ("train_00001_2.tfrecords", 2, 9),
        ("validation_00000_1.tfrecords", 1, 3),
    ]
    for entry in ledger["files"]:
        data = (output / entry["file"]).read_bytes()
        assert entry["sha256"] == hashlib.sha256(data).hexdigest()
        assert entry["num_bytes"] == len(data)
    assert ids_of(output / "train_00000_1.tfrecords", "input_ids") == [documents[0].tolist()]
    assert (output / "tokenizer.json").read_bytes() == (prepared / "tokenizer.json").read_bytes()
    # Of parquet: types as Hugging Face's datasets library writes them.
    export(prepared, tmp_path / "parquet", prepare_output_format="parquet")
    file = parquet.ParquetFile(tmp_path / "parquet" / "train-00000-of-00001.parquet")
    assert str(file.schema_arrow.field("input_ids").type) == "list<element: int32>"
    assert file.metadata.row_group(0).column(0).compression == "ZSTD"


STRIDED = {
    "prepare_output_format": "parquet",
    "records.content": "strided",
    "records.min_length": 2,
    "records.max_length": 4,
    "records.stride": 3,
}


def test_strided_windows_with_mask_and_labels(tmp_path):
    # Id 0 ends documents and is the padding as well: only the mask tells them apart.
    documents = [[11, EOS, 13, 14, 15, 16, EOS], [21, EOS], [31, 32, EOS]]
    prepared = prepared_set(tmp_path / "set", list(map(np.array, documents)))
    lines = export(prepared, tmp_path / "out", **STRIDED)
    table = parquet.read_table(tmp_path / "out" / "train-00000-of-00001.parquet")
    assert table.to_pydict() == {
        "input_ids": [[11, EOS, 13, 14], [14, 15, 16, EOS], [31, 32, EOS, EOS]],
        "attention_mask": [[1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 1, 0]],
        "labels": [[EOS, 13, 14, 15], [15, 16, EOS, -100], [32, EOS, -100, -100]],
    }
    assert "1 document, and 2 tokens" in lines[1]
    prepared = prepared_set(tmp_path / "random", random_documents(0, 40, 30))
    rows = []
    for num_shards in (1, 7):
        output = tmp_path / f"{num_shards}"
        export(prepared, output, **{"records.num_shards": num_shards}, **STRIDED)
        files = sorted(output.glob("*.parquet"))
        assert len(files) == num_shards
        rows.append([row for file in files for row in ids_of(file, "labels")])
    assert rows[0] == rows[1]


@given(
    sizes=st.lists(st.integers(0, 40), max_size=12), first=st.integers(0, 1000),
    min_length=st.integers(1, 9), extra_length=st.integers(0, 9), stride=st.integers(1, 18),
)  # fmt: skip
def test_strided_windows_follow_their_definition(sizes, first, min_length, extra_length, stride):
    max_length = min_length + extra_length
    stride = min(stride, max_length)
    offsets = first + np.cumsum([0, *sizes])
    expected, dropped = [], 0
    for begin, end in itertools.pairwise(offsets.tolist()):
        starts = range(begin, end, stride)
        # Up to the first window that reaches the end.
        starts = starts[: 1 + sum(start + max_length + 1 < end for start in starts)]
        windows = [(start, min(start + max_length + 1, end)) for start in starts]
        windows = [(start, stop) for start, stop in windows if stop - start > min_length]
        expected += windows
        dropped += not windows
    covered = {token for window in expected for token in range(*window)}
    ranges = strided_windows(offsets, min_length, max_length, stride)
    assert list(zip(ranges.starts_W.tolist(), ranges.stops_W.tolist(), strict=True)) == expected
    assert ranges.dropped_documents == dropped
    assert ranges.dropped_tokens + len(covered) == sum(sizes)


def test_finished_files_are_kept_and_missing_ones_written(tmp_path):
    prepared = prepared_set(tmp_path / "set", [np.arange(1, 9)] * 9)
    output = tmp_path / "out"
    export(prepared, output, **{"records.num_shards": 3})
    complete = contents(output)
    assert export(prepared, output, **{"records.num_shards": 3})[0].startswith("Resuming: 3 of 3 ")
    (output / "train_00001_3.tfrecords").unlink()
    assert export(prepared, output, **{"records.num_shards": 3})[0].startswith("Resuming: 2 of 3 ")
    assert contents(output) == complete


def test_failures_leave_no_half_file(tmp_path, monkeypatch):
    prepared = prepared_set(tmp_path / "set", random_documents(0, 20, 30))
    with monkeypatch.context() as context:
        no_space = mock.Mock(side_effect=OSError(28, "No space left on device"))
        context.setattr(tfrecord.TFRecordWriter, "write", no_space)
        with pytest.raises(OSError, match="No space"):
            export(prepared, tmp_path / "out")
    assert not [*(tmp_path / "out").glob("*.tfrecords")]
    export(prepared, tmp_path / "out")
    export(prepared, tmp_path / "fresh")
    assert contents(tmp_path / "out") == contents(tmp_path / "fresh")
    with monkeypatch.context() as context:
        context.setitem(sys.modules, "pyarrow", None)
        parquet_keys = {"prepare_output_format": "parquet"}
        refused(r"jaxpretrain\[data\]", export, prepared, tmp_path / "new", **parquet_keys)
    file = min((tmp_path / "set" / "train").glob("tokens-*"))
    os.truncate(file, 10)
    refused(file.name, export, prepared, tmp_path / "again")
