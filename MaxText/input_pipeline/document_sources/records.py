"""Reads text or ids from TFRecord, ArrayRecord and tensor archives.

Two kinds of readers: `record_texts` for text to prepare, and `read_ids` for token ids, which also
reads tables (tables.py). Both check the checksums of every record.
"""

import functools
import io
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from MaxText.errors import UserError
from MaxText.input_pipeline.document_sources.byte_streams import (
    READ_ERRORS,
    check_no_pointer_file,
    decode,
    decompressed,
    local_file,
    read_errors_as_user_error,
    scan_members,
)
from MaxText.input_pipeline.document_sources.document_formats import FileFormat, Layout, format_of
from MaxText.input_pipeline.document_sources.source_files import FileRange, SourceFile
from MaxText.input_pipeline.document_sources.tables import (
    TokenDocument,
    as_ids,
    id_column,
    open_table,
    table_documents,
)
from MaxText.input_pipeline.document_sources.text_streams import (
    PARAGRAPH_END,
    Skipped,
    missing_text_error,
)
from MaxText.input_pipeline.formats import array_record, tf_example
from MaxText.input_pipeline.formats.torch_tensors import read_tensor
from MaxText.storage import tfrecord
from MaxText.storage.errors import BadRecordError
from MaxText.storage.file_access import open_stream, reason

USUAL_FIELDS = ("input_ids", "text", "tokens")

# Webdataset members hold one tensor, named <sample>.<field>.<ending>: 000123.input_id.pth.
_TENSOR_ENDINGS = (".pth", ".pt", ".npy")
# Default fields if a sample has several.
_USUAL_TENSORS = ("input_id", "input_ids", "tokens", "text", "")

_Records = Iterator[tuple[int, bytes | BadRecordError]]


def scan_records(file_range: FileRange) -> _Records:
    """Yields (position, bytes or error) of each record of a file, in order.

    The position is the offset in the decompressed TFRecord file, or the record number in the
    ArrayRecord file, of which only the records in the range are read. A remote ArrayRecord file is
    copied to local disk temporarily. Raises BadRecordError if no further record can be found, and
    READ_ERRORS for failed reads.
    """
    path = file_range.file.path
    layout, compression = file_range.file.format
    with open_stream(path) as file:
        if layout is Layout.TFRECORD:
            yield from tfrecord.scan_records(decompressed(file, compression), path)
            return
    with local_file(path) as local_copy:
        yield from array_record.scan_records(path, local_copy, file_range.partition)


def record_texts(
    file_range: FileRange, text_field: str, skipped: Skipped
) -> Iterator[tuple[int, str]]:
    """Yields (number of the record in the file, text).

    `text_field` is the tf.train.Example feature with the text; multiple values are paragraphs.
    `skipped` collects records without text. Raises UserError or READ_ERRORS for damage, and
    UserError beyond the limit of `skipped`.
    """
    path = file_range.file.path
    has_numbers = file_range.file.format.layout is Layout.ARRAY_RECORD
    for index, (position, record) in enumerate(scan_records(file_range)):
        # Never skip damaged text records: missing text would go unnoticed.
        if isinstance(record, BadRecordError):
            raise record
        number = position if has_numbers else index
        try:
            text = _text(record, f"{path}, record {number},", text_field)
        except UserError as error:
            skipped.count_malformed(error)
            continue
        yield number, text


def _text(record: bytes, location: str, text_field: str) -> str:
    """Returns the text of a record: a tf.train.Example, or the bytes of the text themselves."""
    try:
        features = tf_example.decode(record)
    except tf_example.ExampleError:
        features = {}
    # Text does not parse as an example by accident: three nested fields each start with a line feed
    # and a matching length.
    if not features or "" in features:
        return decode(record, location)
    values = features.get(text_field)
    if not isinstance(values, list):
        texts = [name for name, value in features.items() if isinstance(value, list)]
        raise missing_text_error(location, text_field, texts)
    return PARAGRAPH_END.join(decode(value, location) for value in values)


def read_ids(
    path: str, kind: str, fields: Sequence[str] = ()
) -> Iterator[TokenDocument | BadRecordError]:
    """Yields the documents of one file, or a BadRecordError for damaged ones.

    TFRecord and ArrayRecord files have one tf.train.Example per document, tables a row with a list
    of integers (see table_documents), webdataset archives a tensor (torch.save or numpy) per
    sample.

    Args:
      path: Local path or URL; TFRecords and archives may end in .gz .zst .xz .bz2 or .tgz.
      kind: "tfrecord", "arrayrecord", "parquet", "arrow" or "webdataset".
      fields: Features, columns or sample fields, of which the first that exists is read; empty for
        the usual ones, or the only one in an archive.

    Raises:
      BadRecordError: Nothing can be read from its position on.
      UserError: There is no such field, or pyarrow is not installed.
    """
    names = fields or USUAL_FIELDS
    if kind in ("parquet", "arrow"):
        return _documents(path, "row", table_documents(path, names))
    if kind == "webdataset":
        return _documents(path, "byte", _archive_tensors(path, fields))
    to_ids = functools.partial(tf_example.int64_values, names=names)
    unit = "byte" if kind == "tfrecord" else "record"
    return _documents(path, unit, _scan_file(path, kind), to_ids)


def read_chunks(path: str, dtype: str) -> Iterator[TokenDocument | BadRecordError]:
    """Reads a token file of a dataset prepared as ArrayRecord."""
    to_ids = functools.partial(np.frombuffer, dtype=np.dtype(dtype).newbyteorder("<"))
    return _documents(path, "record", _scan_file(path, "arrayrecord"), to_ids)


def _tensor(content: bytes) -> np.ndarray:
    """Returns the integers of a file of numpy or torch; UserError if there are none."""
    if not content.startswith(b"\x93NUMPY"):
        return read_tensor(content)
    try:
        values = np.load(io.BytesIO(content), allow_pickle=False)
    # A damaged header can raise anything, even MemoryError (a shape of 2^60).
    except Exception as error:
        raise UserError(f"the .npy member is damaged ({error})") from error
    if values.ndim != 1 or values.dtype.kind not in "iu":
        raise UserError(f"the member is {values.dtype} of shape {values.shape}, not a list of ids")
    return values


def _documents(
    path: str,
    unit: str,
    records: Iterator[tuple[int, bytes | TokenDocument | BadRecordError]],
    to_ids: Callable[[bytes], np.ndarray] = _tensor,
) -> Iterator[TokenDocument | BadRecordError]:
    """Converts records to documents, and errors of the file to BadRecordError.

    Args:
      path: Of the file, for messages.
      unit: What positions count: "byte", "record" or "row".
      records: (position, contents, document or error).
      to_ids: Decodes contents.
    """
    position = 0
    try:
        for position, record in records:
            if isinstance(record, bytes):
                try:
                    yield TokenDocument(as_ids(to_ids(record)))
                except (UserError, ValueError) as error:
                    yield BadRecordError(path, position, str(error), unit)
            else:
                yield record
    except READ_ERRORS as error:
        check_no_pointer_file(path)
        problem = f"from here on the file cannot be read ({reason(error)})"
        raise BadRecordError(path, position, problem, unit) from error


def holds_text(
    files: Sequence[str], kind: str, fields: Sequence[str] = (), text_field: str = "text"
) -> bool:
    """Returns whether files hold text, by their first record or columns.

    Raises UserError for initial damage, or if they hold neither.
    """
    fields = fields or USUAL_FIELDS
    if kind == "webdataset":
        return False
    for file in files:
        with read_errors_as_user_error(file):
            if kind in ("parquet", "arrow"):
                with open_table(FileRange.whole(file)) as table:
                    return id_column(table, file, fields, text_field) is None
            for _, record in _scan_file(file, kind):
                # Damaged records are inconclusive.
                if isinstance(record, bytes):
                    return _is_text(record, file, fields, text_field)
    return False


def _scan_file(path: str, kind: str) -> _Records:
    """Yields the records of a whole file as scan_records does."""
    file_format = FileFormat(Layout(kind), format_of(path).compression)
    return scan_records(FileRange(SourceFile(path, path, -1, file_format)))


def _is_text(record: bytes, path: str, fields: Sequence[str], text_field: str) -> bool:
    """Returns whether a record holds text, not ids; UserError if it holds neither."""
    try:
        features = tf_example.decode(record)
    except tf_example.ExampleError:
        return True
    if any(isinstance(features.get(name), np.ndarray) for name in fields):
        return False
    if isinstance(features.get(text_field), list):
        return True
    raise UserError(
        f"{path}: its records have no integer feature {' or '.join(fields)} and no text in "
        f"{text_field} (features: {tf_example.describe(record)}). Set token_records.field, or "
        "text_field for text, to one of them."
    )


def _archive_tensors(path: str, fields: Sequence[str]) -> Iterator[tuple[int, bytes]]:
    """Yields (offset, contents) of the tensor of each sample.

    The first sample decides which of `fields` is read. Raises UserError for a sample without it.
    """
    chosen_field = None
    for sample in _samples(path):
        if chosen_field is None:
            candidates = fields or (sample if len(sample) == 1 else _USUAL_TENSORS)
            chosen_field = next((field for field in candidates if field in sample), None)
        if chosen_field not in sample:
            missing = " or ".join(fields) or chosen_field or "a usual field"
            members = ", ".join(sorted(field or "(no name)" for field in sample))
            raise UserError(
                f"{path} has a sample without {missing} (its {'/'.join(_TENSOR_ENDINGS)} members: "
                f"{members}). Set token_records.field to the one that holds token ids."
            )
        yield sample[chosen_field]


def _samples(path: str) -> Iterator[dict[str, tuple[int, bytes]]]:
    """Yields {field: (offset, contents)} of consecutive members of one name."""
    key = ""
    sample = {}
    with open_stream(path) as file:
        members = scan_members(decompressed(file, format_of(path).compression))
        for member, content in members:
            if not member.name.endswith(_TENSOR_ENDINGS):
                continue
            folder, _, name = member.name.rpartition("/")
            stem, *parts = name.split(".")
            field = ".".join(parts[:-1])
            if sample and (f"{folder}/{stem}" != key or field in sample):
                yield sample
                sample = {}
            key = f"{folder}/{stem}"
            sample[field] = member.offset_data, content.read()
    if sample:
        yield sample
