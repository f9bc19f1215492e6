"""Splits streams and archives of JSON rows and plain text into documents.

A JSON row is an object with the text in one field, or the text itself. The text may be a list of
paragraphs. Plain text is split at the end of the line at each multiple of LONGEST_TEXT bytes;
splits depend only on the text around them, so reading can start at any multiple.

Archives may be nested. Their members are streamed: nothing is written to disk, and member names
never become paths.
"""

import codecs
import io
import itertools
import json
import os
from collections import Counter
from collections.abc import Iterator
from typing import Any, BinaryIO

from MaxText.errors import UserError
from MaxText.input_pipeline.document_sources.byte_streams import (
    decode,
    decompressed,
    read_errors_as_user_error,
    scan_members,
)
from MaxText.input_pipeline.document_sources.document_formats import (
    JSON_LAYOUTS,
    NOT_TEXT,
    RECORD_LAYOUTS,
    TABLE_LAYOUTS,
    FileFormat,
    Layout,
    format_of,
    known_format,
)
from MaxText.input_pipeline.tokenization.interface import without_surrogates

PARAGRAPH_END = "\n\n"
# Limits reader memory and document length: about 250 thousand tokens, far beyond a window.
LONGEST_TEXT = 2**20

# Search for a line end within 1/16 of LONGEST_TEXT past the multiple, else split the line there.
_SEARCHED_SHARE = 16


class Skipped(Counter[str]):
    """Skipped documents by reason, and errors of malformed ones."""

    def __init__(self, limit: int = 0):
        super().__init__()
        self.limit = limit
        self.bad: list[str] = []

    def count_bad(self, what: str, error: UserError) -> None:
        """Counts a malformed row or unreadable file; raises at the limit."""
        if not self.limit:
            raise error
        if len(self.bad) >= self.limit:
            raise too_many_error(self.limit, self.bad[0]) from error
        self[what] += 1
        self.bad.append(str(error))


def too_many_error(limit: int, first: str) -> UserError:
    return UserError(
        f"more than bad_records.maximum={limit} rows or files cannot be read. The first "
        f"one: {first}"
    )


def json_texts(
    file: io.BufferedReader,
    where: str,
    text_field: str,
    may_be_list: bool,
    start: int,
    stop: int | None,
    skipped: Skipped,
) -> Iterator[tuple[int, str]]:
    """Yields (line number or index, text or "" for null) of a JSON file.

    Only lines that start in bytes [start, stop) are read, and numbered from the first of these.
    Blank lines count but are not yielded. If `may_be_list`, the file may be one list, which is read
    entirely by the range it starts in. The file must be seekable if `start` > 0. `skipped` collects
    malformed lines. Raises UserError beyond its limit.
    """
    if may_be_list and file.peek(1).removeprefix(codecs.BOM_UTF8).lstrip()[:1] == b"[":
        rows = () if start else _parse(file.read(), where, text_field)
        for number, row in enumerate(rows):
            row_where = f"{where}, value {number + 1} of its list,"
            yield number, _row_text(row, row_where, text_field)
        return
    at = start
    if start:
        # A line that starts before the range belongs to the previous one.
        file.seek(start - 1)
        at += len(file.readline()) - 1
        where += f" from byte {start}"
    for number, line in enumerate(file):
        if stop is not None and at >= stop:
            return
        at += len(line)
        if not line.removeprefix(codecs.BOM_UTF8).strip():
            continue
        row_where = f"{where}:{number + 1}"
        try:
            yield number, _row_text(_parse(line, row_where, text_field), row_where, text_field)
        except UserError as error:
            skipped.count_bad("malformed", error)


def _parse(content: bytes, where: str, text_field: str) -> Any:
    text = decode(content.removeprefix(codecs.BOM_UTF8), where)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"{where} is not JSON ({error}). Each line must be one object, for example "
            f'{{"{text_field}": "..."}}, or the file one list of these.'
        ) from error


def _row_text(row: object, where: str, text_field: str) -> str:
    """Returns the text of a JSON value, with paragraphs joined by blank lines."""
    if isinstance(row, str):
        return without_surrogates(row)
    if not isinstance(row, dict):
        raise UserError(
            f"{where} is a JSON {type(row).__name__}, neither an object nor a string. Each row "
            f'must be one object, for example {{"{text_field}": "..."}}.'
        )
    text = row.get(text_field, row)
    if isinstance(text, list) and all(isinstance(paragraph, str) for paragraph in text):
        text = PARAGRAPH_END.join(text)
    if text is None or isinstance(text, str):
        return without_surrogates(text or "")
    strings = [name for name, value in row.items() if isinstance(value, str)]
    raise missing_text_error(where, text_field, strings)


def missing_text_error(where: str, text_field: str, fields: list[str]) -> UserError:
    """Returns the error for a row without the text field; `fields` hold text."""
    return UserError(
        f"{where} has no text in field {text_field!r}; fields with text: "
        f"{', '.join(fields) or 'none'}. Set text_field to one of them, or remove the file from "
        "prepare_source. Token ids need no preparation: name them in dataset_path."
    )


def text_chunks(
    file: BinaryIO, where: str, first: int, last: int | None
) -> Iterator[tuple[int, str]]:
    """Yields (number, text) of the chunks [first, last) of a UTF-8 file.

    `file` must be seekable if `first` > 0. A byte order mark is dropped. An empty file has one
    empty chunk. Raises UserError unless it is UTF-8.
    """
    line, partial = b"", b""
    if first:
        file.seek(first * LONGEST_TEXT)
        # The rest of the line belongs to the previous chunk, except for a split character.
        line, partial = _rest_of_line(file)
    for number in itertools.count(first) if last is None else range(first, last):
        body = partial + file.read(LONGEST_TEXT - len(line) - len(partial))
        line, partial = _rest_of_line(file)
        if not body and number > 0:
            return
        text = body + line
        if number:
            yield number, decode(text, f"{where}, chunk {number} of {LONGEST_TEXT} bytes,")
        else:
            yield number, decode(text.removeprefix(codecs.BOM_UTF8), where)
        if not line and not partial:
            return


def _rest_of_line(file: BinaryIO) -> tuple[bytes, bytes]:
    """Returns the rest of the chunk, and the split character after it."""
    line = file.readline(LONGEST_TEXT // _SEARCHED_SHARE)
    if line.endswith(b"\n") or len(line) < LONGEST_TEXT // _SEARCHED_SHARE:
        return line, b""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(line)
    partial, _ = decoder.getstate()
    return line[: len(line) - len(partial)], partial


def stream_texts(
    file: BinaryIO,
    file_format: FileFormat,
    where: str,
    text_field: str,
    skipped: Skipped,
    start: int = 0,
    stop: int | None = None,
) -> Iterator[tuple[int, str]]:
    """Yields (number, text) of documents, across archive members.

    `file_format` must be streamable, and seekable for a range [start, stop) of its bytes; `where`
    names the file and enclosing members in messages. Raises UserError if it cannot be read.
    """
    layout, compression = file_format
    with read_errors_as_user_error(where):
        stream = decompressed(file, compression)
        if layout is Layout.TAR:
            yield from enumerate(_member_texts(stream, where, text_field, skipped))
        elif layout in JSON_LAYOUTS:
            is_json = layout is Layout.JSON
            yield from json_texts(stream, where, text_field, is_json, start, stop, skipped)
        elif layout is Layout.STDLIB:
            try:
                yield 0, stream.read().decode("utf-8-sig")
            except UnicodeDecodeError:
                skipped["not UTF-8"] += 1
        else:
            assert layout is Layout.TEXT, layout
            last = None if stop is None else stop // LONGEST_TEXT
            yield from text_chunks(stream, where, start // LONGEST_TEXT, last)


def _member_texts(file: BinaryIO, where: str, text_field: str, skipped: Skipped) -> Iterator[str]:
    for member, contents in scan_members(file):
        name = member.name
        if any(part.startswith(".") and part.strip(".") for part in name.split("/")):
            skipped["hidden files in archives"] += 1
            continue
        member_where = f"{where}, member {name!r},"
        file_format = format_of(name)
        # lm_dataformat ignores the names of these members.
        if where.lower().endswith(".jsonl.zst.tar") and not known_format(name):
            file_format = FileFormat(Layout.JSON_LINES, "zst")
        is_text = os.path.splitext(name)[1].lower() not in NOT_TEXT
        if not is_text or file_format.layout in TABLE_LAYOUTS | RECORD_LAYOUTS:
            raise UserError(
                f"{member_where} is not text. Unpack the archive and name the files to read."
            )
        for _, text in stream_texts(contents, file_format, member_where, text_field, skipped):
            yield text
