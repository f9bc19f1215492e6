"""Reads text or token ids from parquet and Arrow files, by row."""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from MaxText.errors import UserError
from MaxText.input_pipeline.document_sources.byte_streams import decode, read_errors_as_user_error
from MaxText.input_pipeline.document_sources.source_files import FileRange
from MaxText.input_pipeline.document_sources.text_streams import (
    PARAGRAPH_END,
    missing_text_error,
    token_ids_error,
)
from MaxText.storage.errors import BadRecordError
from MaxText.storage.file_access import is_url, local_path

IGNORED = -100
"""Label of a position that does not count; any negative one is read as such."""

_BATCH_ROWS = 256  # parquet rows decoded at a time
_TEXT_TYPES = {"string", "large_string", "string_view", "binary", "large_binary", "binary_view"}
_MASK, _LABELS = "attention_mask", "labels"
_UNIT = "row"
_MAX_ID = np.iinfo(np.int32).max


class Table(NamedTuple):
    """A range of an open table."""

    schema: Any  # pyarrow.Schema
    batches: Callable[[list[str]], Iterator[tuple[int, Any]]]
    """Yields (number of the first row in the file, pyarrow.RecordBatch of at least the columns)."""

    @property
    def types(self) -> dict[str, Any]:
        return {field.name: field.type for field in self.schema}


@contextmanager
def open_table(part: FileRange) -> Iterator[Table]:
    """Opens a parquet file, an Arrow file, or an Arrow stream.

    The first bytes determine the format. Errors of pyarrow, even inside the context, become
    OSError. Raises UserError if the file has changed, or pyarrow is not installed.
    """
    path = part.file.path
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise UserError(
            f"{path} is read with pyarrow, which is not installed. Run: pip install 'MaxText[data]'"
        ) from error
    try:
        with part.open() as file:
            magic = file.read(6)
            file.seek(0)
            if magic.startswith(b"PAR1"):
                parquet = pyarrow.parquet.ParquetFile(file, page_checksum_verification=True)
                batches = functools.partial(_parquet_batches, parquet, part)
                yield Table(parquet.schema_arrow, batches)
                return
            # With a memory map, skipped batches are not read.
            name = local_path(path)
            with (
                pyarrow.PythonFile(file, mode="r") if is_url(path) else pyarrow.memory_map(name)
            ) as source:
                if magic == b"ARROW1":
                    reader = pyarrow.ipc.open_file(source)
                    batches = functools.partial(_arrow_batches, reader, part)
                else:
                    reader = pyarrow.ipc.open_stream(source)
                    batches = functools.partial(
                        _arrow_stream_batches, pyarrow.ipc, source, reader.schema, part
                    )
                yield Table(reader.schema, batches)
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:  # or a name that is not UTF-8
        raise OSError(str(error).split("\n")[0]) from error


def _parquet_batches(file: Any, part: FileRange, columns: list[str]) -> Iterator[tuple[int, Any]]:
    sizes = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
    groups = part.partition(len(sizes))
    row = sum(sizes[: groups.start])
    for batch in file.iter_batches(_BATCH_ROWS, row_groups=[*groups], columns=columns):
        yield row, batch
        row += batch.num_rows


def _arrow_batches(reader: Any, part: FileRange, columns: list[str]) -> Iterator[tuple[int, Any]]:
    numbers, row = part.partition(reader.num_record_batches), 0
    for number in range(numbers.stop):
        batch = reader.get_batch(number)
        if number >= numbers.start:
            yield row, batch
        row += batch.num_rows


def _arrow_stream_batches(
    ipc: Any, source: Any, schema: Any, part: FileRange, columns: list[str]
) -> Iterator[tuple[int, Any]]:
    source.seek(0)
    # Skip other columns, which may be compressed or large.
    options = ipc.IpcReadOptions(included_fields=[schema.get_field_index(c) for c in columns])
    reader, row = ipc.open_stream(source, options=options), 0
    while part.stop is None or source.tell() < part.stop:
        offset = source.tell()
        try:
            batch = reader.read_next_batch()
        except StopIteration:
            return
        if offset >= part.start:
            yield row, batch
        row += batch.num_rows


def _is_list(column_type: Any) -> bool:
    return str(column_type).startswith(("list<", "large_list<", "fixed_size_list<"))


def _is_list_of_integers(column_type: Any) -> bool:
    return _is_list(column_type) and str(column_type.value_type).startswith(("int", "uint"))


def table_texts(part: FileRange, text_field: str) -> Iterator[tuple[int, str]]:
    """Yields (row number, text or "" for null) for rows of a range.

    `text_field` is a column of strings, UTF-8 bytes, or lists of strings (paragraphs). Raises
    UserError if the file is damaged, has no such column, or pyarrow is not installed.
    """
    path = part.file.path
    with read_errors_as_user_error(path), open_table(part) as table:
        _check_text_column(table, path, text_field)
        for row, batch in table.batches([text_field]):
            yield from enumerate(_column_texts(batch, path, text_field, row), start=row)


def _check_text_column(table: Table, path: str, text_field: str) -> None:
    fields = []  # names may repeat
    for field in table.schema:
        is_nested = str(field.type).startswith(("list<", "large_list<", "dictionary<"))
        if str(field.type.value_type if is_nested else field.type) in _TEXT_TYPES:
            fields.append(field.name)
    ids = [field.name for field in table.schema if _is_list_of_integers(field.type)]
    if ids and not fields:
        raise token_ids_error(path, path, f"integers in {', '.join(ids)}")
    if fields.count(text_field) != 1:
        raise missing_text_error(path, text_field, fields)


def _column_texts(batch: Any, path: str, text_field: str, first_row: int) -> Iterator[str]:
    try:
        column = batch.column(text_field)
        try:
            column.validate(full=True)  # Arrow files have no checksums for offsets
        except ValueError as error:  # pyarrow.ArrowInvalid
            # Decoding reports non-UTF-8 strings with their row.
            if "UTF8" not in str(error):
                raise
        values = column.to_pylist()
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path}: field {text_field!r} of a row in {first_row} to "
            f"{first_row + batch.num_rows - 1} is not UTF-8 text ({error.reason}). Write the file "
            "again with UTF-8 text."
        ) from error
    for row, value in enumerate(values, start=first_row):
        paragraphs = value if isinstance(value, list) else [value]
        yield PARAGRAPH_END.join(
            decode(paragraph, f"{path}, row {row},") if isinstance(paragraph, bytes) else paragraph
            for paragraph in paragraphs
            if paragraph is not None
        )


class TokenDocument(NamedTuple):
    """A document of N tokens."""

    ids: np.ndarray  # int32 [N]
    labels: np.ndarray | None = None  # int32 [N], id to predict or IGNORED; None: the next id


def as_ids(values_N: np.ndarray, path: str, offset: int, unit: str) -> np.ndarray:
    """Converts integers [N] to int32 ids; BadRecordError if out of range."""
    if values_N.size:
        low, high = int(values_N.min()), int(values_N.max())
        if low < 0 or high > _MAX_ID:
            bad = low if low < 0 else high
            reason = f"{bad} is not a token id (ids are 0 to {_MAX_ID})"
            raise BadRecordError(path, offset, reason, unit)
    return values_N.astype(np.int32, copy=False)


def id_column(table: Table, path: str, fields: Sequence[str], text_field: str = "") -> str | None:
    """Returns the first of `fields` with ids; None if there is text.

    Raises UserError, listing the columns, if there is neither.
    """
    types = table.types
    for name in fields:
        if name in types and _is_list_of_integers(types[name]):
            return name
    if text_field in types and "string" in str(types[text_field]):
        return None
    no_text = f" and no text in {text_field}" if text_field else ""
    columns = ", ".join(f"{name} ({kind})" for name, kind in types.items())
    raise UserError(
        f"{path} has no column of lists of integers named {' or '.join(fields)}{no_text} (columns: "
        f"{columns}). Set token_records.field, or text_field for text, to one of them."
    )


def has_mask_and_labels(table: Table) -> tuple[bool, bool]:
    types = table.types
    has_mask = _MASK in types and _is_list(types[_MASK])
    return has_mask, _LABELS in types and _is_list_of_integers(types[_LABELS])


def table_documents(
    table: Table, path: str, column: str
) -> Iterator[tuple[int, TokenDocument | BadRecordError]]:
    """Yields (row number, document or error) for all rows.

    Without labels, a row ends after the last position with attention, if there is an
    `attention_mask`. With labels it keeps its length, and padding has no label.

    Labels that are the ids of their own positions, as Hugging Face models take them, are shifted
    left by one; the first labels of the file tell.
    """
    has_mask, has_labels = has_mask_and_labels(table)
    shift_labels = has_labels and _labels_are_ids(table, column)
    columns = [column, *[_MASK] * has_mask, *[_LABELS] * has_labels]
    for first, batch in table.batches(columns):
        rows = zip(*(_rows(batch, name) for name in columns), strict=True)
        for row, values in enumerate(rows, start=first):
            try:
                missing = [name for name, of in zip(columns, values, strict=True) if of is None]
                if missing:
                    reason = f"the row lacks a value in {missing[0]}"
                    raise BadRecordError(path, row, reason, _UNIT)
                ids, mask = values[0], values[1] if has_mask else None
                labels = values[-1] if has_labels else None
                document = _document(ids, mask, labels, shift_labels, path, row)
            except BadRecordError as problem:
                document = problem
            yield row, document


def _labels_are_ids(table: Table, column: str) -> bool:
    """Returns whether labels equal the ids at their own positions."""
    for _, batch in table.batches([column, _LABELS]):
        num_counted = 0
        for ids, labels in zip(_rows(batch, column), _rows(batch, _LABELS), strict=True):
            if ids is None or labels is None or ids.size != labels.size:
                return False
            counted = labels >= 0
            num_counted += np.count_nonzero(counted)
            if not np.array_equal(ids[counted], labels[counted]):
                return False
        if num_counted:
            return True
    return False


def _rows(batch: Any, name: str) -> list[np.ndarray | None]:
    """Returns the values of each row of a list column; None if one is null."""
    column = batch.column(name)
    # Arrow files have no checksums, and corrupt offsets would read arbitrary memory.
    column.validate(full=True)
    flat = column.flatten()
    ends = np.cumsum(column.value_lengths().fill_null(0).to_numpy(zero_copy_only=False))[:-1]
    values = np.split(flat.fill_null(0).to_numpy(zero_copy_only=False), ends)
    nulls = np.split(flat.is_null().to_numpy(zero_copy_only=False), ends)
    rows = zip(column.is_null().to_pylist(), nulls, values, strict=False)  # of an empty batch
    # Copies, as the file may be memory-mapped.
    return [None if no_list or no.any() else row.copy() for no_list, no, row in rows]


def _document(
    ids: np.ndarray,
    mask: np.ndarray | None,
    labels: np.ndarray | None,
    shift_labels: bool,
    path: str,
    row: int,
) -> TokenDocument:
    ids = as_ids(ids, path, row, _UNIT)
    end = ids.size if mask is None else int(np.flatnonzero(mask).max(initial=-1)) + 1
    if labels is None:
        return TokenDocument(ids[:end])
    if labels.size != ids.size:
        reason = f"the row has {labels.size} labels for {ids.size} ids"
        raise BadRecordError(path, row, reason, _UNIT)
    labels = labels.astype(np.int64)
    if shift_labels:
        labels = np.append(labels[1:], IGNORED)
    labels = np.where(labels < 0, IGNORED, labels).astype(np.int32)
    labels[end:] = IGNORED
    return TokenDocument(ids, labels)
