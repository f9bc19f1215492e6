"""The token store: random access to flat files of token ids.

Every dataset is read through it: prepared as `bin`, Megatron's .bin, or imported records. Files of
the first and the last kind have CRC-32Cs of their first 0, 4096, 8192, ... and all bytes. Each read
compares them: the one before a range, extended by its bytes, is the one after it.

Legend: P ranges, D documents.
"""

import bisect
import contextlib
import dataclasses
import functools
import hashlib
import itertools
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

import numpy as np
import pydantic
from google_crc32c import extend as extend_crc

from MaxText.errors import UserError
from MaxText.input_pipeline.local_cache import Arrays
from MaxText.input_pipeline.token_store.manifest import (
    OFFSETS_NAME,
    ROWS_NAME,
    SOURCE_FILES_NAME,
    Manifest,
    Split,
    check_files,
    damaged,
)
from MaxText.storage import file_access
from MaxText.storage.atomic import atomic_rename, temporary_name
from MaxText.storage.errors import FileReadError
from MaxText.storage.file_access import FileInfo

# Ranges with fewer tokens on average are read together, including the gaps between them.
_SMALL_PIECE = 256
_BLOCK = 2**13  # documents looked at together
_HASHED_OFFSETS = 2**20  # offsets hashed at a time
_CHECKED_BYTES = 4096  # between checksums: a page of the disk cache
_MAX_GAP = 4096  # largest gap in tokens that is worth reading to save a call


_SOURCE_FILES = pydantic.TypeAdapter(list[tuple[int, str]])


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
        checksums: Path | None = None,
    ):
        """Initializes without opening `files`, given in token order.

        `documents` holds `document_offsets`, and its folder may name their source files. The .npy
        file `checksums` may be absent.
        """
        assert dtype.kind in "iu", dtype
        self.files = tuple(files)
        file_access.invalidate_cache(self.files)  # files may have been replaced
        self.dtype = dtype
        self._documents = documents
        self._first = np.cumsum([0, *num_tokens])  # token of each file
        self.is_checked = checksums is not None and checksums.exists()
        if checksums is not None and self.is_checked:
            self._num_bytes = np.diff(self._first) * dtype.itemsize
            self._first_sum = np.cumsum([0, *(1 - -self._num_bytes // _CHECKED_BYTES)])
            self._checksums = Arrays(checksums.parent)
            self._checksums_name = checksums.stem
            try:
                num_found = len(self._checksums[self._checksums_name])
            # A damaged header can raise anything.
            except Exception as error:
                raise damaged(checksums, error) from error
            if num_found != self._first_sum[-1]:
                raise UserError(f"{checksums} belongs to other data. Copy the data set again.")

    def __len__(self) -> int:
        return int(self._first[-1])

    @property
    def document_offsets(self) -> np.ndarray:
        """int64 [D + 1]: first token of each document, then the end; mapped."""
        return self._documents["document_offsets"]

    @property
    def file_of_document(self) -> np.ndarray | None:
        """int64 [files + 1]: first document of each file and the end, or None."""
        firsts, _ = _read_source_files(self._documents.folder)
        if not firsts:
            return None
        num_documents = len(self.document_offsets) - 1
        if firsts[-1] >= num_documents:
            assert self._documents.folder is not None
            problem = f"it names document {firsts[-1]} of {num_documents}"
            raise damaged(self._documents.folder / SOURCE_FILES_NAME, ValueError(problem))
        return np.array([*firsts, num_documents], np.int64)

    def document_name(self, document: int) -> str:
        """Returns a name such as `letters.jsonl, row 17`, counted from 0."""
        firsts, names = _read_source_files(self._documents.folder)
        if not names:
            return f"document {document}"
        file = bisect.bisect_right(firsts, document) - 1
        assert self._documents.folder is not None
        path = self._documents.folder / ROWS_NAME
        if path.exists():
            try:
                row = int(self._documents["document_rows"][document])
            # A damaged header can raise anything.
            except Exception as error:
                raise damaged(path, error) from error
            return f"{names[file]}, row {row}"
        return f"{names[file]}, record {document - firsts[file]}"

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
        order = np.argsort(starts_P, kind="stable")
        starts = starts_P[order]
        ends = np.maximum.accumulate(stops_P[order])
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
        first = self._first
        files = np.searchsorted(first, starts, side="right") - 1
        num_files = np.searchsorted(first, stops) - files
        if (num_files != 1).any():  # splits ranges at the ends of files, without empty pieces
            num_files = np.maximum(num_files, 0)
            before = np.cumsum(num_files) - num_files
            files = np.repeat(files - before, num_files) + np.arange(num_files.sum())
            starts = np.maximum(np.repeat(starts, num_files), first[files])
            stops = np.minimum(np.repeat(stops, num_files), first[files + 1])
            has_tokens = starts < stops
            files = files[has_tokens]
            starts = starts[has_tokens]
            stops = stops[has_tokens]
        width = self.dtype.itemsize
        lows = (starts - first[files]) * width
        highs = (stops - first[files]) * width
        read = self._read_checked if self.is_checked else self._read_plain
        return np.frombuffer(b"".join(read(files, lows, highs)), self.dtype)

    def _read_plain(self, files: np.ndarray, lows: np.ndarray, highs: np.ndarray) -> list[bytes]:
        paths = [self.files[file] for file in files.tolist()]
        return file_access.read_ranges(paths, lows.tolist(), (highs - lows).tolist())

    def _read_checked(self, files: np.ndarray, lows: np.ndarray, highs: np.ndarray) -> list[bytes]:
        """Reads whole blocks, compares checksums, and crops the ranges."""
        first = lows // _CHECKED_BYTES
        last = -(-highs // _CHECKED_BYTES)
        begins = first * _CHECKED_BYTES
        ends = np.minimum(last * _CHECKED_BYTES, self._num_bytes[files])
        blocks = self._read_plain(files, begins, ends)
        known = self._checksums[self._checksums_name]
        of_file = self._first_sum[files]
        found = [*map(extend_crc, known[of_file + first].tolist(), blocks)]
        if found != (expected := known[of_file + last].tolist()):
            at = int(np.argmax(np.not_equal(found, expected)))
            path = self.files[files[at]]
            raise FileReadError(
                f"{path} is damaged: checksums of the {len(blocks[at])} bytes from byte "
                f"{begins[at]:,} differ. Copy it again; if it is in data_cache_dir, delete that "
                "import, and start again to repeat it."
            )
        crops = zip(blocks, (lows - begins).tolist(), (highs - begins).tolist(), strict=True)
        return [block[low:high] for block, low, high in crops]


@functools.lru_cache(maxsize=8)
def _read_source_files(folder: Path | None) -> tuple[list[int], list[str]]:
    """Returns the first document and the name of each source file, if known."""
    if folder is None or not (folder / SOURCE_FILES_NAME).exists():
        return [], []
    path = folder / SOURCE_FILES_NAME
    try:
        entries = _SOURCE_FILES.validate_json(path.read_bytes(), strict=True)
        firsts = [first for first, _ in entries]
        if not firsts or firsts[0] or any(after < first for first, after in pairwise(firsts)):
            raise ValueError("its documents do not ascend from 0")
    except (OSError, ValueError) as error:
        raise damaged(path, error) from error
    return firsts, [name for _, name in entries]


def checksums_name(kind: str = "tokens") -> str:
    """Returns the name of the array of `file_checksums` of token files."""
    return f"{kind}_running_crc32c"


def file_checksums(path: Path) -> np.ndarray:
    """Returns CRC-32Cs of the first 0, 4096, 8192, ... and all bytes (uint32)."""
    with path.open("rb") as file:
        blocks = iter(functools.partial(file.read, _CHECKED_BYTES), b"")
        return np.fromiter(itertools.accumulate(blocks, extend_crc, initial=0), "<u4")


class TokenWriter:
    """Writes ids to a flat file, synced to disk at the end."""

    def __init__(self, path: Path, dtype: np.dtype):
        self.count = 0
        self.largest = -1
        self._path = path
        self._dtype = dtype
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
        else:
            self._writing.unlink()


def load_offsets(folder: Path, entry: Split) -> Arrays:
    """Returns the document offsets of a folder, checked by the split's entry in the manifest.

    All of them are read, as sequences are cut by them: 8 bytes for each document.
    """
    path = folder / OFFSETS_NAME
    documents = Arrays(folder)
    try:
        offsets = documents["document_offsets"]
        num_documents = len(offsets) - 1
        num_tokens = int(offsets[-1])
        digest = hashlib.sha256()
        for first in range(0, len(offsets), _HASHED_OFFSETS):
            digest.update(np.ascontiguousarray(offsets[first : first + _HASHED_OFFSETS]).data)
    # A damaged header can raise anything.
    except Exception as error:
        raise damaged(path, error) from error
    if (num_documents, num_tokens) != (entry.num_documents, entry.num_tokens):
        raise UserError(
            f"{path} belongs to other data: {num_documents} documents and {num_tokens} tokens, "
            f"where the manifest has {entry.num_documents} and {entry.num_tokens}. Copy the data "
            "set again."
        )
    if offsets.dtype != np.dtype("<i8") or digest.hexdigest() != entry.offsets_sha256:
        raise damaged(path, ValueError("it is not what the manifest says: SHA-256 differs"))
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
        load_offsets(folder / split, entry),
        folder / split / f"{checksums_name()}.npy",
    )
    store.check_sizes(found)
    return store


def document_sizes(document_offsets: np.ndarray) -> Iterator[np.ndarray]:
    """Yields document sizes in blocks, in constant memory."""
    for first in range(0, len(document_offsets) - 1, _BLOCK):
        yield np.diff(document_offsets[first : first + _BLOCK + 1])


@dataclasses.dataclass(frozen=True)
class TokenDataset:
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
) -> TokenDataset:
    """Returns data of another program; UserError without tokens."""
    if not len(store):
        raise UserError(
            f"{where}: {source} hold no tokens. Check that these are the files you mean."
        )
    length = record_length(store.document_offsets)
    kind = f"rows of {length:,}" if length else "documents"
    num_documents = len(store.document_offsets) - 1
    description = f"{len(store):,} tokens in {num_documents:,} {kind} of {source}"
    return TokenDataset(store, description, fingerprint, record_length=length, **more)


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
    length = int(offsets[1] - offsets[0])
    last = int(offsets[-1] - offsets[-2])
    if last != length and not (count > 2 and 0 < last < length):
        return None
    is_even = all(bool((sizes == length).all()) for sizes in document_sizes(offsets[:-1]))
    return length if is_even else None
