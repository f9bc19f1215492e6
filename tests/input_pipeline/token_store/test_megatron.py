"""Megatron data sets, and the sample order of GPT-NeoX against its definition."""

import struct
from pathlib import Path

import numpy as np
import pytest

from MaxText.input_pipeline.sequences.gpt_neox_order import GptNeoxSequences, document_range
from MaxText.input_pipeline.sequences.slicing import SequenceOptions
from MaxText.input_pipeline.token_store.megatron import read_header, read_offsets
from MaxText.storage.file_access import file_info
from tests.input_pipeline.sequences.test_slicing import as_data
from tests.input_pipeline.token_store import token_files
from tests.input_pipeline.token_store.token_files import (
    documents,
    open_data,
    tokens_of,
    write_index,
)
from tests.refusals import refused


def defined_samples(documents, length, seed, num_samples):
    """The samples as GPT-NeoX defines them: shuffle documents of all epochs, join, cut, shuffle."""
    tokens = sum(map(len, documents))
    epochs = 1
    while num_samples is not None and (epochs * tokens - 1) // length < num_samples:
        epochs += 1
    random = np.random.RandomState(seed)
    order = np.array([*range(len(documents))] * epochs, np.int32)
    random.shuffle(order)
    flat = [token for document in order for token in documents[document]]
    samples = [flat[start : start + length + 1] for start in range(0, len(flat) - length, length)]
    visited = np.arange(len(samples), dtype=np.uint32)
    random.shuffle(visited)
    return [samples[sample] for sample in visited]


def in_order(offsets, length, seed, num_samples=None, part=None):
    data = as_data(np.split(np.arange(offsets[-1]), offsets[1:-1]))
    return GptNeoxSequences(
        data,
        SequenceOptions(length),
        seed,
        Path("unused"),
        num_sequences=num_samples,
        documents=part,
    )


@pytest.mark.parametrize("seed", [0, 1234])
@pytest.mark.parametrize("num_samples", [None, 1, 200])
@pytest.mark.parametrize(("length", "part"), [(1, None), (7, (10, 40)), (64, None)])
def test_samples_are_those_of_the_definition(seed, num_samples, length, part):
    sizes = np.random.default_rng(seed).integers(0, 30, 50)  # some without tokens
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    tokens = np.arange(offsets[-1])
    documents = [tokens[offsets[i] : offsets[i + 1]].tolist() for i in range(50)]
    first, end = part or (0, 50)
    order = in_order(offsets, length, seed, num_samples, part)
    expected = defined_samples(documents[first:end], length, seed, num_samples)
    assert len(order) == len(expected)
    for sample, ids in enumerate(expected):
        ranges = order.token_ranges(np.array([sample]), np.zeros(1, np.uint64))
        pieces = [*zip(ranges.start_P, ranges.stop_P, strict=True)]
        assert all(start < stop for start, stop in pieces)
        assert [int(t) for start, stop in pieces for t in tokens[start:stop]] == ids


@pytest.mark.parametrize(
    ("split", "total", "expected"),
    [
        ("969,30,1", 1000, [(0, 969), (969, 999), (999, 1000)]),
        ("969,30,1", 7, [(0, 7), (7, 7), (7, 7)]),
        ("1", 5, [(0, 5), (5, 5), (5, 5)]),
        ("90/5/5", 200, [(0, 180), (180, 190), (190, 200)]),
        ("1,1,1", 10, [(0, 4), (4, 7), (7, 10)]),
        # Rounding to even makes 2 + 2 + 0 of 5: the ends move by one.
        ("1,1", 5, [(0, 3), (3, 5), (5, 5)]),
    ],
)
def test_division_of_the_documents(split, total, expected):
    assert [document_range(split, part, total) for part in range(3)] == expected


def test_mistakes():
    for split in ("", "a,b", "0,0,0", "-1,2,3"):
        refused(f"^'{split}' ", document_range, split, 0, 10)
    for offsets in ([0, 0], [0, 1], [0, 4]):
        refused(f"{offsets[-1]} .* 5", in_order, np.array(offsets), 4, 0)


@pytest.mark.parametrize("name", ["corpus", "corpus.bin", "corpus.idx", ""])
def test_a_data_set_by_any_of_its_names(tmp_path, name):
    ids = documents(0, [3, 14, 15])
    (tmp_path / "d").mkdir()
    token_files.write_megatron(tmp_path / "d" / "corpus", ids)
    data = open_data(tmp_path / "d" / name, tmp_path)
    assert tokens_of(data) == np.concatenate(ids).tolist()
    assert data.store.document_offsets.tolist() == [0, 3, 17, 32]
    assert data.record_length is None
    other = open_data(tmp_path / "d" / name, tmp_path, **{"megatron.order": "gpt_neox"})
    assert other.fingerprint == data.fingerprint


def test_rows_of_a_shuffled_data_set_in_parts(tmp_path):
    # As Pythia's were published: one index, data in parts that do not end with a row.
    ids = documents(0, [9, 9, 9, 9])
    token_files.write_megatron(tmp_path / "document", ids)
    content = (tmp_path / "document.bin").read_bytes()
    (tmp_path / "document.bin").unlink()
    for number in range(3):
        part = content[number * 28 : (number + 1) * 28]
        (tmp_path / f"document-{number:05d}-of-00002.bin").write_bytes(part)
    for location in (tmp_path, tmp_path / "document.idx", f"{tmp_path}/document-*.bin"):
        data = open_data(location, tmp_path)
        assert tokens_of(data) == np.concatenate(ids).tolist()
        assert data.record_length == 9


def test_an_incomplete_data_set_is_refused(tmp_path):
    token_files.write_megatron(tmp_path / "a", documents(0, [9]))
    (tmp_path / "a.bin").write_bytes(b"12")
    refused(r"a\.bin .*2 bytes.* 9 tokens .*18", open_data, tmp_path, tmp_path)
    (tmp_path / "a.bin").unlink()
    refused(r"a\.idx", open_data, tmp_path, tmp_path)
    (tmp_path / "b.bin").write_bytes(b"12")
    refused(r"b\.idx", open_data, tmp_path / "b.bin", tmp_path)
    token_files.write_megatron(tmp_path / "c", documents(0, [9]))
    refused("2 Megatron", open_data, tmp_path, tmp_path)


def offsets_of(path):
    blocks = list(read_offsets(path, file_info(str(path))))
    return np.concatenate([block["document_offsets"] for block in blocks]).tolist()


CODES = {1: "u1", 3: "i2", 4: "i4", 5: "i8", 8: "u2"}


@pytest.mark.parametrize(("code", "dtype"), CODES.items())
def test_bytes_of_an_index(tmp_path, code, dtype):
    path = tmp_path / "x.idx"
    write_index(path, np.dtype(dtype), [3, 0, 5], [0, 2, 3])
    width = np.dtype(dtype).itemsize
    expected = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, code, 3, 3)
    expected += struct.pack("<3i3q3q", 3, 0, 5, 0, 3 * width, 3 * width, 0, 2, 3)
    assert path.read_bytes() == expected
    info = file_info(str(path))
    assert read_header(path, info) == (np.dtype(dtype).newbyteorder("<"), 3, 3)
    assert offsets_of(path) == [0, 3, 8]
    for left in range(len(expected)):
        path.write_bytes(expected[:left])
        refused(r"x\.idx", offsets_of, path)


@pytest.mark.parametrize(
    ("sizes", "documents"), [([3, 1, 5], [0]), ([3, 1], []), ([3, 1, 5], [0, 1, 2, 3]), ([], [0])]
)
def test_sequences_are_documents_where_nothing_joins_them(tmp_path, sizes, documents):
    write_index(tmp_path / "x.idx", np.dtype("u2"), sizes, documents)
    assert offsets_of(tmp_path / "x.idx") == np.cumsum([0, *sizes]).tolist()


@pytest.mark.parametrize(
    ("at", "value", "message"),
    [
        (0, b"TNTIDX\0\0\0", "not an index"),
        (9, b"\2", "version 2"),
        (17, b"\6", "code 6"),
        (17, b"\x20", "code 32"),
        (18, b"\4", "94"),
        (34, b"\xff\xff\xff\xff", "-1"),
        (54, b"\x09", "sequence 1 .*byte 9.* 6"),
        (78, b"\x05", "order"),
    ],
)
def test_damaged_index(tmp_path, at, value, message):
    path = tmp_path / "x.idx"
    write_index(path, np.dtype("u2"), [3, 0, 5], [0, 2, 3])
    content = path.read_bytes()
    path.write_bytes(content[:at] + value + content[at + len(value) :])
    refused(rf"x\.idx.*{message}", offsets_of, path)
