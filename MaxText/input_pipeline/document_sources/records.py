"""Reads text or ids from TFRecord, ArrayRecord and tensor archives."""

import contextlib
import dataclasses
import functools
import io
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from MaxText.errors import UserError
from MaxText.input_pipeline.document_sources.byte_streams import (
    READ_ERRORS,
    decode,
    decompressed,
    describe_error,
    local_file,
    read_errors_as_user_error,
    scan_members,
)
from MaxText.input_pipeline.document_sources.document_formats import Layout, check_not_compressed
from MaxText.input_pipeline.document_sources.source_files import FileRange
from MaxText.input_pipeline.document_sources.tables import (
    TokenDocument,
    as_ids,
    id_column,
    open_table,
    table_documents,
)
from MaxText.input_pipeline.document_sources.text_streams import (
    PARAGRAPH_END,
    missing_text_error,
    token_ids_error,
)
from MaxText.input_pipeline.formats import array_record, tf_example, tfrecord
from MaxText.input_pipeline.formats.torch_tensors import read_tensor
from MaxText.storage.errors import BadRecordError

# Unit of document positions.
_UNITS = {
    **dict.fromkeys(("tfrecord", "webdataset"), "byte"), "arrayrecord": "record",
    **dict.fromkeys(("parquet", "arrow"), "row"),
}  # fmt: skip

_LAYOUTS = {"tfrecord": Layout.TFRECORD, "arrayrecord": Layout.ARRAY_RECORD}
USUAL_FIELDS = ("input_ids", "text", "tokens")

# Webdataset members hold one tensor, named <sample>.<field>.<ending>: 000123.input_id.pth.
_TENSOR_ENDINGS = (".pth", ".pt", ".npy")
# Default fields if a sample has several.
_USUAL_TENSORS = ("input_id", "input_ids", "tokens", "text", "")
_LARGEST_MEMBER = 2**28  # limits memory: a member may be compressed

_Documents = Iterator[tuple[int, TokenDocument | BadRecordError]]
_Records = Iterator[tuple[int, bytes | BadRecordError]]


def scan_records(part: FileRange) -> _Records:
    """Yields (position, bytes or error) of each record of a file, in order.

    The position is the offset in the decompressed TFRecord file, or the record number in the
    ArrayRecord file, of which only the records in the range are read. A remote ArrayRecord file is
    copied to local disk temporarily. Raises BadRecordError if no further record can be found,
    READ_ERRORS for failed reads, and UserError if the file changed or is a compressed ArrayRecord
    file.
    """
    path, (layout, compression) = part.file.path, part.file.format
    check_not_compressed(path, part.file.format)
    with part.open() as file:
        if layout is Layout.TFRECORD:
            with decompressed(file, compression) as contents:
                yield from tfrecord.scan_records(contents, path)
            return
    with local_file(path) as copy:
        yield from array_record.scan_records(path, part.partition, copy)


def record_texts(part: FileRange, text_field: str) -> Iterator[tuple[int, str]]:
    """Yields (number of the record in the file, text).

    `text_field` is the tf.train.Example feature with the text; multiple values are paragraphs.
    Raises UserError for damage or a record without text.
    """
    path = part.file.path
    is_numbered = part.file.format.layout is Layout.ARRAY_RECORD
    with read_errors_as_user_error(path):
        try:
            for count, (position, record) in enumerate(scan_records(part)):
                # Never skip damaged text records: missing text would go unnoticed.
                if isinstance(record, BadRecordError):
                    raise record
                number = position if is_numbered else count
                yield number, _text(record, path, number, text_field)
        except BadRecordError as error:
            raise UserError(
                f"{error}. Copy the file again or remove it from prepare_source."
            ) from error


def _text(record: bytes, path: str, number: int, text_field: str) -> str:
    where = f"{path}, record {number},"
    try:
        features = tf_example.decode(record)
    except tf_example.ExampleError:
        features = {}
    # Text does not parse as an example by accident: three nested fields each start with a line feed
    # and a matching length.
    if not features or "" in features:
        return decode(record, where)
    values = features.get(text_field)
    if isinstance(values, list):
        return PARAGRAPH_END.join(decode(value, where) for value in values)
    texts = [name for name, value in features.items() if isinstance(value, list)]
    ids = [name for name in features if np.asarray(features[name]).dtype.kind == "i"]
    if ids and not texts:
        raise token_ids_error(where, path, f"integers in {', '.join(ids)}")
    raise missing_text_error(where, text_field, texts)


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
    position = 0
    with _read_errors_as_bad_record(path, kind, lambda: position):
        for item in _documents(path, kind, fields):
            position, document = item
            yield document


def read_chunks(path: str, dtype: str) -> Iterator[TokenDocument | BadRecordError]:
    """Reads a token file of a dataset prepared as ArrayRecord."""
    stored = np.dtype(dtype).newbyteorder("<")
    with _read_errors_as_bad_record(path, "arrayrecord"):
        for number, record in _scan_file(path, "arrayrecord"):
            if isinstance(record, bytes) and len(record) % stored.itemsize:
                problem = f"the record is damaged: it has {len(record)} bytes"
                record = BadRecordError(path, number, problem, "record")
            if isinstance(record, BadRecordError):
                yield record
            else:
                yield TokenDocument(np.frombuffer(record, stored).astype(np.int32))


def holds_text(
    files: Sequence[str], kind: str, fields: Sequence[str] = (), text_field: str = "text"
) -> bool:
    """Returns whether files hold text, by their first record or columns.

    Raises BadRecordError for initial damage, and UserError if they hold neither.
    """
    fields = fields or USUAL_FIELDS
    if kind == "webdataset":
        return False
    if kind in ("parquet", "arrow"):
        with (
            _read_errors_as_bad_record(files[0], kind),
            open_table(FileRange.whole(files[0])) as table,
        ):
            return id_column(table, files[0], fields, text_field) is None
    for file in files:
        with _read_errors_as_bad_record(file, kind):
            for _, record in _scan_file(file, kind):
                # Damaged records are inconclusive.
                if isinstance(record, bytes):
                    return _is_text(record, file, fields, text_field)
    return False


@contextlib.contextmanager
def _read_errors_as_bad_record(
    path: str, kind: str, position: Callable[[], int] = lambda: 0
) -> Iterator[None]:
    try:
        yield
    except UserError:
        raise
    except READ_ERRORS as error:
        reason = f"from here on the file {describe_error(error)}"
        raise BadRecordError(path, position(), reason, _UNITS[kind]) from error


def _documents(path: str, kind: str, fields: Sequence[str]) -> _Documents:
    if kind in ("parquet", "arrow"):
        part = FileRange.whole(path)
        check_not_compressed(path, part.file.format)
        with open_table(part) as table:
            column = id_column(table, path, fields or USUAL_FIELDS)
            assert column is not None
            yield from table_documents(table, path, column)
        return
    if kind == "webdataset":
        records, ids_of = _archive_tensors(path, fields), _tensor
    else:
        records = _scan_file(path, kind)
        ids_of = functools.partial(tf_example.int64_values, names=fields or USUAL_FIELDS)
    for position, record in records:
        try:
            if isinstance(record, BadRecordError):
                raise record
            document = TokenDocument(as_ids(ids_of(record), path, position, _UNITS[kind]))
        except BadRecordError as problem:
            document = problem
        except UserError as error:  # ExampleError, TorchFileError
            document = BadRecordError(path, position, str(error), _UNITS[kind])
        yield position, document


def _scan_file(path: str, kind: str) -> _Records:
    part = FileRange.whole(path)
    file = dataclasses.replace(part.file, format=part.file.format._replace(layout=_LAYOUTS[kind]))
    return scan_records(FileRange(file))


def _is_text(record: bytes, path: str, fields: Sequence[str], text_field: str) -> bool:
    try:
        features = tf_example.decode(record)
    except tf_example.ExampleError as error:
        with contextlib.suppress(UnicodeDecodeError):
            if record.decode().strip():
                return True
        raise UserError(
            f"{path}: its first record is neither a tf.train.Example nor UTF-8 text ({error}). "
            "Name files of token ids or of text."
        ) from error
    if any(isinstance(features.get(name), np.ndarray) for name in fields):
        return False
    if isinstance(features.get(text_field), list):
        return True
    raise UserError(
        f"{path}: its records have no integer feature {' or '.join(fields)} and no text in "
        f"{text_field} (features: {tf_example.describe(record)}). Set token_records.field, or "
        "text_field for text, to one of them."
    )


def _archive_tensors(path: str, fields: Sequence[str]) -> _Records:
    chosen, first_name = None, ""
    there: dict[str, None] = {}
    for name, sample in _samples(path):
        first_name = name
        there |= dict.fromkeys(sample)
        wanted = fields or (sample if len(sample) == 1 else _USUAL_TENSORS)
        field = next((field for field in wanted if field in sample), None)
        chosen = field if chosen is None else chosen
        if field is not None and field == chosen:
            yield sample[field]
        elif not fields:
            break
    else:
        if chosen is not None or not first_name:
            return
    asked = f"field {' or '.join(fields)}" if fields else "one field of tokens"
    found = ", ".join(sorted(field or "(no name)" for field in there)) or "none"
    raise UserError(
        f"{path} has no tensors of {asked} (fields of its {'/'.join(_TENSOR_ENDINGS)} members: "
        f"{found}; first member: {first_name}). Set token_records.field to the one that holds "
        "token ids."
    )


def _samples(path: str) -> Iterator[tuple[str, dict[str, tuple[int, bytes]]]]:
    """Yields the first member's name, and {field: (offset, bytes)}."""
    part = FileRange.whole(path)
    with part.open() as file, decompressed(file, part.file.format.compression) as contents:
        first_name, key, sample = "", None, {}
        for member, content in scan_members(contents, path):
            if content is None:
                continue
            first_name = first_name or member.name
            folder, _, name = member.name.rpartition("/")
            if not name.endswith(_TENSOR_ENDINGS):
                continue
            stem, *parts = name.split(".")
            field = ".".join(parts[:-1])
            if (folder, stem) != key or field in sample:
                if sample:
                    yield first_name, sample
                key, sample = (folder, stem), {}
            sample[field] = member.offset_data, content.read(_LARGEST_MEMBER + 1)
    if first_name:
        yield first_name, sample


def _tensor(content: bytes) -> np.ndarray:
    if len(content) > _LARGEST_MEMBER:
        raise UserError(f"the member has more than {_LARGEST_MEMBER:,} bytes")
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
