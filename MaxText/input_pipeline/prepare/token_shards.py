"""Tokenizes the shards of a corpus into the token files of a dataset.

    <staging>/data_set/<split>/tokens-000017.bin    ids of a shard, documents concatenated
    <staging>/shards/000017-<split>.npz             lengths and rows of its documents
    <staging>/shards/000017.json                    TokenizedShard

The last one is its entry in the ledger (run_jobs), written when the others are complete.
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

from MaxText.config.data_sections import PreparationConfig
from MaxText.input_pipeline.document_sources.corpus import Document, Shard
from MaxText.input_pipeline.document_sources.text_streams import Skipped
from MaxText.input_pipeline.local_cache import write_arrays
from MaxText.input_pipeline.prepare import sampling
from MaxText.input_pipeline.prepare.process_pool import run_once
from MaxText.input_pipeline.token_store.manifest import (
    SCHEMA_VERSION,
    SOURCE_FILES_NAME,
    FrozenModel,
    RecordFile,
    Split,
    unigram_entropy,
)
from MaxText.input_pipeline.token_store.store import TokenWriter, checksums_name, file_checksums
from MaxText.input_pipeline.tokenization.interface import Tokenizer
from MaxText.storage.atomic import WRITING_SUFFIX, atomic_write_text, sync_file

_BLOCK_BYTES = 2**24


@dataclass(frozen=True)
class Tokenization:
    """Everything besides the text with an effect on ids, and the staging."""

    staging: Path
    tokenizer: Tokenizer
    keys: PreparationConfig
    before: tuple[int, ...] = ()  # control ids before each document
    after: tuple[int, ...] = ()  # control ids after each document

    @property
    def ledger(self) -> Path:
        return self.staging / "shards"

    @property
    def dtype(self) -> Literal["uint8", "uint16", "uint32"]:
        if self.keys.exports_text:  # the ids are its bytes
            return "uint8"
        return "uint16" if self.tokenizer.entry.vocab_size <= 2**16 else "uint32"

    @property
    def minimum_tokens(self) -> int:
        """Shorter documents are skipped, not counting control ids."""
        return 1 if self.keys.exports_text else max(self.keys.prepare_minimum_tokens, 1)

    def summary(self) -> dict[str, Any]:
        """Returns everything besides the text with an effect on ids."""
        keys = {"prepare_seed", "validation_fraction", "prepare_fix_text"}
        return self.keys.model_dump(mode="json", include=keys) | {
            "before": self.before,
            "after": self.after,
            "is_text": self.keys.exports_text,
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


class ShardSplit(FrozenModel):
    """The shard's part of a split."""

    num_tokens: int
    num_documents: int
    num_text_bytes: int
    source_files: tuple[tuple[int, str], ...]  # (index of its first document, name), in order


class TokenizedShard(FrozenModel):
    """Contents of a finished shard."""

    sha256: str  # sampling.add_to_digest of the text as read
    num_bytes: int
    skipped: dict[str, int]  # reason -> number of documents
    bad: tuple[str, ...] = ()  # errors of malformed rows and unreadable files
    num_bad: int = 0  # documents in these, as Skipped counts them
    unreadable_bytes: tuple[int, ...] = ()  # sizes of files with an unknown number of documents
    readable_bytes: int = 0  # size of all other files
    lowest: int  # hash of a kept document; 2**64 without any
    threshold: int
    splits: dict[str, ShardSplit]  # those without documents are absent

    @property
    def num_documents(self) -> int:
        return sum(part.num_documents for part in self.splits.values())


def _tokens_path(staging: Path, split: str, number: int) -> Path:
    return staging / "data_set" / split / f"tokens-{number:06d}.bin"


def _documents_path(staging: Path, split: str, number: int) -> Path:
    return staging / "shards" / f"{number:06d}-{split}.npz"


def tokenize_shard(tokenization: Tokenization, job: ShardJob) -> dict[str, Any]:
    """Returns a TokenizedShard; raises UserError as Shard.documents does."""
    keys = tokenization.keys
    minimum = tokenization.minimum_tokens
    clean = sampling.text_cleaner(keys.prepare_fix_text)
    digest = hashlib.sha256()
    skipped = Skipped()
    num_bytes = 0
    lowest = 2**64
    writers: dict[str, _SplitWriter] = {}
    with contextlib.ExitStack() as stack:
        for numbers, documents in sampling.numbered_batches(
            job.number, job.shard.documents(skipped)
        ):
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
                lowest = min(lowest, rank)
                by_hash = sampling.VALIDATION if rank < job.threshold else sampling.TRAIN
                split = job.shard.split or by_hash
                if split not in writers:
                    writer = _SplitWriter(tokenization, split, job.number)
                    writers[split] = stack.enter_context(writer)
                if keys.prepare_fix_text:
                    encoded = text.encode()
                writers[split].add(ids_N, len(encoded), document)
    return TokenizedShard(
        sha256=digest.hexdigest(),
        num_bytes=num_bytes,
        skipped=dict(skipped),
        bad=tuple(skipped.bad),
        num_bad=skipped.num_bad,
        unreadable_bytes=tuple(skipped.unreadable_bytes),
        readable_bytes=skipped.readable_bytes,
        lowest=lowest,
        threshold=job.threshold,
        splits={split: writer.finish() for split, writer in writers.items()},
    ).model_dump(mode="json")


def tokenize_again(
    tokenization: Tokenization, job: ShardJob, earlier: TokenizedShard
) -> TokenizedShard:
    """Replaces a shard's result by another threshold's."""
    (tokenization.ledger / f"{job.number:06d}.json").unlink()
    for split in earlier.splits:
        _tokens_path(tokenization.staging, split, job.number).unlink()
    result = run_once(tokenize_shard, tokenization.ledger, tokenization, (job.number, job))
    return TokenizedShard.model_validate(result)


class _SplitWriter(TokenWriter):
    """Writes a shard's documents in one split."""

    def __init__(self, tokenization: Tokenization, split: str, number: int):
        path = _tokens_path(tokenization.staging, split, number)
        path.parent.mkdir(parents=True, exist_ok=True)
        super().__init__(path, np.dtype(tokenization.dtype))
        self._documents_path = _documents_path(tokenization.staging, split, number)
        self._before = np.array(tokenization.before, np.int64)
        self._after = np.array(tokenization.after, np.int64)
        self._lengths, self._rows = array.array("q"), array.array("q")
        self._source_files: list[tuple[int, str]] = []
        self._num_text_bytes = 0

    def add(self, ids_N: np.ndarray, num_text_bytes: int, document: Document) -> None:
        if not self._source_files or self._source_files[-1][1] != document.file:
            self._source_files.append((len(self._lengths), document.file))
        self._lengths.append(len(self._before) + len(ids_N) + len(self._after))
        self._rows.append(document.row)
        self._num_text_bytes += num_text_bytes
        self.write(np.concatenate((self._before, ids_N, self._after)))

    def finish(self) -> ShardSplit:
        """Writes what is known of the documents."""
        np.savez(self._documents_path, lengths=self._lengths, rows=self._rows)
        sync_file(self._documents_path)
        return ShardSplit(
            num_tokens=self.count,
            num_documents=len(self._lengths),
            num_text_bytes=self._num_text_bytes,
            source_files=tuple(self._source_files),
        )


def write_documents(
    tokenization: Tokenization, split: str, shards: Sequence[tuple[int, ShardSplit]]
) -> Split:
    """Writes the document files of a split; returns its manifest entry.

    Holds the documents of only one shard in memory.
    """
    staging = tokenization.staging
    folder = tokenization.staging / "data_set" / split
    dtype = np.dtype(tokenization.dtype)
    # of the first 0
    tokens_digest = hashlib.sha256()
    offsets_digest = hashlib.sha256(bytes(8))
    counts_V = np.zeros(tokenization.tokenizer.entry.vocab_size, np.int64)
    files: list[RecordFile] = []
    source_files: list[tuple[int, str]] = []

    def blocks() -> Iterator[dict[str, np.ndarray]]:
        num_tokens = num_documents = 0
        empty = {"document_rows": np.empty(0, "<i4"), checksums_name(): np.empty(0, "<u4")}
        yield {"document_offsets": np.zeros(1, "<i8"), **empty}
        for number, part in shards:
            path = _tokens_path(staging, split, number)
            size = part.num_tokens
            with np.load(_documents_path(staging, split, number)) as of_shard:
                ends = num_tokens + np.cumsum(of_shard["lengths"])
                rows = of_shard["rows"]
            offsets_digest.update(ends.data)
            checksums = {checksums_name(): file_checksums(path)}
            yield {"document_offsets": ends, "document_rows": rows.astype("<i4"), **checksums}
            with path.open("rb") as file:
                while block := file.read(_BLOCK_BYTES):
                    tokens_digest.update(block)
                    counts_V[:] += np.bincount(np.frombuffer(block, dtype), minlength=counts_V.size)
            for document, name in part.source_files:
                if not source_files or source_files[-1][1] != name:
                    source_files.append((num_documents + document, name))
            sizes = {"num_bytes": size * dtype.itemsize, "num_records": size, "num_tokens": size}
            files.append(RecordFile(name=path.name, **sizes))
            num_tokens += size
            num_documents += part.num_documents

    write_arrays(folder, blocks())
    lines = ",\n".join(json.dumps(entry) for entry in source_files)
    for leftover in folder.glob(f"*{WRITING_SUFFIX}"):
        leftover.unlink()
    atomic_write_text(folder / SOURCE_FILES_NAME, f"[{lines}]\n")
    return Split(
        files=tuple(files),
        num_tokens=sum(part.num_tokens for _, part in shards),
        num_documents=sum(part.num_documents for _, part in shards),
        num_text_bytes=sum(part.num_text_bytes for _, part in shards),
        unigram_entropy_nats=round(unigram_entropy(counts_V), 6),
        max_token_id=int(np.flatnonzero(counts_V)[-1]),
        tokens_sha256=tokens_digest.hexdigest(),
        offsets_sha256=offsets_digest.hexdigest(),
    )
