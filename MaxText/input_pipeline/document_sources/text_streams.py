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
from collections.abc import Iterator, Sequence
from typing import BinaryIO

from MaxText.errors import UserError
from MaxText.input_pipeline.document_sources.byte_streams import (
    PointerFileError,
    check_no_pointer,
    decode,
    decompressed,
    read_errors_as_user_error,
    scan_members,
    with_peek,
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
from MaxText.value_types import JsonValue

PARAGRAPH_END = "\n\n"
# Limits reader memory and document length: about 250 thousand tokens, far beyond a window.
LONGEST_TEXT = 2**20

# Search for a line end within 1/16 of LONGEST_TEXT past the multiple, else split the line there.
_SEARCHED_SHARE = 16


# Text with more zero bytes is binary data, UTF-16, or a file that a crash left without contents.
# A few bytes are too few to tell.
_MAX_ZERO_SHARE = 0.1
_FEWEST_BYTES = 1000
_CHECKED_BYTES = 8000  # at the start of a file

# Nested fields to name in a message.
_MAX_NAMED_FIELDS = 10
_MAX_FIELD_DEPTH = 4


class Skipped(Counter[str]):
    """Skipped documents by reason, and errors of malformed and unreadable ones.

    Attributes:
      limit: Malformed and unreadable documents to skip; further ones raise.
      bad: A message for each of them, or for each unreadable file.
      num_bad: Their number. A file that holds an unknown number counts as one.
      unreadable_bytes: Sizes of the files that hold an unknown number.
      readable_bytes: Size of all other files.
    """

    def __init__(self, limit: int = 0):
        super().__init__()
        self.limit = limit
        self.bad: list[str] = []
        self.num_bad = 0
        self.unreadable_bytes: list[int] = []
        self.readable_bytes = 0

    def count_malformed(self, error: UserError) -> None:
        """Counts a malformed row; raises at the limit."""
        self._count("malformed", error, 1)

    def count_unreadable(self, error: UserError, num_documents: int | None, num_bytes: int) -> None:
        """Counts the documents of an unreadable file; raises at the limit.

        `num_documents` is None if it is unknown: it is estimated from `num_bytes` at the end.
        """
        if num_documents is None:
            self.unreadable_bytes.append(num_bytes)
        self._count("unreadable", error, 1 if num_documents is None else num_documents)

    def _count(self, reason: str, error: UserError, num_documents: int) -> None:
        if not self.limit:
            raise error
        self.num_bad += num_documents
        self.bad.append(str(error))
        if self.num_bad > self.limit:
            raise too_many_error(self.limit, self.num_bad, self.bad[0]) from error
        self[reason] += num_documents


class TooManyBadError(UserError):
    """More documents cannot be read than bad_records.maximum allows."""


def too_many_error(limit: int, num_bad: int, first_message: str) -> TooManyBadError:
    """Returns the error for `num_bad` bad documents, with the message of the first one."""
    return TooManyBadError(
        f"more than bad_records.maximum={limit} documents cannot be read ({num_bad:,} or more). "
        f"The first message: {first_message}"
    )


def json_texts(
    file: io.BufferedReader,
    location: str,
    text_field: str,
    skipped: Skipped,
    *,
    may_be_list: bool,
    start: int,
    stop: int | None,
) -> Iterator[tuple[int, str]]:
    """Yields (line number or index, text or "" for null) of a JSON file.

    Blank lines count but are not yielded.

    Args:
      file: Must be seekable if `start` > 0.
      location: Names the file in messages.
      text_field: Field of the text in an object.
      skipped: Collects malformed lines.
      may_be_list: Whether the file may be one list, which is read entirely by the range it starts
        in.
      start: Only lines that start in bytes [start, stop) are read, and numbered from the first of
        these.
      stop: None for the end of the file.

    Raises:
      UserError: Malformed lines beyond the limit of `skipped`.
    """
    if may_be_list and file.peek(1).removeprefix(codecs.BOM_UTF8).lstrip()[:1] == b"[":
        rows = () if start else _parse(file.read(), location, text_field)
        for number, row in enumerate(rows):
            row_location = f"{location}, value {number + 1} of its list,"
            try:
                text = _row_text(row, row_location, text_field)
            except UserError as error:
                skipped.count_malformed(error)
                continue
            yield number, text
        return
    offset = start
    if start:
        # A line that starts before the range belongs to the previous one.
        file.seek(start - 1)
        offset += len(file.readline()) - 1
        location += f" from byte {start}"
    for number, line in enumerate(file):
        if stop is not None and offset >= stop:
            return
        offset += len(line)
        if not line.removeprefix(codecs.BOM_UTF8).strip():
            continue
        row_location = f"{location}:{number + 1}"
        try:
            text = _row_text(_parse(line, row_location, text_field), row_location, text_field)
        except UserError as error:
            skipped.count_malformed(error)
            continue
        yield number, text


def _parse(content: bytes, location: str, text_field: str) -> JsonValue:
    """Returns the JSON value of a line or file; UserError if there is none."""
    text = decode(content.removeprefix(codecs.BOM_UTF8), location)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"{location} is not JSON ({error}). Each line must be one object, for example "
            f'{{"{text_field}": "..."}}, or the file one list of these.'
        ) from error


def _row_text(row: object, location: str, text_field: str) -> str:
    """Returns the text of a JSON value, with paragraphs joined by blank lines."""
    if isinstance(row, str):
        return without_surrogates(row)
    if not isinstance(row, dict):
        raise UserError(
            f"{location} is a JSON {type(row).__name__}, neither an object nor a string. Each row "
            f'must be one object, for example {{"{text_field}": "..."}}.'
        )
    text = row.get(text_field, row)
    if isinstance(text, list) and all(isinstance(paragraph, str) for paragraph in text):
        text = PARAGRAPH_END.join(text)
    if text is None or isinstance(text, str):
        return without_surrogates(text or "")
    strings = [name for name, value in row.items() if isinstance(value, str)]
    raise missing_text_error(location, text_field, strings, _nested_fields(row))


def _nested_fields(value: object, name: str = "", depth: int = 0) -> list[str]:
    """Returns the names of strings inside of objects and lists, such as `messages[].content`."""
    if isinstance(value, str):
        return [name] if depth > 1 else []
    if depth > _MAX_FIELD_DEPTH:
        return []
    if isinstance(value, list):
        return _nested_fields(value[0], f"{name}[]", depth + 1) if value else []
    if not isinstance(value, dict):
        return []
    nested: list[str] = []
    for key, inner in value.items():
        nested += _nested_fields(inner, f"{name}.{key}" if name else key, depth + 1)
        if len(nested) >= _MAX_NAMED_FIELDS:
            break
    return nested[:_MAX_NAMED_FIELDS]


def missing_text_error(
    location: str, text_field: str, fields: list[str], nested_fields: Sequence[str] = ()
) -> UserError:
    """Returns the error for a row without the text field.

    `fields` hold text that can be read, and `nested` are the names of text inside of other fields.
    """
    problem = f"{location} has no text in field {text_field!r}; fields with text: "
    problem += ", ".join(fields) or "none"
    if nested_fields:
        problem += (
            f"; nested text, which is not read: {', '.join(nested_fields)} (write it to a field of "
            "its own)"
        )
    return UserError(
        f"{problem}. Set text_field to one of the fields with text, or remove the file from "
        "prepare_source. Token ids need no preparation: name them in dataset_path."
    )


def text_chunks(
    file: BinaryIO, location: str, first_chunk: int, stop_chunk: int | None
) -> Iterator[tuple[int, str]]:
    """Yields (number, text) of chunks of a UTF-8 file, see the module's docstring.

    A byte order mark is dropped. An empty file has one empty chunk.

    Args:
      file: Must be seekable if `first_chunk` > 0.
      location: Names the file in messages.
      first_chunk: Number of the first chunk to read.
      stop_chunk: Number after the last one; None for the end of the file.

    Raises:
      UserError: The file is not UTF-8 text.
    """
    line = b""
    partial = b""  # bytes of a character that is split between chunks
    if first_chunk:
        file.seek(first_chunk * LONGEST_TEXT)
        # The rest of the line belongs to the previous chunk, except for a split character.
        line, partial = _rest_of_line(file)
    for number in (
        itertools.count(first_chunk) if stop_chunk is None else range(first_chunk, stop_chunk)
    ):
        body = partial + file.read(LONGEST_TEXT - len(line) - len(partial))
        line, partial = _rest_of_line(file)
        if not body and number > 0:
            return
        content = body + line
        if number == 0:
            _check_is_text(content[:_CHECKED_BYTES], location)
            yield number, decode(content.removeprefix(codecs.BOM_UTF8), location)
        else:
            yield number, decode(content, f"{location}, chunk {number} of {LONGEST_TEXT} bytes,")
        if not line and not partial:
            return


def _check_is_text(head: bytes, location: str) -> None:
    """Raises UserError if the first bytes of a file have too many zeros."""
    # Zero bytes are valid UTF-8.
    if len(head) >= _FEWEST_BYTES and head.count(0) > _MAX_ZERO_SHARE * len(head):
        raise UserError(
            f"{location} is not text: {head.count(0) / len(head):.0%} of its first {len(head):,} "
            "bytes are zeros. If it is UTF-16, convert it (iconv -f UTF-16 -t UTF-8), else copy it "
            "again or remove it from prepare_source."
        )


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
    location: str,
    text_field: str,
    skipped: Skipped,
    *,
    start: int = 0,
    stop: int | None = None,
) -> Iterator[tuple[int, str]]:
    """Yields (number, text) of documents, across archive members.

    Args:
      file: Must be seekable for a range.
      file_format: One that can be streamed: text, JSON or archives of these.
      location: Names the file and enclosing members in messages.
      text_field: Field of the text in JSON objects.
      skipped: Collects malformed and unreadable documents.
      start: First byte of the range to read.
      stop: End of the range; None for the end of the file.

    Raises:
      UserError: The file cannot be read, or `skipped` is at its limit.
    """
    layout, compression = file_format
    with read_errors_as_user_error(location):
        if not start:
            file = with_peek(file)
            check_no_pointer(file.peek(), location)
        stream = decompressed(file, compression)
        if layout is Layout.TAR:
            yield from enumerate(_member_texts(stream, location, text_field, skipped))
        elif layout in JSON_LAYOUTS:
            yield from json_texts(
                stream,
                location,
                text_field,
                skipped,
                may_be_list=layout is Layout.JSON,
                start=start,
                stop=stop,
            )
        elif layout is Layout.STDLIB:
            try:
                yield 0, stream.read().decode("utf-8-sig")
            except UnicodeDecodeError:
                skipped["not UTF-8"] += 1
        else:
            assert layout is Layout.TEXT, layout
            stop_chunk = None if stop is None else stop // LONGEST_TEXT
            yield from text_chunks(stream, location, start // LONGEST_TEXT, stop_chunk)


def _member_texts(
    file: BinaryIO, location: str, text_field: str, skipped: Skipped
) -> Iterator[str]:
    """Yields the texts of an archive's members; `skipped` collects hidden and unreadable ones."""
    for member, contents in scan_members(file):
        name = member.name
        if any(part.startswith(".") and part.strip(".") for part in name.split("/")):
            skipped["hidden files in archives"] += 1
            continue
        member_location = f"{location}, member {name!r},"
        file_format = format_of(name)
        # lm_dataformat ignores the names of these members.
        if location.lower().endswith(".jsonl.zst.tar") and not known_format(name):
            file_format = FileFormat(Layout.JSON_LINES, "zst")
        is_text = os.path.splitext(name)[1].lower() not in NOT_TEXT
        if not is_text or file_format.layout in TABLE_LAYOUTS | RECORD_LAYOUTS:
            error = UserError(
                f"{member_location} is not text. Unpack the archive and name the files to read."
            )
            skipped.count_unreadable(error, None, member.size)
            continue
        has_begun = False
        try:
            for _, text in stream_texts(
                contents, file_format, member_location, text_field, skipped
            ):
                has_begun = True
                yield text
        except UserError as error:
            if has_begun or isinstance(error, TooManyBadError):
                raise
            num_bytes = error.num_bytes if isinstance(error, PointerFileError) else member.size
            num_documents = 1 if file_format.layout is Layout.TEXT else None
            skipped.count_unreadable(error, num_documents, num_bytes)
