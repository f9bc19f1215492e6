"""The corpus of `prepare_source`, divided into independent shards.

A corpus is the list of files that `prepare_source` names. `open_corpus` divides it into shards of
some 64 MB by names and sizes alone, without reading, so that every process (and every later run)
finds the same shards. `Shard.documents` reads the texts of one.
"""

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


class TextDocument(NamedTuple):
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
        return sum(file_range.num_bytes for file_range in self.ranges)

    def documents(self, skipped: Skipped) -> Iterator[TextDocument]:
        """Yields the documents, counting skipped ones.

        Skips up to `bad_records.maximum` documents in malformed rows and in files that cannot be
        read from the start. Raises UserError beyond that, and for files damaged midway.
        """
        skipped.limit = self.max_bad_records
        for file_range in self.ranges:
            name = file_range.name
            has_begun = False
            try:
                with read_errors_as_user_error(file_range.file.path):
                    for row, text in range_texts(file_range, self.text_field, skipped):
                        has_begun = True
                        if text and not text.isspace():
                            yield TextDocument(text, name, row)
                        else:
                            skipped["empty"] += 1
                skipped.readable_bytes += file_range.num_bytes
            except TooManyBadError:
                raise
            except UserError as error:
                if has_begun:
                    raise  # an unknown part of the file would be lost
                _count_unreadable(file_range, error, skipped)


def _count_unreadable(file_range: FileRange, error: UserError, skipped: Skipped) -> None:
    """Counts the documents of a range that cannot be read, as far as their number is known."""
    layout, compression = file_range.file.format
    num_bytes = file_range.num_bytes
    num_documents = None
    try:
        check_no_pointer_file(file_range.file.path)
        if layout in TABLE_LAYOUTS:
            # Rows of another column than the text.
            with contextlib.suppress(OSError, UserError, ValueError):
                num_documents = count_rows(file_range)
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
        ranges = [file_range for shard in self.shards for file_range in shard.ranges]
        return {
            "files": _file_infos(
                list(dict.fromkeys(file_range.file.path for file_range in ranges))
            ),
            "ranges": [
                [file_range.file.path, file_range.start, file_range.stop] for file_range in ranges
            ],
            "text_field": self.shards[0].text_field,
            "max_bad_records": self.shards[0].max_bad_records,
        }


def _file_infos(paths: list[str]) -> list[FileInfo]:
    """Returns `file_infos` of files, of which some may be links that lead nowhere."""
    broken_links = {
        path for path in paths if not is_url(path) and not os.path.exists(local_path(path))
    }
    infos = file_infos([path for path in paths if path not in broken_links])
    return infos + [FileInfo(path, 0, "") for path in sorted(broken_links)]


def open_corpus(
    prepare_source: str,
    text_field: str,
    shard_bytes: int = SHARD_BYTES,
    *,
    max_bad_records: int = 0,
) -> Corpus:
    """Finds the files of `prepare_source` without reading them.

    Args:
      prepare_source: Files, folders, patterns or URLs, comma separated.
      text_field: Field or column of the text in rows.
      shard_bytes: Largest size of a shard on disk, unless it is a file that cannot be split.
      max_bad_records: How many malformed or unreadable documents to skip.

    Raises:
      UserError: There are no entries, or one matches no readable file.
    """
    entries = split_entries(prepare_source)
    notes: list[str] = []
    sources = [file for entry in entries for file in _resolve(entry, entries, notes)]
    files_by_path: dict[str, SourceFile] = {}
    for file, path in zip(sources, real_paths([file.path for file in sources]), strict=True):
        # Of several names of a file, as in a snapshot of the hub, the first that tells its format.
        chosen = files_by_path.get(path)
        if chosen is None or (known_format(file.name) and not known_format(chosen.name)):
            files_by_path[path] = file
    files = [*files_by_path.values()]
    shards = split_into_shards(files, _splits(files), text_field, shard_bytes, max_bad_records)
    stdlib = f"Python {platform.python_version()} standard library"
    names = [stdlib if entry == STDLIB else entry for entry in entries]
    return Corpus(printable(", ".join(names)), len(files), shards, tuple(notes))


def _resolve(entry: str, entries: list[str], notes: list[str]) -> list[SourceFile]:
    """Returns the files of an entry; errors about a missing file mention the commas."""
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
    first_words = (re.split(r"[-_.]", part)[0] for part in name.lower().split("/"))
    return next((_SPLIT_NAMES[word] for word in first_words if word in _SPLIT_NAMES), "")


def split_into_shards(
    files: Sequence[SourceFile],
    splits: Sequence[str],
    text_field: str,
    shard_bytes: int = SHARD_BYTES,
    max_bad_records: int = 0,
) -> tuple[Shard, ...]:
    """Groups small files and splits large ones, by names and sizes only.

    Args:
      files: In document order.
      splits: The split of each file, or empty strings. No shard mixes splits.
      text_field: As in Shard.
      shard_bytes: Only an unsplittable file exceeds it.
      max_bad_records: As in Shard.
    """
    assert shard_bytes > 0, shard_bytes
    total_bytes = sum(file.size for file in files)
    shard_bytes = min(shard_bytes, max(total_bytes // _FEWEST_SHARDS, _SMALLEST_SHARD_BYTES))
    shards: list[tuple[str, list[FileRange]]] = []
    shard_size = 0
    for file, split in zip(files, splits, strict=True):
        for file_range in _split_file(file, shard_bytes):
            is_full = shard_size + file_range.num_bytes > shard_bytes
            if not shards or is_full or split != shards[-1][0]:
                shards.append((split, []))
                shard_size = 0
            shards[-1][1].append(file_range)
            shard_size += file_range.num_bytes
    return tuple(
        Shard(tuple(ranges), text_field, max_bad_records, split) for split, ranges in shards
    )


def _split_file(file: SourceFile, shard_bytes: int) -> list[FileRange]:
    """Divides a file into equal ranges of at most `shard_bytes`, if its format allows it."""
    layout, compression = file.format
    is_splittable = layout in _SPLITTABLE and not compression
    if not is_splittable or is_url(file.path) or file.size <= shard_bytes:
        return [FileRange(file)]
    count = -(-file.size // shard_bytes)
    bounds = [index * file.size // count for index in range(count)]
    if layout is Layout.TEXT:
        chunk_bytes = text_streams.LONGEST_TEXT
        bounds = sorted({bound // chunk_bytes * chunk_bytes for bound in bounds})
    return [
        FileRange(file, start, stop)
        for start, stop in zip(bounds, [*bounds[1:], None], strict=True)
    ]


def range_texts(
    file_range: FileRange, text_field: str, skipped: Skipped
) -> Iterator[tuple[int, str]]:
    """Yields (number, text) of documents of a file range, with empty ones.

    `skipped` collects malformed and unreadable ones. Raises UserError beyond its limit, or if the
    file changed since the corpus was opened.
    """
    file = file_range.file
    path = file_range.file.path
    if file.size >= 0 and not is_url(path) and os.path.getsize(local_path(path)) != file.size:
        raise UserError(
            f"{path} changed while it was read. Run again when nothing writes to the files of "
            "prepare_source."
        )
    if file.format.layout in TABLE_LAYOUTS:
        yield from table_texts(file_range, text_field, skipped)
    elif file.format.layout in RECORD_LAYOUTS:
        yield from record_texts(file_range, text_field, skipped)
    else:
        with open_stream(path) as content:
            yield from stream_texts(
                content,
                file.format,
                path,
                text_field,
                skipped,
                start=file_range.start,
                stop=file_range.stop,
            )
