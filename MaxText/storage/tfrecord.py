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
from typing import BinaryIO

import google_crc32c

from MaxText.storage.errors import BadRecordError

HEADER_BYTES = 12
FOOTER_BYTES = 4
_MASK_DELTA = 0xA282EAD8


def masked_crc32c(data: bytes) -> bytes:
    """Returns the CRC as a file stores it: rotated right by 15 bits, plus a constant."""
    crc = google_crc32c.value(data)
    return struct.pack("<I", (((crc >> 15) | (crc << 17)) + _MASK_DELTA) & 0xFFFFFFFF)


def frame(record: bytes) -> bytes:
    """Returns the bytes of one record in a file."""
    length = struct.pack("<Q", len(record))
    return length + masked_crc32c(length) + record + masked_crc32c(record)


def is_header(header: bytes) -> bool:
    """Returns whether these are the length of a record and its CRC."""
    return len(header) == HEADER_BYTES and masked_crc32c(header[:8]) == header[8:]


class TFRecordWriter:
    """Writes an uncompressed TFRecord file, replacing an existing one."""

    def __init__(self, path: str | os.PathLike[str]):
        """Creates the file."""
        self._file = open(path, "wb")  # noqa: SIM115 - closed by close()

    def write(self, record: bytes) -> None:
        """Appends a record."""
        self._file.write(frame(record))

    def close(self) -> None:
        """Writes what is buffered."""
        self._file.close()


def scan_records(file: BinaryIO, path: str) -> Iterator[tuple[int, bytes | BadRecordError]]:
    """Yields (offset, payload or error), checking every CRC.

    Raises BadRecordError if no further record can be found: the CRC of a length is wrong, or the
    file is truncated.
    """
    offset = 0
    while header := file.read(HEADER_BYTES):
        if not is_header(header):
            reason = "the CRC of the record's length is wrong: not a TFRecord, damaged or truncated"
            raise BadRecordError(path, offset, reason)
        length = int.from_bytes(header[:8], "little")
        body = file.read(length + FOOTER_BYTES)
        if len(body) < length + FOOTER_BYTES:
            reason = f"the record has {length} bytes and the file ends before: it is truncated"
            raise BadRecordError(path, offset, reason)
        record = body[:-FOOTER_BYTES]
        if masked_crc32c(record) == body[-FOOTER_BYTES:]:
            yield offset, record
        else:
            reason = "the CRC of the record is wrong: its bytes are damaged"
            yield offset, BadRecordError(path, offset, reason)
        offset += HEADER_BYTES + length + FOOTER_BYTES
