"""Exports a tokenized dataset as records for other programs.

    <output>/records.json                   request, and each file with its SHA-256
    <output>/tokenizer.json ...             tokenizer files
    <output>/<name>_00000_2048.tfrecords    or <name>-00000-of-00004.parquet

Exported text, which the dataset stores as bytes:

    <output>/export.json                    same as records.json
    <output>/train_data_00000.tfrecord      or train_data_00000.array_record

A killed export resumes with the files that are missing in the ledger <output>.finished/.

Strided windows are overlapping windows with labels, as in jax-lm-training's preprocessing. A window
is S + 1 tokens of a document, control tokens included: S inputs, and S labels shifted by one.
Differences from the original: bos and eos only where the document has them; padding is marked by
the mask, so id 0 is a regular id; windows inside the previous one are omitted; dropped tokens are
counted.

Legend: D documents, W windows or records, S inputs of a window.
"""

import collections
import contextlib
import dataclasses
import hashlib
import itertools
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from MaxText.config.data_sections import ExportedRecordsConfig, PreparationConfig
from MaxText.errors import UserError
from MaxText.formatting import pluralize
from MaxText.input_pipeline.document_sources.tables import require_pyarrow
from MaxText.input_pipeline.formats import tf_example
from MaxText.input_pipeline.formats.array_record import ArrayRecordWriter
from MaxText.input_pipeline.prepare.process_pool import run_jobs
from MaxText.input_pipeline.sequences.slicing import concatenated_ranges
from MaxText.input_pipeline.token_store.manifest import (
    MANIFEST_NAME,
    Manifest,
    Split,
    read_manifest,
)
from MaxText.input_pipeline.token_store.store import TokenStore, open_flat
from MaxText.storage import atomic
from MaxText.storage.tfrecord import TFRecordWriter

FILE_LISTS = {
    **dict.fromkeys(("tfrecord", "parquet"), "records.json"),
    **dict.fromkeys(("text_tfrecord", "text_array_record"), "export.json"),
}
"""Values of prepare_output_format that export records, and the files that list these."""


_PARQUET = "prepare_output_format=parquet"

# For records.num_shards=0: large enough for fast reads, small enough to distribute over hosts.
_TEXT_BYTES_PER_FILE = 256_000_000

# Tokens read, encoded and written at a time; also the size of a parquet row group.
_BATCH_TOKENS = 1_000_000


@dataclasses.dataclass(frozen=True)
class RecordFileJob:
    """A file to write: documents (or chunks) [first, stop) of a split."""

    split: str
    name: str  # prefix of the file names of the split
    number: int  # of the file, from 0
    num_files: int  # of the split
    first: int
    stop: int


class RecordRanges(NamedTuple):
    """Token ranges of records, and counts of what is in none."""

    starts_W: np.ndarray  # int64, positions in the split's tokens
    stops_W: np.ndarray  # int64
    dropped_documents: int = 0
    dropped_tokens: int = 0


def strided_windows(
    document_offsets: np.ndarray, min_length: int, max_length: int, stride: int
) -> RecordRanges:
    """Returns windows of contiguous documents, every `stride` tokens.

    Args:
      document_offsets: int64 [D + 1], the start of each document and the end of the last one.
      min_length: Windows with fewer labels are dropped.
      max_length: Labels of a full window, which has one token more.
      stride: Tokens between the starts of windows; at most `max_length`, so that each token of a
        document but its first is a label.
    """
    assert 1 <= min_length <= max_length, (min_length, max_length)
    assert 1 <= stride <= max_length, (stride, max_length)
    begins_D = document_offsets[:-1]
    ends_D = document_offsets[1:]
    sizes_D = ends_D - begins_D
    # The first window that reaches the end is the last: later ones would be inside it.
    counts_D = 1 + np.maximum(-(-(sizes_D - (max_length + 1)) // stride), 0)
    document_W = np.repeat(np.arange(sizes_D.size), counts_D)
    index_W = concatenated_ranges(np.zeros_like(counts_D), counts_D)
    starts_W = begins_D[document_W] + index_W * stride
    stops_W = np.minimum(starts_W + max_length + 1, ends_D[document_W])
    is_kept_W = stops_W - starts_W > min_length
    starts_W = starts_W[is_kept_W]
    stops_W = stops_W[is_kept_W]
    document_W = document_W[is_kept_W]
    # Only the last window of a document can be too short, so the others cover a prefix.
    covered_D = begins_D.astype(np.int64)
    np.maximum.at(covered_D, document_W, stops_W)
    return RecordRanges(
        starts_W,
        stops_W,
        dropped_documents=int(sizes_D.size - np.unique(document_W).size),
        dropped_tokens=int((ends_D - covered_D).sum()),
    )


@dataclasses.dataclass(frozen=True)
class RecordExport:
    """Writes the prepared dataset as records of one format."""

    prepared: Path  # folder of the dataset
    output: Path  # folder of the records
    file_format: Literal["tfrecord", "array_record", "parquet"]
    kind: Literal["documents", "chunks", "strided", "text"]  # of a record's content
    field: str  # of the ids or the text
    keys: ExportedRecordsConfig

    def plan(self, manifest: Manifest) -> list[RecordFileJob]:
        """Returns the files to write, in the order of splits and documents."""
        jobs = []
        num_files_by_split = self._num_files(manifest)
        for split, split_entry in sorted(manifest.splits.items()):
            total = self._num_items(split_entry)
            num_files = max(min(num_files_by_split[split], total), 1)
            bounds = [total * number // num_files for number in range(num_files + 1)]
            for number in range(num_files):
                job = RecordFileJob(
                    split=split,
                    name=self._file_prefix(split, len(manifest.splits)),
                    number=number,
                    num_files=num_files,
                    first=bounds[number],
                    stop=bounds[number + 1],
                )
                jobs.append(job)
        return jobs

    def _file_prefix(self, split: str, num_splits: int) -> str:
        """Returns the prefix of the file names of a split."""
        prefix = self.keys.name
        if not prefix:
            return split
        if self.kind == "text":
            return f"{prefix}_{split}"
        return prefix if num_splits == 1 else f"{prefix}.{split}"

    def _num_items(self, split: Split) -> int:
        """Returns the number of documents, or of chunks, that are divided among files."""
        if self.kind != "chunks":
            return split.num_documents
        # Each chunk starts with the last token of the previous one.
        num_chunks = -(-(split.num_tokens - 1) // (self.keys.chunk_length - 1))
        return max(num_chunks, min(split.num_tokens, 1))

    def _num_files(self, manifest: Manifest) -> dict[str, int]:
        """Returns the number of files of each split, in proportion to bytes for text."""
        num_shards = self.keys.num_shards
        num_bytes = {split: entry.num_text_bytes for split, entry in manifest.splits.items()}
        if num_shards == 0:
            return {split: -(-size // _TEXT_BYTES_PER_FILE) for split, size in num_bytes.items()}
        if self.kind != "text":
            return dict.fromkeys(num_bytes, num_shards)
        num_files = dict.fromkeys(num_bytes, 1)
        for _ in range(num_shards - len(num_files)):
            # The next file goes to the split with the most bytes per file.
            split = max(num_files, key=lambda split: num_bytes[split] / num_files[split])
            num_files[split] += 1
        return num_files

    def write(self, job: RecordFileJob) -> dict[str, Any]:
        """Writes a file; returns its entry in the list of files.

        `num_tokens` counts ids (or bytes of text) without padding; tokens that chunks or windows
        share count each time. Raises UserError for a damaged dataset.
        """
        manifest = read_manifest(str(self.prepared))
        store = open_flat(self.prepared, manifest, job.split)
        ranges = self._ranges(job, store)
        path = self.output / self._file_name(job, ranges.starts_W.size)
        temporary_path = atomic.temporary_name(path)
        if self.file_format == "parquet":
            self._write_parquet(temporary_path, manifest.pad_id, _batches(ranges, store))
        else:
            self._write_examples(temporary_path, _batches(ranges, store))
        atomic.atomic_rename(temporary_path, path)
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        sizes = ranges.stops_W - ranges.starts_W
        if self.kind == "strided":
            # The last token of a full window is only a label.
            sizes = np.minimum(sizes, self.keys.max_length)
        return {
            "split": job.split,
            "shard": job.number,
            "file": path.name,
            "num_bytes": path.stat().st_size,
            "num_records": ranges.starts_W.size,
            "num_tokens": int(sizes.sum()),
            "dropped_documents": ranges.dropped_documents,
            "dropped_tokens": ranges.dropped_tokens,
            "sha256": digest,
        }

    def _file_name(self, job: RecordFileJob, num_records: int) -> str:
        if self.kind == "text":
            return f"{job.name}_data_{job.number:05d}.{self.file_format}"
        if self.file_format == "tfrecord":
            # GPT-Neo's reader parses the number of records.
            return f"{job.name}_{job.number:05d}_{num_records}.tfrecords"
        return f"{job.name}-{job.number:05d}-of-{job.num_files:05d}.parquet"

    def _ranges(self, job: RecordFileJob, store: TokenStore) -> RecordRanges:
        """Returns the token ranges of a file's records."""
        keys = self.keys
        if self.kind == "chunks":
            starts = np.arange(job.first, job.stop, dtype=np.int64) * (keys.chunk_length - 1)
            return RecordRanges(starts, np.minimum(starts + keys.chunk_length, len(store)))
        offsets = np.asarray(store.document_offsets[job.first : job.stop + 1])
        if self.kind == "strided":
            return strided_windows(offsets, keys.min_length, keys.max_length, keys.stride)
        return RecordRanges(offsets[:-1], offsets[1:])

    def _write_examples(self, path: Path, batches: Iterable[list[np.ndarray]]) -> None:
        """Writes a tf.train.Example per record."""
        open_writer = TFRecordWriter if self.file_format == "tfrecord" else ArrayRecordWriter
        with contextlib.closing(open_writer(path)) as writer:
            for record in itertools.chain.from_iterable(batches):
                value = record.astype(np.uint8).tobytes() if self.kind == "text" else record
                writer.write(tf_example.encode({self.field: value}))

    def _write_parquet(self, path: Path, pad_id: int, batches: Iterable[list[np.ndarray]]) -> None:
        """Writes a row per record; windows are padded to equal lengths."""
        pyarrow, parquet = require_pyarrow(_PARQUET)
        ids_type = pyarrow.list_(pyarrow.int32())
        length = self.keys.max_length
        columns = {self.field: ids_type}
        if self.kind == "strided":
            mask_type = pyarrow.list_(pyarrow.int8())
            columns = {"input_ids": ids_type, "attention_mask": mask_type, "labels": ids_type}
        schema = pyarrow.schema(list(columns.items()))
        with parquet.ParquetWriter(path, schema, compression="zstd") as writer:
            for records in batches:
                if self.kind == "strided":
                    values = _padded(records, length, pad_id, self.keys.ignore_label)
                    ends = np.arange(len(records) + 1) * length
                else:
                    values = [np.concatenate(records)]
                    ends = np.cumsum([0, *(record.size for record in records)])
                # Arrow list offsets are int32.
                assert ends[-1] < 2**31, ends[-1]
                ends = pyarrow.array(ends.astype(np.int32))
                arrays = [pyarrow.ListArray.from_arrays(ends, pyarrow.array(v)) for v in values]
                writer.write_table(pyarrow.Table.from_arrays(arrays, schema=schema))


def _padded(
    records: Sequence[np.ndarray], length: int, pad_id: int, ignore_label: int
) -> list[np.ndarray]:
    """Returns inputs, mask (1 for tokens) and labels of windows, flattened."""
    shape = (len(records), length)
    inputs = np.full(shape, pad_id, np.int32)
    mask = np.zeros(shape, np.int8)
    labels = np.full(shape, ignore_label, np.int32)
    for row, record in enumerate(records):
        num_inputs = min(record.size, length)
        inputs[row, :num_inputs] = record[:num_inputs]
        mask[row, :num_inputs] = 1
        labels[row, : record.size - 1] = record[1:]
    return [inputs.reshape(-1), mask.reshape(-1), labels.reshape(-1)]


def _batches(ranges: RecordRanges, store: TokenStore) -> Iterator[list[np.ndarray]]:
    """Yields the ids of each range in order, about _BATCH_TOKENS at a time."""
    first = 0
    sizes = ranges.stops_W - ranges.starts_W
    ends = np.concatenate([[0], np.cumsum(sizes)])
    while first < ranges.starts_W.size:
        stop = int(np.searchsorted(ends, ends[first] + _BATCH_TOKENS, side="right")) - 1
        stop = max(stop, first + 1)
        starts = ranges.starts_W[first:stop]
        stops = ranges.stops_W[first:stop]
        yield np.split(store.read(starts, stops), ends[first + 1 : stop] - ends[first])
        first = stop


def make_export(prepared: Path, preparation: PreparationConfig, output: Path) -> RecordExport:
    """Returns the export; UserError for conflicts, missing pyarrow."""
    keys = preparation.records
    output_format = preparation.prepare_output_format
    if keys.name and Path(keys.name).name != keys.name:
        raise UserError(
            f"records.name={keys.name} contains a folder, and it is a prefix of file names. Omit "
            "the folder."
        )
    file_format: Any = output_format.removeprefix("text_")
    if file_format == "parquet":
        require_pyarrow(_PARQUET)
    if preparation.exports_text:
        return RecordExport(prepared, output, file_format, "text", "text", keys)
    # GPT-Neo's readers expect ids in `text`, Hugging Face's trainers in `input_ids`.
    field = keys.field or ("input_ids" if file_format == "parquet" else "text")
    return RecordExport(prepared, output, file_format, keys.content, field, keys)


def export_records(
    prepared: Path, preparation: PreparationConfig, output: Path, log: Callable[[str], None]
) -> None:
    """Writes every split as record files to `output`, resuming earlier work.

    Only one process may work on `output` at a time. Raises UserError as make_export does, and for a
    damaged dataset.

    Args:
      prepared: Folder of the tokenized dataset.
      preparation: The format and the key `records`.
      output: Folder of the records.
      log: Takes lines for the terminal.
    """
    export = make_export(prepared, preparation, output)
    output_format = preparation.prepare_output_format
    manifest = read_manifest(str(prepared))
    output.mkdir(exist_ok=True)
    for leftover in output.glob(f"*{atomic.WRITING_SUFFIX}"):
        leftover.unlink()
    if export.kind != "text":
        for file in prepared.iterdir():
            if file.is_file() and file.name != MANIFEST_NAME and not file.name.startswith("."):
                atomic.sync_file(Path(shutil.copyfile(file, output / file.name)))
    jobs = export.plan(manifest)
    num_bytes = sum(file.num_bytes for split in manifest.splits.values() for file in split.files)
    sizes = [num_bytes // len(jobs)] * len(jobs)
    ledger = output.with_name(f"{output.name}.finished")
    for entry in ledger.glob("*.json"):
        if not (output / json.loads(entry.read_bytes())["file"]).exists():
            entry.unlink()
    files = run_jobs(
        "Writing records",
        RecordExport.write,
        export,
        jobs,
        sizes=sizes,
        max_processes=preparation.prepare_num_workers,
        log=log,
        ledger=ledger,
    )
    contents = {
        "schema_version": 1,
        "data_set": manifest.fingerprint,
        "tokenizer_sha256": manifest.tokenizer.sha256,
        "options": {**record_options(preparation), "prepare_output_format": output_format},
        "num_files": len(files),
        "files": files,
    }
    text = json.dumps(contents, indent=1, sort_keys=True) + "\n"
    atomic.atomic_write_text(output / FILE_LISTS[output_format], text)
    for split, split_files in itertools.groupby(files, lambda file: file["split"]):
        _report(split, [*split_files], export, log)


def _report(
    split: str, files: list[dict[str, Any]], export: RecordExport, log: Callable[[str], None]
) -> None:
    """Logs the records of a split, and the documents that are in none."""
    totals = collections.Counter[str]()
    for file in files:
        for name in ("num_tokens", "num_records", "dropped_documents", "dropped_tokens"):
            totals[name] += file[name]
    kind = {"strided": "strided window", "chunks": "chunk"}.get(export.kind, "document")
    amount = f"{totals['num_tokens']:,} tokens"
    if export.kind == "text":
        amount = f"{totals['num_tokens'] / 1e6:,.1f} MB of text"
    records = pluralize(totals["num_records"], kind)
    log(f"  {split}: {records} of {amount} in {pluralize(len(files), 'file')}")
    if totals["dropped_tokens"]:
        log(
            f"  {split}: skipped {pluralize(totals['dropped_documents'], 'document')}, and "
            f"{pluralize(totals['dropped_tokens'], 'token')} in all, because windows of fewer than "
            f"records.min_length={export.keys.min_length} tokens are not written"
        )


def record_options(preparation: PreparationConfig) -> dict[str, Any]:
    """Returns the values of the section `records`, by key: {"records.name": ...}."""
    return {f"records.{name}": value for name, value in preparation.records}
