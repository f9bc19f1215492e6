"""Records of ArrayRecord and TFRecord files: UTF-8 text, or tf.train.Examples that hold it."""

from collections.abc import Iterable, Iterator

import numpy as np

from MaxText.errors import UserError
from MaxText.input_pipeline.data_errors import BadRecord
from MaxText.input_pipeline.document_sources.arrow_tables import partition_range
from MaxText.input_pipeline.document_sources.compressed import (
    decode,
    decompressed,
    local_file,
    open_bytes,
    read_errors_as_user_error,
)
from MaxText.input_pipeline.document_sources.json_rows import (
    PARAGRAPH_END,
    missing_text_error,
    token_ids_error,
)
from MaxText.input_pipeline.formats import array_record, tf_example, tfrecord


def scan_tfrecord(path: str, compression: str = "") -> Iterator[tuple[int, bytes | BadRecord]]:
    """Reads a TFRecord file from front to back.

    Args:
      path: local path or URL.
      compression: "", "gz", "zst", "xz" or "bz2".

    Yields:
      Offset of each record in the decompressed file, and its bytes or what is wrong with it.

    Raises:
      BadRecord: no further record can be found.
      READ_ERRORS: the file cannot be read or decompressed.
    """
    with open_bytes(path) as file, decompressed(file, compression) as contents:
        yield from tfrecord.scan_records(contents, path)


def scan_array_record(
    path: str, start: int = 0, stop: int | None = None, size: int | None = None
) -> Iterator[tuple[int, bytes | BadRecord]]:
    """Reads the records that bytes [start, stop) of an ArrayRecord file stand for.

    Args:
      path: local path; a file behind a URL is copied to this machine while it is read.
      start, stop: a range of the file as in `partition_range`.
      size: bytes of the file when it was found.

    Yields:
      Number of each record, and its bytes or what is wrong with it.

    Raises:
      BadRecord: no ArrayRecord file, or cut short.
      OSError: the file cannot be read.
    """
    open_bytes(path, size).close()
    with local_file(path) as copy:
        yield from array_record.scan_records(
            path, lambda count: partition_range(start, stop, size or 0, count), copy
        )


def tfrecord_texts(path: str, text_field: str, compression: str = "") -> Iterator[tuple[int, str]]:
    """Reads the texts of a TFRecord file.

    Args:
      path, compression: as of scan_tfrecord.
      text_field: feature of a tf.train.Example that holds the text; several values are paragraphs.

    Yields:
      Number of the record in the file and its text.

    Raises:
      UserError: damaged, or a record without text.
    """
    records = (record for _, record in scan_tfrecord(path, compression))
    return _texts(enumerate(records), path, text_field)


def array_record_texts(
    path: str, text_field: str, start: int = 0, stop: int | None = None, size: int | None = None
) -> Iterator[tuple[int, str]]:
    """Reads the texts of an ArrayRecord file.

    The arguments are those of scan_array_record, results and errors those of tfrecord_texts.
    """
    return _texts(scan_array_record(path, start, stop, size), path, text_field)


def _texts(
    records: Iterable[tuple[int, bytes | BadRecord]], path: str, text_field: str
) -> Iterator[tuple[int, str]]:
    with read_errors_as_user_error(path):
        try:
            for number, record in records:
                # Tokens may do without a damaged record; text that is missing would go unnoticed.
                if isinstance(record, BadRecord):
                    raise record
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
    """The features of a record that is a tf.train.Example, none of any other.

    Such a message nests three fields that each begin with a line feed and a length that fits, down
    to the name of a feature: no text looks like that by accident.
    """
    try:
        features = tf_example.decode(record)
    except tf_example.ExampleError:
        return {}
    return {} if "" in features else features
