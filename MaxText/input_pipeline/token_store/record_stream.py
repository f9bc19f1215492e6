"""Token streams over record files: every record is a document (or a row), read at any place."""

from collections.abc import Collection, Sequence

import numpy as np

from MaxText.input_pipeline.data_errors import BadRecord
from MaxText.input_pipeline.token_store.healing import check_sizes, told_where
from MaxText.input_pipeline.token_store.record_index import RecordFormat, RecordIndex


class RecordStream:
    """The records of some files, end to end. See TokenStream."""

    def __init__(self, index: RecordIndex, record_format: RecordFormat, eos_id: int = -1):
        """Reads nothing.

        Args:
          index: where the records lie.
          record_format: of the files.
          eos_id: put at the end of every record; below 0 none is.
        """
        self.index = index
        self._format = record_format
        self._eos_id = eos_id
        self._offsets: np.ndarray | None = None

    def __len__(self) -> int:
        return int(self.document_offsets[-1])

    def __getstate__(self) -> dict:
        return {**vars(self), "_offsets": None}

    def check(self, given_up: Collection[str] = ()) -> None:
        """See TokenStream."""
        check_sizes(self.index.files, self.index.file_bytes, given_up)

    @property
    def _extra(self) -> int:
        return int(self._eos_id >= 0)

    @property
    def document_offsets(self) -> np.ndarray:
        """int64 [records + 1]: first token of each record, then the length of the stream."""
        if self._offsets is None:
            offsets = self.index.document_offsets
            self._offsets = offsets + np.arange(offsets.size) if self._extra else offsets
        return self._offsets

    def document_name(self, document: int) -> str:
        """`pile.tfrecord.b500, record 17`: counted from 0 within the file."""
        file, record = self._place(document)
        return f"{self.index.files[file].rsplit('/', 1)[-1]}, record {record}"

    def _place(self, document: int) -> tuple[int, int]:
        """File of a record, and its number in it."""
        firsts = self.index.first_record
        file = int(np.searchsorted(firsts, document, side="right")) - 1
        return file, document - int(firsts[file])

    def _record_of(self, tokens: np.ndarray) -> np.ndarray:
        """The record that holds each token."""
        return np.searchsorted(self.document_offsets, tokens, side="right") - 1

    def ranges(self, places: Sequence[tuple[int, int]]) -> list[np.ndarray]:
        """Reads pieces of the stream, each record once and the records of a file in one call.

        Args:
          places: pairs (start, stop), 0 <= start <= stop <= len(stream).

        Returns:
          int32 arrays [stop - start].

        Raises:
          BadRecord: a record that a place needs cannot be read.
        """
        bounds = np.asarray(places, np.int64).reshape(-1, 2)
        assert not bounds.size or (
            bounds[:, 0].min() >= 0 and (bounds[:, 0] <= bounds[:, 1]).all()
        ), places
        assert bounds.max(initial=0) <= len(self), (bounds.max(initial=0), len(self))
        filled = bounds[:, 0] < bounds[:, 1]
        first = self._record_of(np.where(filled, bounds[:, 0], 0))
        last = self._record_of(np.where(filled, bounds[:, 1] - 1, 0))
        wanted = {
            record
            for low, high in zip(first[filled].tolist(), last[filled].tolist(), strict=True)
            for record in range(low, high + 1)
        }
        records = self._read(sorted(wanted))
        pieces = []
        for (start, stop), low, high in zip(
            bounds.tolist(), first.tolist(), last.tolist(), strict=True
        ):
            if start == stop:
                pieces.append(np.empty(0, np.int32))
                continue
            begin = int(self.document_offsets[low])
            if low == high:
                pieces.append(records[low][start - begin : stop - begin])
            else:
                parts = np.concatenate([records[record] for record in range(low, high + 1)])
                pieces.append(parts[start - begin : stop - begin])
        return pieces

    def _read(self, wanted: list[int]) -> dict[int, np.ndarray]:
        """Whole records by number, int32, each with the token after it."""
        index = self.index
        numbers = np.asarray(wanted, np.int64)
        files = np.searchsorted(index.first_record, numbers, side="right") - 1
        expected = (index.document_offsets[numbers + 1] - index.document_offsets[numbers]).tolist()
        offsets, sizes = index.offsets[numbers].tolist(), index.sizes[numbers].tolist()
        records = {}
        start = 0
        # Numbers are sorted, so those of one file follow each other.
        for stop in [*(np.flatnonzero(np.diff(files)) + 1).tolist(), len(wanted)]:
            if stop == start:
                continue
            path = index.files[int(files[start])]
            size = index.file_bytes[int(files[start])]
            with told_where(path, size, offsets[start], self._format.unit):
                read = self._format.read(path, offsets[start:stop], sizes[start:stop])
                for place, ids in enumerate(read, start):
                    if ids.size != expected[place]:
                        raise BadRecord(
                            path,
                            offsets[place],
                            f"the record has {ids.size} tokens where the index has "
                            f"{expected[place]}: it is damaged, or the file has changed since the "
                            "start",
                            self._format.unit,
                        )
                    if self._extra:
                        ids = np.append(ids, np.int32(self._eos_id))
                    records[wanted[place]] = ids
            start = stop
        return records
