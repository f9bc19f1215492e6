"""Tokenizes the shards of a corpus into the token files of a dataset.

    <staging>/data_set/<split>/tokens-000017.bin    ids of a shard, documents concatenated
    <staging>/shards/000017-<split>.npz             lengths and rows of its documents, id counts
    <staging>/shards/000017.json                    TokenizedShard, written last

A shard whose json exists is finished, even if its process was killed right afterwards. A shard
without documents in a split has no files there.
"""

import array
import contextlib
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pydantic

from MaxText.config.data_sections import PreparationConfig
from MaxText.input_pipeline.document_sources.corpus import Document, Shard
from MaxText.input_pipeline.document_sources.text_streams import Skipped
from MaxText.input_pipeline.local_cache import write_arrays
from MaxText.input_pipeline.prepare import sampling
from MaxText.input_pipeline.token_store.manifest import (
    OFFSETS_NAME,
    ROWS_NAME,
    SCHEMA_VERSION,
    SOURCE_FILES_NAME,
    RecordFile,
    Split,
    unigram_entropy,
)
from MaxText.input_pipeline.tokenization.interface import TextTokenizer
from MaxText.storage.atomic import atomic_rename, atomic_write_text, sync_file, temporary_name

# Text tokenized at a time: the tokenizers library takes some hundred bytes per token.
_BATCH_CHARACTERS = 4_000_000


@dataclass(frozen=True)
class Tokenization:
    """Everything besides the text with an effect on ids, and the staging."""

    staging: Path
    tokenizer: TextTokenizer
    keys: PreparationConfig
    is_text: bool  # the ids are the bytes of the text
    before: tuple[int, ...] = ()  # control ids before each document
    after: tuple[int, ...] = ()  # control ids after each document

    @property
    def dtype(self) -> Literal["uint8", "uint16", "uint32"]:
        if self.is_text:
            return "uint8"
        return "uint16" if self.tokenizer.entry.vocab_size <= 2**16 else "uint32"

    @property
    def minimum_tokens(self) -> int:
        """Shorter documents are skipped, not counting control ids."""
        return 1 if self.is_text else max(self.keys.prepare_minimum_tokens, 1)

    def summary(self) -> dict[str, Any]:
        """Returns everything besides the text with an effect on ids."""
        keys = {"prepare_seed", "validation_fraction", "prepare_fix_text"}
        return self.keys.model_dump(mode="json", include=keys) | {
            "before": self.before,
            "after": self.after,
            "is_text": self.is_text,
            "minimum_tokens": self.minimum_tokens,
            "schema_version": SCHEMA_VERSION,
            "tokenizer": self.tokenizer.entry.sha256,
            "vocab_size": self.tokenizer.entry.vocab_size,
        }


@dataclass(frozen=True)
class ShardJob:
    """A shard to tokenize."""

    number: int
    shard: Shard
    threshold: int  # documents with a lower hash are held out


class ShardSplit(pydantic.BaseModel):
    """The shard's part of a split."""

    model_config = pydantic.ConfigDict(frozen=True)

    num_tokens: int
    num_documents: int
    num_text_bytes: int
    source_files: tuple[tuple[int, str], ...]  # (index of its first document, name), in order


class TokenizedShard(pydantic.BaseModel):
    """Contents of a finished shard."""

    model_config = pydantic.ConfigDict(frozen=True)

    sha256: str  # sampling.add_to_digest of the text as read
    num_bytes: int
    skipped: dict[str, int]  # reason -> number of documents
    bad: tuple[str, ...] = ()  # errors of malformed rows and unreadable files
    lowest: int  # hash of a kept document; 2**64 without any
    highest: int  # -1 without any
    threshold: int
    splits: dict[str, ShardSplit]

    @property
    def num_tokens(self) -> int:
        return sum(part.num_tokens for part in self.splits.values())


def _tokens_path(staging: Path, split: str, number: int) -> Path:
    return staging / "data_set" / split / f"tokens-{number:06d}.bin"


def _documents_path(staging: Path, split: str, number: int) -> Path:
    return staging / "shards" / f"{number:06d}-{split}.npz"


def _record_path(staging: Path, number: int) -> Path:
    return staging / "shards" / f"{number:06d}.json"


def finished_shard(tokenization: Tokenization, number: int) -> TokenizedShard | None:
    """Returns a shard finished earlier; None if unfinished or damaged."""
    staging, itemsize = tokenization.staging, np.dtype(tokenization.dtype).itemsize
    try:
        found = TokenizedShard.model_validate_json(_record_path(staging, number).read_bytes())
        for split, part in found.splits.items():
            if part.num_documents:
                _documents_path(staging, split, number).stat()
                size = _tokens_path(staging, split, number).stat().st_size
                if size != part.num_tokens * itemsize:
                    return None
    except (OSError, ValueError):
        return None
    return found


def tokenize_shard(tokenization: Tokenization, job: ShardJob) -> TokenizedShard:
    """Tokenizes a shard, or keeps an earlier result.

    Raises UserError as Shard.documents does.
    """
    found = finished_shard(tokenization, job.number)
    if found is None or found.threshold != job.threshold:
        record = _record_path(tokenization.staging, job.number)
        record.unlink(missing_ok=True)
        found = _tokenize(tokenization, job)
        atomic_write_text(record, found.model_dump_json())
    return found


def _tokenize(tokenization: Tokenization, job: ShardJob) -> TokenizedShard:
    keys, minimum = tokenization.keys, tokenization.minimum_tokens
    clean = sampling.text_cleaner(keys.prepare_fix_text)
    digest, skipped = hashlib.sha256(), Skipped()
    num_bytes, index, lowest, highest = 0, 0, 2**64, -1
    by_hash = [sampling.TRAIN, *[sampling.VALIDATION] * (keys.validation_fraction > 0)]
    with contextlib.ExitStack() as stack:
        writers = {
            split: stack.enter_context(_SplitWriter(tokenization, split, job.number))
            for split in ([job.shard.split] if job.shard.split else by_hash)
        }
        for documents in _batches(job.shard.documents(skipped)):
            numbers = sampling.document_number(job.number, index) + np.arange(len(documents))
            index += len(documents)
            texts = [clean(document.text) for document in documents]
            ids = tokenization.tokenizer.encode(texts)
            ranks = sampling.hashes(keys.prepare_seed, sampling.HELD_OUT, numbers).tolist()
            for document, text, ids_N, rank in zip(documents, texts, ids, ranks, strict=True):
                encoded = document.text.encode()
                sampling.add_to_digest(digest, encoded)
                num_bytes += len(encoded)
                if len(ids_N) < minimum:
                    skipped[f"shorter than {minimum} tokens"] += 1
                    continue
                lowest, highest = min(lowest, rank), max(highest, rank)
                split = job.shard.split or by_hash[rank < job.threshold]
                if keys.prepare_fix_text:
                    encoded = text.encode()
                writers[split].add(ids_N, len(encoded), document)
            for writer in writers.values():
                writer.flush()
        splits = {split: writer.finish() for split, writer in writers.items()}
    return TokenizedShard(
        sha256=digest.hexdigest(),
        num_bytes=num_bytes,
        skipped=dict(skipped),
        bad=tuple(skipped.bad),
        lowest=lowest,
        highest=highest,
        threshold=job.threshold,
        splits=splits,
    )


def _batches(documents: Iterator[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document.text)
        if size >= _BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


class _SplitWriter:
    """Writes a shard's documents in one split; deletes them on an error."""

    def __init__(self, tokenization: Tokenization, split: str, number: int):
        dtype = np.dtype(tokenization.dtype).newbyteorder("<")
        self._before = np.array(tokenization.before, dtype)
        self._after = np.array(tokenization.after, dtype)
        self._path = _tokens_path(tokenization.staging, split, number)
        self._documents_path = _documents_path(tokenization.staging, split, number)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._writing = temporary_name(self._path)
        self._file = self._writing.open("wb")
        self._pending: list[np.ndarray] = []
        self._counts_V = np.zeros(tokenization.tokenizer.entry.vocab_size, np.int64)
        self._lengths, self._rows = array.array("q"), array.array("q")
        self._source_files: list[tuple[int, str]] = []
        self._num_text_bytes = 0

    def __enter__(self) -> "_SplitWriter":
        return self

    def __exit__(self, *_: object) -> None:
        # On a full disk, flushing the buffer raises again.
        with contextlib.suppress(OSError):
            self._file.close()
        self._writing.unlink(missing_ok=True)

    def add(self, ids_N: np.ndarray, num_text_bytes: int, document: Document) -> None:
        if not self._source_files or self._source_files[-1][1] != document.file:
            self._source_files.append((len(self._lengths), document.file))
        self._lengths.append(len(self._before) + len(ids_N) + len(self._after))
        self._rows.append(document.row)
        self._num_text_bytes += num_text_bytes
        self._pending += (self._before, ids_N, self._after)

    def flush(self) -> None:
        if self._pending:
            ids = np.concatenate(self._pending)
            counts_V = np.bincount(ids, minlength=self._counts_V.size)
            assert counts_V.size == self._counts_V.size, "an id is not below vocab_size"
            self._counts_V += counts_V
            self._file.write(ids.astype(self._before.dtype).data)
            self._pending = []

    def finish(self) -> ShardSplit:
        """Publishes the files; they are synced to disk when this returns."""
        lengths, rows = np.asarray(self._lengths, np.int64), np.asarray(self._rows, np.int64)
        if lengths.size:
            self._file.close()
            atomic_rename(self._writing, self._path)
            writing = temporary_name(self._documents_path)
            ids = np.flatnonzero(self._counts_V)
            with writing.open("wb") as file:
                np.savez(file, lengths=lengths, rows=rows, ids=ids, counts=self._counts_V[ids])
            atomic_rename(writing, self._documents_path)
            sync_file(self._path.parent)
        return ShardSplit(
            num_tokens=int(lengths.sum()),
            num_documents=lengths.size,
            num_text_bytes=self._num_text_bytes,
            source_files=tuple(self._source_files),
        )


def write_documents(
    tokenization: Tokenization, split: str, shards: Sequence[tuple[int, ShardSplit]]
) -> Split:
    """Writes the document files of a split; returns its manifest entry.

    Holds the documents of only one shard in memory.
    """
    staging, folder = tokenization.staging, tokenization.staging / "data_set" / split
    itemsize = np.dtype(tokenization.dtype).itemsize
    tokens_digest, offsets_digest = hashlib.sha256(), hashlib.sha256(bytes(8))  # of the first 0
    counts_V = np.zeros(tokenization.tokenizer.entry.vocab_size, np.int64)
    files: list[RecordFile] = []
    source_files: list[tuple[int, str]] = []

    def arrays(number: int) -> Any:
        return np.load(_documents_path(staging, split, number))

    # Rows fit int32, except for sources that count something other than rows.
    widest = max(int(arrays(number)["rows"].max()) for number, _ in shards)
    row_type = np.dtype("<i4" if widest <= np.iinfo(np.int32).max else "<i8")

    def blocks() -> Iterator[dict[str, np.ndarray]]:
        end = 0
        yield {"document_offsets": np.zeros(1, "<i8"), "document_rows": np.empty(0, row_type)}
        for number, part in shards:
            with arrays(number) as of_shard:
                ends = (end + np.cumsum(of_shard["lengths"])).astype("<i8")
                rows = of_shard["rows"].astype(row_type)
                counts_V[of_shard["ids"]] += of_shard["counts"]
            offsets_digest.update(ends.data)
            yield {"document_offsets": ends, "document_rows": rows}
            end += part.num_tokens

    write_arrays(folder, blocks())
    first_document = 0
    for number, part in shards:
        path = _tokens_path(staging, split, number)
        with path.open("rb") as file:
            while block := file.read(2**24):
                tokens_digest.update(block)
        for document, name in part.source_files:
            if not source_files or source_files[-1][1] != name:
                source_files.append((first_document + document, name))
        first_document += part.num_documents
        size = part.num_tokens
        files.append(
            RecordFile(name=path.name, num_bytes=size * itemsize, num_records=size, num_tokens=size)
        )
    for name in (OFFSETS_NAME, ROWS_NAME):
        sync_file(folder / name)
    lines = ",\n".join(json.dumps(entry) for entry in source_files)
    atomic_write_text(folder / SOURCE_FILES_NAME, f"[{lines}]\n")
    # Left over if the text has fewer shards than in an earlier process.
    for path in set(folder.glob("tokens-*")) - {folder / file.name for file in files}:
        path.unlink()
    sync_file(folder)
    return Split(
        files=tuple(files),
        num_tokens=sum(part.num_tokens for _, part in shards),
        num_documents=first_document,
        num_text_bytes=sum(part.num_text_bytes for _, part in shards),
        unigram_entropy=round(unigram_entropy(counts_V), 6),
        largest_id=int(np.flatnonzero(counts_V)[-1]),
        tokens_sha256=tokens_digest.hexdigest(),
        offsets_sha256=offsets_digest.hexdigest(),
    )
