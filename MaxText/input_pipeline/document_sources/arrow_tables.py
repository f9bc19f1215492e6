"""Text columns of parquet and arrow files, a few rows at a time."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from MaxText.errors import UserError
from MaxText.input_pipeline.document_sources.compressed import (
    decode,
    open_bytes,
    reading,
)
from MaxText.input_pipeline.document_sources.json_rows import PARAGRAPH_END, no_text, token_ids
from MaxText.input_pipeline.storage import is_url

# Rows of parquet that are decoded at once.
_BATCH_ROWS = 256

_ARROW_FILE_MAGIC = b"ARROW1"
_TEXT_TYPES = {"string", "large_string", "string_view", "binary", "large_binary", "binary_view"}


def share(start: int, stop: int | None, size: int, count: int) -> range:
    """Which of `count` equal parts of a file begin in its bytes [start, stop).

    Ranges that cover the file without overlap give each part once.

    Args:
      stop: None for the end.
      size: bytes of the file, above 0 unless the range is the whole file.
      count: parts.
    """
    first = -(-start * count // size) if start else 0
    return range(first, count if stop is None else -(-stop * count // size))


def parquet_texts(
    path: str, text_field: str, start: int = 0, stop: int | None = None, size: int | None = None
) -> Iterator[tuple[int, str]]:
    """Reads the text of the row groups that bytes [start, stop) stand for.

    Args:
      path: local path or URL.
      text_field: column of strings, of UTF-8 bytes, or of lists of strings (paragraphs).
      start, stop: a range of the file as in `share`.
      size: bytes of the file when it was found.

    Yields:
      Row number in the file and text, "" for null.

    Raises:
      UserError: damaged, no such column, or pyarrow is not installed.
    """
    with _reading_table(path), open_bytes(path, size) as file:
        from pyarrow import parquet

        table = parquet.ParquetFile(file)
        _check_column(table.schema_arrow, path, text_field)
        sizes = [table.metadata.row_group(i).num_rows for i in range(table.num_row_groups)]
        chosen = share(start, stop, size or 0, len(sizes))
        row = sum(sizes[: chosen.start])
        for batch in table.iter_batches(_BATCH_ROWS, row_groups=[*chosen], columns=[text_field]):
            for text in _column_texts(batch, path, text_field, row):
                yield row, text
                row += 1


def arrow_texts(
    path: str, text_field: str, start: int = 0, stop: int | None = None, size: int | None = None
) -> Iterator[tuple[int, str]]:
    """Reads the text of the record batches that bytes [start, stop) stand for.

    The file is an arrow stream, as the Hugging Face datasets library writes, or an arrow file.
    Arguments, results and errors are those of `parquet_texts`.
    """
    with _reading_table(path) as arrow, open_bytes(path, size) as file:
        is_file = file.read(len(_ARROW_FILE_MAGIC)) == _ARROW_FILE_MAGIC
        file.seek(0)
        # Through a map of the file, batches that are passed over are not read.
        with arrow.PythonFile(file, mode="r") if is_url(path) else arrow.memory_map(path) as source:
            if is_file:
                batches = _file_batches(arrow, source, path, text_field, start, stop, size or 0)
            else:
                batches = _stream_batches(arrow, source, path, text_field, start, stop)
            row = 0
            for batch, is_chosen in batches:
                if is_chosen:
                    yield from enumerate(_column_texts(batch, path, text_field, row), start=row)
                row += batch.num_rows


def _stream_batches(
    arrow: Any, source: Any, path: str, text_field: str, start: int, stop: int | None
) -> Iterator[tuple[Any, bool]]:
    """Batches up to the end of the range, and whether they begin in it."""
    schema = arrow.ipc.open_stream(source).schema
    _check_column(schema, path, text_field)
    source.seek(0)
    # Other columns may be compressed, or large.
    options = arrow.ipc.IpcReadOptions(included_fields=[schema.get_field_index(text_field)])
    reader = arrow.ipc.open_stream(source, options=options)
    while stop is None or source.tell() < stop:
        at = source.tell()
        try:
            batch = reader.read_next_batch()
        except StopIteration:
            return
        yield batch, at >= start


def _file_batches(
    arrow: Any, source: Any, path: str, text_field: str, start: int, stop: int | None, size: int
) -> Iterator[tuple[Any, bool]]:
    reader = arrow.ipc.open_file(source)
    _check_column(reader.schema, path, text_field)
    chosen = share(start, stop, size, reader.num_record_batches)
    for number in range(chosen.stop):
        yield reader.get_batch(number), number >= chosen.start


@contextmanager
def _reading_table(path: str) -> Iterator[Any]:
    """Gives the package pyarrow; its errors become UserErrors that name the file."""
    try:
        import pyarrow
    except ImportError as error:
        raise UserError(
            f"{path} is read with pyarrow, which is not installed. Run: pip install 'MaxText[data]'"
        ) from error
    try:
        with reading(path):
            yield pyarrow
    except pyarrow.ArrowException as error:
        reason = str(error).split("\n")[0]
        raise UserError(
            f"{path} cannot be read: {reason}. Copy it again or leave it out of prepare_source."
        ) from error


def _value_type(column_type: Any) -> Any:
    """The type of the values of a list or dictionary column, of any other its own."""
    is_nested = str(column_type).startswith(("list<", "large_list<", "dictionary<"))
    return column_type.value_type if is_nested else column_type


def _is_list_of_integers(column_type: Any) -> bool:
    is_list = str(column_type).startswith(("list<", "large_list<", "fixed_size_list<"))
    return is_list and str(column_type.value_type).startswith(("int", "uint"))


def _check_column(schema: Any, path: str, text_field: str) -> None:
    fields = [field.name for field in schema if str(_value_type(field.type)) in _TEXT_TYPES]
    if not fields and (ids := [f.name for f in schema if _is_list_of_integers(f.type)]):
        raise token_ids(path, path, f"integers in {', '.join(ids)}")
    if fields.count(text_field) != 1:
        raise no_text(path, text_field, fields)


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
        if isinstance(value, list):
            paragraphs = [paragraph for paragraph in value if paragraph is not None]
            yield PARAGRAPH_END.join(_text(paragraph, path, row) for paragraph in paragraphs)
        else:
            yield "" if value is None else _text(value, path, row)


def _check_offsets(column: Any) -> None:
    """Arrow files have no checksums, and what their offsets point at would be read unseen."""
    try:
        column.validate(full=True)
    except ValueError as error:  # pyarrow.ArrowInvalid
        # Strings that are not UTF-8 are named when they are decoded.
        if "UTF8" not in str(error):
            raise


def _text(value: str | bytes, path: str, row: int) -> str:
    return decode(value, f"{path}, row {row},") if isinstance(value, bytes) else value
