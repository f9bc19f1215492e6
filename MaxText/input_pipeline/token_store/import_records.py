"""Imports records of other programs into the token store, at first use.

    <cache_dir>/imported/<digest of names, sizes, times and format>/
      tokens-00000.bin       ids of a source file: uint16, or uint32 if one is larger
      labels-00000.bin       int32, for files with labels
      file-00000.json        summary of a source file; written last, so that an import can resume
      document_offsets.npy   int64 [records + 1]: first token of each record, then the end
      source_files.json      [[first record, name of its file], ...]
      import.json            overall summary; written last, marks completeness

Checking such files means reading every byte anyway. Batches are then read from flat files, whatever
the original format.
"""

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from MaxText.errors import UserError
from MaxText.input_pipeline.document_sources.tables import TokenDocument
from MaxText.input_pipeline.local_cache import Arrays, cache_write_error, delete_unused
from MaxText.input_pipeline.prepare.process_pool import map_in_processes, show_progress
from MaxText.input_pipeline.token_store.manifest import OFFSETS_NAME, SOURCE_FILES_NAME
from MaxText.input_pipeline.token_store.store import Origins, TokenStore
from MaxText.pluralize import pluralize
from MaxText.runtime.cores import num_cores
from MaxText.storage import file_access
from MaxText.storage.atomic import atomic_write_text, lock, sync_file
from MaxText.storage.errors import BadRecordError, FileReadError, is_transient
from MaxText.storage.file_access import FileInfo

_LAYOUT = 1
_HEADER_NAME = "import.json"
_BUFFER_TOKENS = 1 << 20
_MIN_BYTES_FOR_PROCESSES = 1 << 26  # below this size, importing is faster than starting processes


class ImportedRecords(NamedTuple):
    """An import on disk."""

    folder: Path
    dtype: np.dtype
    num_tokens: tuple[int, ...]
    has_labels: bool
    largest_id: int  # -1 without ids
    skipped: tuple[str, ...]

    def files(self, kind: str = "tokens") -> list[str]:
        return [str(_path(self.folder, kind, number)) for number in range(len(self.num_tokens))]

    def store(self, documents: Arrays, origins: Origins, kind: str = "tokens") -> TokenStore:
        dtype = np.dtype("<i4") if kind == "labels" else self.dtype
        return TokenStore(self.files(kind), self.num_tokens, dtype, documents, origins)


Read = Callable[[str], Iterator[TokenDocument | BadRecordError]]
"""Reads a file in order, as read_ids; sent to other processes."""


@dataclasses.dataclass(frozen=True)
class RecordImport:
    """An import of record files, cached until one of them changes."""

    files: Sequence[FileInfo]
    read: Read
    identity: str  # everything besides the file that determines what `read` returns
    cache_dir: Path
    eos_id: int = -1  # appended to every record unless negative
    skip: bool = False  # skip bad records, up to `bad_records.maximum`
    max_bad_records: int = 0

    @functools.cached_property
    def folder(self) -> Path:
        found = [(file_access.absolute(file.path), file.size, file.tag) for file in self.files]
        name = json.dumps([_LAYOUT, self.identity, self.eos_id, self.skip, found])
        return self.cache_dir / "imported" / hashlib.sha256(name.encode()).hexdigest()[:24]

    def path(self, kind: str, number: int) -> Path:
        return _path(self.folder, kind, number)

    def run(self, log: Callable[[str], None]) -> ImportedRecords:
        """Returns the imported records, importing them at the first call.

        If several processes call it, one works and the others wait.

        Raises:
          BadRecordError: A record is damaged, or the rest of a file is not found, without `skip`.
          FileReadError: A file cannot be read.
          UserError: Too many bad records, or `cache_dir` cannot be written.
        """
        folder = self.folder
        imported = _load(folder)
        if imported is None:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                with lock(folder.parent / f".{folder.name}.lock", log):
                    imported = _load(folder)
                    if imported is None:
                        delete_unused(folder.parent)
                        self._import(log)
                        imported = _load(folder)
                        assert imported is not None, folder
            except UserError:
                raise
            except OSError as error:
                if is_transient(error, any(file_access.is_url(file.path) for file in self.files)):
                    raise
                raise cache_write_error(self.cache_dir, error) from error
        with contextlib.suppress(OSError):  # the cache may be read-only
            os.utime(folder)  # see delete_unused
        for message in imported.skipped:
            log(message)
        return imported

    def _import(self, log: Callable[[str], None]) -> None:
        began = time.monotonic()
        total = sum(file.size for file in self.files)
        log(
            f"Importing {pluralize(len(self.files), 'file')} ({total / 1e9:,.2f} GB) of token "
            f"records once, into {self.folder.parent}: 2 bytes a token on disk, 4 where ids are "
            "above 65,535."
        )
        entries = [self.path("file", number) for number in range(len(self.files))]
        todo = [number for number, path in enumerate(entries) if not path.exists()]
        processes = num_cores() if total >= _MIN_BYTES_FOR_PROCESSES else 1
        with show_progress("Importing", total, log) as advance:
            advance(total - sum(self.files[number].size for number in todo))
            for number, _ in map_in_processes(_import_file, self, todo, processes):
                advance(self.files[number].size)
        num_records, num_tokens = self._finish([json.loads(path.read_text()) for path in entries])
        seconds = time.monotonic() - began
        log(f"Imported {num_records:,} records of {num_tokens:,} tokens in {seconds:,.1f} s.")

    def _finish(self, entries: list[dict[str, Any]]) -> tuple[int, int]:
        """Merges the per-file results; returns the numbers of records and tokens."""
        bad = [message for entry in entries for message in entry["bad"]]
        self.check_bad(bad)
        widest = max((entry["dtype"] for entry in entries), default="<u2")
        sizes = []
        for number, entry in enumerate(entries):
            sizes.append(np.load(self.path("sizes", number)))
            if entry["dtype"] != widest:
                _rewrite(self.path("tokens", number), entry["dtype"], widest)
                entry["dtype"] = widest
                atomic_write_text(self.path("file", number), json.dumps(entry))
        firsts = np.cumsum([0, *(array.size for array in sizes)])
        ends = np.cumsum(np.concatenate([np.zeros(1, np.int64), *sizes]), dtype=np.int64)
        np.save(self.folder / OFFSETS_NAME, ends)
        names = [file.path.rsplit("/", 1)[-1] for file in self.files]
        origins = [[int(first), name] for first, name in zip(firsts, names, strict=False)]
        atomic_write_text(self.folder / SOURCE_FILES_NAME, json.dumps(origins))
        header = {
            "dtype": widest,
            "num_tokens": [entry["num_tokens"] for entry in entries],
            "has_labels": any(entry["has_labels"] for entry in entries),
            "largest_id": max((entry["largest_id"] for entry in entries), default=-1),
            "skipped": bad,
            "files": [file.path for file in self.files],
        }
        atomic_write_text(self.folder / _HEADER_NAME, json.dumps(header))
        return int(firsts[-1]), int(ends[-1])

    def check_bad(self, bad: list[str]) -> None:
        limit = self.max_bad_records
        if self.skip and bad and len(bad) >= limit:
            raise UserError(
                f"{len(bad)} records could not be read, and bad_records.maximum={limit}. The last "
                f"one: {bad[-1]}. Fix the files, or raise the limit."
            )


def _load(folder: Path) -> ImportedRecords | None:
    """Returns the import in a folder, or None; deletes a damaged one."""
    if not (folder / _HEADER_NAME).exists():
        return None
    try:
        header = json.loads((folder / _HEADER_NAME).read_text(encoding="utf-8"))
        imported = ImportedRecords(
            folder, np.dtype(header["dtype"]), tuple(header["num_tokens"]), header["has_labels"],
            header["largest_id"], tuple(header["skipped"]),
        )  # fmt: skip
        for kind, width in (("tokens", imported.dtype.itemsize), ("labels", 4)):
            if kind == "tokens" or imported.has_labels:
                for path, count in zip(imported.files(kind), imported.num_tokens, strict=True):
                    if os.stat(path).st_size != count * width:
                        raise ValueError(f"{path} has another size")
        offsets = Arrays(folder)["document_offsets"]
        if offsets.dtype != np.int64 or offsets[0] or offsets[-1] != sum(imported.num_tokens):
            raise ValueError("offsets of other data")
        return imported
    except (ValueError, KeyError, TypeError, IndexError, EOFError, FileNotFoundError):
        shutil.rmtree(folder)
        folder.mkdir()
        return None


def _import_file(job: RecordImport, number: int) -> None:
    file = job.files[number]
    ids, labels = _Writer(job.path("tokens", number)), None
    sizes: list[int] = []
    bad: list[str] = []

    def note(problem: BadRecordError, rest: str = "") -> None:
        if not job.skip:
            raise problem
        bad.append(f"Skipped a record: {problem}{rest}")
        job.check_bad(bad)

    try:
        for record in job.read(file.path):
            if isinstance(record, BadRecordError):
                note(record)
                continue
            size = ids.add(record.ids)
            if record.labels is not None:
                labels = labels or _Writer(job.path("labels", number), "<i4")
                labels.add(record.labels)
            elif job.eos_id >= 0:
                size += ids.add(np.array([job.eos_id], np.int32))
            sizes.append(size)
    except BadRecordError as problem:
        _raise_if_unreadable(problem)
        note(problem, "; the rest of the file is skipped")
    ids.close()
    if labels is not None:
        labels.close()
    np.save(job.path("sizes", number), np.array(sizes, np.int64))
    entry = {
        "num_tokens": ids.count,
        "dtype": ids.dtype.str,
        "largest_id": ids.largest,
        "has_labels": labels is not None,
        "bad": bad,
    }
    atomic_write_text(job.path("file", number), json.dumps(entry))


def _raise_if_unreadable(problem: BadRecordError) -> None:
    """Raises storage errors instead of skipping them as damage."""
    cause = problem.__cause__
    if isinstance(cause, Exception):
        if is_transient(cause, file_access.is_url(problem.path)):
            raise cause  # keeps its type across processes
        if isinstance(cause, OSError) and cause.errno is not None:
            raise FileReadError(str(problem), problem.path) from problem


def _path(folder: Path, kind: str, number: int) -> Path:
    suffix = {"file": "json", "sizes": "npy"}.get(kind, "bin")
    return folder / f"{kind}-{number:05d}.{suffix}"


class _Writer:
    """Appends integers to a file, widening it to uint32 when needed."""

    def __init__(self, path: Path, dtype: str = "<u2"):
        self.dtype = np.dtype(dtype)
        self.count, self.largest = 0, -1
        self._path = path
        path.write_bytes(b"")
        self._waiting: list[np.ndarray] = []
        self._num_waiting = 0

    def add(self, values: np.ndarray) -> int:
        self._waiting.append(values)
        self._num_waiting += values.size
        if self._num_waiting >= _BUFFER_TOKENS:
            self._flush()
        return values.size

    def _flush(self) -> None:
        values = np.concatenate([np.empty(0, np.int32), *self._waiting])
        self.count += values.size
        self.largest = max(self.largest, int(values.max(initial=-1)))
        if self.dtype == np.uint16 and self.largest > np.iinfo(np.uint16).max:
            _rewrite(self._path, self.dtype.str, "<u4")
            self.dtype = np.dtype("<u4")
        with open(self._path, "ab") as file:
            file.write(values.astype(self.dtype).tobytes())
        self._waiting, self._num_waiting = [], 0

    def close(self) -> None:
        self._flush()
        sync_file(self._path)


def _rewrite(path: Path, stored: str, dtype: str) -> None:
    wide = path.with_suffix(".wide")
    with open(path, "rb") as narrow, open(wide, "wb") as file:
        while chunk := narrow.read(_BUFFER_TOKENS * np.dtype(stored).itemsize):
            file.write(np.frombuffer(chunk, stored).astype(dtype).tobytes())
        file.flush()
        os.fsync(file.fileno())
    wide.replace(path)
