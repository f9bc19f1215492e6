"""Imports records of other programs into the token store, at first use.

    <cache_dir>/imported/<digest of names, sizes, times and format>/
      tokens-00000.bin       ids of a source file: uint16, or uint32 if any file has a larger one
      labels-00000.bin       int32, for files with labels
      uint16/000000.json     ledger: summary of a source file
      tokens_running_crc32c.npy    checksums as in store.py; also of labels
      document_offsets.npy   int64 [records + 1]: first token of each record, then the end
      source_files.json      [[first record, name of its file], ...]
      import.json            overall summary; written last, marks completeness

Checking such files means reading every byte anyway. Batches are then read from flat files, whatever
the original format. Hosts without a common disk share the import of files in a bucket: one uploads
it, with ids and labels in the subfolder `tokens`, where the others read them.
"""

import contextlib
import dataclasses
import functools
import hashlib
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from MaxText.errors import UserError
from MaxText.input_pipeline import local_cache
from MaxText.input_pipeline.document_sources.tables import TokenDocument
from MaxText.input_pipeline.local_cache import Arrays, write_arrays
from MaxText.input_pipeline.prepare.process_pool import run_jobs
from MaxText.input_pipeline.token_store.manifest import OFFSETS_NAME, SOURCE_FILES_NAME
from MaxText.input_pipeline.token_store.store import (
    TokenStore,
    TokenWriter,
    checksums_name,
    file_checksums,
)
from MaxText.pluralize import pluralize
from MaxText.storage import file_access
from MaxText.storage.atomic import atomic_write_text, lock
from MaxText.storage.errors import BadRecordError, FileReadError, is_transient
from MaxText.storage.file_access import FileInfo
from MaxText.storage.run_folder import InUseError, Lease

_LAYOUT = 1
_BLOCK = 2**13  # records whose sizes are kept in memory
_HEADER_NAME = "import.json"


class _LargeId(Exception):
    """An id too large for the dtype."""


class ImportedRecords(NamedTuple):
    """An import on disk, perhaps with ids and labels in a bucket."""

    folder: Path
    place: str  # folder or URL of ids and labels
    dtype: str
    num_tokens: list[int]
    has_labels: bool
    max_token_id: int  # -1 without ids
    skipped: list[str]
    files: list[str]  # sources

    def store(self, documents: Arrays, kind: str = "tokens") -> TokenStore:
        numbers = range(len(self.num_tokens))
        paths = [f"{self.place}/{_name(kind, number)}" for number in numbers]
        dtype = np.dtype("int32" if kind == "labels" else self.dtype)
        checksums = self.folder / f"{checksums_name(kind)}.npy"
        return TokenStore(paths, self.num_tokens, dtype, documents, checksums)


@dataclasses.dataclass(frozen=True)
class RecordImport:
    """An import of record files, cached until one of them changes."""

    files: Sequence[FileInfo]
    read: Callable[[str], Iterator[TokenDocument | BadRecordError]]  # sent to other processes
    identity: str  # everything besides the file that determines what `read` returns
    cache_dir: Path
    cache_url: str = ""  # a bucket to share the import of files in buckets
    eos_id: int = -1  # appended to every record unless negative
    skip: bool = False  # skip bad records, up to `bad_records.maximum`
    max_bad_records: int = 0
    has_labels: bool = False  # as the first file
    dtype: str = "uint16"  # of the ids, widened as needed

    @functools.cached_property
    def folder(self) -> Path:
        found = [(file_access.absolute(file.path), file.size, file.tag) for file in self.files]
        name = json.dumps([_LAYOUT, self.identity, self.eos_id, self.skip, found])
        return self.cache_dir / "imported" / hashlib.sha256(name.encode()).hexdigest()[:24]

    @functools.cached_property
    def url(self) -> str:
        """Folder in a bucket to share the import through, or ""."""
        is_shared = self.cache_url and all(file_access.is_url(file.path) for file in self.files)
        return f"{self.cache_url.rstrip('/')}/imported/{self.folder.name}" if is_shared else ""

    @property
    def kinds(self) -> tuple[str, ...]:
        return ("tokens", "labels") if self.has_labels else ("tokens",)

    def path(self, kind: str, number: int) -> Path:
        return self.folder / _name(kind, number)

    def run(self, log: Callable[[str], None]) -> ImportedRecords:
        """Returns the imported records, importing them at the first call.

        If several processes call it, one works and the others wait: those that share `cache_dir`,
        and for files in a bucket also `cache_url`.

        Raises:
          BadRecordError: A record is damaged, or the rest of a file is not found, without `skip`.
          FileReadError: A file cannot be read.
          UserError: Too many bad records, or a cache cannot be written.
        """
        imported = self._shared(log) if self.url else self._local(log)
        self.check_bad(imported.skipped)
        for message in imported.skipped:
            log(message)
        return imported

    def _shared(self, log: Callable[[str], None]) -> ImportedRecords:
        """Returns the import in the bucket; uploads it if none is there."""
        header = f"{self.url}/{_HEADER_NAME}"
        lock_url = f"{self.url}.lock"
        # An upload may delay a heartbeat, and hosts take over at about the same time.
        seconds = {"renewal_seconds": 20.0, "timeout_seconds": 300.0, "takeover_seconds": 60.0}
        lease = Lease(lock_url, is_advisory=True, **seconds)
        waits = False
        ask = functools.partial(_ask, self.cache_url)
        while not ask(file_access.path_type, header):
            if not waits and (waits := bool(ask(file_access.path_type, lock_url))):
                log(f"Waiting for another host to import the records into {self.url}")
            with contextlib.suppress(InUseError):  # looks again while another one works
                ask(lease.acquire)
                try:
                    if not ask(file_access.path_type, header):
                        ask(self._upload, self._local(log))
                        log(f"Uploaded it to {self.url}")
                finally:
                    with contextlib.suppress(Exception):  # it expires without a heartbeat
                        lease.release()
        if (self.folder / _HEADER_NAME).exists():  # this host imported it
            return self._local(log)
        folder = local_cache.copy_folder(self.url, self.cache_dir)
        assert folder is not None, self.url
        return _load(folder, f"{self.url}/tokens")

    def _local(self, log: Callable[[str], None]) -> ImportedRecords:
        folder = self.folder
        header = self.folder / _HEADER_NAME
        local_cache.mark_used(folder)
        if not header.exists():
            try:
                folder.mkdir(parents=True, exist_ok=True)
                with lock(folder.parent / f".{folder.name}.lock", log):
                    if not header.exists():
                        local_cache.delete_unused(self.cache_dir)
                        self._import(log, self._density())
            except UserError:
                raise
            except OSError as error:
                if is_transient(error, any(file_access.is_url(file.path) for file in self.files)):
                    raise
                raise local_cache.cache_write_error(self.cache_dir, error) from error
        imported = _load(folder, str(folder))
        filled = (number for number, count in enumerate(imported.num_tokens) if count)
        # Not so in an import of an earlier version.
        if imported.has_labels and not all(self.path("labels", i).exists() for i in filled):
            raise UserError(
                f"{folder}: only some files have labels. Delete it, and match files of one kind."
            )
        return imported

    def _upload(self, imported: ImportedRecords) -> None:
        small = [OFFSETS_NAME, SOURCE_FILES_NAME, _HEADER_NAME]
        files = {name: self.folder / name for name in small}
        for kind in self.kinds:
            if (checksums := self.folder / f"{checksums_name(kind)}.npy").exists():
                files[checksums.name] = checksums
            paths = [self.path(kind, number) for number in range(len(imported.num_tokens))]
            files |= {f"tokens/{path.name}": path for path in paths if path.exists()}
        local_cache.upload(files, self.url, _HEADER_NAME)

    def _import(self, log: Callable[[str], None], density: tuple[float, float]) -> None:
        if self.dtype == "uint16" and (self.folder / "uint32").exists():
            dataclasses.replace(self, dtype="uint32")._import(log, density)  # resumes
            return
        began = time.monotonic()
        total = sum(file.size for file in self.files) / 1e6
        width = np.dtype(self.dtype).itemsize + 4 * self.has_labels
        about = total * (density[0] * width + density[1] * 16)  # a size and an offset of 8 bytes
        places = " and ".join(filter(None, (str(self.folder.parent), self.url)))
        log(
            f"Importing {pluralize(len(self.files), 'file')} ({total:,.1f} MB) of token records "
            f"once, into {places}: about {about:,.1f} MB, {width} bytes a token."
        )
        numbers = range(len(self.files))
        sizes = [file.size for file in self.files]
        try:
            ledger = self.folder / self.dtype
            entries = run_jobs(
                "Importing",
                _import_file,
                self,
                numbers,
                sizes=sizes,
                max_processes=0,
                log=log,
                ledger=ledger,
            )
        except _LargeId:  # where there is one, it is met early
            dataclasses.replace(self, dtype="uint32")._import(log, density)
            return
        num_records, num_tokens = self._finish(entries)
        seconds = time.monotonic() - began
        log(f"Imported {num_records:,} records of {num_tokens:,} tokens in {seconds:,.1f} s.")

    def _density(self) -> tuple[float, float]:
        """Estimates tokens and records a byte from the first file's beginning."""
        file = self.files[0]
        ids = 0
        records = 0
        size = min(2**22, file.size)
        with tempfile.TemporaryDirectory() as folder, contextlib.suppress(OSError, UserError):
            sample = Path(folder, file.path.rsplit("/", 1)[-1])
            with file_access.open_stream(file.path) as stream:
                sample.write_bytes(stream.read(size))
            for record in self.read(str(sample)):  # an error at the end, where it is cut
                if isinstance(record, TokenDocument):
                    ids = ids + record.ids.size
                    records = records + 1
        ids += records * (self.eos_id >= 0)
        # Formats without a readable beginning are compressed to about two bytes a token.
        return (ids / size, records / size) if records else (0.5, 0.0)

    def _finish(self, entries: list[dict[str, Any]]) -> tuple[int, int]:
        """Merges the per-file results; returns the numbers of records and tokens."""
        bad = [message for entry in entries for message in entry["bad"]]
        self.check_bad(bad)
        firsts = [0]
        num_tokens = 0

        def offsets() -> Iterator[dict[str, np.ndarray]]:
            nonlocal num_tokens
            yield {"document_offsets": np.zeros(1, np.int64)}
            for number in range(len(entries)):
                sizes = np.load(self.path("sizes", number), mmap_mode="r")
                for first in range(0, sizes.size, _BLOCK):
                    ends = num_tokens + np.cumsum(sizes[first : first + _BLOCK])
                    yield {"document_offsets": ends}
                    num_tokens = int(ends[-1])
                firsts.append(firsts[-1] + sizes.size)

        write_arrays(self.folder, offsets())
        for name in map(checksums_name, self.kinds):
            paths = [self.path(name, number) for number in range(len(entries))]
            write_arrays(self.folder, ({name: np.load(path)} for path in paths))
        origins = [[n, Path(file.path).name] for n, file in zip(firsts, self.files, strict=False)]
        atomic_write_text(self.folder / SOURCE_FILES_NAME, json.dumps(origins))
        header = {
            "dtype": self.dtype,
            "num_tokens": [entry["num_tokens"] for entry in entries],
            "has_labels": self.has_labels,
            "max_token_id": max((entry["max_token_id"] for entry in entries), default=-1),
            "skipped": bad,
            "files": [file.path for file in self.files],
        }
        atomic_write_text(self.folder / _HEADER_NAME, json.dumps(header))
        return firsts[-1], num_tokens

    def check_bad(self, bad: list[str]) -> None:
        limit = self.max_bad_records
        if self.skip and bad and len(bad) >= limit:
            raise UserError(
                f"{len(bad)} records could not be read, and bad_records.maximum={limit}. The last "
                f"one: {bad[-1]}. Fix the files, or raise the limit."
            )


def _import_file(job: RecordImport, number: int) -> dict[str, Any]:
    entry: dict[str, Any] = {}
    write_arrays(job.folder, _write_file(job, number, entry))
    for kind in job.kinds:
        name = job.path(checksums_name(kind), number).stem
        write_arrays(job.folder, [{name: file_checksums(job.path(kind, number))}])
    return entry


def _write_file(
    job: RecordImport, number: int, entry: dict[str, Any]
) -> Iterator[dict[str, np.ndarray]]:
    """Writes ids and labels; yields record sizes, then fills `entry`."""
    dtypes = np.dtype(job.dtype), np.dtype(np.int32)
    largest = np.iinfo(dtypes[0]).max
    name = job.path("sizes", number).stem
    sizes: list[int] = []
    bad: list[str] = []

    def note(problem: BadRecordError, rest: str = "") -> None:
        if not job.skip:
            raise problem
        bad.append(f"Skipped a record: {problem}{rest}")
        job.check_bad(bad)

    with contextlib.ExitStack() as stack:
        ids, *labels = (
            stack.enter_context(TokenWriter(job.path(kind, number), dtype))
            for kind, dtype in zip(job.kinds, dtypes, strict=False)
        )
        try:
            for record in job.read(job.files[number].path):
                if isinstance(record, BadRecordError):
                    note(record)
                    continue
                if job.has_labels != (record.labels is not None):
                    raise UserError(
                        f"{job.files[number].path} and {job.files[0].path} are read together, and "
                        "only one has labels. Give a pattern that matches files of one kind."
                    )
                before = ids.count
                ids.write(record.ids)
                if record.labels is not None:
                    labels[0].write(record.labels)
                elif job.eos_id >= 0:
                    ids.write(np.array([job.eos_id]))
                if ids.largest > largest:
                    raise _LargeId
                sizes.append(ids.count - before)
                if len(sizes) == _BLOCK:
                    yield {name: np.array(sizes)}
                    sizes.clear()
        except BadRecordError as problem:
            _raise_if_unreadable(problem)
            note(problem, "; the rest of the file is skipped")
    entry.update(num_tokens=ids.count, max_token_id=ids.largest, bad=bad)
    yield {name: np.array(sizes, np.int64)}


def _raise_if_unreadable(problem: BadRecordError) -> None:
    """Raises storage errors instead of skipping them as damage."""
    cause = problem.__cause__
    if isinstance(cause, Exception):
        if is_transient(cause, file_access.is_url(problem.path)):
            raise cause  # keeps its type across processes
        if isinstance(cause, OSError) and cause.errno is not None:
            raise FileReadError(str(problem)) from problem


def _name(kind: str, number: int) -> str:
    suffix = "bin" if kind in ("tokens", "labels") else "npy"
    return f"{kind}-{number:05d}.{suffix}"


def _ask(url: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Returns the function's result; UserError if a bucket fails for good."""
    try:
        return function(*arguments)
    except Exception as error:  # fsspec backends raise their own errors
        if file_access.is_mistake(error) or is_transient(error, remote=True):
            raise
        raise local_cache.cache_write_error(url, error) from None


def _load(folder: Path, place: str) -> ImportedRecords:
    header = json.loads((folder / _HEADER_NAME).read_text(encoding="utf-8"))
    header.setdefault("max_token_id", header.pop("largest_id", None))  # its earlier name
    return ImportedRecords(folder, place, **header)
