"""The token store: random access to flat files of token ids.

Every dataset is read through it: prepared as `bin`, Megatron's .bin, or imported records. Files of
the first and the last kind have a CRC-32C of every 4 KiB, which each read compares.

Legend: P ranges, D documents.
"""

import bisect
import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
from google_crc32c import value as crc32c

from MaxText.errors import UserError
from MaxText.input_pipeline.local_cache import Arrays
from MaxText.input_pipeline.token_store.manifest import (
    OFFSETS_NAME,
    ROWS_NAME,
    SOURCE_FILES_NAME,
    Manifest,
    check_files,
    damaged,
)
from MaxText.storage import file_access
from MaxText.storage.atomic import atomic_rename, sync_file, temporary_name
from MaxText.storage.errors import FileReadError
from MaxText.storage.file_access import FileInfo

# Ranges with fewer tokens on average are read together, including the gaps between them.
_SMALL_PIECE = 256
_BLOCK = 2**13  # documents looked at together
_CHECKED_BYTES = 4096  # of a checksum: a page of the disk cache
_MAX_GAP = 4096  # largest gap in tokens that is worth reading to save a call


class TokenStore:
    """The ids of some files, concatenated and divided into documents.

    Holds no open file, and large arrays are memory-mapped: thread-safe, and pickled to worker
    processes in a few kilobytes.
    """

    def __init__(
        self,
        files: Sequence[str],
        num_tokens: Sequence[int],
        dtype: np.dtype,
        documents: Arrays,
        kind: str = "tokens",
    ):
        """Initializes without opening `files`, given in token order.

        `documents` holds `document_offsets`, and its folder may name their source files and hold
        the checksums of `files`, which are of this `kind`.
        """
        assert dtype.kind in "iu", dtype
        self.files = tuple(files)
        file_access.invalidate_cache(self.files)  # files may have been replaced
        self.dtype = dtype
        self._documents = documents
        self._first = [*itertools.accumulate(num_tokens, initial=0)]  # token of each file
        num_blocks = (-(-size * dtype.itemsize // _CHECKED_BYTES) for size in num_tokens)
        self._first_block = [*itertools.accumulate(num_blocks, initial=0)]
        self._checksums = checksums_name(kind)
        folder = documents.folder
        self.is_checked = folder is not None and (folder / f"{self._checksums}.npy").exists()
        if self.is_checked and len(documents[self._checksums]) != self._first_block[-1]:
            raise UserError(
                f"{folder}/{self._checksums}.npy belongs to other data. Copy the data set again."
            )

    def __len__(self) -> int:
        return self._first[-1]

    @property
    def document_offsets(self) -> np.ndarray:
        """int64 [D + 1]: first token of each document, then the end; mapped."""
        return self._documents["document_offsets"]

    @property
    def file_of_document(self) -> np.ndarray | None:
        """int64 [files + 1]: first document of each file and the end, or None."""
        firsts, _ = self._source_files()
        return np.array([*firsts, len(self.document_offsets) - 1], np.int64) if firsts else None

    def document_name(self, document: int) -> str:
        """Returns a name such as `letters.jsonl, row 17`, counted from 0."""
        firsts, names = self._source_files()
        if not names:
            return f"document {document}"
        file = bisect.bisect_right(firsts, document) - 1
        assert self._documents.folder is not None
        if (self._documents.folder / ROWS_NAME).exists():
            return f"{names[file]}, row {self._documents['document_rows'][document]}"
        return f"{names[file]}, record {document - firsts[file]}"

    def _source_files(self) -> tuple[list[int], list[str]]:
        """Returns the first document and the name of each source file, if known."""
        folder = self._documents.folder
        return ([], []) if folder is None else _read_source_files(folder)

    def check_sizes(self, files: Sequence[FileInfo]) -> None:
        """Raises UserError if listed sizes do not match the token counts."""
        for file, num_tokens in zip(files, np.diff(self._first).tolist(), strict=True):
            if file.size != (num_bytes := num_tokens * self.dtype.itemsize):
                raise UserError(
                    f"{file.path} has {file.size} bytes, where its {num_tokens} tokens take "
                    f"{num_bytes}: it is truncated or changed. Copy the data set again."
                )

    def read(self, starts_P: np.ndarray, stops_P: np.ndarray) -> np.ndarray:
        """Reads token ranges [P]; returns them concatenated (int32).

        Raises FileReadError if a file is missing, truncated or unreadable.
        """
        sizes_P = stops_P - starts_P
        total = int(sizes_P.sum())
        if total >= _SMALL_PIECE * len(starts_P):
            return self._read(starts_P, stops_P).astype(np.int32)
        # Read neighbors together, then gather the requested tokens.
        order = np.argsort(starts_P, kind="stable")
        starts, ends = starts_P[order], np.maximum.accumulate(stops_P[order])
        is_new = np.append(True, starts[1:] > ends[:-1] + _MAX_GAP)
        group_P = np.empty(len(order), np.int64)
        group_P[order] = np.cumsum(is_new) - 1
        begins_G = starts[is_new]
        ends_G = ends[np.append(is_new[1:], True)]
        lengths_G = ends_G - begins_G
        ids = self._read(begins_G, ends_G).astype(np.int32)
        at_P = starts_P - begins_G[group_P] + (np.cumsum(lengths_G) - lengths_G)[group_P]
        return ids[np.repeat(at_P - (np.cumsum(sizes_P) - sizes_P), sizes_P) + np.arange(total)]

    def _read(self, starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
        width, step = self.dtype.itemsize, _CHECKED_BYTES if self.is_checked else 1
        files, begins, sizes, crops = [], [], [], []  # of whole blocks, to be cropped
        for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
            while start < stop:
                file = bisect.bisect_right(self._first, start) - 1
                first, next_first = self._first[file], self._first[file + 1]
                low, high = (start - first) * width, (min(stop, next_first) - first) * width
                begin = low - low % step
                files.append(file)
                begins.append(begin)
                sizes.append(min(high + -high % step, (next_first - first) * width) - begin)
                crops.append(slice(low - begin, high - begin))
                start = min(stop, next_first)
        blocks = file_access.read_ranges([self.files[file] for file in files], begins, sizes)
        if self.is_checked:
            self._compare_checksums(files, begins, blocks)
        parts = [block[crop] for block, crop in zip(blocks, crops, strict=True)]
        return np.frombuffer(b"".join(parts), self.dtype)

    def _compare_checksums(
        self, files: Sequence[int], begins: Sequence[int], blocks: Sequence[bytes]
    ) -> None:
        checksums = self._documents[self._checksums]
        for file, begin, block in zip(files, begins, blocks, strict=True):
            found = [
                crc32c(block[at : at + _CHECKED_BYTES])
                for at in range(0, len(block), _CHECKED_BYTES)
            ]
            first = self._first_block[file] + begin // _CHECKED_BYTES
            if found != checksums[first : first + len(found)].tolist():
                raise FileReadError(
                    f"{self.files[file]} is damaged: checksums of the {len(block)} bytes from byte "
                    f"{begin:,} differ. Copy it again; if it is in data_cache_dir, delete its "
                    "folder to import it again.",
                    self.files[file],
                )


@functools.lru_cache(maxsize=8)
def _read_source_files(folder: Path) -> tuple[list[int], list[str]]:
    if not (folder / SOURCE_FILES_NAME).exists():
        return [], []
    entries = json.loads((folder / SOURCE_FILES_NAME).read_text(encoding="utf-8"))
    return [first for first, _ in entries], [name for _, name in entries]


def checksums_name(kind: str = "tokens") -> str:
    """Returns the name of the array of checksums of token files."""
    return f"{kind}_crc32c"


def file_checksums(path: Path) -> np.ndarray:
    """Returns the CRC-32C of every 4 KiB of a file (uint32)."""
    with path.open("rb") as file:
        blocks = iter(functools.partial(file.read, _CHECKED_BYTES), b"")
        return np.fromiter(map(crc32c, blocks), "<u4")


class TokenWriter:
    """Writes ids to a flat file, synced to disk at the end."""

    def __init__(self, path: Path, dtype: np.dtype):
        self.count, self.largest = 0, -1
        self._path, self._dtype = path, dtype
        self._writing = temporary_name(path)
        self._file = self._writing.open("wb")

    def write(self, ids: np.ndarray) -> None:
        self.count += ids.size
        self.largest = max(self.largest, int(ids.max(initial=-1)))
        self._file.write(ids.astype(self._dtype).data)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        with contextlib.suppress(*[OSError] * (kind is not None)):
            self._file.close()
        if kind is None:
            atomic_rename(self._writing, self._path)
            sync_file(self._path.parent)
        else:
            self._writing.unlink()


def load_offsets(folder: Path, num_documents: int, num_tokens: int) -> Arrays:
    """Returns the document offsets of a folder, checked by the manifest."""
    path = folder / OFFSETS_NAME
    documents = Arrays(folder)
    try:
        offsets = documents["document_offsets"]
        found = (len(offsets) - 1, int(offsets[-1]))
    # A damaged header can raise anything.
    except Exception as error:
        raise damaged(path, error) from error
    if found != (num_documents, num_tokens):
        raise UserError(
            f"{path} belongs to other data: {found[0]} documents and {found[1]} tokens, where the "
            f"manifest has {num_documents} and {num_tokens}. Copy the data set again."
        )
    return documents


def open_flat(
    folder: Path, manifest: Manifest, split: str, files: Sequence[FileInfo] | None = None
) -> TokenStore:
    """Opens a split of a prepared dataset, possibly with remote `files`."""
    assert manifest.format == "bin", manifest.format
    entry = manifest.splits[split]
    found = check_files(manifest, folder, split) if files is None else files
    store = TokenStore(
        [file.path for file in found],
        [file.num_records for file in entry.files],
        np.dtype(manifest.dtype).newbyteorder("<"),
        load_offsets(folder / split, entry.num_documents, entry.num_tokens),
    )
    store.check_sizes(found)
    return store


def document_sizes(document_offsets: np.ndarray) -> Iterator[np.ndarray]:
    """Yields document sizes in blocks, in constant memory."""
    for first in range(0, len(document_offsets) - 1, _BLOCK):
        yield np.diff(document_offsets[first : first + _BLOCK + 1])


@dataclasses.dataclass(frozen=True)
class TokenSplit:
    """An opened split.

    Attributes:
      fingerprint: Hex digest of the contents, or of file names, sizes and document boundaries:
        equal data gives equal batches.
      record_length: Tokens of each record if all have one length (the last may be shorter), as
        another program cuts training sequences; None for documents.
      labels: A store parallel to `store` with the id to predict at each position (already shifted),
        negative for none; None if targets are the next tokens.
    """

    store: TokenStore
    description: str
    fingerprint: str
    pad_id: int = 0  # padding id
    eos_id: int | None = None
    special_ids: tuple[int, ...] = ()  # known ids that are never text (bos, eos, pad)
    mask_id: int | None = None
    vocab_size: int | None = None
    max_token_id: int | None = None  # None if unknown without reading everything
    unigram_entropy_nats: float | None = None  # nats per token
    record_length: int | None = None
    labels: TokenStore | None = None
    skipped: tuple[str, ...] = ()  # descriptions of records that the import skipped
    tokenizer_folder: Path | None = None  # folder or file of the tokenizer
    tokenizer_sha256: str = ""
    tokens_sha256: str = ""  # of all ids as bytes, by the manifest
    num_text_bytes: int = 0  # UTF-8 bytes of the text; 0 if unknown
    has_bos: bool = False  # whether a control id precedes each text


def foreign_data(
    store: TokenStore, where: str, source: str, fingerprint: str, **more: Any
) -> TokenSplit:
    """Returns data of another program; UserError without tokens."""
    if not len(store):
        raise UserError(
            f"{where}: {source} hold no tokens. Check that these are the files you mean."
        )
    length = record_length(store.document_offsets)
    kind = f"rows of {length:,}" if length else "documents"
    num_documents = len(store.document_offsets) - 1
    description = f"{len(store):,} tokens in {num_documents:,} {kind} of {source}"
    return TokenSplit(store, description, fingerprint, record_length=length, **more)


def boundaries_digest(document_offsets: np.ndarray, added: int = 0) -> str:
    """Returns a digest of the offsets without `added` tokens a document."""
    digest = hashlib.sha256()
    for first in range(0, len(document_offsets), _BLOCK):
        block = document_offsets[first : first + _BLOCK]
        without = block - added * np.arange(first, first + len(block))
        digest.update(without.astype("<i8", copy=False).data)
    return digest.hexdigest()[:16]


def record_length(offsets: np.ndarray) -> int | None:
    """Returns the common length of documents, or None."""
    count = len(offsets) - 1
    if count < 2:
        return None
    length, last = int(offsets[1] - offsets[0]), int(offsets[-1] - offsets[-2])
    if last != length and not (count > 2 and 0 < last < length):
        return None
    is_even = all(bool((sizes == length).all()) for sizes in document_sizes(offsets[:-1]))
    return length if is_even else None
