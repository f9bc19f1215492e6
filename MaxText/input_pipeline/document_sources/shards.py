"""Units of a corpus: consecutive files, or a part of one file."""

import io
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import BinaryIO, cast

from MaxText.errors import UserError
from MaxText.input_pipeline.document_sources import plain_text
from MaxText.input_pipeline.document_sources.archives import stream_texts
from MaxText.input_pipeline.document_sources.arrow_tables import arrow_texts, parquet_texts
from MaxText.input_pipeline.document_sources.compressed import open_bytes, reading
from MaxText.input_pipeline.document_sources.corpus import Document, Skipped
from MaxText.input_pipeline.document_sources.file_formats import Format
from MaxText.input_pipeline.document_sources.json_rows import (
    NoSoundRow,
    begins_list,
    list_texts,
    row_texts,
)
from MaxText.input_pipeline.document_sources.record_files import array_record_texts, tfrecord_texts
from MaxText.input_pipeline.document_sources.source_files import SourceFile
from MaxText.input_pipeline.storage import is_url

UNIT_BYTES = 2**26

# A small corpus is cut finer, so that there is work for as many processes, down to this size.
_FEWEST_UNITS = 64
_SMALLEST_UNIT_BYTES = 2**22

_TABLES = {
    Format.PARQUET: parquet_texts,
    Format.ARROW: arrow_texts,
    Format.ARRAY_RECORD: array_record_texts,
}
_CUT = {*_TABLES, Format.TEXT, Format.ROWS, Format.JSON}


@dataclass(frozen=True)
class FilePart:
    """Bytes [start, stop) of a file, None for its end: the documents that begin there.

    Rows of JSON are numbered from the first line that begins in the part, because counting those
    before it would mean to read them; `name` says so. All other numbers are those in the file.
    """

    file: SourceFile
    start: int = 0
    stop: int | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes on disk."""
        return (self.file.size if self.stop is None else self.stop) - self.start

    @property
    def name(self) -> str:
        """Name of the file, for `Document.file`."""
        counts_rows = self.file.kind.format in (Format.ROWS, Format.JSON)
        is_later = counts_rows and self.start > 0
        return f"{self.file.name} from byte {self.start}" if is_later else self.file.name

    def texts(self, text_field: str, skipped: Skipped) -> Iterator[tuple[int, str]]:
        """Number and text of each document, empty ones too; errors as Unit.documents."""
        file, kind = self.file, self.file.kind
        if kind.format in _TABLES:
            read_table = _TABLES[kind.format]
            yield from read_table(file.path, text_field, self.start, self.stop, file.size)
            return
        if kind.format is Format.TFRECORD:
            yield from tfrecord_texts(file.path, text_field, kind.compression)
            return
        with (
            reading(file.path),
            open_bytes(file.path, None if is_url(file.path) else file.size) as content,
        ):
            if file.skip_undecodable:
                try:
                    yield 0, content.read().decode("utf-8-sig")
                except UnicodeDecodeError:
                    skipped["not UTF-8"] += 1
            elif self.start == 0 and self.stop is None:
                yield from stream_texts(content, kind, file.path, text_field, skipped)
            elif kind.format is Format.TEXT:
                first = self.start // plain_text.LONGEST_TEXT
                last = None if self.stop is None else self.stop // plain_text.LONGEST_TEXT
                yield from plain_text.text_pieces(content, file.path, first, last)
            else:
                yield from self._row_texts(content, text_field, skipped)

    def _row_texts(
        self, content: BinaryIO, text_field: str, skipped: Skipped
    ) -> Iterator[tuple[int, str]]:
        lines = cast(io.BufferedReader, content)
        if self.file.kind.format is Format.JSON and begins_list(lines):
            # A list is read as a whole, by the part that it begins in.
            if self.start == 0:
                yield from list_texts(lines, self.file.path, text_field)
            return
        yield from row_texts(lines, self.file.path, text_field, self.start, self.stop, skipped)


@dataclass(frozen=True)
class TextUnit:
    """See `corpus.Unit`.

    Attributes:
      parts: read one after the other.
      text_field: field of a row or record that holds the text.
      max_bad_records: rows and files that may be bad; they are left out.
    """

    parts: tuple[FilePart, ...]
    text_field: str
    max_bad_records: int = 0

    @property
    def num_bytes(self) -> int:
        """Bytes on disk that are read, for progress."""
        return sum(part.num_bytes for part in self.parts)

    def documents(self, skipped: Counter[str]) -> Iterator[Document]:
        """See corpus.Unit."""
        counted = skipped if isinstance(skipped, Skipped) else Skipped()
        counted.limit = self.max_bad_records
        for part in self.parts:
            name, has_begun = part.name, False
            try:
                for row, text in part.texts(self.text_field, counted):
                    has_begun = True
                    if text and not text.isspace():
                        yield Document(text, name, row)
                    else:
                        counted["empty"] += 1
            except NoSoundRow:
                raise  # a wrong text_field, say
            except UserError as error:
                if has_begun or not counted.limit:
                    raise  # nobody could say how much of a file that has begun would be lost
                counted.leave_out("unreadable", error)
        if counted is not skipped:
            skipped.update(counted)


def cut_into_units(
    files: Sequence[SourceFile],
    splits: Sequence[str],
    text_field: str,
    unit_bytes: int,
    max_bad_records: int = 0,
) -> tuple[TextUnit, ...]:
    """Puts small files together and cuts large ones, by their names and sizes only.

    Args:
      files: in order.
      splits: the split of each file; no unit has files of two.
      text_field: field of a row or record that holds the text.
      unit_bytes: most bytes of a unit, except where one file cannot be cut.
    """
    assert unit_bytes > 0, unit_bytes
    total = sum(file.size for file in files)
    unit_bytes = min(unit_bytes, max(total // _FEWEST_UNITS, _SMALLEST_UNIT_BYTES))
    units: list[TextUnit] = []
    together: list[FilePart] = []
    size, last_split = 0, ""
    for file, split in zip(files, splits, strict=True):
        for part in _parts(file, unit_bytes):
            is_full = size + part.num_bytes > unit_bytes or split != last_split
            if together and is_full:
                units.append(TextUnit(tuple(together), text_field, max_bad_records))
                together, size = [], 0
            together.append(part)
            size += part.num_bytes
            last_split = split
    if together:
        units.append(TextUnit(tuple(together), text_field, max_bad_records))
    return tuple(units)


def _parts(file: SourceFile, unit_bytes: int) -> list[FilePart]:
    is_cut = file.kind.format in _CUT and not file.kind.compression and not file.skip_undecodable
    if not is_cut or is_url(file.path) or file.size <= unit_bytes:
        return [FilePart(file)]
    count = -(-file.size // unit_bytes)
    bounds = [index * file.size // count for index in range(count)]
    if file.kind.format is Format.TEXT:
        # Documents of a text lie between multiples of this.
        longest = plain_text.LONGEST_TEXT
        bounds = sorted({bound // longest * longest for bound in bounds})
    return [
        FilePart(file, start, stop) for start, stop in zip(bounds, [*bounds[1:], None], strict=True)
    ]
