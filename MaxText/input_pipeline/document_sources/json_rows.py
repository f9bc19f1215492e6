"""Reads JSON values as documents, one per line or from a single list.

A row is an object with the text in one field, or the text itself. The text may be a list of
paragraphs.
"""

import codecs
import io
import json
from collections.abc import Iterator
from typing import Any

from MaxText.errors import UserError
from MaxText.input_pipeline.document_sources.compressed import decode
from MaxText.input_pipeline.document_sources.documents import Skipped
from MaxText.input_pipeline.tokenization.interface import without_surrogates

LONGEST_ROW = 2**28  # limits memory for files without line ends

_PIECE_BYTES = 2**20
PARAGRAPH_END = "\n\n"


class NoValidRow(UserError):
    """All rows of a file are malformed; describes the first."""


def json_texts(
    file: io.BufferedReader,
    place: str,
    text_field: str,
    *,
    may_be_list: bool,
    start: int = 0,
    stop: int | None = None,
    skipped: Skipped | None = None,
) -> Iterator[tuple[int, str]]:
    """Yields (line number or list index, text or "" for null) for rows of a JSON file.

    Only lines that start in bytes [start, stop) are read, and numbered from the first of these.
    Blank lines count but are not yielded. If `may_be_list`, the file may be one list, which is read
    entirely by the range it starts in. The file must be seekable if `start` > 0. `skipped` collects
    malformed lines; None raises UserError instead. Raises NoValidRow if all are malformed.
    """
    if may_be_list and file.peek(1).removeprefix(codecs.BOM_UTF8).lstrip()[:1] == b"[":
        if start == 0:
            yield from _list_texts(file, place, text_field)
        return
    at = start
    if start:
        # A line that starts before the range belongs to the previous one.
        file.seek(start - 1)
        while not (piece := file.readline(_PIECE_BYTES)).endswith(b"\n") and piece:
            at += len(piece)
        at += len(piece) - 1
    number = num_valid = 0
    first_bad = ""  # only the message: an error would keep the row alive
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
                num_valid += 1
                yield number, text
        number += 1
    if first_bad and not num_valid:
        raise NoValidRow(first_bad)


def _line_text(line: bytes, place: str, text_field: str) -> str:
    text = decode(line, place)
    try:
        row = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"{place} is not JSON ({error}). Each line of a .jsonl or .json file must be one "
            f'object, for example {{"{text_field}": "..."}}.'
        ) from error
    return _row_text(row, place, text_field)


def _list_texts(file: io.BufferedReader, place: str, text_field: str) -> Iterator[tuple[int, str]]:
    for number, row in enumerate(_list_values(file, place)):
        yield number, _row_text(row, f"{place}, value {number + 1} of its list,", text_field)


def _list_values(file: io.BufferedReader, place: str) -> Iterator[Any]:
    """Yields the values of a JSON list, parsed incrementally."""
    characters = codecs.getincrementaldecoder("utf-8-sig")()
    decoder = json.JSONDecoder()
    text, at, has_ended = "", 0, False

    def malformed(reason: str) -> UserError:
        return UserError(
            f"{place} is not JSON ({reason}). A .json file must be one object per line or one list "
            "of objects or strings."
        )

    def read_more() -> None:
        nonlocal text, at, has_ended
        left = text[at:]
        if len(left) > LONGEST_ROW:
            raise malformed(f"a value is longer than {LONGEST_ROW} characters")
        # Double the buffer, so that a long value is not rescanned quadratically.
        data = file.read(max(_PIECE_BYTES, len(left)))
        has_ended = not data
        try:
            text, at = left + characters.decode(data, final=has_ended), 0
        except UnicodeDecodeError as error:
            raise UserError(f"{place} is not UTF-8 text ({error.reason}).") from error

    def peek() -> str:
        nonlocal at
        while True:
            while at < len(text) and text[at] in " \t\r\n":
                at += 1
            if at < len(text) or has_ended:
                return text[at : at + 1]
            read_more()

    def take(*expected: str) -> str:
        nonlocal at
        found = peek()
        if found not in expected:
            raise malformed(f"there is {found or 'the end'!r} in the place of {expected[0]!r}")
        at += 1
        return found

    take("[")
    delimiter = take("]") if peek() == "]" else ","
    while delimiter == ",":
        peek()
        try:
            value, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError) as error:
            # The value may just be incomplete in the buffer.
            if has_ended or isinstance(error, RecursionError):
                raise malformed(str(error)) from error
            read_more()
            continue
        yield value
        delimiter = take("]", ",")
    if peek():
        raise malformed("there is more behind the list")


def _row_text(row: object, place: str, text_field: str) -> str:
    """Returns the text of a JSON value, with paragraphs joined by blank lines."""
    if isinstance(row, str):
        return without_surrogates(row)
    if not isinstance(row, dict):
        raise UserError(
            f"{place} is a JSON {type(row).__name__}, neither an object nor a string. Each row "
            f'must be one object, for example {{"{text_field}": "..."}}.'
        )
    text = row.get(text_field)
    if isinstance(text, list) and all(isinstance(paragraph, str) for paragraph in text):
        text = PARAGRAPH_END.join(text)
    if isinstance(text, str):
        return without_surrogates(text)
    if text is None and text_field in row:
        return ""
    strings = [name for name, value in row.items() if isinstance(value, str)]
    raise missing_text_error(place, text_field, strings)


def missing_text_error(place: str, text_field: str, fields: list[str]) -> UserError:
    """Returns the error for a row without the text field; `fields` hold text."""
    if not fields:
        return UserError(
            f"{place} has no text in field {text_field!r} or any other. Leave the file out of "
            "prepare_source, or write it again with its text in a field."
        )
    return UserError(
        f"{place} has no text in field {text_field!r}; fields with text: {', '.join(fields)}. Set "
        "text_field to one of them."
    )


def token_ids_error(place: str, path: str, found: str) -> UserError:
    """Returns the error for a file of token ids, which need no preparation."""
    return UserError(
        f"{place} holds {found}, not text: these are token ids. Train on them directly with "
        f"dataset_path={path}"
    )
