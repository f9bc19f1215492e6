"""Writes a prepared data set as records for other programs: `export_records`.

Of ids:

    <output>/
      records.json                     the ledger: what was asked for, and each finished file
      tokenizer.json ...               the tokenizer's files, as the prepared data set has them
      <name>_00000_2048.tfrecords      or <name>-00000-of-00004.parquet

Of text, which the prepared data set holds as bytes:

    <output>/
      export.json                      the ledger
      train_data_00000.tfrecord        or train_data_00000.array_record

The ledger is written anew after each file, so a run that was killed goes on where it stopped. The
files are the same bytes however many processes write them. Imports no jax.
"""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pydantic

from MaxText.configuration.data_sections import Preparation
from MaxText.counting import counted
from MaxText.errors import UserError
from MaxText.input_pipeline.cores import num_cores
from MaxText.input_pipeline.preparation import work_processes
from MaxText.input_pipeline.preparation.record_shards import (
    RecordShape,
    ShardEntry,
    ShardJob,
    num_chunks,
    require_pyarrow,
    write_shard,
)
from MaxText.input_pipeline.preparation.work_processes import Advance
from MaxText.input_pipeline.sync import WRITING_SUFFIX, publish, write_whole, writing_name
from MaxText.input_pipeline.token_store.manifest import MANIFEST_NAME, Manifest, read_manifest
from MaxText.input_pipeline.token_store.store import open_flat

TEXT_FORMATS = ("text_tfrecord", "text_array_record")
"""Values of prepare_output_format that write the text itself."""

_LEDGER_SCHEMA = 1

# With prepare_num_shards=0: large enough for fast reading, small enough to share over hosts.
_TEXT_BYTES_PER_SHARD = 256_000_000

# Name of the ids where none is asked for: GPT-Neo's readers want `text`, Hugging Face's trainers
# `input_ids`.
_DEFAULT_FIELDS = {"tfrecord": "text", "parquet": "input_ids"}
_TEXT_FIELD = "text"


class RecordsLedger(pydantic.BaseModel):
    """Contents of records.json, or of export.json beside text.

    Attributes:
      schema_version: layout of this file.
      data_set: fingerprint of the prepared data set.
      tokenizer_sha256: of its tokenizer.
      options: what was asked for, by configuration key.
      num_files: files there will be.
      files: those that are finished, in order of split and shard.
    """

    model_config = pydantic.ConfigDict(frozen=True)

    schema_version: int
    data_set: str
    tokenizer_sha256: str
    options: dict[str, Any]
    num_files: int
    files: tuple[ShardEntry, ...] = ()


def ledger_name(output_format: str) -> str:
    """Name of the ledger beside records of a format, by which preparing knows what they hold."""
    return "export.json" if output_format in TEXT_FORMATS else "records.json"


def export_records(
    prepared: Path,
    preparation: Preparation,
    output: Path,
    show: Callable[[str], None],
) -> None:
    """Writes every split of a prepared data set as record files, or keeps those that are there.

    Only one process may work on `output` at a time.

    Args:
      prepared: folder of the data set.
      preparation: the keys about preparation; prepare_output_format is one of records.
      output: folder to write; made where it is missing.
      show: takes lines about what was done.

    Raises:
      UserError: keys that make no sense together, pyarrow is missing, `output` holds something
        else, or the data set is damaged.
    """
    shape = _shape(preparation)
    if shape.file_format == "parquet":
        require_pyarrow()
    manifest = read_manifest(str(prepared))
    options = _options(preparation, shape)
    jobs = _plan(prepared, manifest, preparation, shape, output)
    path = output / ledger_name(preparation.prepare_output_format)
    ledger = _open_ledger(path, manifest, options, len(jobs))
    _remove_leftovers(output)
    if shape.kind != "text":
        _copy_tokenizer(prepared, output)
    finished = {(entry.split, entry.shard): entry for entry in ledger.files}
    left = [job for job in jobs if (job.split, job.shard) not in finished]
    if finished:
        show(f"Kept {len(finished):,} of {len(jobs):,} record files, finished earlier")
    num_processes = preparation.prepare_num_workers or num_cores()
    quarters = 0
    entries = work_processes.run(_write, None, left, num_processes, lambda _: None)
    for done, entry in enumerate(entries, 1):
        finished[entry.split, entry.shard] = entry
        in_order = tuple(finished[key] for key in sorted(finished))
        ledger = ledger.model_copy(update={"files": in_order})
        _write_ledger(path, ledger)
        if done * 4 // len(left) > quarters and done < len(left):
            quarters = done * 4 // len(left)
            show(f"Writing records: {done:,} of {len(left):,} files")
    for line in _report(ledger, shape):
        show(line)


def _write(_shared: None, job: ShardJob, _advance: Advance) -> ShardEntry:
    """`write_shard` as work_processes calls it."""
    return write_shard(job)


def _shape(preparation: Preparation) -> RecordShape:
    name = preparation.prepare_name
    if name and Path(name).name != name:
        raise UserError(
            f"prepare_name={name} is no plain name: it begins the names of files in dataset_path. "
            "Leave out its folders."
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
                    "windows could not be that long, or would leave out tokens between them. "
                    f"Lower {key} or raise prep_max_length."
                )
    return RecordShape(
        file_format=file_format,
        kind=kind,
        field=_TEXT_FIELD if is_text else preparation.prepare_field or _DEFAULT_FIELDS[file_format],
        chunk_length=preparation.prepare_chunk_length,
        min_length=preparation.prep_min_length,
        max_length=preparation.prep_max_length,
        stride=preparation.prep_stride,
        ignore_label=preparation.prep_ignore_label,
    )


def _options(preparation: Preparation, shape: RecordShape) -> dict[str, Any]:
    """What decides about the files, besides the data set."""
    keys = ["prepare_output_format", "prepare_record", "prepare_num_shards", "prepare_name"]
    if shape.kind == "chunks":
        keys += ["prepare_chunk_length"]
    if shape.kind == "strided":
        keys += ["prep_min_length", "prep_max_length", "prep_stride", "prep_ignore_label"]
    options = preparation.model_dump(mode="json", include=set(keys))
    return options if shape.kind == "strided" else {**options, "field of the ids": shape.field}


def _plan(
    prepared: Path, manifest: Manifest, preparation: Preparation, shape: RecordShape, output: Path
) -> list[ShardJob]:
    """The files to write, in order of split and number."""
    jobs = []
    shards_of = _num_shards(manifest, preparation.prepare_num_shards, shape)
    for split, entry in sorted(manifest.splits.items()):
        prefix = preparation.prepare_name
        if shape.kind != "text" and prefix and len(manifest.splits) == 1:
            name = prefix
        else:
            name = ("_" if shape.kind == "text" else ".").join(filter(None, (prefix, split)))
        wanted = shards_of[split]
        if shape.kind == "chunks":
            total = num_chunks(entry.num_tokens, shape.chunk_length)
            num_shards = max(min(wanted, total), 1)
            bounds = [total * shard // num_shards for shard in range(num_shards + 1)]
        else:
            stream = open_flat(prepared, manifest, split)
            num_shards = max(min(wanted, entry.num_documents), 1)
            bounds = _even_bounds(np.asarray(stream.document_offsets), num_shards).tolist()
        jobs += [
            ShardJob(
                prepared=prepared,
                split=split,
                shape=shape,
                first=bounds[shard],
                stop=bounds[shard + 1],
                folder=output,
                name=name,
                shard=shard,
                num_shards=num_shards,
            )
            for shard in range(num_shards)
        ]
    return jobs


def _num_shards(manifest: Manifest, num_shards: int, shape: RecordShape) -> dict[str, int]:
    """Files of each split; `num_shards` of text are those of all splits, divided by their bytes."""
    sizes = {split: entry.num_text_bytes for split, entry in manifest.splits.items()}
    if num_shards == 0:
        return {split: -(-size // _TEXT_BYTES_PER_SHARD) for split, size in sizes.items()}
    if shape.kind != "text":
        return dict.fromkeys(sizes, num_shards)
    total = sum(sizes.values())
    shards = {split: max(1, num_shards * size // total) for split, size in sizes.items()}
    # What rounding down left goes to the splits that lost most by it.
    by_loss = sorted(sizes, key=lambda split: shards[split] - num_shards * sizes[split] / total)
    for split in by_loss[: max(0, num_shards - sum(shards.values()))]:
        shards[split] += 1
    return shards


def _even_bounds(document_offsets: np.ndarray, num_shards: int) -> np.ndarray:
    """First document of each shard, then the end: about equal tokens, a document at least."""
    num_documents = len(document_offsets) - 1
    shards = np.arange(num_shards + 1)
    targets = int(document_offsets[-1]) * shards // num_shards
    bounds = np.searchsorted(document_offsets, targets)
    bounds[0], bounds[-1] = 0, num_documents
    if num_documents >= num_shards:
        bounds = np.maximum.accumulate(bounds - shards) + shards
        bounds = np.minimum(bounds, num_documents - num_shards + shards)
    return bounds


def _open_ledger(
    path: Path, manifest: Manifest, options: dict[str, Any], num_files: int
) -> RecordsLedger:
    """The ledger of an earlier run of the same request without files that are gone, or a new one.

    Raises:
      UserError: the folder holds something else, or records of another request.
    """
    asked = RecordsLedger(
        schema_version=_LEDGER_SCHEMA,
        data_set=manifest.fingerprint,
        tokenizer_sha256=manifest.tokenizer.sha256,
        options=options,
        num_files=num_files,
    )
    output = path.parent
    if output.exists() and not output.is_dir():
        raise UserError(f"{output} is a file, and records go to a folder. Choose another name.")
    if path.exists():
        return _same_request(path, asked)
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"The folder {output} cannot be made ({error}). Choose another, or mend that."
        ) from error
    others = [entry.name for entry in output.iterdir() if not entry.name.endswith(WRITING_SUFFIX)]
    if others:
        raise UserError(
            f"{output} holds other things ({min(others)}) and no {path.name}. Choose another "
            "folder, or delete it."
        )
    _write_ledger(path, asked)
    return asked


def _same_request(path: Path, asked: RecordsLedger) -> RecordsLedger:
    try:
        found = RecordsLedger.model_validate_json(path.read_bytes())
    except (OSError, ValueError) as error:
        reason = str(error).replace("\n", " ")
        raise UserError(
            f"{path} cannot be read ({reason}). Delete the folder and export again."
        ) from error
    was = {"data set": found.data_set, "tokenizer": found.tokenizer_sha256, **found.options}
    now = {"data set": asked.data_set, "tokenizer": asked.tokenizer_sha256, **asked.options}
    differences = [
        f"{key} was {was.get(key)!r} and is {now.get(key)!r}"
        for key in {**was, **now}
        if was.get(key) != now.get(key)
    ]
    if differences or found.num_files != asked.num_files:
        raise UserError(
            f"{path.parent} holds other records: {'; '.join(differences) or 'other files'}. Choose "
            "another folder, or delete it to write them again."
        )

    whole = tuple(entry for entry in found.files if _is_whole(path.parent, entry))
    return found.model_copy(update={"files": whole})


def _is_whole(output: Path, entry: ShardEntry) -> bool:
    file = output / entry.file
    return file.is_file() and file.stat().st_size == entry.num_bytes


def damaged_files(output: Path, output_format: str) -> list[str]:
    """Names of the finished record files of a folder that are missing or have another size."""
    ledger = RecordsLedger.model_validate_json((output / ledger_name(output_format)).read_bytes())
    return [entry.file for entry in ledger.files if not _is_whole(output, entry)]


def _write_ledger(path: Path, ledger: RecordsLedger) -> None:
    write_whole(path, json.dumps(ledger.model_dump(mode="json"), indent=1, sort_keys=True) + "\n")


def _remove_leftovers(output: Path) -> None:
    """Deletes files that an earlier run had begun."""
    for leftover in output.glob(f"*{WRITING_SUFFIX}"):
        leftover.unlink(missing_ok=True)


def _copy_tokenizer(prepared: Path, output: Path) -> None:
    """Copies what lies beside the manifest: the files of the tokenizer."""
    for file in sorted(prepared.iterdir()):
        if file.is_file() and file.name != MANIFEST_NAME and not file.name.startswith("."):
            writing = writing_name(output / file.name)
            shutil.copyfile(file, writing)
            publish(writing, output / file.name)


def _report(ledger: RecordsLedger, shape: RecordShape) -> Iterator[str]:
    kind = {"strided": "strided window", "chunks": "chunk"}.get(shape.kind, "document")
    for split in dict.fromkeys(entry.split for entry in ledger.files):
        files = [entry for entry in ledger.files if entry.split == split]
        num_tokens = sum(entry.num_tokens for entry in files)
        num_records = sum(entry.num_records for entry in files)
        size = (
            f"{num_tokens / 1e6:,.1f} MB of text"
            if shape.kind == "text"
            else f"{num_tokens:,} tokens"
        )
        yield f"  {split}: {counted(num_records, kind)} of {size} in {counted(len(files), 'file')}"
        dropped_documents = sum(entry.dropped_documents for entry in files)
        dropped_tokens = sum(entry.dropped_tokens for entry in files)
        if dropped_tokens:
            yield (
                f"  {split}: left out {counted(dropped_documents, 'document')}, and "
                f"{counted(dropped_tokens, 'token')} in all, because windows of fewer than "
                f"prep_min_length={shape.min_length} tokens are not written"
            )
