"""TFRecord files: the bytes of TensorFlow, and every kind of damage."""

import contextlib
import io

import pytest

from MaxText.storage import tfrecord
from MaxText.storage.errors import BadRecordError

RECORDS = [b"", b"a", b"\x00" * 5, bytes(range(256))]
# What tensorflow 2.21.0 writes for the first three of them.
WRITTEN_BY_TENSORFLOW = bytes.fromhex(
    "000000000000000029039807d8ea82a201000000000000000175de4161786ee428"
    "0500000000000000eab2043e0000000000bc75ed8e"
)


def scan(content: bytes) -> list[tuple[int, bytes | BadRecordError]]:
    return list(tfrecord.scan_records(io.BytesIO(content), "x"))


def test_written_and_read(tmp_path):
    with contextlib.closing(tfrecord.TFRecordWriter(tmp_path / "some.tfrecord")) as writer:
        for record in RECORDS:
            writer.write(record)
    content = (tmp_path / "some.tfrecord").read_bytes()
    assert content[: len(WRITTEN_BY_TENSORFLOW)] == WRITTEN_BY_TENSORFLOW
    assert scan(content) == [*zip((0, 16, 33, 54), RECORDS, strict=True)]
    assert scan(b"") == []


def test_truncated_file():
    content = tfrecord.frame(b"hello") + tfrecord.frame(b"last")
    for num_bytes in range(1, len(content)):
        if num_bytes == 21:  # exactly the first record: nothing says that there was another
            assert scan(content[:num_bytes]) == [(0, b"hello")]
            continue
        with pytest.raises(BadRecordError) as caught:
            scan(content[:num_bytes])
        assert (caught.value.path, caught.value.offset) == ("x", 0 if num_bytes < 21 else 21)


def test_flipped_bits():
    original = tfrecord.frame(b"hello") + tfrecord.frame(b"more")
    for at in range(21):
        content = bytearray(original)
        content[at] ^= 0x10
        if at < tfrecord.HEADER_BYTES:
            with pytest.raises(BadRecordError, match="x at byte 0: the CRC of the record's length"):
                scan(bytes(content))
            continue
        (offset, problem), following = scan(bytes(content))
        assert "the CRC of the record is wrong" in str(problem)
        assert (offset, following) == (0, (21, b"more"))
