"""An index of record files: where each record lies and how many tokens it has.

Made by reading every file once, kept in a cache folder and mapped from there afterwards.

    <cache_dir>/indices/<digest of names, sizes, times and format>/
      index.json             files, first record of each, damaged records
      offsets.npy sizes.npy  int64 [R]: place of a record in its file
      document_offsets.npy   int64 [R + 1]: its first token in the stream, then the end
"""

import dataclasses
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np

from MaxText.errors import UserError
from MaxText.input_pipeline.data_errors import BadRecord
from MaxText.input_pipeline.storage import absolute, is_url, versions
from MaxText.input_pipeline.transient import may_pass

_LAYOUT = 3
_ARRAYS = ("offsets", "sizes", "document_offsets")

# Files scanned at once: hides the delay of a bucket; on a local disk numpy's share runs at once.
_THREADS = 8
_SECONDS_BETWEEN_LINES = 10.0


@dataclasses.dataclass(frozen=True)
class FileRecords:
    """The records of one file.

    Attributes:
      offsets: int64 [R], place of each: bytes, or its number where the format counts.
      sizes: int64 [R], bytes of each; 0 where the format finds them itself.
      num_tokens: int64 [R].
      damaged: (record, reason) of those that could not be read. Their num_tokens is a guess, so
        that later ones keep their rows.
      lost: (place, reason) from where on no record could be found, None where all were.
    """

    offsets: np.ndarray
    sizes: np.ndarray
    num_tokens: np.ndarray
    damaged: tuple[tuple[int, str], ...] = ()
    lost: tuple[int, str] | None = None


class FileScan:
    """Collects the records of one file while it is read."""

    def __init__(self, path: str):
        self._path = path
        self._offsets: list[int] = []
        self._sizes: list[int] = []
        self._num_tokens: list[int] = []
        self._damaged: list[tuple[int, str]] = []
        self._lost: tuple[int, str] | None = None

    def add(self, offset: int, size: int, count: Callable[[], int]) -> None:
        """Appends a record.

        Args:
          offset: its place.
          size: its bytes.
          count: reads it and returns its tokens; may raise BadRecord.
        """
        try:
            num_tokens = count()
        except BadRecord as error:
            self._check_stays(error)
            self._damaged.append((len(self._offsets), error.reason))
            # Records of one length are the common case: as many as the one before, or after.
            num_tokens = self._num_tokens[-1] if self._num_tokens else 1
        else:
            if len(self._damaged) == len(self._num_tokens):
                self._num_tokens = [num_tokens] * len(self._num_tokens)
        self._offsets.append(offset)
        self._sizes.append(size)
        self._num_tokens.append(num_tokens)

    def lose_rest(self, problem: BadRecord) -> None:
        """Notes that no record can be found from the place of `problem` on."""
        self._check_stays(problem)
        self._lost = (problem.offset, problem.reason)

    def _check_stays(self, problem: BadRecord) -> None:
        # The index is kept: what storage could not deliver for a moment is no damage to note in it.
        if may_pass(problem, is_url(self._path)):
            raise problem

    def records(self) -> FileRecords:
        """What was collected."""
        return FileRecords(
            np.asarray(self._offsets, np.int64),
            np.asarray(self._sizes, np.int64),
            np.asarray(self._num_tokens, np.int64),
            tuple(self._damaged),
            self._lost,
        )


class RecordFormat(Protocol):
    """How records of one kind of file are found and read.

    Safe to use from several threads; pickled without what it has open. `repr` says everything
    that decides which tokens are read.

    Attributes:
      unit: what places count, see BadRecord.
    """

    unit: ClassVar[str]

    def scan(self, path: str) -> FileRecords:
        """Finds the records of a file.

        Raises:
          BadRecord: the file is damaged so that records after a place cannot be found.
          UserError: it cannot be read, or is of another kind.
        """
        ...

    def read(self, path: str, offsets: Sequence[int], sizes: Sequence[int]) -> list[np.ndarray]:
        """Reads records by place.

        Returns:
          int32 arrays [num_tokens].

        Raises:
          BadRecord: one cannot be read.
        """
        ...


@dataclasses.dataclass(frozen=True)
class RecordIndex:
    """Where the records of some files lie.

    Attributes:
      folder: of the index on disk.
      files: paths, in the order of the records.
      first_record: int64 [F + 1]: first record of each file, then the end.
      offsets, sizes: int64 [R], see FileRecords; mapped from disk.
      document_offsets: int64 [R + 1]: first token of each record, then the end; mapped.
      file_bytes: size of each file when the index was opened.
    """

    folder: Path
    files: tuple[str, ...]
    first_record: np.ndarray
    offsets: np.ndarray
    sizes: np.ndarray
    document_offsets: np.ndarray
    file_bytes: tuple[int, ...]

    def __reduce__(self):
        # Mapped arrays would be pickled as a whole: the other process maps them itself.
        return _reopen, (self.folder, self.files, self.file_bytes)


def _reopen(folder: Path, files: tuple[str, ...], file_bytes: tuple[int, ...]) -> RecordIndex:
    entries = _load(folder, files, file_bytes)
    if entries is None:
        raise UserError(f"The index {folder} is gone or damaged. Start again: it is made anew.")
    return entries[0]


def is_rows(sizes: np.ndarray) -> bool:
    """Whether records of these sizes (int64 [R]) are training rows that a program cut.

    All have one length; the last one may be what was left, when there are two whole ones before.
    """
    if sizes.size < 2:
        return False
    whole = sizes[:-1]
    if np.any(whole != whole[0]):
        return False
    return bool(sizes[-1] == whole[0] or (sizes.size > 2 and 0 < sizes[-1] < whole[0]))


def open_index(
    files: Sequence[str],
    record_format: RecordFormat,
    cache_dir: Path,
    show: Callable[[str], None],
    skip_damaged: bool = False,
) -> RecordIndex:
    """The index of `files`, made on the first call and whenever one of them has changed.

    Args:
      files: paths or URLs, in the order of their records.
      record_format: of all of them.
      cache_dir: folder of indices; created.
      show: takes lines about progress.
      skip_damaged: whether records that cannot be read are kept, with a guess of their size, and
        fail when they are read; and what cannot be found in a file is left out.

    Raises:
      BadRecord: a record is damaged, or the rest of a file cannot be found, and `skip_damaged` is
        false.
      UserError: a file cannot be read, or `cache_dir` not be written.
    """
    found = [(absolute(file), *state) for file, state in zip(files, versions(files), strict=True)]
    identity = json.dumps([_LAYOUT, repr(record_format), found])
    folder = cache_dir / "indices" / hashlib.sha256(identity.encode()).hexdigest()[:24]
    file_bytes = tuple(size for _, size, _ in found)
    entries = _load(folder, files, file_bytes)
    if entries is None:
        _make(folder, list(files), sum(file_bytes), record_format, show)
        entries = _load(folder, files, file_bytes)
        assert entries is not None, folder
    index, damaged = entries
    for path, offset, reason, is_lost in damaged:
        problem = BadRecord(path, offset, reason, record_format.unit)
        if not skip_damaged:
            raise problem
        show(f"{problem}; what follows in the file is left out" if is_lost else str(problem))
    return index


def _load(
    folder: Path, files: Sequence[str], file_bytes: tuple[int, ...] = ()
) -> tuple[RecordIndex, list] | None:
    """The index on disk; None where there is none, or it is damaged."""
    try:
        header = json.loads((folder / "index.json").read_text(encoding="utf-8"))
        arrays = [_mapped(folder / f"{name}.npy") for name in _ARRAYS]
        first_record = np.array(header["first_record"], np.int64)
        offsets, sizes, document_offsets = arrays
        total = int(first_record[-1])
        sound = (
            first_record.size == len(files) + 1
            and offsets.shape == sizes.shape == (total,)
            and document_offsets.shape == (total + 1,)
            and all(array.dtype == np.int64 for array in arrays)
            and int(document_offsets[0]) == 0
            and int(document_offsets[-1]) == header["num_tokens"]
        )
        damaged = [
            (files[number], offset, reason, is_lost)
            for number, offset, reason, is_lost in header["damaged"]
        ]
    # What a damaged header raises is any kind of error; the index is then made again.
    except Exception:
        return None
    if not sound:
        return None
    index = RecordIndex(
        folder, tuple(files), first_record, offsets, sizes, document_offsets, file_bytes
    )
    return index, damaged


def _mapped(path: Path) -> np.ndarray:
    # A plain array over the map: slicing numpy's memmap class costs several times as much.
    return np.load(path, mmap_mode="r", allow_pickle=False).view(np.ndarray)


def _make(
    folder: Path,
    files: list[str],
    num_bytes: int,
    record_format: RecordFormat,
    show: Callable[[str], None],
) -> None:
    begun = last_line = time.monotonic()
    show(f"Indexing {len(files)} files ({num_bytes / 1e9:,.2f} GB) once, into {folder.parent}.")
    scanned: list[FileRecords] = []
    with ThreadPoolExecutor(min(_THREADS, max(1, len(files)))) as threads:
        for records in threads.map(record_format.scan, files):
            scanned.append(records)
            if time.monotonic() - last_line >= _SECONDS_BETWEEN_LINES:
                last_line = time.monotonic()
                show(f"  {len(scanned)} of {len(files)} files")
    first_record = np.cumsum([0, *(records.offsets.size for records in scanned)])
    ends = np.cumsum(np.concatenate([[0], *(records.num_tokens for records in scanned)]))
    arrays = {
        "offsets": _joined([records.offsets for records in scanned]),
        "sizes": _joined([records.sizes for records in scanned]),
        "document_offsets": ends.astype(np.int64),
    }
    header = {
        "first_record": first_record.tolist(),
        "num_tokens": int(ends[-1]),
        "damaged": [
            (number, int(records.offsets[record]), reason, False)
            for number, records in enumerate(scanned)
            for record, reason in records.damaged
        ]
        + [
            (number, *records.lost, True)
            for number, records in enumerate(scanned)
            if records.lost is not None
        ],
        "files": files,
    }
    _save(folder, arrays, header)
    show(
        f"Indexed {first_record[-1]:,} records of {ends[-1]:,} tokens in "
        f"{time.monotonic() - begun:,.1f} s."
    )


def _joined(parts: list[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.empty(0, np.int64), *parts])


def _save(folder: Path, arrays: dict[str, np.ndarray], header: dict[str, Any]) -> None:
    """Writes the index beside its place and renames it there.

    Another process may have made the same one in the meantime: then that one is kept, unless it
    is damaged.
    """
    building = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        building = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
        for name, array in arrays.items():
            np.save(building / f"{name}.npy", array)
        text = json.dumps(header)
        (building / "index.json").write_text(text, encoding="utf-8")
        if folder.exists() and _load(folder, header["files"]) is None:
            shutil.rmtree(folder)
        try:
            os.rename(building, folder)
        except OSError:
            if _load(folder, header["files"]) is None:
                raise
    except OSError as error:
        raise UserError(
            f"data_cache_dir={folder.parent.parent} cannot be written ({error.strerror or error}). "
            "Set data_cache_dir to a folder on a disk with room."
        ) from error
    finally:
        if building is not None and building.exists():
            shutil.rmtree(building)
