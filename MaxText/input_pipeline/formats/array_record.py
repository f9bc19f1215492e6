"""ArrayRecord files, read in order."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from array_record.python import (
    array_record_module,  # pyright: ignore[reportAttributeAccessIssue]
)

from MaxText.storage.file_access import local_path
from MaxText.storage.unreadable import BadRecord

_UNIT = "record"
_DAMAGE = (RuntimeError, IndexError, ValueError)

# Records that are fetched by one call.
_AT_ONCE = 256

_OPTIONS = "readahead_buffer_size:0"  # records are asked for by number
_BUFFER_BYTES = 32768


def scan_records(
    path: str, choose: Callable[[int], range] = range, copy: str = ""
) -> Iterator[tuple[int, bytes | BadRecord]]:
    """Reads records in order.

    Args:
      choose: Returns the numbers to read for the number of records in the file.
      copy: Local path of the file if `path` is a URL; the library reads local files only.

    Yields:
      Number of a record and its bytes or error.

    Raises:
      BadRecord: Not an ArrayRecord file, damaged at its end or truncated.
    """
    reader: Any = array_record_module.ArrayRecordReader(
        copy or local_path(path), options=_OPTIONS, file_reader_buffer_size=_BUFFER_BYTES
    )
    # A file that was cut short or is none opens as one without records.
    if not reader.ok():
        raise BadRecord(path, 0, "no ArrayRecord file, damaged or cut short", _UNIT)
    numbers = choose(reader.num_records())
    try:
        for first in range(0, len(numbers), _AT_ONCE):
            together = numbers[first : first + _AT_ONCE]
            records: Sequence[bytes | BadRecord]
            try:
                records = reader.read([*together])
            except _DAMAGE:  # which of them it was is not said
                records = [_record(reader, path, number) for number in together]
            yield from zip(together, records, strict=True)
    finally:
        # After a failed read, closing fails with the same reason.
        with contextlib.suppress(RuntimeError):
            reader.close()


def _record(reader: Any, path: str, number: int) -> bytes | BadRecord:
    try:
        return reader.read([number])[0]
    except _DAMAGE as error:
        return BadRecord(path, number, f"the record is damaged ({error})", _UNIT)
