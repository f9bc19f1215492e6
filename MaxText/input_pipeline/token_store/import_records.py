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
the original format. Files in a bucket can be imported into a bucket (data_cache_dir=gs://...): ids
and labels are uploaded to the subfolder `tokens`, where all hosts read them.
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
from typing import Any, NamedTuple, TypedDict, TypeVar

import numpy as np

from MaxText.errors import UserError
from MaxText.formatting import pluralize
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
from MaxText.storage import file_access
from MaxText.storage.atomic import atomic_write_text, lock
from MaxText.storage.errors import BadRecordError, FileReadError, is_transient
from MaxText.storage.file_access import FileInfo

_LAYOUT = 1  # of the files below; part of the folder's name
_BLOCK = 2**13  # records whose sizes are kept in memory
_SAMPLE_BYTES = 2**22  # of the first file, to estimate the size of the import
_HEADER_NAME = "import.json"

_Result = TypeVar("_Result")


class _LargeId(Exception):
    """An id too large for the dtype."""


class _Density(NamedTuple):
    """Estimate of what a byte of the files holds."""

    tokens: float
    records: float


class _FileEntry(TypedDict):
    """Summary of an imported file, as in the ledger."""

    num_tokens: int
    max_token_id: int
    bad: list[str]  # messages about skipped records


class ImportedRecords(NamedTuple):
    """An import on disk, perhaps with ids and labels in a bucket."""

    folder: Path
    token_folder: str  # folder or URL of ids and labels
    dtype: str
    num_tokens: list[int]  # of each file
    has_labels: bool
    max_token_id: int  # -1 without ids
    skipped: list[str]  # messages about skipped records
    files: list[str]  # sources

    def store(self, documents: Arrays, kind: str = "tokens") -> TokenStore:
        """Returns the store of "tokens" or "labels", with these document offsets."""
        paths = [
            f"{self.token_folder}/{_file_name(kind, number)}"
            for number in range(len(self.num_tokens))
        ]
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
    cache_url: str = ""  # a bucket for the import of files in buckets
    eos_id: int = -1  # appended to every record unless negative
    skip: bool = False  # skip bad records, up to `bad_records.maximum`
    max_bad_records: int = 0
    has_labels: bool = False  # as the first file
    dtype: str = "uint16"  # of the ids, widened as needed

    @functools.cached_property
    def folder(self) -> Path:
        """Folder of the import; its name depends on all that the contents depend on."""
        versions = [(file_access.absolute(file.path), file.size, file.tag) for file in self.files]
        key = json.dumps([_LAYOUT, self.identity, self.eos_id, self.skip, versions])
        return self.cache_dir / "imported" / hashlib.sha256(key.encode()).hexdigest()[:24]

    @functools.cached_property
    def url(self) -> str:
        """Folder in a bucket for the import, or ""."""
        in_bucket = self.cache_url and all(file_access.is_url(file.path) for file in self.files)
        return f"{self.cache_url.rstrip('/')}/imported/{self.folder.name}" if in_bucket else ""

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of the flat files."""
        return ("tokens", "labels") if self.has_labels else ("tokens",)

    def path(self, kind: str, number: int) -> Path:
        """Returns the path of a file of the import that belongs to one source file."""
        return self.folder / _file_name(kind, number)

    def run(self, log: Callable[[str], None]) -> ImportedRecords:
        """Returns the imported records, importing them at the first call.

        If several processes that share `cache_dir` call it, one works and the others wait.

        Raises:
          BadRecordError: A record is damaged, or the rest of a file is not found, without `skip`.
          FileReadError: A file cannot be read.
          UserError: Too many bad records, or a cache cannot be written.
        """
        imported = self._run_in_bucket(log) if self.url else self._run_locally(log)
        self.check_bad(imported.skipped)
        for message in imported.skipped:
            log(message)
        return imported

    def _run_in_bucket(self, log: Callable[[str], None]) -> ImportedRecords:
        """Returns the import in the bucket; makes and uploads it if none is there.

        Programs that do so at the same time upload the same bytes.
        """
        ask = functools.partial(_call_bucket, self.cache_url)
        if not ask(file_access.path_type, f"{self.url}/{_HEADER_NAME}"):
            ask(self._upload, self._run_locally(log))
            log(f"Uploaded it to {self.url}")
        if (self.folder / _HEADER_NAME).exists():  # this host imported it
            return self._run_locally(log)
        folder = local_cache.copy_folder(self.url, self.cache_dir)
        assert folder is not None, self.url
        return _load(folder, f"{self.url}/tokens")

    def _run_locally(self, log: Callable[[str], None]) -> ImportedRecords:
        """Returns the import in `folder`; makes it if none is there."""
        header = self.folder / _HEADER_NAME
        local_cache.mark_used(self.folder)
        if not header.exists():
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                with lock(self.folder.parent / f".{self.folder.name}.lock", log):
                    if not header.exists():
                        local_cache.delete_unused(self.cache_dir)
                        self._import(log, self._density())
            except UserError:
                raise
            except OSError as error:
                is_remote = any(file_access.is_url(file.path) for file in self.files)
                if is_transient(error, is_remote):
                    raise
                raise local_cache.cache_write_error(self.cache_dir, error) from error
        return _load(self.folder, str(self.folder))

    def _upload(self, imported: ImportedRecords) -> None:
        """Uploads the import to the bucket, its header last."""
        names = [OFFSETS_NAME, SOURCE_FILES_NAME, _HEADER_NAME]
        files = {name: self.folder / name for name in names}
        for kind in self.kinds:
            checksums = self.folder / f"{checksums_name(kind)}.npy"
            if checksums.exists():
                files[checksums.name] = checksums
            for number in range(len(imported.num_tokens)):
                path = self.path(kind, number)
                if path.exists():
                    files[f"tokens/{path.name}"] = path
        local_cache.upload(files, self.url, _HEADER_NAME)

    def _import(self, log: Callable[[str], None], density: _Density) -> None:
        """Imports the files in several processes, with larger ids if one needs them."""
        if self.dtype == "uint16" and (self.folder / "uint32").exists():
            dataclasses.replace(self, dtype="uint32")._import(log, density)  # resumes
            return
        began = time.monotonic()
        self._announce(log, density)
        try:
            entries = run_jobs(
                "Importing",
                _import_file,
                shared=self,
                jobs=range(len(self.files)),
                sizes=[file.size for file in self.files],
                max_processes=0,
                log=log,
                ledger=self.folder / self.dtype,
            )
        except _LargeId:  # where there is one, it is met early
            dataclasses.replace(self, dtype="uint32")._import(log, density)
            return
        num_records, num_tokens = self._finish(entries)
        seconds = time.monotonic() - began
        log(f"Imported {num_records:,} records of {num_tokens:,} tokens in {seconds:,.1f} s.")

    def _announce(self, log: Callable[[str], None], density: _Density) -> None:
        """Logs what is imported, where to, and about how large it gets."""
        megabytes = sum(file.size for file in self.files) / 1e6
        bytes_per_token = np.dtype(self.dtype).itemsize
        if self.has_labels:
            bytes_per_token += np.dtype(np.int32).itemsize
        bytes_per_record = 16  # a size and an offset
        imported_megabytes = megabytes * (
            density.tokens * bytes_per_token + density.records * bytes_per_record
        )
        targets = str(self.folder.parent)
        if self.url:
            targets += f" and {self.url}"
        log(
            f"Importing {pluralize(len(self.files), 'file')} ({megabytes:,.1f} MB) of token "
            f"records once, into {targets}: about {imported_megabytes:,.1f} MB, "
            f"{bytes_per_token} bytes a token."
        )

    def _density(self) -> _Density:
        """Estimates tokens and records per byte from the first file's beginning."""
        file = self.files[0]
        num_ids = 0
        num_records = 0
        sample_size = min(_SAMPLE_BYTES, file.size)
        with tempfile.TemporaryDirectory() as folder, contextlib.suppress(OSError, UserError):
            sample = Path(folder, file.path.rsplit("/", 1)[-1])
            with file_access.open_stream(file.path) as stream:
                sample.write_bytes(stream.read(sample_size))
            for record in self.read(str(sample)):  # an error at the end, where it is cut
                if isinstance(record, TokenDocument):
                    num_ids = num_ids + record.ids.size
                    num_records = num_records + 1
        if not num_records:
            # Formats without a readable beginning are compressed to about two bytes a token.
            return _Density(tokens=0.5, records=0.0)
        if self.eos_id >= 0:
            num_ids += num_records
        return _Density(tokens=num_ids / sample_size, records=num_records / sample_size)

    def _finish(self, entries: list[_FileEntry]) -> tuple[int, int]:
        """Merges the per-file results; returns the numbers of records and tokens."""
        bad = [message for entry in entries for message in entry["bad"]]
        self.check_bad(bad)
        first_records = [0]  # of each file
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
                first_records.append(first_records[-1] + sizes.size)

        write_arrays(self.folder, offsets())
        num_records = first_records.pop()
        for kind in self.kinds:
            name = checksums_name(kind)
            paths = [self.path(name, number) for number in range(len(entries))]
            write_arrays(self.folder, ({name: np.load(path)} for path in paths))
        source_files = [
            [first_record, Path(file.path).name]
            for first_record, file in zip(first_records, self.files, strict=True)
        ]
        atomic_write_text(self.folder / SOURCE_FILES_NAME, json.dumps(source_files))
        header = {
            "dtype": self.dtype,
            "num_tokens": [entry["num_tokens"] for entry in entries],
            "has_labels": self.has_labels,
            "max_token_id": max((entry["max_token_id"] for entry in entries), default=-1),
            "skipped": bad,
            "files": [file.path for file in self.files],
        }
        atomic_write_text(self.folder / _HEADER_NAME, json.dumps(header))
        return num_records, num_tokens

    def check_bad(self, messages: list[str]) -> None:
        """Raises UserError if as many bad records were skipped as are allowed at most."""
        limit = self.max_bad_records
        if self.skip and messages and len(messages) >= limit:
            raise UserError(
                f"{len(messages)} records could not be read, and bad_records.maximum={limit}. The "
                f"last one: {messages[-1]}. Fix the files, or raise the limit."
            )


def _import_file(job: RecordImport, number: int) -> _FileEntry:
    """Imports one file, in a process of its own."""
    file_import = _FileImport(job, number)
    write_arrays(job.folder, file_import.write())
    for kind in job.kinds:
        name = job.path(checksums_name(kind), number).stem
        write_arrays(job.folder, [{name: file_checksums(job.path(kind, number))}])
    return file_import.entry


class _FileImport:
    """The import of one file.

    Attributes:
      entry: Summary of the file, once it is written.
    """

    entry: _FileEntry

    def __init__(self, job: RecordImport, number: int):
        self._job = job
        self._number = number
        self._bad: list[str] = []

    def write(self) -> Iterator[dict[str, np.ndarray]]:
        """Writes ids and labels; yields blocks of record sizes, then sets `entry`."""
        job = self._job
        name = job.path("sizes", self._number).stem
        sizes: list[int] = []
        with contextlib.ExitStack() as stack:
            path = job.path("tokens", self._number)
            ids = stack.enter_context(TokenWriter(path, np.dtype(job.dtype)))
            labels = None
            if job.has_labels:
                path = job.path("labels", self._number)
                labels = stack.enter_context(TokenWriter(path, np.dtype(np.int32)))
            for record in self._records():
                sizes.append(self._write_record(record, ids, labels))
                if len(sizes) == _BLOCK:
                    yield {name: np.array(sizes)}
                    sizes.clear()
        self.entry = _FileEntry(num_tokens=ids.count, max_token_id=ids.max_token_id, bad=self._bad)
        yield {name: np.array(sizes, np.int64)}

    def _records(self) -> Iterator[TokenDocument]:
        """Yields the records that can be read; skips others, or raises the first error."""
        try:
            for record in self._job.read(self._job.files[self._number].path):
                if isinstance(record, BadRecordError):
                    self._skip(record)
                else:
                    yield record
        except BadRecordError as problem:
            _raise_if_unreadable(problem)
            self._skip(problem, "; the rest of the file is skipped")

    def _skip(self, problem: BadRecordError, consequence: str = "") -> None:
        """Notes a record that cannot be read, or raises its error."""
        if not self._job.skip:
            raise problem
        self._bad.append(f"Skipped a record: {problem}{consequence}")
        self._job.check_bad(self._bad)

    def _write_record(
        self, record: TokenDocument, ids: TokenWriter, labels: TokenWriter | None
    ) -> int:
        """Writes a record, with its end; returns its number of tokens."""
        job = self._job
        if (labels is not None) != (record.labels is not None):
            raise UserError(
                f"{job.files[self._number].path} and {job.files[0].path} are read together, and "
                "only one has labels. Give a pattern that matches files of one kind."
            )
        count_before = ids.count
        ids.write(record.ids)
        if labels is not None and record.labels is not None:
            labels.write(record.labels)
        elif job.eos_id >= 0:
            ids.write(np.array([job.eos_id]))
        if ids.max_token_id > np.iinfo(job.dtype).max:
            raise _LargeId
        return ids.count - count_before


def _raise_if_unreadable(problem: BadRecordError) -> None:
    """Raises storage errors instead of skipping them as damage."""
    cause = problem.__cause__
    if isinstance(cause, Exception):
        if is_transient(cause, file_access.is_url(problem.path)):
            raise cause  # keeps its type across processes
        if isinstance(cause, OSError) and cause.errno is not None:
            raise FileReadError(str(problem)) from problem


def _file_name(kind: str, number: int) -> str:
    """Returns the name of the file of a kind that belongs to the `number`-th source file."""
    suffix = "bin" if kind in ("tokens", "labels") else "npy"
    return f"{kind}-{number:05d}.{suffix}"


def _call_bucket(url: str, function: Callable[..., _Result], *arguments: Any) -> _Result:
    """Returns the function's result; UserError if a bucket fails for good."""
    try:
        return function(*arguments)
    except Exception as error:  # fsspec backends raise their own errors
        if file_access.is_mistake(error) or is_transient(error, remote=True):
            raise
        raise local_cache.cache_write_error(url, error) from None


def _load(folder: Path, token_folder: str) -> ImportedRecords:
    """Returns the import of a folder, with ids and labels perhaps in another one."""
    header = json.loads((folder / _HEADER_NAME).read_text(encoding="utf-8"))
    return ImportedRecords(folder, token_folder, **header)
