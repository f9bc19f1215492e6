"""Reads text or token ids from parquet and Arrow files, by row."""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from MaxText.errors import UserError
from MaxText.input_pipeline.document_sources.byte_streams import decode
from MaxText.input_pipeline.document_sources.source_files import FileRange
from MaxText.input_pipeline.document_sources.text_streams import (
    PARAGRAPH_END,
    Skipped,
    missing_text_error,
)
from MaxText.storage.errors import BadRecordError
from MaxText.storage.file_access import is_url, local_path, open_stream

IGNORED = -100
"""Label of a position that does not count; any negative one is read as such."""

_MAX_NAMED_FIELDS = 10  # in a message
_BATCH_ROWS = 256  # parquet rows decoded at a time
_TEXT_TYPES = {"string", "large_string", "string_view", "binary", "large_binary", "binary_view"}
_MASK = "attention_mask"
_LABELS = "labels"
_MAX_ID = np.iinfo(np.int32).max


# Of pyarrow, which is imported when a table is opened: the type of a column, rows as columns, and
# what they are read from (ParquetFile, RecordBatchFileReader, NativeFile).
DataType = Any
RecordBatch = Any
ArrowReader = Any


class Table(NamedTuple):
    """A range of an open table."""

    types: dict[str, DataType]  # by column
    read: Callable[[list[str]], Iterator[tuple[int, RecordBatch]]]

    def batches(self, columns: list[str]) -> Iterator[tuple[int, RecordBatch]]:
        """Yields (number of the first row in the file, RecordBatch)."""
        for row, batch in self.read(columns):
            selected = batch.select(columns)
            # Arrow files have no checksums, and corrupt offsets would read arbitrary memory.
            selected.validate(full=True)
            yield row, selected


def require_pyarrow(user: str) -> tuple[Any, Any]:
    """Returns pyarrow and pyarrow.parquet; UserError if not installed.

    `user` is what needs them, for the message: a file or an option.
    """
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise UserError(
            f"{user} needs pyarrow, which is not installed. Run: pip install 'jaxpretrain[data]'"
        ) from error
    return pyarrow, parquet


@contextmanager
def open_table(file_range: FileRange) -> Iterator[Table]:
    """Opens a parquet file, an Arrow file, or an Arrow stream.

    The first bytes determine the format. Errors of pyarrow, even inside the context, become
    OSError. Raises UserError if pyarrow is not installed.
    """
    path = file_range.file.path
    pyarrow, parquet = require_pyarrow(path)
    try:
        with open_stream(path) as file:
            first_bytes = file.read(6)
            file.seek(0)
            if first_bytes.startswith(b"PAR1"):
                reader = parquet.ParquetFile(file, page_checksum_verification=True)
                yield _table(reader.schema_arrow, _parquet_batches, reader, file_range)
                return
            # With a memory map, skipped batches are not read.
            name = local_path(path)
            with (
                pyarrow.PythonFile(file, mode="r") if is_url(path) else pyarrow.memory_map(name)
            ) as source:
                if first_bytes == b"ARROW1":
                    reader = pyarrow.ipc.open_file(source)
                    yield _table(reader.schema, _arrow_batches, reader, file_range)
                else:
                    schema = pyarrow.ipc.open_stream(source).schema
                    yield _table(schema, _arrow_stream_batches, source, file_range)
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:  # or a name that is not UTF-8
        raise OSError(str(error).split("\n")[0]) from error


def _table(
    schema: Iterable[Any], batches: Callable, reader: ArrowReader, file_range: FileRange
) -> Table:
    """Returns the table of a reader; `batches` is one of the functions below."""
    types = {field.name: field.type for field in schema}
    return Table(types, functools.partial(batches, reader, file_range))


def _parquet_batches(
    file: ArrowReader, file_range: FileRange, columns: list[str]
) -> Iterator[tuple[int, RecordBatch]]:
    sizes = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
    groups = file_range.partition(len(sizes))
    row = sum(sizes[: groups.start])
    for batch in file.iter_batches(_BATCH_ROWS, row_groups=[*groups], columns=columns):
        yield row, batch
        row += batch.num_rows


def _arrow_batches(
    reader: ArrowReader, file_range: FileRange, columns: list[str]
) -> Iterator[tuple[int, RecordBatch]]:
    numbers = file_range.partition(reader.num_record_batches)
    row = 0
    for number in range(numbers.stop):
        batch = reader.get_batch(number)
        if number >= numbers.start:
            yield row, batch
        row += batch.num_rows


def _arrow_stream_batches(
    source: ArrowReader, file_range: FileRange, columns: list[str]
) -> Iterator[tuple[int, RecordBatch]]:
    import pyarrow

    source.seek(0)
    reader = pyarrow.ipc.open_stream(source)
    row = 0
    while file_range.stop is None or source.tell() < file_range.stop:
        offset = source.tell()
        try:
            batch = reader.read_next_batch()
        except StopIteration:
            return
        if offset >= file_range.start:
            yield row, batch
        row += batch.num_rows


def _is_list(column_type: DataType) -> bool:
    return str(column_type).startswith(("list<", "large_list<", "fixed_size_list<"))


def _is_list_of_integers(column_type: DataType) -> bool:
    return _is_list(column_type) and str(column_type.value_type).startswith(("int", "uint"))


def _is_text(column_type: DataType) -> bool:
    """Returns whether values are text, paragraphs, or encoded text."""
    return str(getattr(column_type, "value_type", column_type)) in _TEXT_TYPES


def _nested_text(name: str, column_type: DataType) -> list[str]:
    """Returns the names of text inside of a column, such as `meta.text`."""
    if _is_text(column_type):
        return [name]
    if _is_list(column_type):
        return _nested_text(f"{name}[]", column_type.value_type)
    if str(column_type).startswith("struct<"):
        return [
            nested
            for field in column_type
            for nested in _nested_text(f"{name}.{field.name}", field.type)
        ]
    return []


def count_rows(file_range: FileRange) -> int:
    """Returns the number of rows of a range, whatever their columns; raises as open_table."""
    with open_table(file_range) as table:
        return sum(batch.num_rows for _, batch in table.read([]))


def table_texts(
    file_range: FileRange, text_field: str, skipped: Skipped
) -> Iterator[tuple[int, str]]:
    """Yields (row number, text or "" for null) for rows of a range.

    Args:
      file_range: A parquet or Arrow file, or a part of it.
      text_field: A column of strings, UTF-8 bytes, or lists of strings (paragraphs).
      skipped: Collects rows of bytes that are not UTF-8.

    Raises:
      UserError: There is no such column, pyarrow is not installed, or `skipped` is at its limit.
      READ_ERRORS: The file is damaged.
    """
    path = file_range.file.path
    with open_table(file_range) as table:
        fields = [name for name, column_type in table.types.items() if _is_text(column_type)]
        if text_field not in fields:
            nested = [
                name
                for column, column_type in table.types.items()
                if column not in fields
                for name in _nested_text(column, column_type)
            ]
            raise missing_text_error(path, text_field, fields, nested[:_MAX_NAMED_FIELDS])
        for first_row, batch in table.batches([text_field]):
            for row, value in enumerate(batch.column(0).to_pylist(), start=first_row):
                paragraphs = value if isinstance(value, list) else [value]
                try:
                    texts = [
                        decode(text, f"{path}, row {row},") if isinstance(text, bytes) else text
                        for text in paragraphs
                        if text is not None
                    ]
                except UserError as error:
                    skipped.count_malformed(error)
                    continue
                yield row, PARAGRAPH_END.join(texts)


class TokenDocument(NamedTuple):
    """A document of N tokens."""

    ids: np.ndarray  # int32 [N]
    labels: np.ndarray | None = None  # int32 [N], id to predict or IGNORED; None: the next id


def as_ids(values_N: np.ndarray) -> np.ndarray:
    """Converts integers [N] to int32 ids; UserError if out of range."""
    invalid = values_N[(values_N < 0) | (values_N > _MAX_ID)]
    if invalid.size:
        raise UserError(f"{invalid[0]} is not a token id (ids are 0 to {_MAX_ID})")
    return values_N.astype(np.int32, copy=False)


def id_column(table: Table, path: str, fields: Sequence[str], text_field: str = "") -> str | None:
    """Returns the first of `fields` with ids; None if there is text.

    Raises UserError, listing the columns, if there is neither.
    """
    types = table.types
    for name in fields:
        if name in types and _is_list_of_integers(types[name]):
            return name
    if text_field in types and _is_text(types[text_field]):
        return None
    no_text = f" and no text in {text_field}" if text_field else ""
    columns = ", ".join(f"{name} ({kind})" for name, kind in types.items())
    raise UserError(
        f"{path} has no column of lists of integers named {' or '.join(fields)}{no_text} (columns: "
        f"{columns}). Set token_records.field, or text_field for text, to one of them."
    )


def has_mask_and_labels(table: Table) -> tuple[bool, bool]:
    """Returns whether a table has the columns attention_mask and labels."""
    types = table.types
    has_mask = _MASK in types and _is_list(types[_MASK])
    return has_mask, _LABELS in types and _is_list_of_integers(types[_LABELS])


def table_documents(
    path: str, fields: Sequence[str]
) -> Iterator[tuple[int, TokenDocument | BadRecordError]]:
    """Yields (row number, document or error) for all rows.

    The first of `fields` that exists holds the ids. Without labels, a row ends after the last
    position with attention, if there is an `attention_mask`. With labels it keeps its length, and
    padding has no label.

    Hugging Face models take labels that are the ids of their own positions and shift them inside
    the model. Such labels are shifted left by one here; the first labels of the file decide.
    """
    with open_table(FileRange.whole(path)) as table:
        column = id_column(table, path, fields)
        assert column is not None
        has_mask, has_labels = has_mask_and_labels(table)
        shift_labels = has_labels and _labels_are_ids(table, column)
        columns = [column]
        if has_mask:
            columns.append(_MASK)
        if has_labels:
            columns.append(_LABELS)
        for first_row, batch in table.batches(columns):
            for row, row_values in enumerate(zip(*batch.columns, strict=True), start=first_row):
                try:
                    values_by_column = dict(zip(columns, map(_values, row_values), strict=True))
                    document = _document(
                        values_by_column[column],
                        values_by_column.get(_MASK),
                        values_by_column.get(_LABELS),
                        shift_labels,
                    )
                    yield row, document
                except UserError as error:
                    yield row, BadRecordError(path, row, str(error), "row")


def _labels_are_ids(table: Table, column: str) -> bool:
    """Returns whether the first labels equal the ids at their own positions."""
    for _, batch in table.batches([column, _LABELS]):
        ids, labels = (values.flatten().to_numpy(zero_copy_only=False) for values in batch.columns)
        if ids.size != labels.size:
            return False
        has_label = labels >= 0
        if has_label.any():
            return np.array_equal(ids[has_label], labels[has_label])
    return False


def _values(scalar: Any) -> np.ndarray:
    """Copies the values of a list, as the file may be memory-mapped."""
    values = scalar.values
    if values is None or values.null_count:
        raise UserError("the row lacks a value")
    return np.array(values)


def _document(
    ids: np.ndarray, mask: np.ndarray | None, labels: np.ndarray | None, shift_labels: bool
) -> TokenDocument:
    """Returns the document of a row, see table_documents.

    Args:
      ids: Integers [N].
      mask: [N], nonzero where there is a token; None without one.
      labels: [N], negative where there is none; None without labels.
      shift_labels: Whether labels are those of their own positions.
    """
    ids = as_ids(ids)
    length = ids.size if mask is None else int(np.flatnonzero(mask).max(initial=-1)) + 1
    if labels is None:
        return TokenDocument(ids[:length])
    if labels.size != ids.size:
        raise UserError(f"the row has {labels.size} labels for {ids.size} ids")
    labels = labels.astype(np.int64)
    if shift_labels:
        labels = np.append(labels[1:], IGNORED)
    labels = np.where(labels < 0, IGNORED, labels).astype(np.int32)
    labels[length:] = IGNORED
    return TokenDocument(ids, labels)
