"""Records of token ids in files of other programs, read in order: one class for each format.

Each is a RecordFormat; its `repr` says everything that decides which ids are read. Imports no jax.
"""

import contextlib
import dataclasses
import gzip
import io
import os
import tempfile
import zlib
from collections.abc import Iterator
from typing import Any, BinaryIO, ClassVar, NamedTuple, Protocol

import numpy as np
from array_record.python import (
    array_record_module,  # pyright: ignore[reportAttributeAccessIssue]
)

from MaxText.errors import UserError
from MaxText.input_pipeline import storage
from MaxText.input_pipeline.data_errors import BadRecord
from MaxText.input_pipeline.formats import tar_members, tf_example, tfrecord
from MaxText.input_pipeline.formats.torch_tensors import TorchFileError, read_tensor
from MaxText.input_pipeline.storage import FileInfo

_LARGEST = np.iinfo(np.int32).max
# Label of a place that does not count; any negative one is read as such.
IGNORED = -100
_MASK, LABELS = "attention_mask", "labels"
_RECORDS_AT_ONCE = 256
# A file that is this many times as large as its gzip file, and larger than the other bound, is
# nothing but repetition: gzip itself ends at 1032. Records of tokens shrink to a half or a tenth.
_MAX_RATIO, _ALWAYS_BYTES = 200, 1 << 26


class TokenRecord(NamedTuple):
    """One record: int32 [n] `ids`, and `labels` [n] (negative: none) in files that have them."""

    ids: np.ndarray
    labels: np.ndarray | None = None


class RecordFormat(Protocol):
    """How the records of one kind of file are read. Attributes: `unit`: see BadRecord."""

    unit: ClassVar[str]

    def records(self, file: FileInfo) -> Iterator[TokenRecord | BadRecord]:
        """Yields each record in order, or what is wrong with it.

        A BadRecord with `is_last` stands for all records from its place on, which cannot be found.

        Raises:
          OSError: the file cannot be read.
          UserError: it is of another kind.
        """
        ...


def as_ids(values_N: np.ndarray, path: str, offset: int, unit: str = "byte") -> np.ndarray:
    """Integers [N] of any type as int32 ids; `offset` and `unit` are those of BadRecord.

    Raises:
      BadRecord: one is below 0 or beyond int32.
    """
    if values_N.size and (values_N.dtype.itemsize > 2 or values_N.dtype.kind == "i"):
        low, high = int(values_N.min()), int(values_N.max())
        if low < 0 or high > _LARGEST:
            bad = low if low < 0 else high
            raise BadRecord(path, offset, f"{bad} is no token id (ids are 0 to {_LARGEST})", unit)
    return values_N.astype(np.int32, copy=False)


@contextlib.contextmanager
def plain_stream(file: FileInfo) -> Iterator[BinaryIO]:
    """The contents of a file, decompressed into a temporary file where its name ends in gz or tgz.

    Raises:
      BadRecord: the file is damaged or cut short, or made to fill the disk.
      OSError: it cannot be read.
    """
    path = file.path
    with storage.open_stream(path) as stream:
        if not path.endswith((".gz", ".tgz")):
            yield stream
            return
        with tempfile.TemporaryFile() as plain, gzip.open(stream) as contents:
            try:
                while piece := contents.read(1 << 20):
                    plain.write(piece)
                    if plain.tell() > max(_ALWAYS_BYTES, _MAX_RATIO * file.size):
                        raise BadRecord(
                            path, plain.tell(),
                            f"the file grows to more than {_MAX_RATIO} times its size: such a file "
                            "is made to fill a disk. Decompress it yourself if you trust it",
                        )  # fmt: skip
            except EOFError as error:
                raise BadRecord(path, plain.tell(), "the compressed file is cut short") from error
            except (gzip.BadGzipFile, zlib.error) as error:
                problem = f"the compressed file is damaged ({error})"
                raise BadRecord(path, plain.tell(), problem) from error
            plain.seek(0)
            yield plain  # pyright: ignore[reportReturnType]


def _example_ids(
    record: bytes, names: tuple[str, ...], path: str, place: int, unit: str
) -> TokenRecord | BadRecord:
    try:
        return TokenRecord(as_ids(tf_example.int64_values(record, names), path, place, unit))
    except tf_example.ExampleError as error:
        return BadRecord(path, place, str(error), unit)
    except BadRecord as problem:
        return problem


@dataclasses.dataclass(frozen=True)
class TFRecordIds:
    """An integer feature of a tf.train.Example each: the first of `names` that is there."""

    unit: ClassVar[str] = "byte"
    names: tuple[str, ...]

    def records(self, file: FileInfo) -> Iterator[TokenRecord | BadRecord]:
        """See RecordFormat."""
        for offset, record in raw_tfrecords(file):
            if isinstance(record, BadRecord):
                yield record
            else:
                yield _example_ids(record, self.names, file.path, offset, self.unit)


def raw_tfrecords(file: FileInfo) -> Iterator[tuple[int, bytes | BadRecord]]:
    """Offset of each payload and its bytes, or what is wrong; past a wrong length nothing is found.

    Raises:
      OSError: the file cannot be read.
    """
    path, at = file.path, 0
    try:
        with plain_stream(file) as stream:
            size = stream.seek(0, os.SEEK_END)
            stream.seek(0)
            while at < size:
                header = stream.read(tfrecord.HEADER_BYTES)
                if len(header) < tfrecord.HEADER_BYTES:
                    raise BadRecord(path, at, "the file ends inside a record's header: cut short")
                length = tfrecord.parse_header(header, path, at)
                start = at + tfrecord.HEADER_BYTES
                if length > size - start - tfrecord.FOOTER_BYTES:
                    raise BadRecord(
                        path, at,
                        f"the record has {length} bytes and a CRC, and the file ends after "
                        f"{size - start} of them: it was cut short",
                    )  # fmt: skip
                stored = stream.read(length + tfrecord.FOOTER_BYTES)
                at = start + length + tfrecord.FOOTER_BYTES
                try:
                    record = tfrecord.check(stored, path, start)
                except BadRecord as problem:
                    record = problem
                yield start, record
    except BadRecord as problem:
        problem.is_last = True
        yield at, problem


@dataclasses.dataclass(frozen=True)
class ArrayRecordIds:
    """As TFRecordIds, in ArrayRecord files."""

    unit: ClassVar[str] = "record"
    names: tuple[str, ...]

    def records(self, file: FileInfo) -> Iterator[TokenRecord | BadRecord]:
        """See RecordFormat."""
        for number, record in enumerate(raw_array_records(file)):
            if isinstance(record, BadRecord):
                yield record
            else:
                yield _example_ids(record, self.names, file.path, number, self.unit)


@dataclasses.dataclass(frozen=True)
class PreparedChunks:
    """Token files of a set that prepare_data.py wrote as ArrayRecord: a chunk of ids each."""

    unit: ClassVar[str] = "record"
    dtype: str

    def records(self, file: FileInfo) -> Iterator[TokenRecord | BadRecord]:
        """See RecordFormat."""
        dtype = np.dtype(self.dtype).newbyteorder("<")
        for number, record in enumerate(raw_array_records(file)):
            if isinstance(record, BadRecord):
                yield record
            elif len(record) % dtype.itemsize:
                problem = f"the record is damaged: it has {len(record)} bytes"
                yield BadRecord(file.path, number, problem, self.unit)
            else:
                yield TokenRecord(np.frombuffer(record, dtype).astype(np.int32))


def raw_array_records(file: FileInfo) -> Iterator[bytes | BadRecord]:
    """The bytes of each record, or what is wrong with it.

    Raises:
      OSError: the file cannot be read.
    """
    path = file.path
    with contextlib.ExitStack() as stack:
        if storage.is_url(path):  # the library reads local files only
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            system, name = storage.file_system(path)
            local = f"{folder}/file.array_record"
            system.get_file(name, local)
        else:
            local = storage.local_path(path)
            open(local, "rb").close()  # the library takes one that may not be read for damaged
        reader = array_record_module.ArrayRecordReader(local, options="readahead_buffer_size:0")
        # A file that was cut short or is none opens as one without records.
        if not reader.ok():
            problem = BadRecord(path, 0, "no ArrayRecord file, damaged or cut short")
            problem.is_last = True
            yield problem
            return
        for start in range(0, total := reader.num_records(), _RECORDS_AT_ONCE):
            numbers = list(range(start, min(start + _RECORDS_AT_ONCE, total)))
            try:
                yield from reader.read(numbers)
                continue
            except (RuntimeError, IndexError, ValueError):
                pass  # which of them it was is not said
            for number in numbers:
                try:
                    yield reader.read([number])[0]
                except (RuntimeError, IndexError, ValueError) as error:
                    yield BadRecord(path, number, f"the record is damaged ({error})", "record")


@dataclasses.dataclass(frozen=True)
class TarTensors:
    """Members like `000123.input_id.pth` of a webdataset archive, one tensor each.

    Members of one sample share the part of their name before the first dot; what follows says
    which field it is and how it is stored: .pth and .pt as torch.save does, .npy as numpy does.
    `field`: which member of a sample is read; empty for the only one.
    """

    unit: ClassVar[str] = "byte"
    ENDINGS: ClassVar[tuple[str, ...]] = (".pth", ".pt", ".npy")
    # Fields that are taken without asking when a sample has several.
    USUAL: ClassVar[tuple[str, ...]] = ("input_id", "input_ids", "tokens", "text", "")
    field: str

    def records(self, file: FileInfo) -> Iterator[TokenRecord | BadRecord]:
        """See RecordFormat."""
        try:
            with plain_stream(file) as stream:
                for member in self._chosen(tar_members.members(stream, file.path), file.path):
                    stream.seek(member.offset)
                    content = stream.read(member.size)
                    try:
                        values = _tensor(content, file.path, member.offset)
                        # Formats without a checksum show damage by values that are no ids.
                        yield TokenRecord(as_ids(values, file.path, member.offset))
                    except BadRecord as problem:
                        yield problem
        except BadRecord as problem:
            problem.is_last = True
            yield problem

    def _chosen(self, found: list[tar_members.Member], path: str) -> list[tar_members.Member]:
        """The members that hold tokens, one of each sample."""
        fields: dict[str, list[tar_members.Member]] = {}
        for member in found:
            name = member.name.rsplit("/", 1)[-1]
            if name.endswith(self.ENDINGS):
                # 12.input_id.pth is field input_id; 12.pth has no name of a field.
                fields.setdefault(".".join(name.split(".")[1:-1]), []).append(member)
        if not found:
            return []
        wanted = [self.field] if self.field or len(fields) != 1 else list(fields)
        if not self.field and len(fields) > 1:
            wanted = [field for field in self.USUAL if field in fields]
        if not wanted or wanted[0] not in fields:
            there = ", ".join(sorted(field or "(no name)" for field in fields)) or "none"
            asked = f"field {self.field}" if self.field else "one field of tokens"
            raise UserError(
                f"{path} has no tensors of {asked} (fields of its {'/'.join(self.ENDINGS)} "
                f"members: {there}; first member: {found[0].name}). Set tokens_field to the one "
                "that holds token ids."
            )
        return fields[wanted[0]]


def _tensor(content: bytes, path: str, offset: int) -> np.ndarray:
    if not content.startswith(b"\x93NUMPY"):
        try:
            return read_tensor(content)
        except TorchFileError as error:
            raise BadRecord(path, offset, str(error)) from error
    try:
        values = np.load(io.BytesIO(content), allow_pickle=False)
    # What a damaged header raises is any kind of error; MemoryError for a shape of 2^60.
    except Exception as error:
        raise BadRecord(path, offset, f"the .npy member is damaged ({error})") from error
    if values.ndim != 1 or values.dtype.kind not in "iu":
        problem = f"the member is {values.dtype} of shape {values.shape}, not a list of ids"
        raise BadRecord(path, offset, problem)
    return values


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


class TableIds:
    """A row of a parquet or Arrow file each: a column of lists of integers.

    Without a column of labels a row ends after its last place with attention, where that is
    stored: what follows is padding. With one, rows keep their length, and padding has no label.
    """

    unit: ClassVar[str] = "row"

    def __init__(self, column: str, columns: list[str], shift: bool | None = None):
        """Chooses what is read.

        Args:
          column: of token ids.
          columns: all columns of the files.
          shift: of labels: whether stored ones are the ids of their own places, as Hugging Face
            models take them, and have to move one place to the left; None reads no labels.
        """
        self._column, self._shift = column, shift
        self._has_mask = _MASK in columns
        self._has_labels = LABELS in columns

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._column!r}, {self._has_mask}, {self._has_labels})"

    def records(self, file: FileInfo) -> Iterator[TokenRecord | BadRecord]:
        """See RecordFormat."""
        columns = [self._column]
        columns += [_MASK] if self._has_mask else []
        columns += [] if self._shift is None else [LABELS]
        row = 0
        try:
            for batch in _batches(file, columns):
                lists = [_lists(batch.column(column)) for column in columns]
                for number in range(batch.num_rows):
                    values = [array[number] for array in lists]
                    try:
                        yield self._record(dict(zip(columns, values, strict=True)), file.path, row)
                    except BadRecord as problem:
                        yield problem
                    row += 1
        except (import_pyarrow()[0].ArrowException, ValueError) as error:
            if isinstance(error, UserError):
                raise
            problem = BadRecord(
                file.path, row, f"no table, damaged or cut short ({error})", self.unit
            )
            problem.is_last = True
            yield problem

    def _record(self, values: dict[str, np.ndarray], path: str, row: int) -> TokenRecord:
        ids = as_ids(values[self._column], path, row, self.unit)
        length = ids.size
        if self._has_mask:
            length = int(np.flatnonzero(values[_MASK]).max(initial=-1)) + 1
        if self._shift is None:
            return TokenRecord(ids if self._has_labels else ids[:length])
        labels = values[LABELS].astype(np.int32)
        if labels.size != ids.size:
            problem = f"the row has {labels.size} labels for {ids.size} ids"
            raise BadRecord(path, row, problem, self.unit)
        if self._shift:
            labels = np.append(labels[1:], np.int32(IGNORED))
        labels = np.where(labels < 0, np.int32(IGNORED), labels)
        labels[length:] = IGNORED
        return TokenRecord(ids, labels)


def table_schema(file: FileInfo) -> Any:
    """pyarrow's schema of a parquet or Arrow file.

    Raises:
      BadRecord: no such file, damaged or cut short.
    """
    arrow, parquet, ipc = import_pyarrow()
    try:
        with storage.open_stream(file.path) as stream:
            magic = stream.read(6)
            stream.seek(0)
            if magic[:4] == b"PAR1":
                return parquet.ParquetFile(stream).schema_arrow
            schema = (ipc.open_file if magic == b"ARROW1" else ipc.open_stream)(stream).schema
            str(schema)  # names are decoded only when they are looked at
            return schema
    except (arrow.ArrowException, OSError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        problem = f"no table, damaged or cut short ({error})"
        if isinstance(error, PermissionError):
            problem = f"the file cannot be read ({error.strerror})"
        raise BadRecord(file.path, 0, problem) from error


def is_list_of_integers(kind: Any) -> bool:
    """Whether a column of this pyarrow type holds a list of ids per row."""
    types = import_pyarrow()[0].types
    lists = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    return bool(lists) and bool(types.is_integer(kind.value_type))


def labels_are_ids(file: FileInfo, column: str) -> bool:
    """Whether the labels of a file are the ids of their own places, not of the next ones.

    Looks at the first group of rows.
    """
    for batch in _batches(file, [column, LABELS]):
        if batch.num_rows:
            pairs = zip(_lists(batch.column(column)), _lists(batch.column(LABELS)), strict=True)
            return _same_where_counted(list(pairs))
    return False


def _same_where_counted(pairs: list[tuple[np.ndarray, np.ndarray]]) -> bool:
    if any(ids.size != labels.size for ids, labels in pairs):
        return False
    ids, labels = (np.concatenate(side) for side in zip(*pairs, strict=True))
    return bool((labels >= 0).any()) and bool(np.array_equal(ids[labels >= 0], labels[labels >= 0]))


def _batches(file: FileInfo, columns: list[str]) -> Iterator[Any]:
    """The record batches of a file, with these columns."""
    _, parquet, ipc = import_pyarrow()
    with storage.open_stream(file.path) as stream:
        magic = stream.read(6)
        stream.seek(0)
        if magic[:4] == b"PAR1":
            table = parquet.ParquetFile(stream, page_checksum_verification=True)
            for group in range(table.num_row_groups):
                yield from table.read_row_group(group, columns).to_batches()
            return
        if magic == b"ARROW1":
            reader = ipc.open_file(stream)
            batches = (reader.get_batch(number) for number in range(reader.num_record_batches))
        else:
            batches = iter(ipc.open_stream(stream))
        for batch in batches:
            chosen = batch.select(columns)
            # Arrow files have no checksums, and what their offsets point at is read unseen.
            chosen.validate(full=True)
            yield chosen


def _lists(column: Any) -> list[np.ndarray]:
    """The rows of a column of lists.

    Raises:
      ValueError: a value is missing.
    """
    arrow = import_pyarrow()[0]
    if column.null_count:
        raise ValueError(f"{column.null_count} rows have no list")
    values = column.flatten()
    if values.null_count:
        raise ValueError(f"{values.null_count} values are missing")
    flat = values.to_numpy(zero_copy_only=False)
    if arrow.types.is_fixed_size_list(column.type):
        ends = np.arange(1, len(column)) * column.type.list_size
    else:
        starts = column.offsets.to_numpy()
        ends = (starts - starts[0])[1:-1] if starts.size else starts
    return np.split(flat, ends) if len(column) else []
