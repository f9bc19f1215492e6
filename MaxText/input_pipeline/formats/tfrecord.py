"""TFRecord files: records with checksums of their lengths and bytes.

    length of the payload   8 bytes, little-endian
    masked CRC of length    4 bytes
    payload
    masked CRC of payload   4 bytes

A CRC is CRC-32C, masked as TensorFlow does.
"""

import os
import struct
from collections.abc import Iterator
from typing import Protocol

import google_crc32c

from MaxText.storage.errors import BadRecordError

HEADER_BYTES = 12
FOOTER_BYTES = 4
_LENGTH_CRC = struct.Struct("<QI")
_CRC = struct.Struct("<I")
_MASK_DELTA = 0xA282EAD8

_CHUNK_BYTES = 1 << 24  # read in chunks, so that a corrupt length does not allocate memory
_LONGEST_RECORD = 1 << 28  # a fixed limit, because the size of compressed contents is unknown


def masked_crc32c(data: bytes) -> int:
    crc = google_crc32c.value(data)
    return (((crc >> 15) | (crc << 17)) + _MASK_DELTA) & 0xFFFFFFFF


def frame(record: bytes) -> bytes:
    """Returns the bytes of one record in a file."""
    length = struct.pack("<Q", len(record))
    return b"".join(
        (length, _CRC.pack(masked_crc32c(length)), record, _CRC.pack(masked_crc32c(record)))
    )


class TFRecordWriter:
    """Writes an uncompressed TFRecord file, replacing an existing one."""

    def __init__(self, path: str | os.PathLike[str]):
        self._file = open(path, "wb")  # noqa: SIM115 - closed by close()

    def write(self, record: bytes) -> None:
        self._file.write(frame(record))

    def close(self) -> None:
        """Syncs the file to disk and closes it; idempotent."""
        if not self._file.closed:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()


class Readable(Protocol):
    """A decompressed file open for reading."""

    def read(self, size: int, /) -> bytes: ...


def scan_records(file: Readable, path: str) -> Iterator[tuple[int, bytes | BadRecordError]]:
    """Yields (offset, payload or error), checking every CRC.

    Raises BadRecordError if no further record can be found: the CRC of a length is wrong, or the
    file is truncated.
    """
    at = 0
    while header := _read(file, HEADER_BYTES):
        if len(header) < HEADER_BYTES:
            raise BadRecordError(path, at, "the file ends inside a record's header")
        length, crc = _LENGTH_CRC.unpack(header)
        if masked_crc32c(header[:8]) != crc:
            reason = "the CRC of the record's length is wrong: not a TFRecord, or damaged"
            raise BadRecordError(path, at, reason)
        wanted = min(length, _LONGEST_RECORD) + FOOTER_BYTES
        body = _read(file, wanted)
        if len(body) < wanted:
            raise BadRecordError(
                path,
                at,
                f"the record has {length} bytes and a CRC of {FOOTER_BYTES}, and the file ends "
                f"after {len(body)} of them: it is truncated",
            )
        if length > _LONGEST_RECORD:
            reason = f"the record has {length:,} bytes; up to {_LONGEST_RECORD:,} are read"
            raise BadRecordError(path, at, reason)
        record = body[:-FOOTER_BYTES]
        if (masked_crc32c(record),) == _CRC.unpack(body[-FOOTER_BYTES:]):
            yield at, record
        else:
            reason = "the CRC of the record is wrong: its bytes are damaged"
            yield at, BadRecordError(path, at, reason)
        at += HEADER_BYTES + length + FOOTER_BYTES


def _read(file: Readable, size: int) -> bytes:
    chunks = []
    while size > 0 and (chunk := file.read(min(size, _CHUNK_BYTES))):
        chunks.append(chunk)
        size -= len(chunk)
    return b"".join(chunks)
