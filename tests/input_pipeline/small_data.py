"""Small data sets of known ids, and the batches that training and evaluation read from them."""

import contextlib
import dataclasses
import hashlib
import itertools
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np

from MaxText.config.data_sections import DataConfig
from MaxText.config.schema import Config, unflatten
from MaxText.input_pipeline.formats.array_record import ArrayRecordWriter
from MaxText.input_pipeline.iterator import EvalBatches, TrainIterator
from MaxText.input_pipeline.loader import make_eval_iterator, make_train_iterator
from MaxText.input_pipeline.sequences.batch_schedule import BatchSchedule
from MaxText.input_pipeline.sequences.batch_source import BatchShard
from MaxText.input_pipeline.token_store.manifest import (
    MANIFEST_NAME,
    SCHEMA_VERSION,
    Manifest,
    RecordFile,
    SourceEntry,
    Split,
    TokenizerEntry,
    unigram_entropy,
)
from MaxText.input_pipeline.token_store.store import checksums_name, file_checksums
from MaxText.layers.batch import Batch

VOCAB_SIZE = 50_000
EOS = 0
LENGTH = 16


def random_documents(
    seed: int, count: int, longest: int, vocab_size: int = VOCAB_SIZE
) -> list[np.ndarray]:
    """Documents of 1..longest random ids, each ended by EOS."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(0, longest, count)
    return [np.append(rng.integers(1, vocab_size, size), EOS) for size in sizes]


def numbered_documents(sizes: list[int]) -> list[np.ndarray]:
    """Documents in which every id of the whole stream is different: 1, 2, 3, ..."""
    ends = np.cumsum([0, *sizes]) + 1
    return [np.arange(ends[i], ends[i + 1]) for i in range(len(sizes))]


def write_data_set(
    folder: Path,
    splits: dict[str, list[np.ndarray]],
    vocab_size: int = VOCAB_SIZE,
    chunk_length: int = 64,
    records_per_file: int = 5,
    file_format: str = "bin",
) -> Manifest:
    """Writes documents as a data set whose small files make every boundary occur."""
    form = (vocab_size, chunk_length, records_per_file, file_format)
    entries = {name: _write_split(folder / name, ids, *form) for name, ids in splits.items()}
    tokenizer = TokenizerEntry(origin="a test", sha256="0" * 64, vocab_size=vocab_size, eos_id=EOS)
    manifest = Manifest(
        schema_version=SCHEMA_VERSION,
        tokenizer=tokenizer,
        dtype="uint16" if vocab_size <= 2**16 else "uint32",
        format=file_format,
        chunk_length=chunk_length if file_format == "array_record" else 1,
        splits=entries,
        source=SourceEntry(description="random ids", sha256="0" * 64, num_files=0),
    )
    (folder / MANIFEST_NAME).write_text(manifest.to_json(), encoding="utf-8")
    return manifest


def _write_split(folder, documents, vocab_size, chunk_length, records_per_file, file_format):
    """Document i is row i of numbers.txt and 3 bytes of text per id."""
    folder.mkdir(parents=True)
    ids = np.concatenate(documents).astype("uint16" if vocab_size <= 2**16 else "uint32")
    offsets = np.cumsum([0, *map(len, documents)])
    files = []
    for number, at in enumerate(range(0, ids.size, chunk_length * records_per_file)):
        of_file = ids[at : at + chunk_length * records_per_file]
        path = folder / f"tokens-{number:05d}.{file_format}"
        records = of_file.size
        if file_format == "bin":
            path.write_bytes(of_file.tobytes())
        else:
            chunks = [of_file[i : i + chunk_length] for i in range(0, of_file.size, chunk_length)]
            with contextlib.closing(ArrayRecordWriter(path)) as writer:
                for chunk in chunks:
                    writer.write(chunk.tobytes())
            records = len(chunks)
        size = path.stat().st_size
        files.append(
            RecordFile(name=path.name, num_bytes=size, num_records=records, num_tokens=of_file.size)
        )
    if file_format == "bin":
        checksums = [file_checksums(folder / file.name) for file in files]
        np.save(folder / f"{checksums_name()}.npy", np.concatenate(checksums))
    np.save(folder / "document_offsets.npy", offsets)
    np.save(folder / "document_rows.npy", np.arange(len(documents), dtype=np.int32))
    (folder / "source_files.json").write_text(json.dumps([[0, "numbers.txt"]]))
    return Split(
        files=tuple(files),
        num_tokens=ids.size,
        num_documents=len(documents),
        num_text_bytes=3 * ids.size,
        max_token_id=int(ids.max()),
        unigram_entropy_nats=round(unigram_entropy(np.bincount(ids)), 6),
        tokens_sha256=hashlib.sha256(ids).hexdigest(),
        offsets_sha256=hashlib.sha256(offsets.astype("<i8")).hexdigest(),
    )


def data_keys(folder: Path | str, **keys) -> DataConfig:
    return DataConfig(dataset_path=str(folder), **keys)


def quiet(line: str) -> None:
    """Logs nothing."""


def run_config(data, masking=None, **keys) -> Config:
    """The configuration of a run that reads this data."""
    keys = {"vocab_size": VOCAB_SIZE, "max_target_length": LENGTH, **keys}
    sections = {"data": data} | ({"masking": masking} if masking else {})
    return unflatten(keys).model_copy(update=sections)


def open_train(
    data, batch: int = 8, host: int = 0, hosts: int = 1, schedule=None, log=quiet, **keys
) -> TrainIterator:
    schedule = schedule or BatchSchedule.constant(batch, LENGTH)
    config = run_config(data, max_target_length=schedule.sequence_length, **keys)
    return make_train_iterator(config, schedule, BatchShard(host, hosts), log)


def open_eval(
    data, batch: int = 8, host: int = 0, hosts: int = 1, log=quiet, **keys
) -> EvalBatches:
    return make_eval_iterator(run_config(data, **keys), batch, BatchShard(host, hosts), log)


def take(iterator, count: int) -> list[Batch]:
    """The next batches; closes the iterator."""
    batches = list(itertools.islice(iterator, count))
    if hasattr(iterator, "close"):
        iterator.close()
    return batches


def fields(batch: Batch) -> dict[str, np.ndarray]:
    values = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    return {name: value for name, value in values.items() if value is not None}


def join(batches) -> Batch:
    rows = [fields(batch) for batch in batches]
    return Batch(**{name: np.concatenate([row[name] for row in rows]) for name in rows[0]})


def assert_same(batches, expected) -> None:
    for batch, reference in zip(batches, expected, strict=True):
        assert fields(batch).keys() == fields(reference).keys()
        for name, value in fields(batch).items():
            np.testing.assert_array_equal(value, fields(reference)[name], err_msg=name)


def contents(folder: Path) -> dict[str, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def denying(function: Callable, *names: str) -> Callable:
    """`function` as for a user who may not read these; chmod does not stop root."""

    def denied(path, *arguments, **keys):
        if str(path).endswith(names):
            raise PermissionError(13, "Permission denied", str(path))
        return function(path, *arguments, **keys)

    return denied
