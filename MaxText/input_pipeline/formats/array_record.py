"""Sequential reader and writer of ArrayRecord files."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from array_record.python import (
    array_record_module,  # pyright: ignore[reportAttributeAccessIssue]
)

from MaxText.storage.errors import BadRecordError

_DAMAGE = (RuntimeError, IndexError, ValueError)
_AT_ONCE = 256  # records per read call

_READ_OPTIONS = "readahead_buffer_size:0"  # records are read by number
# Groups of 1 keep each record separately readable, for Grain's random access.
_WRITE_OPTIONS = "group_size:1"
_BUFFER_BYTES = 32768


def scan_records(
    path: str, local_copy: str, choose_numbers: Callable[[int], range]
) -> Iterator[tuple[int, bytes | BadRecordError]]:
    """Yields (record number, bytes or error) in order.

    Args:
      path: Of the file, for messages.
      local_copy: The same path, or a local copy of a URL, which the library cannot read.
      choose_numbers: Maps the record count to the numbers to read.

    Raises:
      BadRecordError: The file is not an ArrayRecord file or is truncated.
    """
    reader: Any = array_record_module.ArrayRecordReader(
        local_copy, options=_READ_OPTIONS, file_reader_buffer_size=_BUFFER_BYTES
    )
    # A truncated or foreign file opens as an empty one.
    if not reader.ok():
        raise BadRecordError(path, 0, "not an ArrayRecord file, damaged or truncated", "record")
    numbers = choose_numbers(reader.num_records())
    try:
        for first in range(0, len(numbers), _AT_ONCE):
            batch_numbers = numbers[first : first + _AT_ONCE]
            try:
                records = reader.read([*batch_numbers])
            except _DAMAGE:  # the library does not say which one failed
                records = [_record(reader, path, number) for number in batch_numbers]
            yield from zip(batch_numbers, records, strict=True)
    finally:
        # After a failed read, close() raises the same error.
        with contextlib.suppress(RuntimeError):
            reader.close()


def _record(reader: Any, path: str, number: int) -> bytes | BadRecordError:
    """Reads a single record; returns the error if it is damaged."""
    try:
        return reader.read([number])[0]
    except _DAMAGE as error:
        return BadRecordError(path, number, f"the record is damaged ({error})", "record")


@contextlib.contextmanager
def _write_errors_as_os_error() -> Iterator[None]:
    """Converts the library's errors of a full disk to OSError."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        raise OSError(str(error)) from error


class ArrayRecordWriter:
    """Writes an ArrayRecord file; disk failures raise OSError."""

    @_write_errors_as_os_error()
    def __init__(self, path: Path):
        """Creates the file."""
        self._writer: Any = array_record_module.ArrayRecordWriter(str(path), _WRITE_OPTIONS)

    @_write_errors_as_os_error()
    def write(self, record: bytes) -> None:
        """Appends a record."""
        self._writer.write(record)

    @_write_errors_as_os_error()
    def close(self) -> None:
        """Writes the index, the last part of a readable file."""
        self._writer.close()
