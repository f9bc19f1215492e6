"""Token ids in tables: a column of lists of integers in parquet or Arrow files.

Arrow files are mapped. Of parquet files whole row groups are decoded, and the last few are kept:
reading rows in random order is slow where a file has few, large row groups.
"""

import bisect
import collections
import mmap
import threading
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np

from MaxText.errors import UserError
from MaxText.input_pipeline.data_errors import BadRecord
from MaxText.input_pipeline.formats.token_ids import as_ids
from MaxText.input_pipeline.storage import is_url, local_path, open_stream, version
from MaxText.input_pipeline.token_store.record_index import FileRecords

# Decoded row groups that are kept, for all files together, and open files.
_MOST_GROUPS = 16
_MOST_TABLES = 128

# Label of a place that does not count; any negative one is read as such.
IGNORED = -100

_MASK = "attention_mask"
LABELS = "labels"


def import_pyarrow() -> tuple[Any, Any, Any]:
    """pyarrow, pyarrow.parquet and pyarrow.ipc.

    Raises:
      UserError: pyarrow is not installed.
    """
    try:
        import pyarrow
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError as error:
        raise UserError(
            "Parquet and Arrow files need pyarrow: pip install 'MaxText[data]'"
        ) from error
    return pyarrow, pyarrow.parquet, pyarrow.ipc


class _Lists(NamedTuple):
    """The rows of one group: row i is values[starts[i] : starts[i + 1]]."""

    starts: np.ndarray
    values: np.ndarray

    def row(self, number: int) -> np.ndarray:
        return self.values[self.starts[number] : self.starts[number + 1]]


class Table:
    """One parquet or Arrow file: its columns, and its rows group by group.

    Attributes:
      schema: pyarrow's, column names and types.
      first_rows: first row of each group, then the end.
    """

    def __init__(self, path: str):
        """Opens the file and reads what describes it.

        Raises:
          BadRecord: no such file, damaged or cut short.
          UserError: it cannot be read, or lies where it cannot be mapped.
        """
        self._path = path
        self._arrow, parquet, ipc = import_pyarrow()
        size, _ = version(path)
        self._size = size
        self._map: mmap.mmap | None = None
        try:
            with open_stream(path) as stream:
                magic = stream.read(6)
            self._parquet = self._batches = None
            if magic[:4] == b"PAR1":
                source = open_stream(path) if is_url(path) else local_path(path)
                self._parquet = parquet.ParquetFile(source, page_checksum_verification=True)
                metadata = self._parquet.metadata
                counts = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
                self.schema = self._parquet.schema_arrow
            else:
                if is_url(path):
                    raise UserError(
                        f"{path}: Arrow files are mapped, so they are read from a local file "
                        "system only. Copy them, or use parquet."
                    )
                if size:  # an empty file cannot be mapped
                    with open(local_path(path), "rb") as file:
                        self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                opened = ipc.open_file if magic == b"ARROW1" else ipc.open_stream
                reader = opened(self._arrow.py_buffer(self._map or b""))
                if magic == b"ARROW1":
                    batches = [reader.get_batch(i) for i in range(reader.num_record_batches)]
                else:
                    batches = list(reader)
                self._batches = batches
                counts = [batch.num_rows for batch in batches]
                self.schema = reader.schema
                str(self.schema)  # names are decoded only when they are looked at
        except (self._arrow.ArrowException, OSError, ValueError) as error:
            if isinstance(error, UserError):
                raise
            reason = f"no table, damaged or cut short ({error})"
            if isinstance(error, PermissionError):
                reason = f"the file cannot be read ({error.strerror})"
            raise BadRecord(path, 0, reason) from error
        self.first_rows = np.cumsum([0, *counts]).tolist()

    @property
    def is_mapped(self) -> bool:
        """Whether what lists() returns lies in a map of the file."""
        return self._map is not None

    def check_size(self, row: int) -> None:
        """Looks whether a mapped file is still whole: reading beyond its end ends the process.

        Args:
          row: that is read first, for the error.

        Raises:
          BadRecord: it was cut short.
        """
        if self._map is not None and (size := self._map.size()) < self._size:
            reason = f"the file was cut short: it ends after {size} of {self._size} bytes"
            raise BadRecord(self._path, row, reason, TableIds.unit)

    def lists(self, group: int, column: str) -> _Lists:
        """A column of lists of integers.

        Raises:
          BadRecord: the group is damaged, or a value is missing; the file was cut short.
        """
        self.check_size(self.first_rows[group])
        arrow = self._arrow
        try:
            if self._parquet is not None:
                chunks = self._parquet.read_row_group(group, columns=[column]).column(0).chunks
            else:
                assert self._batches is not None
                chunk = self._batches[group].column(column)
                # Arrow files have no checksums, and what their offsets point at is read unseen.
                chunk.validate(full=True)
                chunks = [chunk]
            parts = [_flat(arrow, chunk) for chunk in chunks]
        except (arrow.ArrowException, OSError, ValueError) as error:
            reason = f"the group of rows is damaged ({error})"
            raise BadRecord(self._path, self.first_rows[group], reason, TableIds.unit) from error
        if len(parts) == 1:
            return parts[0]
        sizes = np.concatenate([np.diff(part.starts) for part in parts])
        values = np.concatenate([part.values for part in parts]) if parts else np.empty(0, int)
        return _Lists(np.concatenate([[0], np.cumsum(sizes)]), values)


def _flat(arrow: Any, chunk: Any) -> _Lists:
    if chunk.null_count:
        raise ValueError(f"{chunk.null_count} rows have no list")
    if arrow.types.is_fixed_size_list(chunk.type):
        starts = np.arange(len(chunk) + 1, dtype=np.int64) * chunk.type.list_size
    else:
        starts = chunk.offsets.to_numpy()
        starts = starts - starts[0] if starts.size else np.zeros(1, np.int64)
    values = chunk.flatten()
    if values.null_count:
        raise ValueError(f"{values.null_count} values are missing")
    return _Lists(starts, values.to_numpy(zero_copy_only=False))


def _damaged_rows(lists: _Lists, path: str, first_row: int) -> list[tuple[int, str]]:
    """Rows of a group that hold what is no token id, and why."""
    damaged = []
    try:
        as_ids(lists.values, path, first_row)
    except BadRecord:
        for number in range(lists.starts.size - 1):
            try:
                as_ids(lists.row(number), path, first_row)
            except BadRecord as problem:
                damaged.append((first_row + number, problem.reason))
    return damaged


def is_list_of_integers(kind: Any) -> bool:
    """Whether a column of this pyarrow type holds a list of ids per row."""
    types = import_pyarrow()[0].types
    lists = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    return bool(lists) and bool(types.is_integer(kind.value_type))


class TableIds:
    """See RecordFormat. A record is a row; its place is its number in the file.

    Without a column of labels a row ends after its last place with attention, where that is
    stored: what follows is padding. With one, rows keep their length, and padding has no label.
    """

    unit: ClassVar[str] = "row"

    def __init__(self, column: str, columns: Sequence[str]):
        """Chooses what is read.

        Args:
          column: of token ids.
          columns: all columns of the files.
        """
        self._column = column
        self._has_mask = _MASK in columns
        self._has_labels = LABELS in columns
        self._start()

    def _start(self) -> None:
        self._tables: collections.OrderedDict[str, Table] = collections.OrderedDict()
        self._groups: collections.OrderedDict[tuple, _Lists] = collections.OrderedDict()
        # pyarrow's files are not for several threads at once.
        self._lock = threading.RLock()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._column!r}, {self._has_mask}, {self._has_labels})"

    def __getstate__(self) -> dict:
        state = self.__dict__.copy()
        for name in ("_tables", "_groups", "_lock"):
            del state[name]
        return state

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        self._start()

    def scan(self, path: str) -> FileRecords:
        table = Table(path)
        counts, damaged = [], []
        for group in range(len(table.first_rows) - 1):
            lists = table.lists(group, self._column)
            sizes = np.diff(lists.starts)
            damaged += _damaged_rows(lists, path, table.first_rows[group])
            if self._has_mask and not self._has_labels:
                masks = table.lists(group, _MASK)
                sizes = np.array([_attended(masks.row(row)) for row in range(sizes.size)], np.int64)
            counts.append(sizes)
        num_tokens = np.concatenate([np.empty(0, np.int64), *counts]).astype(np.int64)
        rows = np.arange(num_tokens.size, dtype=np.int64)
        return FileRecords(rows, np.zeros_like(rows), num_tokens, tuple(damaged))

    def read(self, path: str, offsets: Sequence[int], sizes: Sequence[int]) -> list[np.ndarray]:
        with self._lock:
            if path not in self._tables:
                self._tables[path] = Table(path)
                while len(self._tables) > _MOST_TABLES:
                    self._tables.popitem(last=False)
            self._tables.move_to_end(path)
            table = self._tables[path]
            if offsets:
                table.check_size(offsets[0])
            rows = [self._row(table, path, row) for row in offsets]
            # Out of the map while the file is known to be whole.
            return [row.copy() for row in rows] if table.is_mapped else rows

    def _row(self, table: Table, path: str, row: int) -> np.ndarray:
        ids = as_ids(self._entry(table, path, row, self._column), path, row, self.unit)
        if self._has_labels or not self._has_mask:
            return ids
        return ids[: _attended(self._entry(table, path, row, _MASK))]

    def _entry(self, table: Table, path: str, row: int, column: str) -> np.ndarray:
        if row >= table.first_rows[-1]:
            reason = f"the file has {table.first_rows[-1]} rows: it has changed"
            raise BadRecord(path, row, reason, self.unit)
        group = bisect.bisect_right(table.first_rows, row) - 1
        return self._cached(table, path, group, column).row(row - table.first_rows[group])

    def _cached(self, table: Table, path: str, group: int, column: str) -> _Lists:
        key = (path, group, column)
        if key not in self._groups:
            self._groups[key] = table.lists(group, column)
            if len(self._groups) > _MOST_GROUPS:
                self._groups.popitem(last=False)
        self._groups.move_to_end(key)
        return self._groups[key]


class TableLabels(TableIds):
    """See RecordFormat. The labels beside the ids of TableIds, of the same length.

    Each is the id to predict at its place, IGNORED where none is.
    """

    def __init__(self, column: str, columns: Sequence[str], shift: bool):
        """Chooses what is read.

        Args:
          column: of token ids.
          columns: all columns of the files; LABELS is one.
          shift: whether stored labels are the ids of their own places, as Hugging Face models
            take them, and have to move one place to the left.
        """
        super().__init__(column, columns)
        self._shift = shift

    def _row(self, table: Table, path: str, row: int) -> np.ndarray:
        ids = self._entry(table, path, row, self._column)
        labels = self._entry(table, path, row, LABELS).astype(np.int32)
        if labels.size != ids.size:
            reason = f"the row has {labels.size} labels for {ids.size} ids"
            raise BadRecord(path, row, reason, self.unit)
        if self._shift:
            labels = np.append(labels[1:], np.int32(IGNORED))
        labels = np.where(labels < 0, np.int32(IGNORED), labels)
        if self._has_mask:
            labels[_attended(self._entry(table, path, row, _MASK)) :] = IGNORED
        return labels


def labels_are_ids(table: Table, column: str) -> bool:
    """Whether the labels of a file are the ids of their own places, not of the next ones.

    Looks at the first group of rows.
    """
    if table.first_rows[-1] == 0:
        return False
    ids, labels = table.lists(0, column), table.lists(0, LABELS)
    if not np.array_equal(ids.starts, labels.starts):
        return False
    counted = labels.values >= 0
    return bool(counted.any() and np.array_equal(ids.values[counted], labels.values[counted]))


def _attended(mask_N: np.ndarray) -> int:
    """Places up to the last one with attention."""
    return int(np.flatnonzero(mask_N).max(initial=-1)) + 1
