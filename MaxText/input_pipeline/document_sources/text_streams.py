"""Splits streams and archives of JSON rows and plain text into documents.

A JSON row is an object with the text in one field, or the text itself. The text may be a list of
paragraphs. Plain text is split at the end of the line at each multiple of LONGEST_TEXT bytes;
splits depend only on the text around them, so reading can start at any multiple.

Archives may be nested. Their members are streamed: nothing is written to disk, and member names
never become paths.
"""

import codecs
import io
import json
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
    NOT_TEXT,
    SEEKING,
    FileFormat,
    Layout,
    format_of_member,
)
from MaxText.input_pipeline.tokenization.interface import without_surrogates

PARAGRAPH_END = "\n\n"
# Limits reader memory and document length: about 250 thousand tokens, far beyond a window.
LONGEST_TEXT = 2**20

# Search for a line end within 1/16 of LONGEST_TEXT past the multiple, else split the line there.
_SEARCHED_SHARE = 16
_LONGEST_ROW = 2**28  # limits memory: of a line, or a whole list
_CHUNK_BYTES = 2**20
_MAX_DEPTH = 4  # OpenWebText nests archives once; deeper nesting is not a corpus


class Skipped(Counter[str]):
    """Skipped documents by reason, and errors of malformed ones."""

    def __init__(self, limit: int = 0):
        super().__init__()
        self.limit = limit
        self.bad: list[str] = []

    def count_bad(self, what: str, error: UserError) -> None:
        """Counts a malformed row or unreadable file; UserError at the limit."""
        if len(self.bad) >= self.limit:
            raise too_many_error(self.limit, self.bad[0]) from error
        self[what] += 1
        self.bad.append(str(error))


def too_many_error(limit: int, first: str) -> UserError:
    return UserError(
        f"more than bad_records.maximum={limit} rows or files cannot be read. The first "
        f"one: {first}"
    )


class NoValidRow(UserError):
    """All rows of a file are malformed; describes the first."""


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
    malformed lines. Raises UserError beyond its limit, and NoValidRow if all are malformed.
    """
    if may_be_list and file.peek(1).removeprefix(codecs.BOM_UTF8).lstrip()[:1] == b"[":
        if start:
            return
        content = file.read(_LONGEST_ROW + 1)
        if len(content) > _LONGEST_ROW:
            raise UserError(
                f"{where} is a list of more than {_LONGEST_ROW:,} bytes. Write it as .jsonl, one "
                "value per line."
            )
        values = _parse(content.removeprefix(codecs.BOM_UTF8), where, text_field)
        for number, row in enumerate(values):
            row_where = f"{where}, value {number + 1} of its list,"
            yield number, _row_text(row, row_where, text_field)
        return
    at = start
    if start:
        # A line that starts before the range belongs to the previous one.
        file.seek(start - 1)
        while not (chunk := file.readline(_CHUNK_BYTES)).endswith(b"\n") and chunk:
            at += len(chunk)
        at += len(chunk) - 1
    number = num_valid = 0
    first_bad = ""  # only the message: an error would keep the row alive
    while (stop is None or at < stop) and (line := file.readline(_LONGEST_ROW)):
        at += len(line)
        row = line.removeprefix(codecs.BOM_UTF8)
        if row and not row.isspace():
            row_where = f"{where}:{number + 1}"
            if start:
                row_where = f"{where}, line {number + 1} from byte {start} on,"
            if len(line) >= _LONGEST_ROW and not line.endswith(b"\n"):
                raise UserError(
                    f"{row_where} is longer than {_LONGEST_ROW} bytes. Cut it, or name the file "
                    ".txt if it holds no rows."
                )
            try:
                text = _row_text(_parse(row, row_where, text_field), row_where, text_field)
            except UserError as error:
                if not skipped.limit:
                    raise
                first_bad = first_bad or str(error)
                skipped.count_bad("malformed", error)
            else:
                num_valid += 1
                yield number, text
        number += 1
    if first_bad and not num_valid:
        raise NoValidRow(first_bad)


def _parse(content: bytes, where: str, text_field: str) -> Any:
    text = decode(content, where)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"{where} is not JSON ({error}). Each line of a .jsonl or .json file must be one "
            f'object, for example {{"{text_field}": "..."}}; a .json file may be one list of these.'
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
        "prepare_source."
    )


def token_ids_error(where: str, path: str, found: str) -> UserError:
    """Returns the error for a file of token ids: nothing to prepare."""
    return UserError(
        f"{where} holds {found}, not text: these are token ids. Train on them directly with "
        f"dataset_path={path}"
    )


def text_chunks(
    file: BinaryIO, where: str, first: int = 0, last: int | None = None
) -> Iterator[tuple[int, str]]:
    """Yields (number, text) of the chunks [first, last) of a UTF-8 file.

    `file` must be seekable if `first` > 0. A byte order mark is dropped. An empty file has one
    empty chunk. Raises UserError unless it is UTF-8.
    """
    partial = b""
    at = first * LONGEST_TEXT
    if first:
        file.seek(at)
        # The rest of the line belongs to the previous chunk, except for a split character.
        line, partial = _rest_of_line(file)
        at += len(line)
    number = first
    while last is None or number < last:
        start = at
        body = partial + file.read((number + 1) * LONGEST_TEXT - at - len(partial))
        at += len(body)
        line, partial = _rest_of_line(file)
        at += len(line)
        if not body and number > 0:
            return
        text = body + line
        if number == 0 and text.startswith(codecs.BOM_UTF8):
            start, text = len(codecs.BOM_UTF8), text[len(codecs.BOM_UTF8) :]
        yield number, decode(text, where, start)
        if not line and not partial:
            return
        number += 1


def _rest_of_line(file: BinaryIO) -> tuple[bytes, bytes]:
    """Returns the rest of the chunk before a split."""
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
    depth: int = 0,
) -> Iterator[tuple[int, str]]:
    """Yields (number, text) of documents, across archive members.

    `file_format` must be streamable; `where` names the file and enclosing members in
    messages; `depth` counts enclosing archives. Raises UserError if it cannot be read.
    """
    layout, compression = file_format
    with read_errors_as_user_error(where):
        stream = decompressed(file, compression)
        if layout is Layout.TAR:
            yield from enumerate(_member_texts(stream, where, text_field, skipped, depth))
        elif layout in (Layout.JSON_LINES, Layout.JSON):
            is_json = layout is Layout.JSON
            yield from json_texts(stream, where, text_field, is_json, 0, None, skipped)
        else:
            assert layout is Layout.TEXT, layout
            yield from text_chunks(stream, where)


def _member_texts(
    file: BinaryIO, where: str, text_field: str, skipped: Skipped, depth: int
) -> Iterator[str]:
    for member, contents in scan_members(file, where):
        name = member.name
        if contents is None:
            if not member.isdir():
                skipped["links and devices in archives"] += 1
            continue
        if any(part.startswith(".") and part.strip(".") for part in name.split("/")):
            skipped["hidden files in archives"] += 1
            continue
        member_where = f"{where}, member {name!r},"
        file_format = format_of_member(where, name)
        ending = "." + name.rsplit(".", 1)[-1].lower()
        if file_format.layout in (*SEEKING, Layout.TFRECORD) or ending in NOT_TEXT:
            raise UserError(
                f"{member_where} is not text, and {ending} files in archives are not read. Unpack "
                "the archive and name the files to read."
            )
        if depth == _MAX_DEPTH:
            raise UserError(
                f"{member_where} is nested in more than {_MAX_DEPTH} archives. Unpack some."
            )
        texts = stream_texts(contents, file_format, member_where, text_field, skipped, depth + 1)
        for _, text in texts:
            yield text
