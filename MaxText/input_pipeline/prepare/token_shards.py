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
from MaxText.input_pipeline.document_sources.corpus import Shard, TextDocument
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
    """Everything besides the text with an effect on ids, and the staging folder."""

    staging: Path  # see the module's docstring
    tokenizer: Tokenizer
    keys: PreparationConfig
    ids_before: tuple[int, ...] = ()  # control ids before each document
    ids_after: tuple[int, ...] = ()  # control ids after each document

    @property
    def ledger(self) -> Path:
        """Folder of the results of finished shards."""
        return self.staging / "shards"

    @property
    def dtype(self) -> Literal["uint8", "uint16", "uint32"]:
        """Type of the ids in token files, the smallest that holds the vocabulary."""
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
            "before": self.ids_before,
            "after": self.ids_after,
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
        """Documents of all splits."""
        return sum(shard_split.num_documents for shard_split in self.splits.values())


def _tokens_path(staging: Path, split: str, number: int) -> Path:
    return staging / "data_set" / split / f"tokens-{number:06d}.bin"


def _documents_path(staging: Path, split: str, number: int) -> Path:
    return staging / "shards" / f"{number:06d}-{split}.npz"


def tokenize_shard(tokenization: Tokenization, job: ShardJob) -> dict[str, Any]:
    """Tokenizes a shard and writes its token files.

    Returns a TokenizedShard as JSON values. Raises UserError as Shard.documents does.
    """
    keys = tokenization.keys
    minimum_tokens = tokenization.minimum_tokens
    clean = sampling.text_cleaner(keys.prepare_fix_text)
    digest = hashlib.sha256()
    skipped = Skipped()
    num_bytes = 0
    lowest_hash = 2**64
    writers: dict[str, _SplitWriter] = {}
    with contextlib.ExitStack() as stack:
        for numbers, documents in sampling.numbered_batches(
            job.number, job.shard.documents(skipped)
        ):
            texts = [clean(document.text) for document in documents]
            ids = tokenization.tokenizer.encode(texts)
            document_hashes = sampling.hashes(keys.prepare_seed, sampling.HELD_OUT, numbers)
            for document, text, ids_N, document_hash in zip(
                documents, texts, ids, document_hashes.tolist(), strict=True
            ):
                encoded = document.text.encode()
                sampling.add_to_digest(digest, encoded)
                num_bytes += len(encoded)
                if len(ids_N) < minimum_tokens:
                    skipped[f"shorter than {minimum_tokens} tokens"] += 1
                    continue
                lowest_hash = min(lowest_hash, document_hash)
                if job.shard.split:
                    split = job.shard.split
                elif document_hash < job.threshold:
                    split = sampling.VALIDATION
                else:
                    split = sampling.TRAIN
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
        lowest=lowest_hash,
        threshold=job.threshold,
        splits={split: writer.finish() for split, writer in writers.items()},
    ).model_dump(mode="json")


def tokenize_again(
    tokenization: Tokenization, job: ShardJob, old_result: TokenizedShard
) -> TokenizedShard:
    """Tokenizes a shard with another threshold, replacing its files and its result."""
    (tokenization.ledger / f"{job.number:06d}.json").unlink()
    for split in old_result.splits:
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
        self._before = np.array(tokenization.ids_before, np.int64)
        self._after = np.array(tokenization.ids_after, np.int64)
        self._lengths = array.array("q")
        self._rows = array.array("q")
        self._source_files: list[tuple[int, str]] = []
        self._num_text_bytes = 0

    def add(self, ids_N: np.ndarray, num_text_bytes: int, document: TextDocument) -> None:
        """Writes the ids of a document, with control ids around them."""
        if not self._source_files or self._source_files[-1][1] != document.file:
            self._source_files.append((len(self._lengths), document.file))
        self._lengths.append(len(self._before) + len(ids_N) + len(self._after))
        self._rows.append(document.row)
        self._num_text_bytes += num_text_bytes
        self.write(np.concatenate((self._before, ids_N, self._after)))

    def finish(self) -> ShardSplit:
        """Writes the lengths and rows of the documents; returns the shard's part of the split."""
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

    Args:
      tokenization: Names the folder; all shards are tokenized.
      split: Name of the split.
      shards: (number, its part of the split) of the shards with documents in it, in order.
    """
    staging = tokenization.staging
    folder = tokenization.staging / "data_set" / split
    dtype = np.dtype(tokenization.dtype)
    tokens_digest = hashlib.sha256()
    offsets_digest = hashlib.sha256(bytes(8))  # offsets begin with 0, an int64
    counts_V = np.zeros(tokenization.tokenizer.entry.vocab_size, np.int64)
    files: list[RecordFile] = []
    source_files: list[tuple[int, str]] = []

    def blocks() -> Iterator[dict[str, np.ndarray]]:
        """Yields arrays to append to those of the split: first empty ones, then a shard at a time.

        On the way it adds up digests, token counts and files, which `write_documents` returns.
        """
        num_tokens = 0
        num_documents = 0
        empty = {"document_rows": np.empty(0, "<i4"), checksums_name(): np.empty(0, "<u4")}
        yield {"document_offsets": np.zeros(1, "<i8"), **empty}
        for number, shard_split in shards:
            path = _tokens_path(staging, split, number)
            with np.load(_documents_path(staging, split, number)) as arrays:
                ends = num_tokens + np.cumsum(arrays["lengths"])
                rows = arrays["rows"]
            offsets_digest.update(ends.data)
            checksums = {checksums_name(): file_checksums(path)}
            yield {"document_offsets": ends, "document_rows": rows.astype("<i4"), **checksums}
            with path.open("rb") as file:
                while block := file.read(_BLOCK_BYTES):
                    tokens_digest.update(block)
                    counts_V[:] += np.bincount(np.frombuffer(block, dtype), minlength=counts_V.size)
            for document, name in shard_split.source_files:
                if not source_files or source_files[-1][1] != name:
                    source_files.append((num_documents + document, name))
            record_file = RecordFile(
                name=path.name,
                num_bytes=shard_split.num_tokens * dtype.itemsize,
                num_records=shard_split.num_tokens,
                num_tokens=shard_split.num_tokens,
            )
            files.append(record_file)
            num_tokens += shard_split.num_tokens
            num_documents += shard_split.num_documents

    write_arrays(folder, blocks())
    lines = ",\n".join(json.dumps(entry) for entry in source_files)
    for leftover in folder.glob(f"*{WRITING_SUFFIX}"):
        leftover.unlink()
    atomic_write_text(folder / SOURCE_FILES_NAME, f"[{lines}]\n")
    return Split(
        files=tuple(files),
        num_tokens=sum(shard_split.num_tokens for _, shard_split in shards),
        num_documents=sum(shard_split.num_documents for _, shard_split in shards),
        num_text_bytes=sum(shard_split.num_text_bytes for _, shard_split in shards),
        unigram_entropy_nats=round(unigram_entropy(counts_V), 6),
        max_token_id=int(np.flatnonzero(counts_V)[-1]),
        tokens_sha256=tokens_digest.hexdigest(),
        offsets_sha256=offsets_digest.hexdigest(),
    )
