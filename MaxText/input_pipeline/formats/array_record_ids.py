"""Token ids in ArrayRecord files: an integer feature of a `tf.train.Example` each."""

import collections
import dataclasses
import threading
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from MaxText.input_pipeline.formats import tf_example
from MaxText.input_pipeline.formats.array_record import UNIT, open_reader, read_records
from MaxText.input_pipeline.formats.token_ids import as_ids
from MaxText.input_pipeline.streams.bad_record import BadRecord
from MaxText.input_pipeline.streams.record_index import FileRecords, FileScan

# Records of a scan fetched by one call.
_AT_ONCE = 256

# Readers at once: each keeps its file open, and a data set may have thousands.
_MOST_READERS = 128


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


@dataclasses.dataclass(frozen=True)
class ArrayRecordIds:
    """See RecordFormat. `names`: features to look for; the first one that is there is read."""

    unit: ClassVar[str] = UNIT
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
