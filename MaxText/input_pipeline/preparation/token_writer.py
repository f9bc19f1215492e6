"""Writes one split of a data set: token records and document offsets. Imports no jax."""

import array
import hashlib
from pathlib import Path
from typing import Any, Literal

import numpy as np
from array_record.python import (
    array_record_module,  # pyright: ignore[reportAttributeAccessIssue]
)

from MaxText.input_pipeline.manifest import OFFSETS_NAME, RecordFile, Split, unigram_entropy
from MaxText.input_pipeline.sync import sync_file

# Tokens per record. A shuffled window of T tokens reads 1 + T / 8192 records on average, so this
# bounds what is read in vain (16 kB of uint16, 26 us) for short windows, and keeps the cost per
# record (header, index entry, call) small against its tokens for long ones.
CHUNK_LENGTH = 8192

# 256 MiB of uint16 per file: few files for a trillion tokens, still copied in parallel.
RECORDS_PER_FILE = 16384

# Grain and our reader fetch single records: groups of 1 keep each one separately readable.
WRITER_OPTIONS = "group_size:1"


def narrowest_dtype(vocab_size: int) -> Literal["uint16", "uint32"]:
    """The smallest unsigned type that holds ids 0..vocab_size-1."""
    return "uint16" if vocab_size <= 2**16 else "uint32"


class TokenWriter:
    """Appends documents to a split and sums up what the manifest says about it.

    Memory: one chunk, the counts of each id, and 8 bytes per document.
    """

    def __init__(
        self,
        folder: Path,
        vocab_size: int,
        chunk_length: int = CHUNK_LENGTH,
        records_per_file: int = RECORDS_PER_FILE,
    ):
        """Starts a split in `folder`, which is created.

        Args:
          folder: of the split; must not hold records yet.
          vocab_size: ids are below it; fixes the stored type.
          chunk_length: tokens per record.
          records_per_file: records after which the next file begins.
        """
        folder.mkdir(parents=True)
        self._folder = folder
        self._dtype = np.dtype(narrowest_dtype(vocab_size)).newbyteorder("<")
        self._chunk_length = chunk_length
        self._records_per_file = records_per_file
        self._pending: list[np.ndarray] = []
        self._num_pending = 0
        self._offsets = array.array("q", [0])
        self._counts_V = np.zeros(vocab_size, np.int64)
        self._hash = hashlib.sha256()
        self._num_text_bytes = 0
        self._records_of_files: list[int] = []
        self._writer: Any = None

    def add(self, ids_N: np.ndarray, num_text_bytes: int) -> None:
        """Appends one document: ids [N] with N > 0, made from that many bytes of text."""
        assert ids_N.ndim == 1, ids_N.shape
        assert ids_N.size > 0
        counts = np.bincount(ids_N, minlength=self._counts_V.size)
        assert counts.size == self._counts_V.size, "an id is not below vocab_size"
        self._counts_V += counts
        self._offsets.append(self._offsets[-1] + ids_N.size)
        self._num_text_bytes += num_text_bytes
        self._pending.append(ids_N.astype(self._dtype))
        self._num_pending += ids_N.size
        if self._num_pending >= self._chunk_length:
            self._write_chunks()

    def _write_chunks(self, everything: bool = False) -> None:
        tokens = np.concatenate(self._pending) if self._pending else np.empty(0, self._dtype)
        end = tokens.size if everything else tokens.size // self._chunk_length * self._chunk_length
        for start in range(0, end, self._chunk_length):
            chunk = tokens[start : min(start + self._chunk_length, end)]
            self._write_record(chunk.tobytes())
        self._pending = [tokens[end:]] if end < tokens.size else []
        self._num_pending = tokens.size - end

    def _write_record(self, record: bytes) -> None:
        if self._writer is None:
            self._writer = self._open_file()
        self._writer.write(record)
        self._hash.update(record)
        self._records_of_files[-1] += 1
        if self._records_of_files[-1] == self._records_per_file:
            self._close_file()

    def _open_file(self) -> Any:
        path = self._folder / f"tokens-{len(self._records_of_files):05d}"
        self._records_of_files.append(0)
        return array_record_module.ArrayRecordWriter(str(path), WRITER_OPTIONS)

    def _close_file(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def finish(self) -> Split:
        """Writes what is left, gives the files their final names and syncs them to disk."""
        self._write_chunks(everything=True)
        self._close_file()
        files = []
        total = len(self._records_of_files)
        for index, num_records in enumerate(self._records_of_files):
            name = f"tokens-{index:05d}-of-{total:05d}.array_record"
            path = (self._folder / f"tokens-{index:05d}").rename(self._folder / name)
            sync_file(path)
            size = path.stat().st_size
            files.append(RecordFile(name=name, num_bytes=size, num_records=num_records))
        offsets = np.frombuffer(self._offsets, np.int64)
        np.save(self._folder / OFFSETS_NAME, offsets)
        sync_file(self._folder / OFFSETS_NAME)
        sync_file(self._folder)
        occurring = np.flatnonzero(self._counts_V)
        return Split(
            files=tuple(files),
            num_tokens=int(offsets[-1]),
            num_documents=len(offsets) - 1,
            num_text_bytes=self._num_text_bytes,
            unigram_entropy=round(unigram_entropy(self._counts_V), 6),
            largest_id=int(occurring[-1]) if occurring.size else 0,
            tokens_sha256=self._hash.hexdigest(),
            offsets_sha256=hashlib.sha256(offsets.astype("<i8").tobytes()).hexdigest(),
        )

    def close(self) -> None:
        """Releases the open file of a split that is given up."""
        self._close_file()
