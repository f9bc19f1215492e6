"""Random access to the stream, across chunks, files, threads and processes."""

import json
import os
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from MaxText.errors import UserError
from MaxText.input_pipeline.manifest import (
    OFFSETS_NAME,
    ROWS_NAME,
    SOURCE_FILES_NAME,
    Manifest,
    RecordFile,
)
from MaxText.input_pipeline.streams.bad_record import BadRecord
from MaxText.input_pipeline.streams.token_stream import TokenStream

from ..small_data import random_documents, write_data_set


def places_in(size: int) -> list[tuple[int, int]]:
    rng = np.random.default_rng(1)
    return [tuple(sorted(rng.integers(0, size + 1, 2).tolist())) for _ in range(50)]


@pytest.mark.parametrize("file_format", ["array_record", "bin"])
@pytest.mark.parametrize("vocab_size", [50_000, 70_000])
def test_any_range_equals_the_concatenated_documents(tmp_path, vocab_size, file_format):
    documents = random_documents(0, count=60, longest=90, vocab_size=vocab_size)
    manifest = write_data_set(
        tmp_path / "d", {"train": documents}, vocab_size, file_format=file_format
    )
    assert manifest.dtype == ("uint16" if vocab_size <= 65536 else "uint32")
    assert len(manifest.splits["train"].files) > 1
    whole = np.concatenate(documents)
    stream = TokenStream(str(tmp_path / "d"), manifest, "train")
    assert len(stream) == whole.size
    np.testing.assert_array_equal(stream[:], whole)
    places = places_in(whole.size)
    for (start, stop), piece in zip(places, stream.ranges(places), strict=True):
        assert piece.dtype == np.int32
        np.testing.assert_array_equal(piece, whole[start:stop])
    ends = np.cumsum([0, *map(len, documents)])
    np.testing.assert_array_equal(stream.document_offsets, ends)


def as_version_1(folder: Path, manifest: Manifest) -> Manifest:
    """The same data set as the first version of the layout describes it."""
    entry = manifest.splits["train"]
    files = tuple(file.model_copy(update={"num_tokens": None}) for file in entry.files)
    for name in (ROWS_NAME, SOURCE_FILES_NAME):
        (folder / "train" / name).unlink()
    splits = {"train": entry.model_copy(update={"files": files})}
    return manifest.model_copy(update={"schema_version": 1, "splits": splits})


def test_sets_of_version_1_are_read(tmp_path):
    documents = random_documents(0, count=60, longest=90)
    manifest = as_version_1(tmp_path / "d", write_data_set(tmp_path / "d", {"train": documents}))
    stream = TokenStream(str(tmp_path / "d"), manifest, "train")
    np.testing.assert_array_equal(stream[:], np.concatenate(documents))
    assert stream.document_name(17) == "document 17"
    assert stream.file_of_document is None


def test_the_last_record_of_every_file_may_be_shorter(tmp_path):
    parts = [random_documents(seed, count=20, longest=40) for seed in range(3)]
    whole = [write_data_set(tmp_path / str(i), {"train": part}) for i, part in enumerate(parts)]
    folder = tmp_path / "d" / "train"
    folder.mkdir(parents=True)
    files: list[RecordFile] = []
    for number, manifest in enumerate(whole):
        for file in manifest.splits["train"].files:
            name = f"tokens-{len(files):05d}.array_record"
            (tmp_path / str(number) / "train" / file.name).rename(folder / name)
            files.append(file.model_copy(update={"name": name}))
    documents = [document for part in parts for document in part]
    ends = np.cumsum([0, *map(len, documents)])
    np.save(folder / OFFSETS_NAME, ends)
    entry = (
        whole[0]
        .splits["train"]
        .model_copy(
            update={"files": tuple(files), "num_tokens": int(ends[-1]), "num_documents": 60}
        )
    )
    manifest = whole[0].model_copy(update={"splits": {"train": entry}})
    assert len({(file.num_tokens or 0) % 64 for file in files}) > 2
    stream = TokenStream(str(tmp_path / "d"), manifest, "train")
    tokens = np.concatenate(documents)
    np.testing.assert_array_equal(stream[:], tokens)
    places = places_in(tokens.size)
    for (start, stop), piece in zip(places, stream.ranges(places), strict=True):
        np.testing.assert_array_equal(piece, tokens[start:stop])


@pytest.mark.parametrize("file_format", ["array_record", "bin"])
def test_threads_and_pickled_copies_read_the_same(tmp_path, file_format):
    manifest = write_data_set(
        tmp_path / "d", {"train": random_documents(2, 100, 60)}, file_format=file_format
    )
    stream = TokenStream(str(tmp_path / "d"), manifest, "train")
    whole = stream[:]
    copy = pickle.loads(pickle.dumps(stream))
    assert hasattr(copy, "gather") == (file_format == "bin")
    places = [(i, i + 100) for i in range(0, len(stream) - 100, 7)]
    with ThreadPoolExecutor(8) as threads:
        for (start, stop), piece in zip(
            places, threads.map(lambda place: copy[place[0] : place[1]], places), strict=True
        ):
            np.testing.assert_array_equal(piece, whole[start:stop])
    if file_format == "bin":
        starts = np.array([start for start, _ in places])
        expected = np.stack([whole[start:stop] for start, stop in places])
        for reader in (stream, copy):
            np.testing.assert_array_equal(reader.gather(starts, 100), expected)


@pytest.mark.parametrize("file_format", ["array_record", "bin"])
def test_truncated_and_missing_files_are_named(tmp_path, file_format):
    manifest = write_data_set(
        tmp_path / "d", {"train": random_documents(3, 100, 60)}, file_format=file_format
    )
    record = tmp_path / "d" / "train" / manifest.splits["train"].files[1].name
    content = record.read_bytes()
    record.write_bytes(content[:-1])
    with pytest.raises(UserError, match=rf"{record.name} has {len(content) - 1} bytes"):
        TokenStream(str(tmp_path / "d"), manifest, "train")
    record.unlink()
    with pytest.raises(UserError, match=f"{record.name} is missing"):
        TokenStream(str(tmp_path / "d"), manifest, "train")


def test_flipped_bit_is_an_error_not_other_text(tmp_path):
    manifest = write_data_set(tmp_path / "d", {"train": random_documents(4, 100, 60)})
    record = tmp_path / "d" / "train" / manifest.splits["train"].files[0].name
    content = bytearray(record.read_bytes())
    content[200] ^= 4  # in the first record, behind the headers
    record.write_bytes(content)
    stream = TokenStream(str(tmp_path / "d"), manifest, "train")
    with pytest.raises(BadRecord, match=f"{record.name} at record 0: the record is damaged"):
        stream[:]
    assert stream[64:].size == len(stream) - 64


def test_a_file_that_is_cut_short_later_is_a_bad_record(tmp_path):
    manifest = write_data_set(tmp_path / "d", {"train": random_documents(4, 100, 60)})
    stream = TokenStream(str(tmp_path / "d"), manifest, "train")
    record = tmp_path / "d" / "train" / manifest.splits["train"].files[0].name
    os.truncate(record, 100)
    with pytest.raises(BadRecord, match=f"{record.name} at byte 0: no ArrayRecord file"):
        stream[:10]
    record.unlink()
    with pytest.raises(UserError, match=f"{record.name} cannot be read"):
        stream[:10]


def test_offsets_of_another_data_set_are_refused(tmp_path):
    manifest = write_data_set(tmp_path / "a", {"train": random_documents(5, 10, 60)})
    write_data_set(tmp_path / "b", {"train": random_documents(6, 11, 60)})
    offsets = tmp_path / "b" / "train" / "document_offsets.npy"
    offsets.replace(tmp_path / "a" / "train" / "document_offsets.npy")
    stream = TokenStream(str(tmp_path / "a"), manifest, "train")
    with pytest.raises(UserError, match="11 documents"):
        _ = stream.document_offsets
    (tmp_path / "a" / "train" / "document_offsets.npy").write_bytes(b"")
    with pytest.raises(UserError, match=r"document_offsets\.npy is damaged"):
        _ = stream.document_offsets


def test_documents_are_named_by_file_and_row(tmp_path):
    manifest = write_data_set(tmp_path / "d", {"train": random_documents(5, 5, 60)})
    folder = tmp_path / "d" / "train"
    np.save(folder / ROWS_NAME, np.array([0, 2, 3, 0, 7], np.int32))
    (folder / SOURCE_FILES_NAME).write_text(json.dumps([[0, "a.jsonl"], [3, "b.jsonl"]]))
    stream = pickle.loads(pickle.dumps(TokenStream(str(tmp_path / "d"), manifest, "train")))
    names = [stream.document_name(document) for document in range(5)]
    assert names == [
        "a.jsonl, row 0", "a.jsonl, row 2", "a.jsonl, row 3", "b.jsonl, row 0", "b.jsonl, row 7",
    ]  # fmt: skip
    assert stream.file_of_document.tolist() == [0, 3, 5]


@pytest.mark.parametrize(
    ("rows", "files"),
    [([0, 1], '[[0, "a"]]'), ([0] * 5, "{"), ([0] * 5, '[[1, "a"]]'), ([0] * 5, "[0]")],
)
def test_damaged_names_of_documents_are_refused(tmp_path, rows, files):
    manifest = write_data_set(tmp_path / "d", {"train": random_documents(5, 5, 60)})
    np.save(tmp_path / "d" / "train" / ROWS_NAME, np.array(rows, np.int32))
    (tmp_path / "d" / "train" / SOURCE_FILES_NAME).write_text(files)
    stream = TokenStream(str(tmp_path / "d"), manifest, "train")
    with pytest.raises(UserError, match=r"source_files\.json or document_rows\.npy is damaged"):
        stream.document_name(0)


@pytest.mark.parametrize("name", ["document_offsets.npy", "document_rows.npy"])
def test_what_lies_beside_the_tokens_and_may_not_be_read_is_named(tmp_path, monkeypatch, name):
    manifest = write_data_set(tmp_path, {"train": random_documents(4, 10, 60)})
    stream = TokenStream(str(tmp_path), manifest, "train")
    load = np.load

    def denied(path, *arguments, **keys):
        if Path(path).name == name:
            raise PermissionError(13, "Permission denied", str(path))
        return load(path, *arguments, **keys)

    monkeypatch.setattr(np, "load", denied)  # chmod does not stop root
    with pytest.raises(UserError, match=rf"{name} cannot be read \(Permission denied\)"):
        _ = stream.document_offsets[0], stream.document_name(0)
