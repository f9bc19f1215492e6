"""Token ids in ArrayRecord files: an integer feature of a `tf.train.Example` each."""

import collections
import dataclasses
import threading
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
from array_record.python import (
    array_record_module,  # pyright: ignore[reportAttributeAccessIssue]
)

from MaxText.errors import UserError
from MaxText.input_pipeline.formats import tf_example
from MaxText.input_pipeline.formats.token_ids import as_ids
from MaxText.input_pipeline.storage import is_url, local_path, open_stream, version
from MaxText.input_pipeline.streams.bad_record import BadRecord
from MaxText.input_pipeline.streams.record_index import FileRecords, FileScan

# Records of a scan fetched by one call.
_AT_ONCE = 256

# Each read fetches single records at random places: read nothing ahead.
READER_OPTIONS = "readahead_buffer_size:0"
_READER_BUFFER_BYTES = 32768

# Readers at once: each keeps its file open, and a data set may have thousands.
_MOST_READERS = 128


def open_reader(path: str) -> Any:
    """A reader of an ArrayRecord file; safe to use from several threads.

    Raises:
      BadRecord: no such file, damaged at its end or cut short.
      UserError: missing, or a URL (the library reads local files only).
    """
    if is_url(path):
        raise UserError(
            f"{path}: ArrayRecord files are read from a local file system only. Copy them, or "
            "mount the bucket (gcsfuse), and give the local path."
        )
    version(path)  # a missing file is named before the library looks for it
    try:
        open_stream(path).close()
    except OSError as error:
        # The library takes a file that it may not read for a damaged one.
        raise BadRecord(path, 0, f"the file cannot be read ({error.strerror})") from error
    reader = array_record_module.ArrayRecordReader(
        local_path(path), options=READER_OPTIONS, file_reader_buffer_size=_READER_BUFFER_BYTES
    )
    # A file that was cut short or is none opens as one without records.
    if not reader.ok():
        raise BadRecord(path, 0, "no ArrayRecord file, damaged or cut short")
    return reader


class Readers:
    """Open readers by path: those that were not used for longest are let go."""

    def __init__(self) -> None:
        self._readers: collections.OrderedDict[str, Any] = collections.OrderedDict()
        self._lock = threading.Lock()

    def __reduce__(self):
        return Readers, ()  # the one who unpickles opens its own

    def reader(self, path: str) -> Any:
        """The reader of a file; raises as open_reader."""
        with self._lock:
            if path not in self._readers:
                self._readers[path] = open_reader(path)
            self._readers.move_to_end(path)
            while len(self._readers) > _MOST_READERS:
                self._readers.popitem(last=False)
            return self._readers[path]


def read_records(reader: Any, path: str, records: Sequence[int]) -> list[bytes]:
    """The bytes of records by number.

    Raises:
      BadRecord: one cannot be read; its place is its number.
    """
    try:
        return reader.read(records)
    except (RuntimeError, IndexError, ValueError) as error:
        if len(records) == 1:
            reason = f"the record is damaged ({error})"
            raise BadRecord(path, records[0], reason, ArrayRecordIds.unit) from error
    # Which of them it was is not said: the first that fails on its own is.
    return [content for record in records for content in read_records(reader, path, [record])]


@dataclasses.dataclass(frozen=True)
class ArrayRecordIds:
    """See RecordFormat. `names`: features to look for; the first one that is there is read."""

    unit: ClassVar[str] = "record"
    names: tuple[str, ...]
    _readers: Readers = dataclasses.field(default_factory=Readers, repr=False, compare=False)

    def scan(self, path: str) -> FileRecords:
        reader = open_reader(path)
        found = FileScan(path)
        total = reader.num_records()
        for start in range(0, total, _AT_ONCE):
            numbers = list(range(start, min(start + _AT_ONCE, total)))
            contents: Sequence[bytes | None]
            try:
                contents = read_records(reader, path, numbers)
            except BadRecord:
                contents = [None] * len(numbers)
            for number, content in zip(numbers, contents, strict=True):
                found.add(
                    number,
                    0,
                    lambda number=number, content=content: self._count(
                        reader, path, number, content
                    ),
                )
        return found.records()

    def _count(self, reader: Any, path: str, number: int, content: bytes | None) -> int:
        if content is None:  # one of its neighbours is damaged, or it is
            (content,) = read_records(reader, path, [number])
        try:
            return tf_example.int64_values(content, self.names).size
        except tf_example.ExampleError as error:
            raise BadRecord(path, number, str(error), self.unit) from error

    def read(self, path: str, offsets: Sequence[int], sizes: Sequence[int]) -> list[np.ndarray]:
        reader = self._readers.reader(path)
        records = []
        for number, content in zip(offsets, read_records(reader, path, offsets), strict=True):
            try:
                values = tf_example.int64_values(content, self.names)
            except tf_example.ExampleError as error:
                raise BadRecord(path, number, str(error), self.unit) from error
            records.append(as_ids(values, path, number, self.unit))
        return records
