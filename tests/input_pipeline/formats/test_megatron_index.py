"""Megatron's index files: their bytes, and what is refused."""

import struct

import numpy as np
import pytest

from MaxText.errors import UserError
from MaxText.input_pipeline.formats.megatron_index import read_index, write_index


@pytest.mark.parametrize("code", [1, 2, 3, 4, 5, 8])
def test_the_bytes_of_an_index(tmp_path, code):
    dtype = {1: "u1", 2: "i1", 3: "i2", 4: "i4", 5: "i8", 8: "u2"}[code]
    path = tmp_path / "x.idx"
    write_index(path, np.dtype(dtype), [3, 0, 5], [0, 2, 3])
    width = np.dtype(dtype).itemsize
    expected = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, code, 3, 3)
    expected += struct.pack("<3i3q3q", 3, 0, 5, 0, 3 * width, 3 * width, 0, 2, 3)
    assert path.read_bytes() == expected
    index = read_index(str(path))
    assert index.dtype == np.dtype(dtype).newbyteorder("<")
    assert index.offsets.tolist() == [0, 3, 3, 8]
    assert index.documents.tolist() == [0, 2, 3]
    assert index.document_offsets.tolist() == [0, 3, 8]


@pytest.mark.parametrize("documents", [[0], [], [0, 1, 2, 3]])
def test_sequences_are_documents_where_nothing_joins_them(tmp_path, documents):
    write_index(tmp_path / "x.idx", np.dtype("u2"), [3, 1, 5], documents)
    assert read_index(str(tmp_path / "x.idx")).document_offsets.tolist() == [0, 3, 4, 9]


def test_an_empty_index(tmp_path):
    write_index(tmp_path / "x.idx", np.dtype("u2"), [], [0])
    assert read_index(str(tmp_path / "x.idx")).document_offsets.tolist() == [0]


def changed(place: int, value: bytes):
    return lambda content: content[:place] + value + content[place + len(value) :]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: b"", "does not begin as an index"),
        (changed(0, b"TNTIDX\0\0\0"), "does not begin as an index"),
        (changed(9, b"\2"), "has version 2; version 1 is known"),
        (changed(17, b"\6"), "type code 6 is none of integers"),
        (changed(17, b"\x20"), "type code 32 is none of integers"),
        (lambda content: content[:-1], "has 93 bytes, where its header asks for 94"),
        (changed(18, b"\4"), "asks for"),
        (changed(34, b"\xff\xff\xff\xff"), "a sequence of -1 tokens"),
        (changed(54, b"\x09"), "sequence 1 lies at byte 9, where the ones before it end at 6"),
        (changed(78, b"\x05"), "document entries are out of order"),
    ],
)
def test_damage_is_refused(tmp_path, change, message):
    path = tmp_path / "x.idx"
    write_index(path, np.dtype("u2"), [3, 0, 5], [0, 2, 3])
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(UserError, match=message):
        read_index(str(path))


def test_a_missing_index(tmp_path):
    with pytest.raises(UserError, match=r"none\.idx cannot be read"):
        read_index(str(tmp_path / "none.idx"))
