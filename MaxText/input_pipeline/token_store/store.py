"""The token store: random access to flat files of token ids.

Every dataset is read through it: prepared as `bin`, Megatron's .bin, or imported records. Files of
the first and the last kind have CRC-32Cs of their first 0, 4096, 8192, ... and all bytes. Each read
compares them: the one before a range, extended by its bytes, is the one after it.

Legend: P token ranges, G groups of ranges that are read together, F ranges within one file, D
documents.
"""

import bisect
import contextlib
import functools
import hashlib
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

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
_SMALL_RANGE = 256
_MAX_GAP = 4096  # largest gap in tokens that is worth reading to save a call
_BLOCK = 2**13  # documents looked at together
_HASHED_OFFSETS = 2**20  # offsets hashed at a time
_CHECKED_BYTES = 4096  # between checksums: a page of the disk cache

# Of source_files.json: first document and name of each file.
_SOURCE_FILES = pydantic.TypeAdapter(list[tuple[int, str]])


class _FileRanges(NamedTuple):
    """Token ranges that do not cross files; [F] each."""

    file_F: np.ndarray  # index of the file
    start_F: np.ndarray  # first token in the store
    stop_F: np.ndarray  # token after the last


class TokenStore:
    """The ids of some files, concatenated and divided into documents.

    Holds no open file, and large arrays are memory-mapped: thread-safe, and pickled to worker
    processes in a few kilobytes.

    Attributes:
      files: Paths or URLs in token order.
      dtype: Integer type of the ids in the files.
      is_checked: Each read compares checksums.
    """

    def __init__(
        self,
        files: Sequence[str],
        num_tokens: Sequence[int],
        dtype: np.dtype,
        documents: Arrays,
        checksums: Path | None = None,
    ):
        """Initializes without opening the files.

        Args:
          files: Paths or URLs in token order.
          num_tokens: Tokens of each file.
          dtype: Integer type of the ids in the files.
          documents: Holds `document_offsets`; its folder may also hold the names of source files
            and the rows of documents in them.
          checksums: .npy file of `file_checksums` of all files, one after the other. It may be
            absent.

        Raises:
          UserError: The checksums are damaged or belong to other data.
        """
        assert dtype.kind in "iu", dtype
        self.files = tuple(files)
        self.reopen()
        self.dtype = dtype
        self._documents = documents
        self._first_token = np.cumsum([0, *num_tokens])  # of each file, then the end
        self.is_checked = checksums is not None and checksums.exists()
        if checksums is not None and self.is_checked:
            self._open_checksums(checksums)

    def _open_checksums(self, path: Path) -> None:
        """Maps the checksums; UserError if they are not of these files."""
        self._num_bytes = np.diff(self._first_token) * self.dtype.itemsize  # of each file
        num_checksums = 1 - -self._num_bytes // _CHECKED_BYTES
        self._first_checksum = np.cumsum([0, *num_checksums])  # of each file, then the end
        self._checksum_arrays = Arrays(path.parent)
        self._checksum_name = path.stem
        try:
            num_found = len(self._checksums)
        # A damaged header can raise anything.
        except Exception as error:
            raise damaged(path, error) from error
        if num_found != self._first_checksum[-1]:
            raise UserError(f"{path} belongs to other data. Copy the data set again.")

    @property
    def _checksums(self) -> np.ndarray:
        return self._checksum_arrays[self._checksum_name]

    def __len__(self) -> int:
        """Returns the number of tokens."""
        return int(self._first_token[-1])

    def reopen(self) -> None:
        """Makes the next read open the files again: they may have been replaced."""
        file_access.invalidate_cache(self.files)

    @property
    def document_offsets(self) -> np.ndarray:
        """int64 [D + 1]: first token of each document, then the end; mapped."""
        return self._documents["document_offsets"]

    @property
    def file_of_document(self) -> np.ndarray | None:
        """int64 [files + 1]: first document of each source file and the end; None if unknown."""
        source_files = _read_source_files(self._documents.folder)
        if source_files is None:
            return None
        first_documents = source_files.first_documents
        num_documents = len(self.document_offsets) - 1
        if first_documents[-1] >= num_documents:
            problem = f"it names document {first_documents[-1]} of {num_documents}"
            raise damaged(source_files.path, ValueError(problem))
        return np.array([*first_documents, num_documents], np.int64)

    def document_name(self, document: int) -> str:
        """Returns a name such as `letters.jsonl, row 17`, counted from 0."""
        source_files = _read_source_files(self._documents.folder)
        if source_files is None:
            return f"document {document}"
        file = bisect.bisect_right(source_files.first_documents, document) - 1
        name = source_files.names[file]
        rows_path = source_files.path.with_name(ROWS_NAME)
        if not rows_path.exists():
            return f"{name}, record {document - source_files.first_documents[file]}"
        try:
            row = int(self._documents["document_rows"][document])
        # A damaged header can raise anything.
        except Exception as error:
            raise damaged(rows_path, error) from error
        return f"{name}, row {row}"

    def check_sizes(self, files: Sequence[FileInfo]) -> None:
        """Raises UserError if listed sizes do not match the token counts."""
        for file, num_tokens in zip(files, np.diff(self._first_token).tolist(), strict=True):
            num_bytes = num_tokens * self.dtype.itemsize
            if file.size != num_bytes:
                raise UserError(
                    f"{file.path} has {file.size} bytes, where its {num_tokens} tokens take "
                    f"{num_bytes}: it is truncated or changed. Copy the data set again."
                )

    def read(self, start_P: np.ndarray, stop_P: np.ndarray) -> np.ndarray:
        """Reads token ranges [start, stop), in any order; they may overlap.

        Returns:
          Their ids (int32), one range after the other.

        Raises:
          FileReadError: A file is missing, truncated, damaged or unreadable.
        """
        num_tokens = int((stop_P - start_P).sum())
        if num_tokens >= _SMALL_RANGE * len(start_P):
            return self._read(start_P, stop_P).astype(np.int32)
        return self._read_merged(start_P, stop_P)

    def _read_merged(self, start_P: np.ndarray, stop_P: np.ndarray) -> np.ndarray:
        """Reads neighboring ranges with the gaps between them; returns the same as `read`."""
        order = np.argsort(start_P, kind="stable")
        sorted_start_P = start_P[order]
        sorted_stop_P = np.maximum.accumulate(stop_P[order])
        begins_group = np.append(True, sorted_start_P[1:] > sorted_stop_P[:-1] + _MAX_GAP)
        ends_group = np.append(begins_group[1:], True)
        group_P = np.empty(len(order), np.int64)
        group_P[order] = np.cumsum(begins_group) - 1
        start_G = sorted_start_P[begins_group]
        stop_G = sorted_stop_P[ends_group]
        ids = self._read(start_G, stop_G).astype(np.int32)
        # Index in `ids` of each group, and of the first token of each range.
        size_G = stop_G - start_G
        index_G = np.cumsum(size_G) - size_G
        index_P = index_G[group_P] + start_P - start_G[group_P]
        size_P = stop_P - start_P
        result_index_P = np.cumsum(size_P) - size_P
        shifts = np.repeat(index_P - result_index_P, size_P)
        return ids[shifts + np.arange(len(shifts))]

    def _read(self, start_P: np.ndarray, stop_P: np.ndarray) -> np.ndarray:
        """Returns the ids of ranges in the store's dtype, one range after the other."""
        file_F, start_F, stop_F = self._split_at_files(start_P, stop_P)
        itemsize = self.dtype.itemsize
        low_F = (start_F - self._first_token[file_F]) * itemsize
        high_F = (stop_F - self._first_token[file_F]) * itemsize
        if self.is_checked:
            contents = self._read_checked_bytes(file_F, low_F, high_F)
        else:
            contents = self._read_bytes(file_F, low_F, high_F)
        return np.frombuffer(b"".join(contents), self.dtype)

    def _split_at_files(self, start_P: np.ndarray, stop_P: np.ndarray) -> _FileRanges:
        """Splits ranges at the ends of files, without empty ones."""
        first_token = self._first_token
        file_P = np.searchsorted(first_token, start_P, side="right") - 1
        num_files_P = np.searchsorted(first_token, stop_P) - file_P
        if (num_files_P == 1).all():
            return _FileRanges(file_P, start_P, stop_P)
        num_files_P = np.maximum(num_files_P, 0)
        before_P = np.cumsum(num_files_P) - num_files_P
        file_F = np.repeat(file_P - before_P, num_files_P) + np.arange(num_files_P.sum())
        start_F = np.maximum(np.repeat(start_P, num_files_P), first_token[file_F])
        stop_F = np.minimum(np.repeat(stop_P, num_files_P), first_token[file_F + 1])
        has_tokens = start_F < stop_F
        return _FileRanges(file_F[has_tokens], start_F[has_tokens], stop_F[has_tokens])

    def _read_bytes(self, file_F: np.ndarray, low_F: np.ndarray, high_F: np.ndarray) -> list[bytes]:
        """Returns the bytes [low, high) of files."""
        paths = [self.files[file] for file in file_F.tolist()]
        return file_access.read_ranges(paths, low_F.tolist(), (high_F - low_F).tolist())

    def _read_checked_bytes(
        self, file_F: np.ndarray, low_F: np.ndarray, high_F: np.ndarray
    ) -> list[bytes]:
        """Returns the bytes [low, high) of files; reads whole blocks and compares checksums."""
        first_block_F = low_F // _CHECKED_BYTES
        end_block_F = -(-high_F // _CHECKED_BYTES)
        begin_F = first_block_F * _CHECKED_BYTES
        end_F = np.minimum(end_block_F * _CHECKED_BYTES, self._num_bytes[file_F])
        blocks = self._read_bytes(file_F, begin_F, end_F)
        checksums = self._checksums
        first_checksum_F = self._first_checksum[file_F]
        checksums_before = checksums[first_checksum_F + first_block_F].tolist()
        expected = checksums[first_checksum_F + end_block_F].tolist()
        computed = list(map(extend_crc, checksums_before, blocks))
        if computed != expected:
            index = int(np.argmax(np.not_equal(computed, expected)))
            path = self.files[file_F[index]]
            raise FileReadError(
                f"{path} is damaged: checksums of the {len(blocks[index])} bytes from byte "
                f"{begin_F[index]:,} differ. Copy it again; if it is in data_cache_dir, delete "
                "that import, and start again to repeat it."
            )
        crops = zip(blocks, (low_F - begin_F).tolist(), (high_F - begin_F).tolist(), strict=True)
        return [block[low:high] for block, low, high in crops]


class _SourceFiles(NamedTuple):
    """Contents of source_files.json."""

    path: Path
    first_documents: list[int]  # of each file
    names: list[str]


@functools.lru_cache(maxsize=8)
def _read_source_files(folder: Path | None) -> _SourceFiles | None:
    """Returns the source files of the documents; None if unknown."""
    if folder is None or not (folder / SOURCE_FILES_NAME).exists():
        return None
    path = folder / SOURCE_FILES_NAME
    try:
        entries = _SOURCE_FILES.validate_json(path.read_bytes(), strict=True)
        first_documents = [first for first, _ in entries]
        if not first_documents or first_documents[0] or first_documents != sorted(first_documents):
            raise ValueError("its documents do not ascend from 0")
    except (OSError, ValueError) as error:
        raise damaged(path, error) from error
    return _SourceFiles(path, first_documents, [name for _, name in entries])


def checksums_name(kind: str = "tokens") -> str:
    """Returns the name of the array of `file_checksums` of token files."""
    return f"{kind}_running_crc32c"


def file_checksums(path: Path) -> np.ndarray:
    """Returns CRC-32Cs of the first 0, 4096, 8192, ... and all bytes (uint32)."""
    with path.open("rb") as file:
        blocks = iter(functools.partial(file.read, _CHECKED_BYTES), b"")
        return np.fromiter(itertools.accumulate(blocks, extend_crc, initial=0), "<u4")


class TokenWriter:
    """Writes ids to a flat file, synced to disk at the end; a context manager.

    After an error in its block, there is no file.

    Attributes:
      count: Ids written so far.
      max_token_id: The largest of them; -1 without any.
    """

    def __init__(self, path: Path, dtype: np.dtype):
        """Opens a temporary file; `dtype` is the type of the ids in it."""
        self.count = 0
        self.max_token_id = -1
        self._path = path
        self._dtype = dtype
        self._temporary_path = temporary_name(path)
        self._file = self._temporary_path.open("wb")

    def write(self, ids: np.ndarray) -> None:
        """Appends ids, which must fit the dtype."""
        self.count += ids.size
        self.max_token_id = max(self.max_token_id, int(ids.max(initial=-1)))
        self._file.write(ids.astype(self._dtype).data)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error_type is not None:
            with contextlib.suppress(OSError):  # the error in the block is raised
                self._file.close()
            self._temporary_path.unlink()
            return
        self._file.close()
        atomic_rename(self._temporary_path, self._path)


def load_offsets(folder: Path, entry: Split) -> Arrays:
    """Returns the document offsets of a folder, checked by the split's entry in the manifest.

    All of them are read, as sequences are sliced by them: 8 bytes for each document. Raises
    UserError if they are damaged or belong to other data.
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
    """Opens a split of a prepared dataset of flat files.

    Args:
      folder: The dataset, or a local copy of its small files.
      manifest: Its manifest.
      split: A split that is not empty.
      files: The token files, which may be remote; None: those in `folder`.

    Raises:
      UserError: A file is missing, damaged or of other data.
    """
    assert manifest.format == "bin", manifest.format
    entry = manifest.splits[split]
    if files is None:
        files = check_files(manifest, folder, split)
    store = TokenStore(
        [file.path for file in files],
        [file.num_records for file in entry.files],
        np.dtype(manifest.dtype).newbyteorder("<"),
        load_offsets(folder / split, entry),
        folder / split / f"{checksums_name()}.npy",
    )
    store.check_sizes(files)
    return store


def document_sizes(document_offsets: np.ndarray) -> Iterator[np.ndarray]:
    """Yields the numbers of tokens of documents in blocks, in constant memory."""
    for first in range(0, len(document_offsets) - 1, _BLOCK):
        yield np.diff(document_offsets[first : first + _BLOCK + 1])
