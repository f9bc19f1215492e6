"""Shards of a corpus: consecutive files, or a part of one file."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from MaxText.errors import UserError
from MaxText.input_pipeline.document_sources import plain_text
from MaxText.input_pipeline.document_sources.archives import stream_texts
from MaxText.input_pipeline.document_sources.arrow_tables import table_texts
from MaxText.input_pipeline.document_sources.compressed import (
    decompressed,
    open_bytes,
    read_errors_as_user_error,
)
from MaxText.input_pipeline.document_sources.document_formats import Layout
from MaxText.input_pipeline.document_sources.documents import Document, Skipped
from MaxText.input_pipeline.document_sources.json_rows import NoValidRow, json_texts
from MaxText.input_pipeline.document_sources.record_files import record_texts
from MaxText.input_pipeline.document_sources.source_files import SourceFile
from MaxText.storage.file_access import is_url

SHARD_BYTES = 2**26

# Split a small corpus into at least this many shards for parallelism, but not below this size.
_FEWEST_SHARDS = 64
_SMALLEST_SHARD_BYTES = 2**22

_JSON = (Layout.JSON_LINES, Layout.JSON)
_TABLES = (Layout.PARQUET, Layout.ARROW)
_RECORDS = (Layout.ARRAY_RECORD, Layout.TFRECORD)
_CUT = {*_TABLES, *_JSON, Layout.ARRAY_RECORD, Layout.TEXT}


@dataclass(frozen=True)
class FileRange:
    """Documents that start in bytes [start, stop) of a file.

    JSON rows are numbered from the first line in the range (as `name` says), because counting
    earlier ones would mean reading them. All other numbers are relative to the file.
    """

    file: SourceFile
    start: int = 0
    stop: int | None = None

    @property
    def num_bytes(self) -> int:
        return (self.file.size if self.stop is None else self.stop) - self.start

    @property
    def name(self) -> str:
        """Name of the file, for `Document.file`."""
        counts_rows = self.file.format.layout in _JSON and self.start > 0
        return f"{self.file.name} from byte {self.start}" if counts_rows else self.file.name

    def texts(self, text_field: str, skipped: Skipped) -> Iterator[tuple[int, str]]:
        """Yields (number, text) of each document, including empty ones."""
        file, start, stop = self.file, self.start, self.stop
        layout = file.format.layout
        size = None if is_url(file.path) else file.size
        if layout in _TABLES:
            yield from table_texts(file.path, text_field, start, stop, size)
            return
        if layout in _RECORDS:
            yield from record_texts(file.path, file.format, text_field, start, stop, size)
            return
        with read_errors_as_user_error(file.path), open_bytes(file.path, size) as content:
            if file.skip_undecodable:
                try:
                    yield 0, content.read().decode("utf-8-sig")
                except UnicodeDecodeError:
                    skipped["not UTF-8"] += 1
            elif start == 0 and stop is None:
                yield from stream_texts(content, file.format, file.path, text_field, skipped)
            elif layout is Layout.TEXT:
                first = start // plain_text.LONGEST_TEXT
                last = None if stop is None else stop // plain_text.LONGEST_TEXT
                yield from plain_text.text_pieces(content, file.path, first, last)
            else:
                yield from json_texts(
                    decompressed(content, ""),
                    file.path,
                    text_field,
                    may_be_list=layout is Layout.JSON,
                    start=start,
                    stop=stop,
                    skipped=skipped,
                )


@dataclass(frozen=True)
class Shard:
    """A part of a corpus that is read independently.

    Shards depend only on file names and sizes, never on the number of processes.
    """

    ranges: tuple[FileRange, ...]
    text_field: str
    max_bad_records: int = 0  # malformed rows and unreadable files to skip

    @property
    def num_bytes(self) -> int:
        """Bytes on disk to read, for progress reports."""
        return sum(each.num_bytes for each in self.ranges)

    def documents(self, skipped: Counter[str]) -> Iterator[Document]:
        """Yields the documents, counting skipped ones by reason (with errors if a Skipped).

        Skips up to `max_bad_records` malformed rows and files that cannot be read from the start.
        Raises UserError beyond that, for files without a valid row, and for files damaged midway.
        """
        counted = skipped if isinstance(skipped, Skipped) else Skipped()
        counted.limit = self.max_bad_records
        for each in self.ranges:
            name, has_begun = each.name, False
            try:
                for row, text in each.texts(self.text_field, counted):
                    has_begun = True
                    if text and not text.isspace():
                        yield Document(text, name, row)
                    else:
                        counted["empty"] += 1
            except NoValidRow:
                raise  # probably a wrong text_field
            except UserError as error:
                if has_begun or not counted.limit:
                    raise  # an unknown part of the file would be lost
                counted.leave_out("unreadable", error)
        if counted is not skipped:
            skipped.update(counted)


def cut_into_shards(
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
    shards: list[list[FileRange]] = []
    size, last_split = 0, None
    for file, split in zip(files, splits, strict=True):
        for each in _cut(file, shard_bytes):
            if size + each.num_bytes > shard_bytes or split != last_split or not shards:
                shards.append([])
                size, last_split = 0, split
            shards[-1].append(each)
            size += each.num_bytes
    return tuple(Shard(tuple(ranges), text_field, max_bad_records) for ranges in shards)


def _cut(file: SourceFile, shard_bytes: int) -> list[FileRange]:
    layout, compression = file.format
    is_cut = layout in _CUT and not compression and not file.skip_undecodable
    if not is_cut or is_url(file.path) or file.size <= shard_bytes:
        return [FileRange(file)]
    count = -(-file.size // shard_bytes)
    bounds = [index * file.size // count for index in range(count)]
    if layout is Layout.TEXT:
        longest = plain_text.LONGEST_TEXT
        bounds = sorted({bound // longest * longest for bound in bounds})
    return [
        FileRange(file, start, stop)
        for start, stop in zip(bounds, [*bounds[1:], None], strict=True)
    ]
