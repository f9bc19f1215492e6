"""Reads ArrayRecord and TFRecord files of UTF-8 text or tf.train.Examples."""

from collections.abc import Iterator

import numpy as np

from MaxText.errors import UserError
from MaxText.input_pipeline.document_sources.arrow_tables import partition_range
from MaxText.input_pipeline.document_sources.compressed import (
    decode,
    decompressed,
    local_file,
    open_bytes,
    read_errors_as_user_error,
)
from MaxText.input_pipeline.document_sources.document_formats import (
    FileFormat,
    Layout,
    check_not_compressed,
)
from MaxText.input_pipeline.document_sources.json_rows import (
    PARAGRAPH_END,
    missing_text_error,
    token_ids_error,
)
from MaxText.input_pipeline.formats import array_record, tf_example, tfrecord
from MaxText.storage.errors import BadRecord


def scan_records(
    path: str,
    file_format: FileFormat,
    start: int = 0,
    stop: int | None = None,
    size: int | None = None,
) -> Iterator[tuple[int, bytes | BadRecord]]:
    """Yields (position, bytes or error) of each record, in order.

    The position is the offset in the decompressed TFRecord file, or the record number in the
    ArrayRecord file, of which `start` and `stop` select bytes (see `partition_range`). A remote
    ArrayRecord file is copied to local disk temporarily. Raises BadRecord if no further record can
    be found, READ_ERRORS for failed reads, and UserError if the file changed or is a compressed
    ArrayRecord file.
    """
    check_not_compressed(path, file_format)
    with open_bytes(path, size) as file:
        if file_format.layout is Layout.TFRECORD:
            with decompressed(file, file_format.compression) as contents:
                yield from tfrecord.scan_records(contents, path)
            return
    with local_file(path) as copy:
        yield from array_record.scan_records(
            path, lambda count: partition_range(start, stop, size or 0, count), copy
        )


def record_texts(
    path: str,
    file_format: FileFormat,
    text_field: str,
    start: int = 0,
    stop: int | None = None,
    size: int | None = None,
) -> Iterator[tuple[int, str]]:
    """Yields (number of the record in the file, text).

    `text_field` is the tf.train.Example feature with the text; multiple values are paragraphs.
    Raises UserError for damage or a record without text.
    """
    records = scan_records(path, file_format, start, stop, size)
    is_numbered = file_format.layout is Layout.ARRAY_RECORD
    with read_errors_as_user_error(path):
        try:
            for count, (position, record) in enumerate(records):
                # Never skip damaged text records: missing text would go unnoticed.
                if isinstance(record, BadRecord):
                    raise record
                number = position if is_numbered else count
                yield number, _text(record, path, number, text_field)
        except BadRecord as error:
            raise UserError(
                f"{error}. Copy the file again or leave it out of prepare_source."
            ) from error


def _text(record: bytes, path: str, number: int, text_field: str) -> str:
    place = f"{path}, record {number},"
    features = example_features(record)
    if not features:
        return decode(record, place)
    values = features.get(text_field)
    if isinstance(values, list):
        return PARAGRAPH_END.join(decode(value, place) for value in values)
    texts = [name for name, value in features.items() if isinstance(value, list)]
    ids = [
        name
        for name, value in features.items()
        if isinstance(value, np.ndarray) and value.dtype.kind == "i"
    ]
    if ids and not texts:
        raise token_ids_error(place, path, f"integers in {', '.join(ids)}")
    raise missing_text_error(place, text_field, texts)


def example_features(record: bytes) -> dict[str, np.ndarray | list[bytes]]:
    """Returns the features of a tf.train.Example; none for any other record.

    Text does not parse as one by accident: three nested fields each start with a line feed and a
    matching length.
    """
    try:
        features = tf_example.decode(record)
    except tf_example.ExampleError:
        return {}
    return {} if "" in features else features
