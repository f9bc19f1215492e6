"""TFRecord files: the bytes of TensorFlow, and every kind of damage."""

import gzip
import io

import pytest

from MaxText.input_pipeline.formats import tfrecord
from MaxText.input_pipeline.streams.bad_record import BadRecord

RECORDS = [b"", b"a", b"\x00" * 5, bytes(range(256))]
# What tensorflow 2.21.0 writes for the first three of them.
WRITTEN_BY_TENSORFLOW = bytes.fromhex(
    "000000000000000029039807d8ea82a201000000000000000175de4161786ee428"
    "0500000000000000eab2043e0000000000bc75ed8e"
)


@pytest.fixture
def written(tmp_path):
    path = tmp_path / "some.tfrecord"
    with tfrecord.TFRecordWriter(path) as writer:
        for record in RECORDS:
            writer.write(record)
    return path


def test_the_bytes_are_those_of_tensorflow(written):
    assert written.read_bytes()[: len(WRITTEN_BY_TENSORFLOW)] == WRITTEN_BY_TENSORFLOW
    assert tfrecord.masked_crc32c(b"a") == 0x28E46E78


def test_what_was_written_is_read(written, tmp_path):
    assert list(tfrecord.read_records(written)) == RECORDS
    compressed = tmp_path / "some.tfrecord.gz"
    compressed.write_bytes(gzip.compress(written.read_bytes()))
    assert list(tfrecord.read_records(compressed)) == RECORDS
    assert list(tfrecord.read_records("a name", io.BytesIO(written.read_bytes()))) == RECORDS


def test_a_scan_finds_every_payload(written):
    content = written.read_bytes()
    places = tfrecord.payloads(memoryview(content), str(written))
    for (offset, length), record in zip(places, RECORDS, strict=True):
        stored = content[offset : offset + length + tfrecord.FOOTER_BYTES]
        assert tfrecord.check(stored, "x", offset) == record


def test_an_empty_file_has_no_records(tmp_path):
    path = tmp_path / "empty.tfrecord"
    tfrecord.TFRecordWriter(path).close()
    assert path.read_bytes() == b""
    assert list(tfrecord.read_records(path)) == []
    assert list(tfrecord.payloads(b"", "x")) == []


@pytest.mark.parametrize("left", range(1, 21 + 16 + 5))
def test_a_file_cut_anywhere_inside_a_record_is_found(tmp_path, left):
    whole = tfrecord.frame(b"hello") + tfrecord.frame(b"last")
    path = tmp_path / "cut.tfrecord"
    path.write_bytes(whole[:left])
    if left == 21:  # exactly the first record: nothing says that there was another
        assert list(tfrecord.read_records(path)) == [b"hello"]
        return
    if left == len(whole):
        assert list(tfrecord.read_records(path)) == [b"hello", b"last"]
        return
    offset = 0 if left < 21 else 21
    for read in (
        lambda: list(tfrecord.read_records(path)),
        lambda: list(tfrecord.payloads(whole[:left], str(path))),
    ):
        with pytest.raises(BadRecord, match="the file ends") as caught:
            read()
        assert (caught.value.path, caught.value.offset) == (str(path), offset)


@pytest.mark.parametrize("place", range(21))
def test_a_flipped_bit_is_found_wherever_it_is(tmp_path, place):
    content = bytearray(tfrecord.frame(b"hello") + tfrecord.frame(b"more"))
    content[place] ^= 0x10
    path = tmp_path / "flipped.tfrecord"
    path.write_bytes(content)
    what = "CRC of the record's length" if place < 12 else "CRC of the record is wrong"
    with pytest.raises(BadRecord, match=what) as caught:
        list(tfrecord.read_records(path))
    assert caught.value.offset == 0


def test_a_wrong_length_never_allocates_what_it_claims(tmp_path):
    # A header with a right CRC that claims 4 EiB.
    path = tmp_path / "huge.tfrecord"
    path.write_bytes(tfrecord.frame(b"")[:0] + _header(2**62) + b"abc")
    with pytest.raises(BadRecord, match="the file ends after 3 of them"):
        list(tfrecord.read_records(path))


def _header(length: int) -> bytes:
    content = length.to_bytes(8, "little")
    return content + tfrecord.masked_crc32c(content).to_bytes(4, "little")


def test_a_damaged_gzip_stream_is_a_bad_record(written, tmp_path):
    compressed = gzip.compress(written.read_bytes())
    for name, content in {
        "cut": compressed[: len(compressed) // 2],
        "other": b"plain" * 10,
        "flipped": compressed[:12] + bytes([compressed[12] ^ 0xFF]) + compressed[13:],
    }.items():
        path = tmp_path / f"{name}.tfrecord.gz"
        path.write_bytes(content)
        with pytest.raises(BadRecord, match="the compressed file is"):
            list(tfrecord.read_records(path))


def test_one_record_read_at_a_random_place_is_checked():
    stored = tfrecord.frame(b"hello")[tfrecord.HEADER_BYTES :]
    assert tfrecord.check(stored, "x", 12) == b"hello"
    with pytest.raises(BadRecord, match="x at byte 12: the CRC of the record is wrong"):
        tfrecord.check(b"jello" + stored[5:], "x", 12)
    with pytest.raises(BadRecord, match="x at byte 12: the record is cut short"):
        tfrecord.check(b"abc", "x", 12)


def test_tensorflow_reads_ours_and_we_read_tensorflows(written, tmp_path):
    tensorflow = pytest.importorskip(
        "tensorflow", reason="compares with TensorFlow itself: pip install 'MaxText[tensorflow]'"
    )
    theirs = [record.numpy() for record in tensorflow.data.TFRecordDataset(str(written))]
    assert theirs == RECORDS
    other = tmp_path / "theirs.tfrecord"
    with tensorflow.io.TFRecordWriter(str(other)) as writer:
        for record in RECORDS:
            writer.write(record)
    assert other.read_bytes() == written.read_bytes()
    options = tensorflow.io.TFRecordOptions(compression_type="GZIP")
    compressed = tmp_path / "theirs.tfrecord.gz"
    with tensorflow.io.TFRecordWriter(str(compressed), options) as writer:
        for record in RECORDS:
            writer.write(record)
    assert list(tfrecord.read_records(compressed)) == RECORDS
