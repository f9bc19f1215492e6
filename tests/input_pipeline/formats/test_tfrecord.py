"""TFRecord files: the bytes of TensorFlow, and every kind of damage."""

import gzip
import io

import pytest

from MaxText.input_pipeline.data_errors import BadRecord
from MaxText.input_pipeline.formats import tfrecord

RECORDS = [b"", b"a", b"\x00" * 5, bytes(range(256))]
# What tensorflow 2.21.0 writes for the first three of them.
WRITTEN_BY_TENSORFLOW = bytes.fromhex(
    "000000000000000029039807d8ea82a201000000000000000175de4161786ee428"
    "0500000000000000eab2043e0000000000bc75ed8e"
)


def test_written_and_read(tmp_path):
    written = tmp_path / "some.tfrecord"
    with tfrecord.TFRecordWriter(written) as writer:
        for record in RECORDS:
            writer.write(record)
    content = written.read_bytes()
    assert content[: len(WRITTEN_BY_TENSORFLOW)] == WRITTEN_BY_TENSORFLOW
    compressed = tmp_path / "some.tfrecord.gz"
    compressed.write_bytes(gzip.compress(content))
    empty = tmp_path / "empty.tfrecord"
    tfrecord.TFRecordWriter(empty).close()
    assert list(tfrecord.read_records(written)) == RECORDS
    assert list(tfrecord.read_records(compressed)) == RECORDS
    assert list(tfrecord.read_records("a name", io.BytesIO(content))) == RECORDS
    assert list(tfrecord.read_records(empty)) == []
    # A scan for places, and single records read at them.
    places = tfrecord.payloads(memoryview(content), str(written))
    for (offset, length), record in zip(places, RECORDS, strict=True):
        stored = content[offset : offset + length + tfrecord.FOOTER_BYTES]
        assert tfrecord.check(stored, "x", offset) == record
    assert list(tfrecord.payloads(b"", "x")) == []


def test_truncated_file(tmp_path):
    whole = tfrecord.frame(b"hello") + tfrecord.frame(b"last")
    path = tmp_path / "cut.tfrecord"
    for left in range(1, len(whole)):
        path.write_bytes(whole[:left])
        if left == 21:  # exactly the first record: nothing says that there was another
            assert list(tfrecord.read_records(path)) == [b"hello"]
            continue
        for read in (
            lambda: list(tfrecord.read_records(path)),
            lambda left=left: list(tfrecord.payloads(whole[:left], str(path))),
        ):
            with pytest.raises(BadRecord) as caught:
                read()
            expected = (str(path), 0 if left < 21 else 21)
            assert (caught.value.path, caught.value.offset) == expected


def test_flipped_bits(tmp_path):
    whole = tfrecord.frame(b"hello") + tfrecord.frame(b"more")
    path = tmp_path / "flipped.tfrecord"
    for at in range(21):
        content = bytearray(whole)
        content[at] ^= 0x10
        path.write_bytes(content)
        with pytest.raises(BadRecord, match="CRC") as caught:
            list(tfrecord.read_records(path))
        assert caught.value.offset == 0
    stored = whole[tfrecord.HEADER_BYTES : 21]
    for damaged in (b"j" + stored[1:], b"abc"):
        with pytest.raises(BadRecord, match="x at byte 12"):
            tfrecord.check(damaged, "x", 12)


def test_a_length_beyond_the_file_allocates_nothing(tmp_path):
    length = (2**62).to_bytes(8, "little")
    header = length + tfrecord.masked_crc32c(length).to_bytes(4, "little")
    (tmp_path / "huge.tfrecord").write_bytes(header + b"abc")
    with pytest.raises(BadRecord, match=r"huge\.tfrecord"):
        list(tfrecord.read_records(tmp_path / "huge.tfrecord"))
