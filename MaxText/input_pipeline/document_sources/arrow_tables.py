"""Reads columns of parquet and Arrow files in batches of rows."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from MaxText.errors import UserError
from MaxText.input_pipeline.document_sources.compressed import (
    decode,
    open_bytes,
    read_errors_as_user_error,
)
from MaxText.input_pipeline.document_sources.json_rows import (
    PARAGRAPH_END,
    missing_text_error,
    token_ids_error,
)
from MaxText.storage.file_access import is_url, local_path

_BATCH_ROWS = 256  # parquet rows decoded at a time

_TEXT_TYPES = {"string", "large_string", "string_view", "binary", "large_binary", "binary_view"}


def partition_range(start: int, stop: int | None, size: int, count: int) -> range:
    """Returns which of `count` equal parts of a file start in its bytes [start, stop).

    Ranges that partition the file give each part exactly once.
    """
    first = -(-start * count // size) if start else 0
    return range(first, count if stop is None else -(-stop * count // size))


class Table(Protocol):
    """An open table; `schema` is its pyarrow.Schema."""

    schema: Any

    def batches(
        self, columns: list[str], start: int = 0, stop: int | None = None
    ) -> Iterator[tuple[int, Any]]:
        """Reads the rows in bytes [start, stop) of the file.

        Yields (number of the first row in the file, pyarrow.RecordBatch of at least `columns`).
        """
        ...


@contextmanager
def open_table(path: str, size: int | None = None) -> Iterator[Table]:
    """Opens a parquet file, an Arrow file, or an Arrow stream as written by `datasets`.

    The first bytes determine the format; `size` is the listed size, to detect changes. Errors of
    pyarrow, even inside the context, become OSError. Raises UserError if the file has changed, or
    pyarrow is not installed.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise UserError(
            f"{path} is read with pyarrow, which is not installed. Run: pip install 'MaxText[data]'"
        ) from error
    try:
        with open_bytes(path, size) as file:
            magic = file.read(6)
            file.seek(0)
            if magic.startswith(b"PAR1"):
                yield _Parquet(pyarrow, file, size or 0)
                return
            # With a memory map, skipped batches are not read.
            name = local_path(path)
            with (
                pyarrow.PythonFile(file, mode="r") if is_url(path) else pyarrow.memory_map(name)
            ) as source:
                arrow_type = _ArrowFile if magic == b"ARROW1" else _ArrowStream
                yield arrow_type(pyarrow, source, size or 0)
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:  # or a name that is not UTF-8
        raise OSError(str(error).split("\n")[0]) from error


class _Parquet:
    def __init__(self, pyarrow: Any, file: Any, size: int):
        self._file = pyarrow.parquet.ParquetFile(file, page_checksum_verification=True)
        self._size = size
        self.schema = self._file.schema_arrow

    def batches(
        self, columns: list[str], start: int = 0, stop: int | None = None
    ) -> Iterator[tuple[int, Any]]:
        groups = range(self._file.num_row_groups)
        sizes = [self._file.metadata.row_group(i).num_rows for i in groups]
        chosen = partition_range(start, stop, self._size, len(sizes))
        row = sum(sizes[: chosen.start])
        for batch in self._file.iter_batches(_BATCH_ROWS, row_groups=[*chosen], columns=columns):
            yield row, batch
            row += batch.num_rows


class _ArrowFile:
    def __init__(self, pyarrow: Any, source: Any, size: int):
        self._reader = pyarrow.ipc.open_file(source)
        self._size = size
        self.schema = self._reader.schema

    def batches(
        self, columns: list[str], start: int = 0, stop: int | None = None
    ) -> Iterator[tuple[int, Any]]:
        chosen = partition_range(start, stop, self._size, self._reader.num_record_batches)
        row = 0
        for number in range(chosen.stop):
            batch = self._reader.get_batch(number)
            if number >= chosen.start:
                yield row, batch
            row += batch.num_rows


class _ArrowStream:
    def __init__(self, pyarrow: Any, source: Any, size: int):
        self._ipc, self._source = pyarrow.ipc, source
        self.schema = pyarrow.ipc.open_stream(source).schema

    def batches(
        self, columns: list[str], start: int = 0, stop: int | None = None
    ) -> Iterator[tuple[int, Any]]:
        self._source.seek(0)
        # Skip other columns, which may be compressed or large.
        included = [self.schema.get_field_index(name) for name in columns]
        options = self._ipc.IpcReadOptions(included_fields=included)
        reader = self._ipc.open_stream(self._source, options=options)
        row = 0
        while stop is None or self._source.tell() < stop:
            at = self._source.tell()
            try:
                batch = reader.read_next_batch()
            except StopIteration:
                return
            if at >= start:
                yield row, batch
            row += batch.num_rows


def table_texts(
    path: str, text_field: str, start: int = 0, stop: int | None = None, size: int | None = None
) -> Iterator[tuple[int, str]]:
    """Yields (row number in the file, text or "" for null) for the rows in bytes [start, stop).

    `text_field` is a column of strings, UTF-8 bytes, or lists of strings (paragraphs). Raises
    UserError if the file is damaged, has no such column, or pyarrow is not installed.
    """
    with read_errors_as_user_error(path), open_table(path, size) as table:
        _check_text_column(table.schema, path, text_field)
        for row, batch in table.batches([text_field], start, stop):
            yield from enumerate(_column_texts(batch, path, text_field, row), start=row)


def is_list(column_type: Any) -> bool:
    return str(column_type).startswith(("list<", "large_list<", "fixed_size_list<"))


def is_list_of_integers(column_type: Any) -> bool:
    return is_list(column_type) and str(column_type.value_type).startswith(("int", "uint"))


def _value_type(column_type: Any) -> Any:
    """Returns the value type of a list or dictionary column, else the column's own."""
    is_nested = str(column_type).startswith(("list<", "large_list<", "dictionary<"))
    return column_type.value_type if is_nested else column_type


def _check_text_column(schema: Any, path: str, text_field: str) -> None:
    fields = [field.name for field in schema if str(_value_type(field.type)) in _TEXT_TYPES]
    if not fields and (ids := [f.name for f in schema if is_list_of_integers(f.type)]):
        raise token_ids_error(path, path, f"integers in {', '.join(ids)}")
    if fields.count(text_field) != 1:
        raise missing_text_error(path, text_field, fields)


def _column_texts(batch: Any, path: str, text_field: str, first_row: int) -> Iterator[str]:
    try:
        column = batch.column(text_field)
        _check_offsets(column)
        values = column.to_pylist()
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path}: field {text_field!r} of a row in {first_row} to "
            f"{first_row + batch.num_rows - 1} is not UTF-8 text ({error.reason}). Write the file "
            "again with text that is."
        ) from error
    for row, value in enumerate(values, start=first_row):
        paragraphs = value if isinstance(value, list) else [value]
        yield PARAGRAPH_END.join(
            decode(paragraph, f"{path}, row {row},") if isinstance(paragraph, bytes) else paragraph
            for paragraph in paragraphs
            if paragraph is not None
        )


def _check_offsets(column: Any) -> None:
    """Validates offsets before use: Arrow files have no checksums."""
    try:
        column.validate(full=True)
    except ValueError as error:  # pyarrow.ArrowInvalid
        # Decoding reports non-UTF-8 strings with their row.
        if "UTF8" not in str(error):
            raise
