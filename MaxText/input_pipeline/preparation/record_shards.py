"""Writes one file of records out of a prepared data set: `write_shard`.

A file is a pure function of its job, whoever writes it and whenever. It appears under its name
only when it is complete and on disk. Imports no jax.
"""

import contextlib
import dataclasses
import hashlib
import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pydantic

from MaxText.errors import UserError
from MaxText.input_pipeline.formats import tf_example
from MaxText.input_pipeline.formats.tfrecord import TFRecordWriter
from MaxText.input_pipeline.preparation.array_record_writer import ArrayRecordWriter
from MaxText.input_pipeline.preparation.strided_windows import rows_of_windows, strided_windows
from MaxText.input_pipeline.sync import publish, sync_file, writing_name
from MaxText.input_pipeline.token_store.manifest import read_manifest
from MaxText.input_pipeline.token_store.store import TokenStore, open_flat

# Tokens read, encoded and handed to the writer at a time; also the size of a parquet row group.
_BATCH_TOKENS = 1_000_000


@dataclasses.dataclass(frozen=True)
class RecordShape:
    """What a record is.

    Attributes:
      file_format: of the files.
      kind: documents, chunks or strided windows of ids, or the text of a document, of which the
        data set holds the bytes.
      field: name of the ids or the text in a record; strided windows have names of their own.
      chunk_length: tokens of a chunk; the next chunk begins with the last of these.
      min_length, max_length, stride: of strided windows, see strided_windows.
      ignore_label: label of strided windows where there is no token to predict.
    """

    file_format: Literal["tfrecord", "array_record", "parquet"]
    kind: Literal["documents", "chunks", "strided", "text"]
    field: str
    chunk_length: int
    min_length: int
    max_length: int
    stride: int
    ignore_label: int


@dataclasses.dataclass(frozen=True)
class ShardJob:
    """One file to write.

    Attributes:
      prepared: folder of the data set.
      split: part of it.
      shape: see RecordShape.
      first, stop: documents (of chunks: numbers of chunks) that the file holds.
      folder: where the file goes.
      name: name of the split's files before the number.
      shard, num_shards: which of the split's files this is.
    """

    prepared: Path
    split: str
    shape: RecordShape
    first: int
    stop: int
    folder: Path
    name: str
    shard: int
    num_shards: int

    def file_name(self, num_records: int) -> str:
        """Final name; GPT-Neo's reader takes the number of token records from it."""
        if self.shape.kind == "text":
            return f"{self.name}_data_{self.shard:05d}.{self.shape.file_format}"
        if self.shape.file_format == "tfrecord":
            return f"{self.name}_{self.shard:05d}_{num_records}.tfrecords"
        return f"{self.name}-{self.shard:05d}-of-{self.num_shards:05d}.parquet"


class ShardEntry(pydantic.BaseModel):
    """What the ledger says about a finished file.

    Attributes:
      split, shard: which one it is.
      file: its name.
      num_bytes: its size.
      num_records: records in it.
      num_tokens: ids (of text: bytes) in all its records, padding left out; the token that two
        chunks share and those that windows share count each time.
      dropped_documents: documents of its range that no record holds any part of.
      dropped_tokens: tokens of its range that are in no record.
      sha256: of the file.
    """

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")

    split: str
    shard: int
    file: str
    num_bytes: int
    num_records: int
    num_tokens: int
    dropped_documents: int
    dropped_tokens: int
    sha256: str


def num_chunks(num_tokens: int, chunk_length: int) -> int:
    """Chunks of a stream: each token but the first is in one of them after its first token."""
    return max(-(-(num_tokens - 1) // (chunk_length - 1)), min(num_tokens, 1))


class _Places(NamedTuple):
    """Where the records of a file lie in the stream, and what no record holds."""

    starts: np.ndarray
    stops: np.ndarray
    dropped_documents: int = 0
    dropped_tokens: int = 0


def _places(job: ShardJob, stream: TokenStore) -> _Places:
    shape = job.shape
    if shape.kind == "chunks":
        starts = np.arange(job.first, job.stop, dtype=np.int64) * (shape.chunk_length - 1)
        return _Places(starts, np.minimum(starts + shape.chunk_length, len(stream)))
    offsets = np.asarray(stream.document_offsets[job.first : job.stop + 1])
    if shape.kind in ("documents", "text"):
        return _Places(offsets[:-1], offsets[1:])
    return _Places(*strided_windows(offsets, shape.min_length, shape.max_length, shape.stride))


def _batches(places: _Places, stream: TokenStore) -> Iterator[list[np.ndarray]]:
    """The pieces of the stream in order, about _BATCH_TOKENS tokens at a time."""
    first, num_records = 0, places.starts.size
    ends = np.cumsum(places.stops - places.starts)
    while first < num_records:
        done = int(ends[first - 1]) if first else 0
        stop = int(np.searchsorted(ends, done + _BATCH_TOKENS, side="right"))
        stop = max(stop, first + 1)
        starts, stops = places.starts[first:stop], places.stops[first:stop]
        ids = stream.read(starts, stops)
        yield np.split(ids, np.cumsum(stops - starts)[:-1])
        first = stop


def write_shard(job: ShardJob) -> ShardEntry:
    """Writes the file of a job, over one that is there.

    Raises:
      UserError: the prepared data is damaged, the folder cannot be written to, or pyarrow is
        missing.
    """
    manifest = read_manifest(str(job.prepared))
    stream = open_flat(job.prepared, manifest, job.split)
    places = _places(job, stream)
    path = job.folder / job.file_name(places.starts.size)
    writing = writing_name(path)
    batches = _batches(places, stream)
    try:
        if job.shape.file_format == "parquet":
            _write_parquet(writing, job.shape, manifest.filler_id, batches)
        else:
            _write_examples(writing, job.shape, batches)
        with writing.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        num_bytes = writing.stat().st_size
        publish(writing, path)
        sync_file(job.folder)
    except OSError as error:
        raise UserError(
            f"{path} could not be written ({error}). Make room or give the right to write there, "
            "and run the same command again: finished files are kept."
        ) from error
    finally:
        with contextlib.suppress(OSError):
            writing.unlink(missing_ok=True)
    sizes = places.stops - places.starts
    if job.shape.kind == "strided":
        # The last token of a whole window is a label only.
        sizes = np.minimum(sizes, job.shape.max_length)
    return ShardEntry(
        split=job.split,
        shard=job.shard,
        file=path.name,
        num_bytes=num_bytes,
        num_records=places.starts.size,
        num_tokens=int(sizes.sum()),
        dropped_documents=places.dropped_documents,
        dropped_tokens=places.dropped_tokens,
        sha256=digest,
    )


def _write_examples(path: Path, shape: RecordShape, batches: Iterable[list[np.ndarray]]) -> None:
    """Writes each piece as a tf.train.Example."""
    open_writer = TFRecordWriter if shape.file_format == "tfrecord" else ArrayRecordWriter
    with contextlib.closing(open_writer(path)) as writer:
        for piece in itertools.chain.from_iterable(batches):
            value = piece.astype(np.uint8).tobytes() if shape.kind == "text" else piece
            writer.write(tf_example.encode({shape.field: value}))


def _write_parquet(
    path: Path, shape: RecordShape, filler_id: int, batches: Iterable[list[np.ndarray]]
) -> None:
    pyarrow, parquet = require_pyarrow()
    lists = {"int32": pyarrow.list_(pyarrow.int32()), "int8": pyarrow.list_(pyarrow.int8())}
    columns = {shape.field: lists["int32"]}
    if shape.kind == "strided":
        columns = {"input_ids": lists["int32"], "attention_mask": lists["int8"]}
        columns["labels"] = lists["int32"]
    schema = pyarrow.schema(list(columns.items()))
    with parquet.ParquetWriter(path, schema, compression="zstd") as writer:
        for pieces in batches:
            if shape.kind == "strided":
                rows = rows_of_windows(pieces, shape.max_length, filler_id, shape.ignore_label)
                ends = np.arange(len(pieces) + 1) * shape.max_length
                values = [rows[name].reshape(-1) for name in columns]
            else:
                ends = np.cumsum([0, *(piece.size for piece in pieces)])
                values = [np.concatenate(pieces)]
            # Offsets are 32 bits wide in arrow: one document of 2^31 tokens would not fit.
            assert ends[-1] < 2**31, ends[-1]
            ends = pyarrow.array(ends.astype(np.int32))
            arrays = [pyarrow.ListArray.from_arrays(ends, pyarrow.array(v)) for v in values]
            writer.write_table(pyarrow.Table.from_arrays(arrays, schema=schema))


def require_pyarrow() -> tuple[Any, Any]:
    """pyarrow and pyarrow.parquet.

    Raises:
      UserError: they are not installed.
    """
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise UserError(
            "prepare_output_format=parquet needs pyarrow. Install it: pip install 'MaxText[data]'"
        ) from error
    return pyarrow, parquet
