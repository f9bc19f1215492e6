"""Rows of JSON as documents: one value per line, or the values of one list.

A row is an object with the text in one field, or the text itself. The text may be a list of
strings, which are paragraphs.
"""

import codecs
import io
import json
from collections.abc import Iterator
from typing import Any

from MaxText.errors import UserError
from MaxText.input_pipeline.document_sources.compressed import decode
from MaxText.input_pipeline.document_sources.corpus import Skipped
from MaxText.input_pipeline.tokenization.interface import without_surrogates

# A file without line ends is no file of rows: stop before it fills the memory.
LONGEST_ROW = 2**28

_PIECE_BYTES = 2**20
_WHITE_SPACE = " \t\r\n"
PARAGRAPH_END = "\n\n"


class NoSoundRow(UserError):
    """All rows of a file are bad: what is wrong with the first of them."""


def row_texts(
    file: io.BufferedReader,
    place: str,
    text_field: str,
    start: int = 0,
    stop: int | None = None,
    skipped: Skipped | None = None,
) -> Iterator[tuple[int, str]]:
    """Reads the rows whose lines begin in bytes [start, stop) of a file, None for its end.

    Args:
      file: lines of JSON; must seek where `start` is above 0.
      place: the file, for messages.
      text_field: field of an object that holds the text.
      skipped: takes bad rows, which are left out; None for none.

    Yields:
      Number of the line, from 0 at the first that begins in the range, and its text, "" for null.
      Blank lines are not yielded, and count.

    Raises:
      UserError: a line is no row with text; names file and line.
      NoSoundRow: bad rows may be left out, and there are no others.
    """
    at = start
    if start:
        file.seek(start - 1)
        at += _skip_line(file) - 1
    number = num_sound = 0
    first_bad = ""  # the message: a kept error would keep the row alive
    while (stop is None or at < stop) and (line := file.readline(LONGEST_ROW)):
        at += len(line)
        row = line.removeprefix(codecs.BOM_UTF8)
        if row and not row.isspace():
            row_place = f"{place}:{number + 1}"
            if start:
                row_place = f"{place}, line {number + 1} from byte {start} on,"
            if len(line) >= LONGEST_ROW and not line.endswith(b"\n"):
                raise UserError(
                    f"{row_place} is longer than {LONGEST_ROW} bytes. Cut it, or name the file "
                    ".txt if it holds no rows."
                )
            try:
                text = _line_text(row, row_place, text_field)
            except UserError as error:
                if skipped is None or not skipped.limit:
                    raise
                first_bad = first_bad or str(error)
                skipped.leave_out("malformed", error)
            else:
                num_sound += 1
                yield number, text
        number += 1
    if first_bad and not num_sound:
        raise NoSoundRow(first_bad)


def _skip_line(file: io.BufferedReader) -> int:
    """Bytes up to the end of the line."""
    skipped = 0
    while piece := file.readline(_PIECE_BYTES):
        skipped += len(piece)
        if piece.endswith(b"\n"):
            break
    return skipped


def _line_text(line: bytes, place: str, text_field: str) -> str:
    try:
        row = json.loads(decode(line, place))
    except UserError:
        raise
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"{place} is not JSON ({error}). Each line of a .jsonl or .json file must be one "
            f'object, for example {{"{text_field}": "..."}}.'
        ) from error
    text = text_of_row(row, place, text_field)
    # Only an escape can name half of a surrogate pair: what was decoded from UTF-8 has none.
    return without_surrogates(text) if b"\\u" in line else text


def begins_list(file: io.BufferedReader) -> bool:
    """Whether the JSON ahead is a list; reads nothing."""
    ahead = file.peek(1)
    return ahead.removeprefix(codecs.BOM_UTF8).lstrip()[:1] == b"["


def list_texts(file: io.BufferedReader, place: str, text_field: str) -> Iterator[tuple[int, str]]:
    """Reads the rows of one JSON list, a piece of the file at a time.

    Args:
      file: the list and nothing else.
      place: the file, for messages.
      text_field: field of an object that holds the text.

    Yields:
      Number and text of each value, "" for null.

    Raises:
      UserError: it is no list of rows with text.
    """
    values = _ListReader(file, place)
    for number, row in enumerate(values.rows()):
        text = text_of_row(row, f"{place}, value {number + 1} of its list,", text_field)
        yield number, without_surrogates(text)


class _ListReader:
    """Decodes the values of a JSON list out of a text that grows while it is read."""

    def __init__(self, file: io.BufferedReader, place: str):
        self._file = file
        self._place = place
        self._characters = codecs.getincrementaldecoder("utf-8-sig")()
        self._text = ""
        self._at = 0
        self._ended = False

    def rows(self) -> Iterator[Any]:
        """The values."""
        self._take("[")
        if self._next() != "]":
            while True:
                yield self._value()
                if self._next() != ",":
                    break
                self._take(",")
        self._take("]")
        if self._next():
            raise self._malformed("there is more behind the list")

    def _malformed(self, reason: str) -> UserError:
        return UserError(
            f"{self._place} is not JSON ({reason}). A .json file must be one object per line or "
            "one list of objects or strings."
        )

    def _read_more(self) -> None:
        left = self._text[self._at :]
        if len(left) > LONGEST_ROW:
            raise self._malformed(f"a value is longer than {LONGEST_ROW} characters")
        # As much again as is there already: a long value is not scanned over and over.
        data = self._file.read(max(_PIECE_BYTES, len(left)))
        self._ended = not data
        try:
            more = self._characters.decode(data, final=self._ended)
        except UnicodeDecodeError as error:
            raise UserError(f"{self._place} is not UTF-8 text ({error.reason}).") from error
        self._text, self._at = left + more, 0

    def _next(self) -> str:
        """The next character that is no white space, "" at the end; stays where it is."""
        while True:
            while self._at < len(self._text):
                if self._text[self._at] not in _WHITE_SPACE:
                    return self._text[self._at]
                self._at += 1
            if self._ended:
                return ""
            self._read_more()

    def _take(self, character: str) -> None:
        found = self._next()
        if found != character:
            raise self._malformed(f"there is {found or 'the end'!r} in the place of {character!r}")
        self._at += 1

    def _value(self) -> Any:
        decoder = json.JSONDecoder()
        while True:
            self._next()
            try:
                value, self._at = decoder.raw_decode(self._text, self._at)
                return value
            except (ValueError, RecursionError) as error:
                # It may only be cut off at the end of what was read so far.
                if self._ended or isinstance(error, RecursionError):
                    raise self._malformed(str(error)) from error
            self._read_more()


def text_of_row(row: object, place: str, text_field: str) -> str:
    """The text of a JSON value; paragraphs are joined by blank lines, null is "".

    Raises:
      UserError: there is no text; names the fields that hold one.
    """
    if isinstance(row, str):
        return row
    if not isinstance(row, dict):
        raise UserError(
            f"{place} is a JSON {type(row).__name__}, neither an object nor a string. Each row "
            f'must be one object, for example {{"{text_field}": "..."}}.'
        )
    text = row.get(text_field)
    if isinstance(text, str):
        return text
    if isinstance(text, list) and all(isinstance(paragraph, str) for paragraph in text):
        return PARAGRAPH_END.join(text)
    if text is None and text_field in row:
        return ""
    strings = [name for name, value in row.items() if isinstance(value, str)]
    raise no_text(place, text_field, strings)


def no_text(place: str, text_field: str, fields: list[str]) -> UserError:
    """The error for a row without the text field, that names the `fields` that hold text."""
    if not fields:
        return UserError(
            f"{place} has no text in field {text_field!r} or any other. Leave the file out of "
            "prepare_source, or write it again with its text in a field."
        )
    return UserError(
        f"{place} has no text in field {text_field!r}; fields with text: {', '.join(fields)}. Set "
        "text_field to one of them."
    )


def token_ids(place: str, path: str, found: str) -> UserError:
    """The error for a file of token ids, which need no preparation.

    Args:
      place: the file and row.
      path: the file or folder, as dataset_path names it.
      found: what was found there instead of text.
    """
    return UserError(
        f"{place} holds {found}, not text: these are token ids. Train on them directly with "
        f"dataset_path={path}"
    )
