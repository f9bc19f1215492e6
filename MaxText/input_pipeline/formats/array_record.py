"""ArrayRecord files: records by number."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from array_record.python import (
    array_record_module,  # pyright: ignore[reportAttributeAccessIssue]
)

from MaxText.errors import UserError
from MaxText.input_pipeline.data_errors import BadRecord
from MaxText.input_pipeline.storage import file_info, is_url, local_path, open_stream

UNIT = "record"
"""What a BadRecord of such a file counts."""

# Records that a scan fetches by one call.
_AT_ONCE = 256

_OPTIONS = "readahead_buffer_size:0"  # or single records at random positions take others along
_BUFFER_BYTES = 32768


def open_reader(path: str, copy: str = "") -> Any:
    """A reader of an ArrayRecord file; safe to use from several threads.

    Args:
      path: of the file.
      copy: of it on this machine; the library reads local files only.

    Raises:
      BadRecord: no such file, damaged at its end or cut short.
      UserError: missing, or a URL without a copy.
    """
    if is_url(path) and not copy:
        raise UserError(
            f"{path}: ArrayRecord files are read from a local file system only. Copy them, or "
            "mount the bucket (gcsfuse), and give the local path."
        )
    file_info(path)  # a missing file is named before the library looks for it
    try:
        open_stream(copy or path).close()
    except OSError as error:
        # The library takes a file that it may not read for a damaged one.
        raise BadRecord(path, 0, f"the file cannot be read ({error.strerror})") from error
    reader = array_record_module.ArrayRecordReader(
        local_path(copy or path), options=_OPTIONS, file_reader_buffer_size=_BUFFER_BYTES
    )
    # A file that was cut short or is none opens as one without records.
    if not reader.ok():
        raise BadRecord(path, 0, "no ArrayRecord file, damaged or cut short")
    return reader


def read_records(reader: Any, path: str, records: Sequence[int]) -> list[bytes]:
    """The bytes of records by number.

    Raises:
      BadRecord: one cannot be read; its place is its number.
    """
    try:
        return reader.read(records)
    except (RuntimeError, IndexError, ValueError) as error:
        if len(records) == 1:
            raise BadRecord(path, records[0], f"the record is damaged ({error})", UNIT) from error
    # Which of them it was is not said: the first that fails on its own is.
    return [content for record in records for content in read_records(reader, path, [record])]


def scan_records(
    path: str, choose: Callable[[int], range] = range, copy: str = ""
) -> Iterator[tuple[int, bytes | BadRecord]]:
    """Reads records in order.

    Args:
      path, copy: as of open_reader.
      choose: gives the numbers to read for the number of records in the file.

    Yields:
      Number of a record and its bytes, or what is wrong with it.

    Raises:
      BadRecord, UserError: as open_reader.
    """
    reader = open_reader(path, copy)
    numbers = choose(reader.num_records())
    try:
        for first in range(0, len(numbers), _AT_ONCE):
            together = numbers[first : first + _AT_ONCE]
            records: Sequence[bytes | BadRecord]
            try:
                records = reader.read([*together])
            except (RuntimeError, IndexError, ValueError):
                records = [_record(reader, path, number) for number in together]
            yield from zip(together, records, strict=True)
    finally:
        # After a failed read, closing fails with the same reason.
        with contextlib.suppress(RuntimeError):
            reader.close()


def _record(reader: Any, path: str, number: int) -> bytes | BadRecord:
    try:
        return read_records(reader, path, [number])[0]
    except BadRecord as problem:
        return problem
