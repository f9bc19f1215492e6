"""Token ids in TFRecord files: an integer feature of a `tf.train.Example` each."""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from MaxText.input_pipeline.formats import tf_example, tfrecord
from MaxText.input_pipeline.formats.token_ids import as_ids
from MaxText.input_pipeline.storage import Blocks, open_file
from MaxText.input_pipeline.streams.bad_record import BadRecord
from MaxText.input_pipeline.streams.record_index import FileRecords, FileScan


@dataclasses.dataclass(frozen=True)
class TFRecordIds:
    """See RecordFormat. `names`: features to look for; the first one that is there is read."""

    unit: ClassVar[str] = "byte"
    names: tuple[str, ...]

    def scan(self, path: str) -> FileRecords:
        data = Blocks(open_file(path))
        found = FileScan(path)
        try:
            for offset, length in tfrecord.payloads(data, path):
                found.add(
                    offset, length, lambda at=offset, size=length: self._count(data, path, at, size)
                )
        except BadRecord as problem:
            found.lose_rest(problem)
        return found.records()

    def _count(self, data: Blocks, path: str, offset: int, length: int) -> int:
        stored = data[offset : offset + length + tfrecord.FOOTER_BYTES]
        record = tfrecord.check(stored, path, offset)
        try:
            return tf_example.int64_values(record, self.names).size
        except tf_example.ExampleError as error:
            raise BadRecord(path, offset, str(error)) from error

    def read(self, path: str, offsets: Sequence[int], sizes: Sequence[int]) -> list[np.ndarray]:
        places = [
            (offset, size + tfrecord.FOOTER_BYTES)
            for offset, size in zip(offsets, sizes, strict=True)
        ]
        records = []
        for offset, stored in zip(offsets, open_file(path).read_many(places), strict=True):
            try:
                values = tf_example.int64_values(tfrecord.check(stored, path, offset), self.names)
            except tf_example.ExampleError as error:
                raise BadRecord(path, offset, str(error)) from error
            records.append(as_ids(values, path, offset))
        return records
