"""Exports a tokenized dataset as records for other programs.

    <output>/records.json                   request, and each file with its SHA-256
    <output>/tokenizer.json ...             tokenizer files
    <output>/<name>_00000_2048.tfrecords    or <name>-00000-of-00004.parquet

Exported text, which the dataset stores as bytes:

    <output>/export.json                    same as records.json
    <output>/train_data_00000.tfrecord      or train_data_00000.array_record

During the export, `<output>.finished` has an entry for each finished file, so a killed process can
resume. The files do not depend on the number of processes.
"""

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from MaxText.config.data_sections import Preparation
from MaxText.counting import counted
from MaxText.errors import UserError
from MaxText.input_pipeline.preparation.process_pool import map_in_processes
from MaxText.input_pipeline.preparation.record_shards import (
    FinishedFile,
    RecordFileJob,
    RecordShape,
    num_chunks,
    require_pyarrow,
    write_record_file,
)
from MaxText.input_pipeline.token_store.manifest import MANIFEST_NAME, Manifest, read_manifest
from MaxText.input_pipeline.token_store.store import open_flat
from MaxText.runtime.cores import num_cores
from MaxText.storage.atomic import WRITING_SUFFIX, atomic_write_text, publish, writing_name

TEXT_FORMATS = ("text_tfrecord", "text_array_record")
"""Values of prepare_output_format that export the text itself."""

RECORD_FORMATS = ("tfrecord", "parquet", *TEXT_FORMATS)
"""Values of prepare_output_format that export records."""

OPTIONS_OF_RECORDS = (
    "prepare_record",
    "prepare_field",
    "prepare_chunk_length",
    "prepare_num_shards",
    "prepare_name",
    "prep_min_length",
    "prep_max_length",
    "prep_stride",
    "prep_ignore_label",
)

_LEDGER_SCHEMA = 1

# For prepare_num_shards=0: large enough for fast reads, small enough to distribute over hosts.
_TEXT_BYTES_PER_FILE = 256_000_000

# GPT-Neo's readers expect ids in `text`, Hugging Face's trainers in `input_ids`.
_DEFAULT_FIELDS = {"tfrecord": "text", "parquet": "input_ids"}
_TEXT_FIELD = "text"


def export_records(
    prepared: Path, preparation: Preparation, output: Path, show: Callable[[str], None]
) -> None:
    """Writes every split as record files to the staging folder `output`, resuming earlier work.

    Only one process may work on `output` at a time.
    """
    shape = record_shape(preparation)
    manifest = read_manifest(str(prepared))
    ledger = {
        "schema_version": _LEDGER_SCHEMA,
        "data_set": manifest.fingerprint,
        "tokenizer_sha256": manifest.tokenizer.sha256,
        "options": {
            **preparation.model_dump(mode="json", include={*OPTIONS_OF_RECORDS}),
            "prepare_output_format": preparation.prepare_output_format,
        },
    }
    finished_folder = output.with_name(f"{output.name}.finished")
    _open_output(output, finished_folder, ledger)
    jobs = _plan(prepared, manifest, shape, output)
    finished = {job: file for job in jobs if (file := _finished(finished_folder, job))}
    if shape.kind != "text":
        _copy_tokenizer(prepared, output)
    if finished:
        show(f"Resuming: {len(finished):,} of {len(jobs):,} record files are already written")
    left = [job for job in jobs if job not in finished]
    quarters = 0
    num_processes = preparation.prepare_num_workers or num_cores()
    written = map_in_processes(_write, finished_folder, left, num_processes, lambda _: None)
    for done, (job, file) in enumerate(written, 1):
        finished[job] = file
        if done * 4 // len(left) > quarters and done < len(left):
            quarters = done * 4 // len(left)
            show(f"Writing records: {done:,} of {len(left):,} files")
    files = [finished[job] for job in jobs]
    entries = {"num_files": len(files), "files": [file.model_dump() for file in files]}
    text = json.dumps(ledger | entries, indent=1, sort_keys=True) + "\n"
    atomic_write_text(output / _ledger_name(preparation.prepare_output_format), text)
    for line in _report(files, shape):
        show(line)


def damaged_files(output: Path, output_format: str) -> list[str]:
    """Returns the names of exported files that are missing or of another size."""
    ledger = json.loads((output / _ledger_name(output_format)).read_bytes())
    files = [FinishedFile.model_validate(entry) for entry in ledger["files"]]
    return [file.file for file in files if not _is_whole(output, file)]


def _ledger_name(output_format: str) -> str:
    return "export.json" if output_format in TEXT_FORMATS else "records.json"


def _open_output(output: Path, finished: Path, ledger: dict[str, Any]) -> None:
    """Creates both folders, deleting results of other requests and partial files."""
    request = finished / "request.json"
    asked = json.dumps(ledger, indent=1, sort_keys=True)
    if not request.exists() or request.read_text(encoding="utf-8") != asked:
        for folder in (finished, output):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
        atomic_write_text(request, asked)
    for leftover in output.glob(f"*{WRITING_SUFFIX}"):
        leftover.unlink()


def _record_path(finished: Path, job: RecordFileJob) -> Path:
    return finished / f"{job.split}-{job.number:05d}.json"


def _finished(finished: Path, job: RecordFileJob) -> FinishedFile | None:
    try:
        file = FinishedFile.model_validate_json(_record_path(finished, job).read_bytes())
    except (OSError, ValueError):
        return None
    return file if _is_whole(job.folder, file) else None


def _is_whole(output: Path, file: FinishedFile) -> bool:
    path = output / file.file
    return path.is_file() and path.stat().st_size == file.num_bytes


def _write(
    finished: Path, job: RecordFileJob, _advance: Callable[[int], None]
) -> tuple[RecordFileJob, FinishedFile]:
    file = write_record_file(job)
    atomic_write_text(_record_path(finished, job), file.model_dump_json())
    return job, file


def record_shape(preparation: Preparation) -> RecordShape:
    """Returns the record format. Raises UserError if keys conflict, or pyarrow is not installed."""
    name = preparation.prepare_name
    if name and Path(name).name != name:
        raise UserError(
            f"prepare_name={name} contains a folder, and it is a prefix of file names. Leave out "
            "the folder."
        )
    is_text = preparation.prepare_output_format in TEXT_FORMATS
    file_format = preparation.prepare_output_format.removeprefix("text_")
    assert file_format in ("tfrecord", "array_record", "parquet"), file_format
    kind = "text" if is_text else preparation.prepare_record
    if kind == "strided":
        if file_format != "parquet":
            raise UserError(
                f"prepare_record=strided is written as parquet, and prepare_output_format is "
                f"{file_format}. Set prepare_output_format=parquet, or prepare_record=chunks."
            )
        for key in ("prep_min_length", "prep_stride"):
            value = getattr(preparation, key)
            if value > preparation.prep_max_length:
                raise UserError(
                    f"{key}={value} is above prep_max_length={preparation.prep_max_length}: "
                    "windows cannot be that long, or would skip tokens between them. "
                    f"Lower {key} or raise prep_max_length."
                )
    if file_format == "parquet":
        require_pyarrow()
    return RecordShape(
        file_format=file_format,
        kind=kind,
        field=_TEXT_FIELD if is_text else preparation.prepare_field or _DEFAULT_FIELDS[file_format],
        keys=preparation,
    )


def _plan(
    prepared: Path, manifest: Manifest, shape: RecordShape, output: Path
) -> list[RecordFileJob]:
    jobs = []
    files_of = _num_files(manifest, shape.keys.prepare_num_shards, shape)
    for split, entry in sorted(manifest.splits.items()):
        prefix = shape.keys.prepare_name
        if shape.kind != "text" and prefix and len(manifest.splits) == 1:
            name = prefix
        else:
            name = ("_" if shape.kind == "text" else ".").join(filter(None, (prefix, split)))
        if shape.kind == "chunks":
            total = num_chunks(entry.num_tokens, shape.keys.prepare_chunk_length)
            num_files = max(min(files_of[split], total), 1)
            bounds = [total * number // num_files for number in range(num_files + 1)]
        else:
            offsets = np.asarray(open_flat(prepared, manifest, split).document_offsets)
            num_files = max(min(files_of[split], entry.num_documents), 1)
            bounds = _even_bounds(offsets, num_files).tolist()
        jobs += [
            RecordFileJob(
                prepared=prepared,
                split=split,
                shape=shape,
                first=bounds[number],
                stop=bounds[number + 1],
                folder=output,
                name=name,
                number=number,
                num_files=num_files,
            )
            for number in range(num_files)
        ]
    return jobs


def _num_files(manifest: Manifest, num_shards: int, shape: RecordShape) -> dict[str, int]:
    """Returns the files of each split; text splits share `num_shards` in proportion to bytes."""
    sizes = {split: entry.num_text_bytes for split, entry in manifest.splits.items()}
    if num_shards == 0:
        return {split: -(-size // _TEXT_BYTES_PER_FILE) for split, size in sizes.items()}
    if shape.kind != "text":
        return dict.fromkeys(sizes, num_shards)
    total = sum(sizes.values())
    files = {split: max(1, num_shards * size // total) for split, size in sizes.items()}
    # The remainder goes to the splits that lost most by rounding down.
    by_loss = sorted(sizes, key=lambda split: files[split] - num_shards * sizes[split] / total)
    for split in by_loss[: max(0, num_shards - sum(files.values()))]:
        files[split] += 1
    return files


def _even_bounds(document_offsets: np.ndarray, num_files: int) -> np.ndarray:
    """Returns the first document of each nonempty, roughly equal file, and the end."""
    num_documents = len(document_offsets) - 1
    numbers = np.arange(num_files + 1)
    targets = int(document_offsets[-1]) * numbers // num_files
    bounds = np.searchsorted(document_offsets, targets)
    bounds[0], bounds[-1] = 0, num_documents
    if num_documents >= num_files:
        bounds = np.maximum.accumulate(bounds - numbers) + numbers
        bounds = np.minimum(bounds, num_documents - num_files + numbers)
    return bounds


def _copy_tokenizer(prepared: Path, output: Path) -> None:
    for file in sorted(prepared.iterdir()):
        if file.is_file() and file.name != MANIFEST_NAME and not file.name.startswith("."):
            writing = writing_name(output / file.name)
            shutil.copyfile(file, writing)
            publish(writing, output / file.name)


def _report(files: Sequence[FinishedFile], shape: RecordShape) -> Iterator[str]:
    kind = {"strided": "strided window", "chunks": "chunk"}.get(shape.kind, "document")
    for split in dict.fromkeys(file.split for file in files):
        of_split = [file for file in files if file.split == split]
        num_tokens = sum(file.num_tokens for file in of_split)
        num_records = counted(sum(file.num_records for file in of_split), kind)
        is_text = shape.kind == "text"
        size = f"{num_tokens / 1e6:,.1f} MB of text" if is_text else f"{num_tokens:,} tokens"
        yield f"  {split}: {num_records} of {size} in {counted(len(of_split), 'file')}"
        dropped_documents = sum(file.dropped_documents for file in of_split)
        dropped_tokens = sum(file.dropped_tokens for file in of_split)
        if dropped_tokens:
            yield (
                f"  {split}: skipped {counted(dropped_documents, 'document')}, and "
                f"{counted(dropped_tokens, 'token')} in all, because windows of fewer than "
                f"prep_min_length={shape.keys.prep_min_length} tokens are not written"
            )
