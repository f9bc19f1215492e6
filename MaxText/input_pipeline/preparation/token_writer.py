"""Makes the files of a split from part files: `write_token_file`, `write_document_files`.

Where a file ends depends on the number of tokens only, so neither units nor processes show in a
data set. Imports no jax.
"""

import hashlib
import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

import numpy as np

from MaxText.input_pipeline.preparation.array_record_writer import ArrayRecordWriter
from MaxText.input_pipeline.preparation.part_files import Part
from MaxText.input_pipeline.sync import publish, sync_file, write_whole, writing_name
from MaxText.input_pipeline.token_store.manifest import (
    OFFSETS_NAME,
    ROWS_NAME,
    SOURCE_FILES_NAME,
    RecordFile,
    Split,
    unigram_entropy,
)

FileFormat = Literal["array_record", "bin"]

# Tokens per record. A shuffled window of T tokens reads 1 + T / 8192 records on average, so this
# bounds what is read in vain (16 kB of uint16, 26 us) for short windows, and keeps the cost per
# record (header, index entry, call) small against its tokens for long ones.
CHUNK_LENGTH = 8192

# 256 MiB of uint16 per file: few files for a trillion tokens, still copied in parallel.
RECORDS_PER_FILE = 16384

# Ids read, counted and written at a time.
_BLOCK_TOKENS = 2**21


def narrowest_dtype(vocab_size: int) -> Literal["uint16", "uint32"]:
    """The smallest unsigned type that holds ids 0..vocab_size-1."""
    return "uint16" if vocab_size <= 2**16 else "uint32"


@dataclass(frozen=True)
class SplitPlan:
    """A split to write.

    Attributes:
      parts_folder: where the parts lie.
      parts: what it is made of, in order; none is empty.
      folder: to write the split to; exists.
      vocab_size: ids are below it.
      dtype: type of stored ids, little-endian.
      file_format: array_record or bin.
      chunk_length: ids per record of array_record.
      records_per_file: records of chunk_length ids after which the next file begins, in either
        format.
    """

    parts_folder: Path
    parts: tuple[Part, ...]
    folder: Path
    vocab_size: int
    dtype: np.dtype
    file_format: FileFormat = "array_record"
    chunk_length: int = CHUNK_LENGTH
    records_per_file: int = RECORDS_PER_FILE

    @property
    def num_tokens(self) -> int:
        """Tokens of the split."""
        return sum(part.num_tokens for part in self.parts)

    @property
    def num_documents(self) -> int:
        """Documents of the split."""
        return sum(part.num_documents for part in self.parts)

    @property
    def tokens_per_file(self) -> int:
        """Tokens of every file but the last."""
        return self.chunk_length * self.records_per_file

    @property
    def num_files(self) -> int:
        """Files that hold its tokens."""
        return -(-self.num_tokens // self.tokens_per_file)

    def blocks(self, start: int, stop: int) -> Iterator[np.ndarray]:
        """Ids [start, stop) of the split, in pieces that are a whole number of records."""
        first_token = [0, *itertools.accumulate(part.num_tokens for part in self.parts)]
        size = max(_BLOCK_TOKENS // self.chunk_length, 1) * self.chunk_length
        index = 0
        for at in range(start, stop, size):
            pieces, end = [], min(at + size, stop)
            while at < end:
                while first_token[index + 1] <= at:
                    index += 1
                upto = min(end, first_token[index + 1])
                inside = (at - first_token[index], upto - first_token[index])
                pieces.append(self.parts[index].tokens(self.parts_folder, self.dtype, *inside))
                at = upto
            yield np.concatenate(pieces)


@dataclass(frozen=True)
class TokenFile:
    """A finished file and how often each id occurs in it (int64 [vocab_size])."""

    entry: RecordFile
    counts_V: np.ndarray


def write_token_file(plan: SplitPlan, index: int) -> TokenFile:
    """Writes file `index` of a split; what was there under its name before is replaced."""
    start = index * plan.tokens_per_file
    stop = min(start + plan.tokens_per_file, plan.num_tokens)
    path = plan.folder / f"tokens-{index:05d}-of-{plan.num_files:05d}.{plan.file_format}"
    writing = writing_name(path)
    counts_V = np.zeros(plan.vocab_size, np.int64)
    num_records = 0
    is_array_record = plan.file_format == "array_record"
    file = ArrayRecordWriter(writing) if is_array_record else writing.open("wb")
    try:
        for tokens in plan.blocks(start, stop):
            counts = np.bincount(tokens, minlength=plan.vocab_size)
            assert counts.size == plan.vocab_size, "an id is not below vocab_size"
            counts_V += counts
            length = plan.chunk_length if is_array_record else tokens.size
            for at in range(0, tokens.size, length):
                file.write(tokens[at : at + length].tobytes())
                num_records += 1
    finally:
        file.close()
    publish(writing, path)
    num_tokens = stop - start
    entry = RecordFile(
        name=path.name,
        num_bytes=path.stat().st_size,
        num_records=num_records if is_array_record else num_tokens,
        num_tokens=num_tokens,
    )
    return TokenFile(entry, counts_V)


def tokens_digest(plan: SplitPlan) -> str:
    """sha256 of all ids of a split as they are stored."""
    digest = hashlib.sha256()
    for tokens in plan.blocks(0, plan.num_tokens):
        digest.update(tokens.data)
    return digest.hexdigest()


def write_document_files(plan: SplitPlan) -> str:
    """Writes what is known about documents: first tokens, rows and source files.

    Memory: that of one part.

    Returns:
      sha256 of the offsets as little-endian int64.
    """
    digest = hashlib.sha256()
    count = plan.num_documents
    widest = max(
        (int(part.rows(plan.parts_folder).max()) for part in plan.parts if part.num_documents),
        default=0,
    )
    # Rows fit int32, except in sources that count something else than rows.
    row_type = np.dtype("<i4" if widest <= np.iinfo(np.int32).max else "<i8")
    offset_type = np.dtype("<i8")
    paths = [plan.folder / name for name in (OFFSETS_NAME, ROWS_NAME)]
    at = num_tokens = 0
    source_files: list[tuple[int, str]] = []
    # Written from front to back: a full disk is then an error, where it kills a process that
    # fills a map of the file.
    with paths[0].open("wb") as offsets, paths[1].open("wb") as rows:
        _begin_array(offsets, offset_type, count + 1)
        _begin_array(rows, row_type, count)

        def add_offsets(offsets_N: np.ndarray) -> None:
            data = offsets_N.astype(offset_type).tobytes()
            offsets.write(data)
            digest.update(data)

        add_offsets(np.zeros(1))
        for part in plan.parts:
            ends = num_tokens + np.cumsum(part.lengths(plan.parts_folder))
            add_offsets(ends)
            rows.write(part.rows(plan.parts_folder).astype(row_type).tobytes())
            for document, name in part.source_files:
                if not source_files or source_files[-1][1] != name:
                    source_files.append((at + document, name))
            at += part.num_documents
            num_tokens += part.num_tokens
            assert ends.size == part.num_documents, part
            assert not ends.size or ends[-1] == num_tokens, part
    for path in paths:
        sync_file(path)
    lines = ",\n".join(json.dumps(entry) for entry in source_files)
    write_whole(plan.folder / SOURCE_FILES_NAME, f"[{lines}]\n")
    return digest.hexdigest()


def _begin_array(file: BinaryIO, dtype: np.dtype, count: int) -> None:
    """Writes what an .npy file of [count] begins with."""
    header = {"descr": dtype.str, "fortran_order": False, "shape": (count,)}
    np.lib.format.write_array_header_1_0(file, header)


def split_entry(
    plan: SplitPlan, files: Sequence[TokenFile], tokens_sha256: str, offsets_sha256: str
) -> Split:
    """What the manifest says about a split.

    Args:
      files: all of its files, in order.
      tokens_sha256, offsets_sha256: as `tokens_digest` and `write_document_files` gave them.
    """
    counts_V = np.zeros(plan.vocab_size, np.int64)
    for file in files:
        counts_V += file.counts_V
    occurring = np.flatnonzero(counts_V)
    return Split(
        files=tuple(file.entry for file in files),
        num_tokens=plan.num_tokens,
        num_documents=plan.num_documents,
        num_text_bytes=sum(part.num_text_bytes for part in plan.parts),
        unigram_entropy=round(unigram_entropy(counts_V), 6),
        largest_id=int(occurring[-1]) if occurring.size else 0,
        tokens_sha256=tokens_sha256,
        offsets_sha256=offsets_sha256,
    )


def write_split(plan: SplitPlan) -> Split:
    """Writes all files of a split, in this process."""
    files = [write_token_file(plan, index) for index in range(plan.num_files)]
    entry = split_entry(plan, files, tokens_digest(plan), write_document_files(plan))
    sync_file(plan.folder)
    return entry
