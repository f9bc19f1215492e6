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

from MaxText.config.data_sections import ExportedRecords, PreparationConfig
from MaxText.errors import UserError
from MaxText.input_pipeline.document_sources.tables import require_pyarrow
from MaxText.input_pipeline.formats import tf_example
from MaxText.input_pipeline.formats.array_record import ArrayRecordWriter
from MaxText.input_pipeline.formats.tfrecord import TFRecordWriter
from MaxText.input_pipeline.prepare.process_pool import run_jobs
from MaxText.input_pipeline.sequences.slicing import concatenated_ranges
from MaxText.input_pipeline.token_store.manifest import MANIFEST_NAME, Manifest, read_manifest
from MaxText.input_pipeline.token_store.store import TokenStore, open_flat
from MaxText.pluralize import pluralize
from MaxText.storage import atomic

FILE_LISTS = {
    **dict.fromkeys(("tfrecord", "parquet"), "records.json"),
    **dict.fromkeys(("text_tfrecord", "text_array_record"), "export.json"),
}
"""Values of prepare_output_format that export records, and the files that list these."""

# Name in manifests -> entry of the key `records`.
OPTIONS_OF_RECORDS = {
    "prepare_record": "content",
    "prepare_field": "field",
    "prepare_chunk_length": "chunk_length",
    "prepare_num_shards": "num_shards",
    "prepare_name": "name",
    "prep_min_length": "min_length",
    "prep_max_length": "max_length",
    "prep_stride": "stride",
    "prep_ignore_label": "ignore_label",
}

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
    number: int
    num_files: int
    first: int
    stop: int


class RecordRanges(NamedTuple):
    """Token ranges of records, and counts of what is in none."""

    starts_W: np.ndarray
    stops_W: np.ndarray
    dropped_documents: int = 0
    dropped_tokens: int = 0


def strided_windows(
    document_offsets: np.ndarray, min_length: int, max_length: int, stride: int
) -> RecordRanges:
    """Returns windows of contiguous documents, every `stride` tokens.

    `document_offsets` are int64 [D + 1]. Windows have `min_length` to `max_length` labels; shorter
    ones are dropped. `stride` is at most `max_length`, so that each token of a document but its
    first is a label.
    """
    assert 1 <= min_length <= max_length, (min_length, max_length)
    assert 1 <= stride <= max_length, (stride, max_length)
    begins_D = document_offsets[:-1]
    ends_D = document_offsets[1:]
    sizes_D = ends_D - begins_D
    # The first window that reaches the end is the last: later ones would be inside it.
    counts_D = 1 + np.maximum(-(-(sizes_D - (max_length + 1)) // stride), 0)
    document_W = np.repeat(np.arange(sizes_D.size), counts_D)
    number_W = concatenated_ranges(np.zeros_like(counts_D), counts_D)
    starts_W = begins_D[document_W] + number_W * stride
    stops_W = np.minimum(starts_W + max_length + 1, ends_D[document_W])
    kept_W = stops_W - starts_W > min_length
    starts_W = starts_W[kept_W]
    stops_W = stops_W[kept_W]
    document_W = document_W[kept_W]
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

    prepared: Path
    output: Path
    file_format: Literal["tfrecord", "array_record", "parquet"]
    kind: Literal["documents", "chunks", "strided", "text"]
    field: str
    keys: ExportedRecords

    def plan(self, manifest: Manifest) -> list[RecordFileJob]:
        jobs = []
        prefix = self.keys.name
        is_text = self.kind == "text"
        files_of = self._num_files(manifest)
        for split, entry in sorted(manifest.splits.items()):
            name = ("_" if is_text else ".").join(filter(None, (prefix, split)))
            if prefix and not is_text and len(manifest.splits) == 1:
                name = prefix
            total = entry.num_documents
            if self.kind == "chunks":
                # Each chunk starts with the last token of the previous one.
                size = entry.num_tokens
                length = self.keys.chunk_length
                total = max(-(-(size - 1) // (length - 1)), min(size, 1))
            num_files = max(min(files_of[split], total), 1)
            bounds = [total * number // num_files for number in range(num_files + 1)]
            jobs += [
                RecordFileJob(split, name, number, num_files, *ends)
                for number, ends in enumerate(itertools.pairwise(bounds))
            ]
        return jobs

    def _num_files(self, manifest: Manifest) -> dict[str, int]:
        """Returns the files of each split, in proportion to bytes for text."""
        num_shards = self.keys.num_shards
        sizes = {split: entry.num_text_bytes for split, entry in manifest.splits.items()}
        if num_shards == 0:
            return {split: -(-size // _TEXT_BYTES_PER_FILE) for split, size in sizes.items()}
        if self.kind != "text":
            return dict.fromkeys(sizes, num_shards)
        files = dict.fromkeys(sizes, 1)
        for _ in range(num_shards - len(files)):
            files[max(files, key=lambda split: sizes[split] / files[split])] += 1
        return files

    def write(self, job: RecordFileJob) -> dict[str, Any]:
        """Writes a file; returns its entry in the list of files.

        `num_tokens` counts ids (or bytes of text) without padding; tokens that chunks or windows
        share count each time. Raises UserError for a damaged dataset.
        """
        manifest = read_manifest(str(self.prepared))
        store = open_flat(self.prepared, manifest, job.split)
        ranges = self._ranges(job, store)
        path = self.output / self._file_name(job, ranges.starts_W.size)
        writing = atomic.temporary_name(path)
        if self.file_format == "parquet":
            self._write_parquet(writing, manifest.pad_id, _batches(ranges, store))
        else:
            self._write_examples(writing, _batches(ranges, store))
        atomic.atomic_rename(writing, path)
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
        keys = self.keys
        if self.kind == "chunks":
            starts = np.arange(job.first, job.stop, dtype=np.int64) * (keys.chunk_length - 1)
            return RecordRanges(starts, np.minimum(starts + keys.chunk_length, len(store)))
        offsets = np.asarray(store.document_offsets[job.first : job.stop + 1])
        if self.kind == "strided":
            return strided_windows(offsets, keys.min_length, keys.max_length, keys.stride)
        return RecordRanges(offsets[:-1], offsets[1:])

    def _write_examples(self, path: Path, batches: Iterable[list[np.ndarray]]) -> None:
        open_writer = TFRecordWriter if self.file_format == "tfrecord" else ArrayRecordWriter
        with contextlib.closing(open_writer(path)) as writer:
            for record in itertools.chain.from_iterable(batches):
                value = record.astype(np.uint8).tobytes() if self.kind == "text" else record
                writer.write(tf_example.encode({self.field: value}))

    def _write_parquet(self, path: Path, pad_id: int, batches: Iterable[list[np.ndarray]]) -> None:
        pyarrow, parquet = require_pyarrow(_PARQUET)
        ids = pyarrow.list_(pyarrow.int32())
        length = self.keys.max_length
        columns = {self.field: ids}
        if self.kind == "strided":
            mask = pyarrow.list_(pyarrow.int8())
            columns = {"input_ids": ids, "attention_mask": mask, "labels": ids}
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

    Only one process may work on `output` at a time.
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
    most = preparation.prepare_num_workers
    ledger = output.with_name(f"{output.name}.finished")
    for record in ledger.glob("*.json"):
        if not (output / json.loads(record.read_bytes())["file"]).exists():
            record.unlink()
    files = run_jobs("Writing records", RecordExport.write, export, jobs, sizes, most, log, ledger)
    contents = {
        "schema_version": 1,
        "data_set": manifest.fingerprint,
        "tokenizer_sha256": manifest.tokenizer.sha256,
        "options": {**stored_options(preparation), "prepare_output_format": output_format},
        "num_files": len(files),
        "files": files,
    }
    text = json.dumps(contents, indent=1, sort_keys=True) + "\n"
    atomic.atomic_write_text(output / FILE_LISTS[output_format], text)
    for split, of_split in itertools.groupby(files, lambda file: file["split"]):
        _report(split, [*of_split], export, log)


def _report(
    split: str, files: list[dict[str, Any]], export: RecordExport, log: Callable[[str], None]
) -> None:
    names = ("num_tokens", "num_records", "dropped_documents", "dropped_tokens")
    num_tokens, num_records, documents, tokens = (sum(f[name] for f in files) for name in names)
    kind = {"strided": "strided window", "chunks": "chunk"}.get(export.kind, "document")
    size = f"{num_tokens:,} tokens"
    if export.kind == "text":
        size = f"{num_tokens / 1e6:,.1f} MB of text"
    records = pluralize(num_records, kind)
    in_files = pluralize(len(files), "file")
    log(f"  {split}: {records} of {size} in {in_files}")
    if tokens:
        log(
            f"  {split}: skipped {pluralize(documents, 'document')}, and "
            f"{pluralize(tokens, 'token')} in all, because windows of fewer than "
            f"records.min_length={export.keys.min_length} tokens are not written"
        )


def stored_options(preparation: PreparationConfig) -> dict[str, Any]:
    """Returns the options of records under their names in manifests."""
    return {name: getattr(preparation.records, entry) for name, entry in OPTIONS_OF_RECORDS.items()}
