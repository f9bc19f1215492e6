"""Megatron's index files, byte by byte."""

import struct

import numpy as np
import pytest

from MaxText.input_pipeline.formats.megatron_index import read_index, write_index
from tests.refusals import refused

CODES = {1: "u1", 2: "i1", 3: "i2", 4: "i4", 5: "i8", 8: "u2"}


@pytest.mark.parametrize(("code", "dtype"), CODES.items())
def test_bytes_of_an_index(tmp_path, code, dtype):
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


@pytest.mark.parametrize(
    ("sizes", "documents"), [([3, 1, 5], [0]), ([3, 1], []), ([3, 1, 5], [0, 1, 2, 3]), ([], [0])]
)
def test_sequences_are_documents_where_nothing_joins_them(tmp_path, sizes, documents):
    write_index(tmp_path / "x.idx", np.dtype("u2"), sizes, documents)
    index = read_index(str(tmp_path / "x.idx"))
    assert index.document_offsets.tolist() == np.cumsum([0, *sizes]).tolist()


@pytest.mark.parametrize(
    ("at", "value", "message"),
    [
        (0, b"TNTIDX\0\0\0", "begin"), (9, b"\2", "version 2"), (17, b"\6", "code 6"),
        (17, b"\x20", "code 32"), (18, b"\4", "94"), (34, b"\xff\xff\xff\xff", "-1"),
        (54, b"\x09", "sequence 1 .*byte 9.* 6"), (78, b"\x05", "order"),
    ],
)  # fmt: skip
def test_damaged_index(tmp_path, at, value, message):
    path = tmp_path / "x.idx"
    write_index(path, np.dtype("u2"), [3, 0, 5], [0, 2, 3])
    content = path.read_bytes()
    path.write_bytes(content[:at] + value + content[at + len(value) :])
    refused(rf"x\.idx.*{message}", read_index, str(path))


def test_truncated_index(tmp_path):
    path = tmp_path / "x.idx"
    write_index(path, np.dtype("u2"), [3, 0, 5], [0, 2, 3])
    content = path.read_bytes()
    for left in range(len(content)):
        path.write_bytes(content[:left])
        refused(r"x\.idx", read_index, str(path))
