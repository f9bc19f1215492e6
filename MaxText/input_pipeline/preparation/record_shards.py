"""Writes record files from a tokenized dataset.

A file is a pure function of its job, and is published only when complete and synced.

Strided windows are overlapping windows with labels, as in jax-lm-training's preprocessing. A window
is S + 1 tokens of a document, control tokens included: S inputs, and S labels shifted by one.
Differences from the original: bos and eos only where the document has them; padding is marked by
the mask, so id 0 is a regular id; windows inside the previous one are omitted; dropped tokens are
counted.

Legend: D documents, W windows or records, S inputs of a window.
"""

import contextlib
import dataclasses
import hashlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pydantic

from MaxText.config.data_sections import Preparation
from MaxText.errors import UserError
from MaxText.input_pipeline.formats import tf_example
from MaxText.input_pipeline.formats.array_record import ArrayRecordWriter
from MaxText.input_pipeline.formats.tfrecord import TFRecordWriter
from MaxText.input_pipeline.token_store.manifest import read_manifest
from MaxText.input_pipeline.token_store.store import TokenStore, open_flat
from MaxText.storage.atomic import publish, sync_file, writing_name

# Tokens read, encoded and written at a time; also the size of a parquet row group.
_BATCH_TOKENS = 1_000_000


@dataclasses.dataclass(frozen=True)
class RecordShape:
    """Format and contents of a record."""

    file_format: Literal["tfrecord", "array_record", "parquet"]
    kind: Literal["documents", "chunks", "strided", "text"]
    field: str
    keys: Preparation  # prepare_chunk_length, and prep_ keys of strided windows


@dataclasses.dataclass(frozen=True)
class RecordFileJob:
    """A file to write: documents (or chunks) [first, stop) of a split."""

    prepared: Path
    split: str
    shape: RecordShape
    first: int
    stop: int
    folder: Path
    name: str  # prefix of the file names of the split
    number: int
    num_files: int

    def file_name(self, num_records: int) -> str:
        """Returns the final name; GPT-Neo's reader parses the number of records from it."""
        if self.shape.kind == "text":
            return f"{self.name}_data_{self.number:05d}.{self.shape.file_format}"
        if self.shape.file_format == "tfrecord":
            return f"{self.name}_{self.number:05d}_{num_records}.tfrecords"
        return f"{self.name}-{self.number:05d}-of-{self.num_files:05d}.parquet"


class FinishedFile(pydantic.BaseModel):
    """Ledger entry of a record file.

    `num_tokens` counts ids (or bytes of text) without padding; tokens that chunks or windows share
    count each time.
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


class RecordRanges(NamedTuple):
    """Token ranges of records, and counts of what is in none."""

    starts_W: np.ndarray
    stops_W: np.ndarray
    dropped_documents: int = 0
    dropped_tokens: int = 0


def strided_windows(
    document_offsets: np.ndarray, min_length: int, max_length: int, stride: int
) -> RecordRanges:
    """Returns the windows of contiguous documents (int64 [D + 1] offsets), every `stride` tokens.

    Windows have `min_length` to `max_length` labels; shorter ones are dropped. `stride` is at most
    `max_length`, so that each token of a document but its first is a label.
    """
    assert 1 <= min_length <= max_length, (min_length, max_length)
    assert 1 <= stride <= max_length, (stride, max_length)
    begins_D, ends_D = document_offsets[:-1], document_offsets[1:]
    sizes_D = ends_D - begins_D
    # The first window that reaches the end is the last: later ones would be inside it.
    counts_D = 1 + np.maximum(-(-(sizes_D - (max_length + 1)) // stride), 0)
    document_W = np.repeat(np.arange(sizes_D.size), counts_D)
    first_W = np.cumsum(counts_D) - counts_D
    number_W = np.arange(document_W.size) - first_W[document_W]
    starts_W = begins_D[document_W] + number_W * stride
    stops_W = np.minimum(starts_W + max_length + 1, ends_D[document_W])
    kept_W = stops_W - starts_W > min_length
    starts_W, stops_W, document_W = starts_W[kept_W], stops_W[kept_W], document_W[kept_W]
    # Only the last window of a document can be too short, so the others cover a prefix.
    covered_D = begins_D.astype(np.int64)
    np.maximum.at(covered_D, document_W, stops_W)
    return RecordRanges(
        starts_W,
        stops_W,
        dropped_documents=int(sizes_D.size - np.unique(document_W).size),
        dropped_tokens=int((ends_D - covered_D).sum()),
    )


def rows_of_windows(
    records: Sequence[np.ndarray], max_length: int, pad_id: int, ignore_label: int
) -> dict[str, np.ndarray]:
    """Returns arrays [W, S] of windows with 2 to S + 1 tokens each.

    They are int32 `input_ids`, int8 `attention_mask` (1 for tokens), and int32 `labels`, the token
    after each input; `pad_id` and `ignore_label` are padding.
    """
    shape = (len(records), max_length)
    rows = {
        "input_ids": np.full(shape, pad_id, np.int32),
        "attention_mask": np.zeros(shape, np.int8),
        "labels": np.full(shape, ignore_label, np.int32),
    }
    for row, record in enumerate(records):
        num_inputs = min(record.size, max_length)
        rows["input_ids"][row, :num_inputs] = record[:num_inputs]
        rows["attention_mask"][row, :num_inputs] = 1
        rows["labels"][row, : record.size - 1] = record[1:]
    return rows


def num_chunks(num_tokens: int, chunk_length: int) -> int:
    """Returns the number of chunks, each of which starts with the last token of the previous."""
    return max(-(-(num_tokens - 1) // (chunk_length - 1)), min(num_tokens, 1))


def _ranges(job: RecordFileJob, store: TokenStore) -> RecordRanges:
    shape = job.shape
    if shape.kind == "chunks":
        starts = np.arange(job.first, job.stop, dtype=np.int64) * (
            shape.keys.prepare_chunk_length - 1
        )
        return RecordRanges(
            starts, np.minimum(starts + shape.keys.prepare_chunk_length, len(store))
        )
    offsets = np.asarray(store.document_offsets[job.first : job.stop + 1])
    if shape.kind in ("documents", "text"):
        return RecordRanges(offsets[:-1], offsets[1:])
    return strided_windows(
        offsets, shape.keys.prep_min_length, shape.keys.prep_max_length, shape.keys.prep_stride
    )


def _batches(ranges: RecordRanges, store: TokenStore) -> Iterator[list[np.ndarray]]:
    """Yields the ids of each range in order, about _BATCH_TOKENS at a time."""
    first, num_records = 0, ranges.starts_W.size
    ends = np.cumsum(ranges.stops_W - ranges.starts_W)
    while first < num_records:
        done = int(ends[first - 1]) if first else 0
        stop = int(np.searchsorted(ends, done + _BATCH_TOKENS, side="right"))
        stop = max(stop, first + 1)
        starts, stops = ranges.starts_W[first:stop], ranges.stops_W[first:stop]
        yield np.split(store.read(starts, stops), np.cumsum(stops - starts)[:-1])
        first = stop


def write_record_file(job: RecordFileJob) -> FinishedFile:
    """Writes or replaces a file. Raises UserError for a damaged dataset or a failed write."""
    manifest = read_manifest(str(job.prepared))
    store = open_flat(job.prepared, manifest, job.split)
    ranges = _ranges(job, store)
    path = job.folder / job.file_name(ranges.starts_W.size)
    writing = writing_name(path)
    batches = _batches(ranges, store)
    try:
        if job.shape.file_format == "parquet":
            _write_parquet(writing, job.shape, manifest.pad_id, batches)
        else:
            _write_examples(writing, job.shape, batches)
        with writing.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        num_bytes = writing.stat().st_size
        publish(writing, path)
        sync_file(job.folder)
    except OSError as error:
        raise UserError(
            f"{path} could not be written ({error}). Free some space or get write permission, and "
            "run the same command to resume: finished files are kept."
        ) from error
    finally:
        with contextlib.suppress(OSError):
            writing.unlink(missing_ok=True)
    sizes = ranges.stops_W - ranges.starts_W
    if job.shape.kind == "strided":
        # The last token of a full window is only a label.
        sizes = np.minimum(sizes, job.shape.keys.prep_max_length)
    return FinishedFile(
        split=job.split,
        shard=job.number,
        file=path.name,
        num_bytes=num_bytes,
        num_records=ranges.starts_W.size,
        num_tokens=int(sizes.sum()),
        dropped_documents=ranges.dropped_documents,
        dropped_tokens=ranges.dropped_tokens,
        sha256=digest,
    )


def _write_examples(path: Path, shape: RecordShape, batches: Iterable[list[np.ndarray]]) -> None:
    open_writer = TFRecordWriter if shape.file_format == "tfrecord" else ArrayRecordWriter
    with contextlib.closing(open_writer(path)) as writer:
        for record in itertools.chain.from_iterable(batches):
            value = record.astype(np.uint8).tobytes() if shape.kind == "text" else record
            writer.write(tf_example.encode({shape.field: value}))


def _write_parquet(
    path: Path, shape: RecordShape, pad_id: int, batches: Iterable[list[np.ndarray]]
) -> None:
    pyarrow, parquet = require_pyarrow()
    lists = {"int32": pyarrow.list_(pyarrow.int32()), "int8": pyarrow.list_(pyarrow.int8())}
    columns = {shape.field: lists["int32"]}
    if shape.kind == "strided":
        columns = {"input_ids": lists["int32"], "attention_mask": lists["int8"]}
        columns["labels"] = lists["int32"]
    schema = pyarrow.schema(list(columns.items()))
    with parquet.ParquetWriter(path, schema, compression="zstd") as writer:
        for records in batches:
            if shape.kind == "strided":
                rows = rows_of_windows(
                    records, shape.keys.prep_max_length, pad_id, shape.keys.prep_ignore_label
                )
                ends = np.arange(len(records) + 1) * shape.keys.prep_max_length
                values = [rows[name].reshape(-1) for name in columns]
            else:
                ends = np.cumsum([0, *(record.size for record in records)])
                values = [np.concatenate(records)]
            # Arrow list offsets are int32.
            assert ends[-1] < 2**31, ends[-1]
            ends = pyarrow.array(ends.astype(np.int32))
            arrays = [pyarrow.ListArray.from_arrays(ends, pyarrow.array(v)) for v in values]
            writer.write_table(pyarrow.Table.from_arrays(arrays, schema=schema))


def require_pyarrow() -> tuple[Any, Any]:
    """Returns pyarrow and pyarrow.parquet, or raises a UserError."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise UserError(
            "prepare_output_format=parquet needs pyarrow. Install it: pip install 'MaxText[data]'"
        ) from error
    return pyarrow, parquet
