"""TFRecord files: records one after the other, each with a checksum of its length and its bytes.

    length of the payload   8 bytes, little-endian
    masked CRC of these     4 bytes
    payload
    masked CRC of it        4 bytes

A CRC is CRC-32C, masked as TensorFlow does so that a CRC of data that holds CRCs stays useful.
"""

import contextlib
import gzip
import os
import struct
import zlib
from collections.abc import Iterator
from types import TracebackType
from typing import Protocol

import google_crc32c

from MaxText.input_pipeline.data_errors import BadRecord

HEADER_BYTES = 12
FOOTER_BYTES = 4
_LENGTH_CRC = struct.Struct("<QI")
_CRC = struct.Struct("<I")
_MASK_DELTA = 0xA282EAD8

# A length that a broken header claims is not believed by allocating it: read this much at a time.
_PIECE_BYTES = 1 << 24
# Of a file that is read from front to back, where the length cannot be compared with what is left
# of it: a few kilobytes of gzip hold gigabytes.
_LONGEST_RECORD = 1 << 28


def masked_crc32c(data: bytes) -> int:
    """The masked CRC-32C of `data`, below 2^32."""
    crc = google_crc32c.value(data)
    return (((crc >> 15) | (crc << 17)) + _MASK_DELTA) & 0xFFFFFFFF


def frame(record: bytes) -> bytes:
    """The bytes of one record in a file: header, payload, footer."""
    length = struct.pack("<Q", len(record))
    return b"".join(
        (length, _CRC.pack(masked_crc32c(length)), record, _CRC.pack(masked_crc32c(record)))
    )


class TFRecordWriter:
    """Writes an uncompressed TFRecord file, replacing what was there."""

    def __init__(self, path: str | os.PathLike[str]):
        """Creates the file."""
        self._file = open(path, "wb")  # noqa: SIM115 - closed by close()

    def write(self, record: bytes) -> None:
        """Appends one record."""
        self._file.write(frame(record))

    def close(self) -> None:
        """Writes what is buffered to disk and closes the file; may be called again."""
        if not self._file.closed:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()

    def __enter__(self) -> "TFRecordWriter":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def parse_header(header: bytes, path: str, offset: int) -> int:
    """The payload's length out of a record's first 12 bytes.

    Args:
      header: 12 bytes.
      path: file that errors name.
      offset: of the record in it.

    Raises:
      BadRecord: the CRC of the length is wrong.
    """
    length, crc = _LENGTH_CRC.unpack(header)
    if masked_crc32c(header[:8]) != crc:
        raise BadRecord(
            path, offset, "the CRC of the record's length is wrong: not a TFRecord, or damaged"
        )
    return length


def check(payload_and_crc: bytes, path: str, offset: int) -> bytes:
    """The payload of one record that was read with its footer.

    Args:
      payload_and_crc: the payload and the 4 bytes after it.
      path: file that errors name.
      offset: of the payload in it.

    Raises:
      BadRecord: too short for a footer, or the CRC is wrong.
    """
    if len(payload_and_crc) < FOOTER_BYTES:
        raise BadRecord(path, offset, "the record is cut short")
    payload = payload_and_crc[:-FOOTER_BYTES]
    (crc,) = _CRC.unpack(payload_and_crc[-FOOTER_BYTES:])
    if masked_crc32c(payload) != crc:
        raise BadRecord(path, offset, "the CRC of the record is wrong: its bytes are damaged")
    return payload


class Sliceable(Protocol):
    """The contents of a file: bytes, a memory view, a map, or storage.Blocks."""

    def __len__(self) -> int: ...
    def __getitem__(self, place: slice, /) -> bytes | memoryview: ...


def payloads(data: Sliceable, path: str) -> Iterator[tuple[int, int]]:
    """Finds the records of a file by their headers, one after the other.

    Args:
      data: the whole file.
      path: file that errors name.

    Yields:
      Offset of a payload in the file, and its length in bytes.

    Raises:
      BadRecord: a length's CRC is wrong, or the last record is incomplete.
    """
    at, size = 0, len(data)
    while at < size:
        if size - at < HEADER_BYTES:
            raise BadRecord(path, at, f"the file ends inside a record's header ({size} bytes)")
        length = parse_header(bytes(data[at : at + HEADER_BYTES]), path, at)
        start = at + HEADER_BYTES
        if length > size - start - FOOTER_BYTES:
            raise BadRecord(path, at, _truncated_reason(length, size - start))
        yield start, length
        at = start + length + FOOTER_BYTES


class Readable(Protocol):
    """A file open for reading, decompressed."""

    def read(self, size: int, /) -> bytes: ...


def scan_records(file: Readable, path: str) -> Iterator[tuple[int, bytes | BadRecord]]:
    """Reads a file from front to back, checking every CRC.

    Args:
      file: its contents.
      path: file that errors name.

    Yields:
      Offset of a record in the contents, and its payload, or what is wrong with that.

    Raises:
      BadRecord: no further record can be found: the CRC of a length is wrong, or the file ends
        inside a record or its gzip data.
    """
    at = 0
    while header := _read(file, HEADER_BYTES, path, at):
        if len(header) < HEADER_BYTES:
            raise BadRecord(path, at, "the file ends inside a record's header")
        length = parse_header(header, path, at)
        wanted = min(length, _LONGEST_RECORD) + FOOTER_BYTES
        body = _read(file, wanted, path, at)
        if len(body) < wanted:
            raise BadRecord(path, at, _truncated_reason(length, len(body)))
        if length > _LONGEST_RECORD:
            reason = f"the record has {length:,} bytes; up to {_LONGEST_RECORD:,} are read"
            raise BadRecord(path, at, reason)
        record: bytes | BadRecord
        try:
            record = check(body, path, at)
        except BadRecord as problem:
            record = problem
        yield at, record
        at += HEADER_BYTES + length + FOOTER_BYTES


def read_records(path: str | os.PathLike[str], file: Readable | None = None) -> Iterator[bytes]:
    """Reads the payloads of a file in order.

    Args:
      path: of the file; read as gzip where the name ends in .gz.
      file: the same, already open and decompressed.

    Raises:
      BadRecord: as scan_records, or the CRC of a payload is wrong.
      OSError: the file cannot be opened.
    """
    name = os.fspath(path)
    with contextlib.ExitStack() as stack:
        if file is None:
            file = stack.enter_context((gzip.open if name.endswith(".gz") else open)(name, "rb"))
        for _, record in scan_records(file, name):
            if isinstance(record, BadRecord):
                raise record
            yield record


def _truncated_reason(length: int, left: int) -> str:
    return (
        f"the record has {length} bytes and a CRC of {FOOTER_BYTES}, and the file ends after "
        f"{left} of them: it was cut short"
    )


def _read(file: Readable, size: int, path: str, offset: int) -> bytes:
    """Up to `size` bytes, fewer at the end of the file only."""
    pieces = []
    try:
        while size > 0 and (piece := file.read(min(size, _PIECE_BYTES))):
            pieces.append(piece)
            size -= len(piece)
    except EOFError as error:
        raise BadRecord(path, offset, "the compressed file is cut short") from error
    except (gzip.BadGzipFile, zlib.error) as error:
        raise BadRecord(path, offset, f"the compressed file is damaged ({error})") from error
    return b"".join(pieces)
