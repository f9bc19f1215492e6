import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from MaxText.configuration.data_sections import Preparation
from MaxText.errors import UserError
from MaxText.input_pipeline.formats import tf_example, tfrecord
from MaxText.input_pipeline.preparation import record_export
from MaxText.input_pipeline.preparation.record_export import LEDGER_NAME, export_records
from tests.house.sources import REPOSITORY
from tests.input_pipeline.small_data import (
    EOS,
    numbered_documents,
    random_documents,
    write_data_set,
)

pyarrow_parquet = pytest.importorskip("pyarrow.parquet", reason="extra `data` is not installed")


def asked(**keys) -> Preparation:
    return Preparation(**{"prepare_output_format": "tfrecord", "prepare_num_workers": 1, **keys})


def export(prepared: Path, output: Path, **keys) -> list[str]:
    """Exports in this process; the lines that were shown."""
    lines: list[str] = []
    export_records(prepared, asked(**keys), output, lines.append)
    return lines


def prepared_set(folder: Path, documents: list[np.ndarray], **more) -> Path:
    write_data_set(folder, {"train": documents, **more})
    (folder / "tokenizer.json").write_text('{"a": "tokenizer"}', encoding="utf-8")
    return folder


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def ids_of(path: Path, field: str = "text") -> list[list[int]]:
    """Ids of each record; checks that a record holds nothing else."""
    records = [tf_example.decode(record) for record in tfrecord.read_records(path)]
    assert all(list(record) == [field] for record in records)
    return [np.asarray(record[field]).tolist() for record in records]


def rows_of(path: Path) -> dict[str, list]:
    return pyarrow_parquet.read_table(path).to_pydict()


def test_documents_are_whole_records_of_their_own(tmp_path):
    documents = numbered_documents([3, 1, 200, 7])
    prepared = prepared_set(tmp_path / "set", documents)
    lines = export(prepared, tmp_path / "out")
    assert names(tmp_path / "out") == [LEDGER_NAME, "tokenizer.json", "train_00000_4.tfrecords"]
    expected = [document.tolist() for document in documents]
    assert ids_of(tmp_path / "out" / "train_00000_4.tfrecords") == expected
    assert (tmp_path / "out" / "tokenizer.json").read_text() == '{"a": "tokenizer"}'
    assert lines == ["  train: 4 documents of 211 tokens in 1 file"]


@pytest.mark.parametrize(
    ("num_tokens", "expected"),
    [
        (1, [[1]]),
        (2, [[1, 2]]),
        (4, [[1, 2, 3, 4]]),
        (5, [[1, 2, 3, 4], [4, 5]]),
        (7, [[1, 2, 3, 4], [4, 5, 6, 7]]),
        (9, [[1, 2, 3, 4], [4, 5, 6, 7], [7, 8, 9]]),
    ],
)
def test_chunks_share_one_token_and_the_last_is_shorter(num_tokens, expected, tmp_path):
    # Two documents where there is room for them: chunks do not care.
    sizes = [num_tokens // 2, num_tokens - num_tokens // 2] if num_tokens > 1 else [1]
    prepared = prepared_set(tmp_path / "set", numbered_documents(sizes))
    export(prepared, tmp_path / "out", prepare_record="chunks", prepare_chunk_length=4)
    assert ids_of(tmp_path / "out" / f"train_00000_{len(expected)}.tfrecords") == expected


@settings(deadline=None, max_examples=25)
@given(
    sizes=st.lists(st.integers(1, 60), min_size=1, max_size=12),
    num_shards=st.integers(1, 15),
    chunk_length=st.integers(2, 40),
)
def test_no_token_is_lost_or_repeated_whatever_the_shards(sizes, num_shards, chunk_length):
    documents = numbered_documents(sizes)
    stream = np.concatenate(documents).tolist()
    with tempfile.TemporaryDirectory() as name:
        prepared = prepared_set(Path(name, "set"), documents)
        for kind in ("documents", "chunks"):
            output = Path(name, kind)
            export(
                prepared,
                output,
                prepare_record=kind,
                prepare_num_shards=num_shards,
                prepare_chunk_length=chunk_length,
            )
            files = sorted(output.glob("*.tfrecords"))
            in_files = [ids_of(file) for file in files]
            # GPT-Neo's reader believes the number in a file's name.
            assert [int(file.stem.rsplit("_", 1)[1]) for file in files] == list(map(len, in_files))
            assert all(in_files)
            records = [record for file in in_files for record in file]
            ledger = json.loads((output / LEDGER_NAME).read_text())
            assert sum(file["num_tokens"] for file in ledger["files"]) == sum(map(len, records))
            if kind == "documents":
                assert records == [document.tolist() for document in documents]
                assert len(files) == min(num_shards, len(documents))
            else:
                joined = records[0] + [token for record in records[1:] for token in record[1:]]
                assert joined == stream
                assert all(len(record) == chunk_length for record in records[:-1])
                assert len(files) == min(num_shards, len(records))


@given(
    sizes=st.lists(st.integers(1, 1000), min_size=1, max_size=30),
    num_shards=st.integers(1, 30),
)
def test_shards_hold_about_equal_tokens(sizes, num_shards):
    num_shards = min(num_shards, len(sizes))
    offsets = np.cumsum([0, *sizes])
    bounds = record_export._even_bounds(offsets, num_shards)
    assert (bounds[0], bounds[-1]) == (0, len(sizes))
    assert (np.diff(bounds) > 0).all()
    tokens = np.diff(offsets[bounds])
    # A shard can be too large by a document at each end, unless it has one document only.
    for num_tokens, num_documents in zip(tokens, np.diff(bounds), strict=True):
        assert num_documents == 1 or num_tokens <= sum(sizes) / num_shards + 2 * max(sizes)


def test_parquet_documents_and_chunks(tmp_path):
    documents = numbered_documents([5, 2])
    prepared = prepared_set(tmp_path / "set", documents)
    keys = {"prepare_output_format": "parquet", "prepare_name": "text8"}
    export(prepared, tmp_path / "documents", **keys)
    export(prepared, tmp_path / "chunks", prepare_record="chunks", prepare_chunk_length=5, **keys)
    file = "text8-00000-of-00001.parquet"
    assert rows_of(tmp_path / "documents" / file) == {"input_ids": [[1, 2, 3, 4, 5], [6, 7]]}
    assert rows_of(tmp_path / "chunks" / file) == {"input_ids": [[1, 2, 3, 4, 5], [5, 6, 7]]}
    parquet = pyarrow_parquet.ParquetFile(tmp_path / "documents" / file)
    assert str(parquet.schema_arrow.field("input_ids").type) == "list<element: int32>"
    assert parquet.metadata.row_group(0).column(0).compression == "ZSTD"


STRIDED = {
    "prepare_output_format": "parquet",
    "prepare_record": "strided",
    "prep_min_length": 2,
    "prep_max_length": 4,
    "prep_stride": 3,
}


def test_strided_windows_with_mask_and_labels(tmp_path):
    # Id 0 ends documents and is the padding as well: only the mask tells them apart.
    documents = [
        np.array([11, EOS, 13, 14, 15, 16, EOS]),
        np.array([21, EOS]),
        np.array([31, 32, EOS]),
    ]
    prepared = prepared_set(tmp_path / "set", documents)
    lines = export(prepared, tmp_path / "out", **STRIDED)
    assert rows_of(tmp_path / "out" / "train-00000-of-00001.parquet") == {
        "input_ids": [[11, EOS, 13, 14], [14, 15, 16, EOS], [31, 32, EOS, EOS]],
        "attention_mask": [[1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 1, 0]],
        "labels": [[EOS, 13, 14, 15], [15, 16, EOS, -100], [32, EOS, -100, -100]],
    }
    assert lines == [
        "  train: 3 strided windows of 11 tokens in 1 file",
        "  train: left out 1 document, and 2 tokens in all, because windows of fewer than "
        "prep_min_length=2 tokens are not written",
    ]


def test_strided_windows_do_not_depend_on_shards(tmp_path):
    prepared = prepared_set(tmp_path / "set", random_documents(0, 40, 30))
    rows: dict[int, list] = {}
    for num_shards in (1, 7):
        output = tmp_path / f"{num_shards}"
        export(prepared, output, prepare_num_shards=num_shards, **STRIDED)
        files = sorted(output.glob("*.parquet"))
        assert [file.name for file in files] == [
            f"train-{shard:05d}-of-{num_shards:05d}.parquet" for shard in range(num_shards)
        ]
        rows[num_shards] = [row for file in files for row in rows_of(file)["labels"]]
    assert rows[1] == rows[7]


def test_huggingface_datasets_reads_what_is_written(tmp_path):
    datasets = pytest.importorskip("datasets", reason="Hugging Face datasets is not installed")
    prepared = prepared_set(tmp_path / "set", random_documents(0, 40, 30))
    export(prepared, tmp_path / "out", prepare_num_shards=3, **STRIDED)
    files = sorted(map(str, (tmp_path / "out").glob("*.parquet")))
    read = datasets.Dataset.from_parquet(files, cache_dir=str(tmp_path / "cache"))
    expected = [rows_of(Path(file)) for file in files]
    assert read.column_names == ["input_ids", "attention_mask", "labels"]
    for column in read.column_names:
        assert list(read[column]) == [row for rows in expected for row in rows[column]]


def test_more_tokens_than_are_read_at_a_time(tmp_path, monkeypatch):
    documents = random_documents(3, 30, 20)
    prepared = prepared_set(tmp_path / "set", documents)
    export(prepared, tmp_path / "whole")
    monkeypatch.setattr("MaxText.input_pipeline.preparation.record_shards._BATCH_TOKENS", 25)
    export(prepared, tmp_path / "pieces")
    assert contents(tmp_path / "pieces") == contents(tmp_path / "whole")
    export(prepared, tmp_path / "parquet", prepare_output_format="parquet")
    file = tmp_path / "parquet" / "train-00000-of-00001.parquet"
    assert pyarrow_parquet.ParquetFile(file).num_row_groups > 5
    assert rows_of(file)["input_ids"] == [document.tolist() for document in documents]


def test_the_field_can_be_named(tmp_path):
    # MUDDFormer's reader of the Pile wants input_ids.
    prepared = prepared_set(tmp_path / "set", numbered_documents([3]))
    export(prepared, tmp_path / "out", prepare_field="input_ids")
    assert ids_of(tmp_path / "out" / "train_00000_1.tfrecords", "input_ids") == [[1, 2, 3]]
    with pytest.raises(UserError, match="field of the ids was 'input_ids' and is 'text'"):
        export(prepared, tmp_path / "out")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("", ["train_00000_1.tfrecords", "validation_00000_2.tfrecords"]),
        ("pile", ["pile.train_00000_1.tfrecords", "pile.validation_00000_2.tfrecords"]),
    ],
)
def test_each_split_has_files_of_its_own(name, expected, tmp_path):
    prepared = prepared_set(
        tmp_path / "set", numbered_documents([3]), validation=numbered_documents([4, 1])
    )
    export(prepared, tmp_path / "out", prepare_name=name)
    assert [file for file in names(tmp_path / "out") if file.endswith("s")] == expected


def test_the_ledger_describes_the_files(tmp_path):
    prepared = prepared_set(tmp_path / "set", numbered_documents([3, 4, 5]))
    export(prepared, tmp_path / "out", prepare_num_shards=2)
    ledger = json.loads((tmp_path / "out" / LEDGER_NAME).read_text())
    assert ledger["tokenizer_sha256"] == "0" * 64
    assert ledger["num_files"] == 2
    assert ledger["options"] == {
        "prepare_output_format": "tfrecord",
        "prepare_record": "documents",
        "prepare_num_shards": 2,
        "prepare_name": "",
        "field of the ids": "text",
    }
    assert [
        (f["split"], f["shard"], f["num_records"], f["num_tokens"]) for f in ledger["files"]
    ] == [
        ("train", 0, 2, 7),
        ("train", 1, 1, 5),
    ]
    for entry in ledger["files"]:
        data = (tmp_path / "out" / entry["file"]).read_bytes()
        assert entry["sha256"] == hashlib.sha256(data).hexdigest()
        assert entry["num_bytes"] == len(data)


def test_the_format_of_the_prepared_set_does_not_matter(tmp_path):
    documents = random_documents(2, 20, 30)
    for file_format in ("array_record", "bin"):
        write_data_set(tmp_path / file_format, {"train": documents}, file_format=file_format)
        export(tmp_path / file_format, tmp_path / f"of {file_format}", prepare_num_shards=2)
    assert len(contents(tmp_path / "of bin")) == 3
    assert contents(tmp_path / "of bin") == contents(tmp_path / "of array_record")


def test_processes_write_the_same_bytes(tmp_path):
    prepared = prepared_set(tmp_path / "set", random_documents(1, 50, 40))
    for keys in ({"prepare_record": "documents"}, STRIDED):
        one, two = tmp_path / f"1 {len(keys)}", tmp_path / f"2 {len(keys)}"
        export(prepared, one, prepare_num_shards=5, **keys)
        export(prepared, two, prepare_num_shards=5, prepare_num_workers=2, **keys)
        assert len(contents(one)) == 7
        assert contents(two) == contents(one)


# Kills the whole process at a moment of the export that the first argument names.
KILLED = """
import os, signal, sys
from pathlib import Path
from MaxText.configuration.data_sections import Preparation
from MaxText.input_pipeline.formats import tfrecord
from MaxText.input_pipeline.preparation import record_export, record_shards

def kill_at(owner, name, call):
    original, calls = getattr(owner, name), []
    def counted(*arguments):
        calls.append(None)
        if len(calls) == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*arguments)
    setattr(owner, name, counted)

if __name__ == "__main__":
    moment, workers, prepared, output = sys.argv[1:]
    if moment == "inside a file":
        kill_at(record_shards.TFRecordWriter, "write", 25)
    else:
        kill_at(record_export, "_write_ledger", 4)  # the first one begins the ledger
    keys = {"prepare_output_format": "tfrecord", "prepare_num_shards": 5}
    preparation = Preparation(prepare_num_workers=int(workers), **keys)
    record_export.export_records(Path(prepared), preparation, Path(output), lambda line: None)
"""


@pytest.mark.parametrize(
    ("moment", "workers"),
    [("inside a file", 1), ("between file and ledger", 1), ("between file and ledger", 2)],
)
def test_a_killed_export_goes_on_where_it_stopped(moment, workers, tmp_path):
    prepared = prepared_set(tmp_path / "set", [np.arange(1, 9)] * 50)
    export(prepared, tmp_path / "unbroken", prepare_num_shards=5)
    program, output = tmp_path / "killed.py", tmp_path / "out"
    program.write_text(KILLED, encoding="utf-8")
    # The pipe closes when the last process is gone: a worker that lived on would make this wait.
    killed = subprocess.run(
        [sys.executable, program, moment, str(workers), prepared, output],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        timeout=60,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    finished = json.loads((output / LEDGER_NAME).read_text())["files"]
    assert len(finished) == 2
    before = {entry["file"]: (output / entry["file"]).stat() for entry in finished}
    lines = export(prepared, output, prepare_num_shards=5)
    assert lines[0] == "Kept 2 of 5 record files, finished earlier"
    assert contents(output) == contents(tmp_path / "unbroken")
    for file, status in before.items():
        assert (output / file).stat().st_ino == status.st_ino
        assert (output / file).stat().st_mtime_ns == status.st_mtime_ns


def test_a_finished_export_is_kept_and_what_is_gone_is_written_again(tmp_path):
    prepared = prepared_set(tmp_path / "set", [np.arange(1, 9)] * 9)
    output = tmp_path / "out"
    export(prepared, output, prepare_num_shards=3)
    whole = contents(output)
    assert export(prepared, output, prepare_num_shards=3)[0].startswith("Kept 3 of 3 record files")
    (output / "train_00001_3.tfrecords").unlink()
    with (output / "train_00002_3.tfrecords").open("ab") as file:
        file.write(b"more")
    assert export(prepared, output, prepare_num_shards=3)[0].startswith("Kept 1 of 3 record files")
    assert contents(output) == whole


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({**STRIDED, "prepare_output_format": "tfrecord"}, "prepare_output_format is tfrecord"),
        ({**STRIDED, "prep_stride": 5}, "prep_stride=5 is above prep_max_length=4"),
        ({**STRIDED, "prep_min_length": 6}, "prep_min_length=6 is above prep_max_length=4"),
    ],
)
def test_keys_that_make_no_sense_together(keys, message, tmp_path):
    prepared = prepared_set(tmp_path / "set", numbered_documents([3]))
    with pytest.raises(UserError, match=message):
        export(prepared, tmp_path / "out", **keys)
    assert not (tmp_path / "out").exists()


def test_a_folder_in_the_way(tmp_path):
    prepared = prepared_set(tmp_path / "set", numbered_documents([3]))
    (tmp_path / "file").write_text("")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("years of work")
    with pytest.raises(UserError, match="is a file, and records go to a folder"):
        export(prepared, tmp_path / "file")
    with pytest.raises(UserError, match=r"holds other things \(thesis.tex\)"):
        export(prepared, tmp_path / "full")
    with pytest.raises(UserError, match="cannot be made"):
        export(prepared, tmp_path / "file" / "below")
    assert names(tmp_path / "full") == ["thesis.tex"]


def test_records_of_another_request(tmp_path):
    first = prepared_set(tmp_path / "first", numbered_documents([3, 4]))
    second = prepared_set(tmp_path / "second", numbered_documents([4, 3]))
    output = tmp_path / "out"
    export(first, output)
    before = contents(output)
    for prepared, keys, message in (
        (first, {"prepare_record": "chunks"}, "prepare_record was 'documents' and is 'chunks'"),
        (first, {"prepare_num_shards": 2}, "prepare_num_shards was 0 and is 2"),
        (second, {}, r"data set was '\w{16}' and is '\w{16}'\. Choose"),
    ):
        with pytest.raises(UserError, match=message):
            export(prepared, output, **keys)
    assert contents(output) == before


@pytest.mark.parametrize("damage", [b"", b"{", b'{"schema_version": 1}', b"\xff"])
def test_a_damaged_ledger(damage, tmp_path):
    prepared = prepared_set(tmp_path / "set", numbered_documents([3]))
    export(prepared, tmp_path / "out")
    (tmp_path / "out" / LEDGER_NAME).write_bytes(damage)
    with pytest.raises(UserError, match=re.escape(f"{tmp_path / 'out' / LEDGER_NAME} cannot be")):
        export(prepared, tmp_path / "out")


def test_damaged_records_leave_no_half_file(tmp_path):
    prepared = prepared_set(tmp_path / "set", random_documents(0, 20, 30))
    file = min((prepared / "train").glob("tokens-*"))
    file.write_bytes(bytes(reversed(file.read_bytes())))
    with pytest.raises(UserError, match=file.name):
        export(prepared, tmp_path / "out")
    assert names(tmp_path / "out") == [LEDGER_NAME, "tokenizer.json"]


def test_a_full_disk_is_told(tmp_path, monkeypatch):
    def no_space(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tfrecord.TFRecordWriter, "write", no_space)
    prepared = prepared_set(tmp_path / "set", numbered_documents([3]))
    with pytest.raises(UserError, match=r"_1.tfrecords could not be written .* No space left"):
        export(prepared, tmp_path / "out")
    assert names(tmp_path / "out") == [LEDGER_NAME, "tokenizer.json"]


def test_parquet_without_pyarrow(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UserError, match=r"pip install 'MaxText\[data\]'"):
        export(tmp_path / "set", tmp_path / "out", prepare_output_format="parquet")
