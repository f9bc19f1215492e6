"""The corpus of `prepare_source`, divided into independent shards."""

import contextlib
import os
import platform
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from MaxText.errors import UserError
from MaxText.input_pipeline.document_sources import text_streams
from MaxText.input_pipeline.document_sources.byte_streams import (
    PointerFileError,
    check_no_pointer_file,
    read_errors_as_user_error,
)
from MaxText.input_pipeline.document_sources.document_formats import (
    JSON_LAYOUTS,
    RECORD_LAYOUTS,
    TABLE_LAYOUTS,
    Layout,
    known_format,
)
from MaxText.input_pipeline.document_sources.records import record_texts
from MaxText.input_pipeline.document_sources.source_files import (
    STDLIB,
    FileRange,
    SourceFile,
    printable,
    resolve_files,
    split_entries,
)
from MaxText.input_pipeline.document_sources.tables import count_rows, table_texts
from MaxText.input_pipeline.document_sources.text_streams import (
    Skipped,
    TooManyBadError,
    stream_texts,
)
from MaxText.storage.file_access import (
    FileInfo,
    file_infos,
    is_url,
    local_path,
    open_stream,
    real_paths,
)

SHARD_BYTES = 2**26

# Split a small corpus into at least this many shards for parallelism, but not below this size.
_FEWEST_SHARDS = 64
_SMALLEST_SHARD_BYTES = 2**22

_SPLITTABLE = {*TABLE_LAYOUTS, *JSON_LAYOUTS, Layout.ARRAY_RECORD, Layout.TEXT}

_SPLIT_NAMES = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev", "eval"), "validation"),
    **dict.fromkeys(("test", "testing"), "test"),
}


class Document(NamedTuple):
    """A text document, except blank ones."""

    text: str
    file: str  # name without machine-specific folders
    row: int  # number in the file from 0, counting skipped documents


@dataclass(frozen=True)
class Shard:
    """An independently read part of a corpus.

    Shards depend only on file names and sizes, never on the number of processes.
    """

    ranges: tuple[FileRange, ...]
    text_field: str
    max_bad_records: int = 0  # malformed and unreadable documents to skip
    split: str = ""  # of the source; empty if it has none

    @property
    def num_bytes(self) -> int:
        """Bytes on disk to read, for progress reports."""
        return sum(each.num_bytes for each in self.ranges)

    def documents(self, skipped: Skipped) -> Iterator[Document]:
        """Yields the documents, counting skipped ones.

        Skips up to `bad_records.maximum` documents in malformed rows and in files that cannot be
        read from the start. Raises UserError beyond that, and for files damaged midway.
        """
        skipped.limit = self.max_bad_records
        for each in self.ranges:
            name = each.name
            has_begun = False
            try:
                with read_errors_as_user_error(each.file.path):
                    for row, text in range_texts(each, self.text_field, skipped):
                        has_begun = True
                        if text and not text.isspace():
                            yield Document(text, name, row)
                        else:
                            skipped["empty"] += 1
                skipped.readable_bytes += each.num_bytes
            except TooManyBadError:
                raise
            except UserError as error:
                if has_begun:
                    raise  # an unknown part of the file would be lost
                _count_unreadable(each, error, skipped)


def _count_unreadable(part: FileRange, error: UserError, skipped: Skipped) -> None:
    """Counts the documents of a range that cannot be read, as far as their number is known."""
    layout, compression = part.file.format
    num_bytes = part.num_bytes
    num_documents = None
    try:
        check_no_pointer_file(part.file.path)
        if layout in TABLE_LAYOUTS:
            # Rows of another column than the text.
            with contextlib.suppress(OSError, UserError, ValueError):
                num_documents = count_rows(part)
    except PointerFileError as pointer:
        error = pointer
        num_bytes = pointer.num_bytes
    if layout is Layout.TEXT and not compression:
        num_documents = max(1, -(-num_bytes // text_streams.LONGEST_TEXT))
    skipped.count_unreadable(error, num_documents, num_bytes)


@dataclass(frozen=True)
class Corpus:
    """All text of `prepare_source`."""

    description: str  # without machine-specific paths
    num_files: int
    shards: tuple[Shard, ...]  # in document order
    notes: tuple[str, ...] = ()  # on files that are not read, or not as their neighbors are

    @property
    def splits(self) -> tuple[str, ...]:
        """Splits of the source, if it has any."""
        return tuple(dict.fromkeys(shard.split for shard in self.shards if shard.split))

    def identity(self) -> dict[str, Any]:
        """Returns what the text depends on: files, their times, and options."""
        ranges = [part for shard in self.shards for part in shard.ranges]
        return {
            "files": _file_infos(list(dict.fromkeys(part.file.path for part in ranges))),
            "ranges": [[part.file.path, part.start, part.stop] for part in ranges],
            "text_field": self.shards[0].text_field,
            "max_bad_records": self.shards[0].max_bad_records,
        }


def _file_infos(paths: list[str]) -> list[FileInfo]:
    """Returns `file_infos` of files, of which some may be links that lead nowhere."""
    broken = {path for path in paths if not is_url(path) and not os.path.exists(local_path(path))}
    known = file_infos([path for path in paths if path not in broken])
    return known + [FileInfo(path, 0, "") for path in sorted(broken)]


def open_corpus(
    prepare_source: str,
    text_field: str,
    shard_bytes: int = SHARD_BYTES,
    *,
    max_bad_records: int = 0,
) -> Corpus:
    """Finds the files of `prepare_source` without reading them.

    A shard has at most `shard_bytes` on disk, unless it is a file that cannot be split. Raises
    UserError without entries, or for one that matches no readable file.
    """
    entries = split_entries(prepare_source)
    notes: list[str] = []
    found = [file for entry in entries for file in _resolve(entry, entries, notes)]
    files_by_path: dict[str, SourceFile] = {}
    for file, path in zip(found, real_paths([file.path for file in found]), strict=True):
        # Of several names of a file, as in a snapshot of the hub, the first that tells its format.
        known = files_by_path.get(path)
        if known is None or (known_format(file.name) and not known_format(known.name)):
            files_by_path[path] = file
    files = [*files_by_path.values()]
    shards = split_into_shards(files, _splits(files), text_field, shard_bytes, max_bad_records)
    stdlib = f"Python {platform.python_version()} standard library"
    names = [stdlib if entry == STDLIB else entry for entry in entries]
    return Corpus(printable(", ".join(names)), len(files), shards, tuple(notes))


def _resolve(entry: str, entries: list[str], notes: list[str]) -> list[SourceFile]:
    try:
        return resolve_files(entry, notes)
    except UserError as error:
        if len(entries) == 1 or "no such file" not in str(error):
            raise
        raise UserError(
            f"{error} prepare_source was split at its commas: write [,] for a comma that belongs "
            "to a pattern or a URL."
        ) from error


def _splits(files: list[SourceFile]) -> list[str]:
    """Returns the split of each file; empty ones without several splits."""
    splits = [_split_of(file.name) for file in files]
    is_divided = all(splits) and set(splits) != {"train"}
    return splits if is_divided else [""] * len(files)


def _split_of(name: str) -> str:
    """Returns the split at the start of a name, or ""."""
    words = (re.split(r"[-_.]", part)[0] for part in name.lower().split("/"))
    return next((_SPLIT_NAMES[word] for word in words if word in _SPLIT_NAMES), "")


def split_into_shards(
    files: Sequence[SourceFile],
    splits: Sequence[str],
    text_field: str,
    shard_bytes: int = SHARD_BYTES,
    max_bad_records: int = 0,
) -> tuple[Shard, ...]:
    """Groups small files and splits large ones, by names and sizes only.

    No shard mixes `splits`, and only an unsplittable file exceeds `shard_bytes`.
    """
    assert shard_bytes > 0, shard_bytes
    total = sum(file.size for file in files)
    shard_bytes = min(shard_bytes, max(total // _FEWEST_SHARDS, _SMALLEST_SHARD_BYTES))
    shards: list[tuple[str, list[FileRange]]] = []
    size = 0
    for file, split in zip(files, splits, strict=True):
        for each in _split_file(file, shard_bytes):
            if not shards or size + each.num_bytes > shard_bytes or split != shards[-1][0]:
                shards.append((split, []))
                size = 0
            shards[-1][1].append(each)
            size += each.num_bytes
    return tuple(
        Shard(tuple(ranges), text_field, max_bad_records, split) for split, ranges in shards
    )


def _split_file(file: SourceFile, shard_bytes: int) -> list[FileRange]:
    layout, compression = file.format
    is_splittable = layout in _SPLITTABLE and not compression
    if not is_splittable or is_url(file.path) or file.size <= shard_bytes:
        return [FileRange(file)]
    count = -(-file.size // shard_bytes)
    bounds = [index * file.size // count for index in range(count)]
    if layout is Layout.TEXT:
        longest = text_streams.LONGEST_TEXT
        bounds = sorted({bound // longest * longest for bound in bounds})
    return [
        FileRange(file, start, stop)
        for start, stop in zip(bounds, [*bounds[1:], None], strict=True)
    ]


def range_texts(part: FileRange, text_field: str, skipped: Skipped) -> Iterator[tuple[int, str]]:
    """Yields (number, text) of documents of a file range, with empty ones."""
    file = part.file
    path = part.file.path
    if file.size >= 0 and not is_url(path) and os.path.getsize(local_path(path)) != file.size:
        raise UserError(
            f"{path} changed while it was read. Run again when nothing writes to the files of "
            "prepare_source."
        )
    if file.format.layout in TABLE_LAYOUTS:
        yield from table_texts(part, text_field, skipped)
    elif file.format.layout in RECORD_LAYOUTS:
        yield from record_texts(part, text_field, skipped)
    else:
        with open_stream(path) as content:
            span = part.start, part.stop
            yield from stream_texts(content, file.format, path, text_field, skipped, *span)
