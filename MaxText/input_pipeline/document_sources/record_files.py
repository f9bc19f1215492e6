"""Documents of ArrayRecord and TFRecord files: UTF-8 text, or tf.train.Examples that hold it."""

from collections.abc import Iterator
from contextlib import ExitStack, suppress
from typing import Any

import numpy as np
from array_record.python import (
    array_record_module,  # pyright: ignore[reportAttributeAccessIssue]
)

from MaxText.errors import UserError
from MaxText.input_pipeline.document_sources.arrow_tables import share
from MaxText.input_pipeline.document_sources.compressed import (
    decode,
    decompressed,
    open_bytes,
    reading,
)
from MaxText.input_pipeline.document_sources.json_rows import PARAGRAPH_END, no_text, token_ids
from MaxText.input_pipeline.formats import tf_example, tfrecord
from MaxText.input_pipeline.storage import is_url
from MaxText.input_pipeline.streams.bad_record import BadRecord

# Read at a time: enough that a call costs nothing, little enough to hold in memory.
_BATCH_RECORDS = 64

_DELIMITED_FIELD_1 = 0x0A


def array_record_texts(
    path: str, text_field: str, start: int = 0, stop: int | None = None, size: int | None = None
) -> Iterator[tuple[int, str]]:
    """Reads the records that bytes [start, stop) of an ArrayRecord file stand for.

    Args:
      path: local path.
      text_field: feature of a tf.train.Example that holds the text.
      start, stop: a range of the file as in `tables.share`.
      size: bytes of the file when it was found.

    Yields:
      Number of the record in the file and its text.

    Raises:
      UserError: damaged, or a record without text.
    """
    if is_url(path):
        raise UserError(
            f"{path}: ArrayRecord files are read on a local file system only. Copy it to this "
            "machine first (gcloud storage cp), or mount the bucket (gcsfuse)."
        )
    with reading(path):
        open_bytes(path, size).close()
    reader: Any = array_record_module.ArrayRecordReader(
        path, "readahead_buffer_size:0,max_parallelism:0"
    )
    if not reader.ok():
        raise _damaged(path, "it has no ArrayRecord footer")
    try:
        chosen = share(start, stop, size or 0, reader.num_records())
        for first in range(chosen.start, chosen.stop, _BATCH_RECORDS):
            try:
                records = reader.read(first, min(first + _BATCH_RECORDS, chosen.stop))
            except (RuntimeError, IndexError, ValueError) as error:
                raise _damaged(path, f"near record {first}: {error}") from error
            for number, record in enumerate(records, start=first):
                yield number, record_text(record, path, number, text_field)
    finally:
        # After a failed read, closing fails with the same reason.
        with suppress(RuntimeError):
            reader.close()


def _damaged(path: str, reason: str) -> UserError:
    return UserError(
        f"{path} is no whole ArrayRecord file ({reason}). Copy it again or leave it out of "
        "prepare_source."
    )


def tfrecord_texts(path: str, text_field: str, compression: str = "") -> Iterator[tuple[int, str]]:
    """Reads all records of a TFRecord file.

    Args:
      path: local path or URL.
      text_field: feature of a tf.train.Example that holds the text.
      compression: "", "gz", "zst", "xz" or "bz2".

    Yields:
      Number of the record in the file and its text.

    Raises:
      UserError: damaged, or a record without text.
    """
    with reading(path), open_bytes(path) as file, ExitStack() as stack:
        contents = file
        if compression:
            contents = stack.enter_context(decompressed(file, compression))
        try:
            for number, record in enumerate(tfrecord.read_records(path, contents)):
                yield number, record_text(record, path, number, text_field)
        except BadRecord as error:
            # Readers of tokens may pass over such a record; text that is missing would not be
            # noticed.
            raise UserError(
                f"{error}. Copy the file again or leave it out of prepare_source."
            ) from error


def record_text(record: bytes, path: str, number: int, text_field: str) -> str:
    """The text of record `number` of a file; several values of its feature are paragraphs.

    Raises:
      UserError: it is neither UTF-8 text nor a tf.train.Example with text in `text_field`.
    """
    place = f"{path}, record {number},"
    if not is_example(record):
        return decode(record, place)
    try:
        features = tf_example.decode(record)
    except tf_example.ExampleError as error:
        raise UserError(
            f"{place} is damaged: {error}. Copy the file again or leave it out of prepare_source."
        ) from error
    values = features.get(text_field)
    if not isinstance(values, list):
        texts = [name for name, value in features.items() if isinstance(value, list)]
        ids = [
            name
            for name, value in features.items()
            if isinstance(value, np.ndarray) and value.dtype.kind == "i"
        ]
        if ids and not texts:
            raise token_ids(place, path, f"integers in {', '.join(ids)}")
        raise no_text(place, text_field, texts)
    return PARAGRAPH_END.join(decode(value, place) for value in values)


def is_example(record: bytes) -> bool:
    """Whether a record is built as a tf.train.Example with at least one named feature.

    Such a message nests three fields that each begin with a line feed and a length, and the outer
    two lengths fit the record exactly: no text looks like that by accident.
    """
    outer = _field(record, 0)
    if outer is None or outer[1] != len(record):
        return False
    entry = _field(record, outer[0])
    if entry is None:
        return False
    name = _field(record, entry[0])
    return name is not None and name[1] <= entry[1]


def _field(record: bytes, at: int) -> tuple[int, int] | None:
    """Start and end of the contents of a delimited field 1 that begins at byte `at`."""
    if at >= len(record) or record[at] != _DELIMITED_FIELD_1:
        return None
    length = shift = 0
    for start in range(at + 1, min(at + 6, len(record))):
        length |= (record[start] & 0x7F) << shift
        shift += 7
        if record[start] < 0x80:
            end = start + 1 + length
            return (start + 1, end) if end <= len(record) else None
    return None
