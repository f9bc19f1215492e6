"""Plain text as documents; long files are split at line ends.

A file is split at the end of the line at each multiple of LONGEST_TEXT bytes. Splits depend only on
the text around them, so reading can start at any multiple.
"""

import codecs
from collections.abc import Iterator
from typing import BinaryIO

from MaxText.input_pipeline.document_sources.compressed import decode

# Limits reader memory and document length: about 250 thousand tokens, far beyond a window.
LONGEST_TEXT = 2**20

# Search for a line end within 1/16 of LONGEST_TEXT past the multiple, else split the line there.
_SEARCHED_SHARE = 16


def text_pieces(
    file: BinaryIO, place: str, first: int = 0, last: int | None = None
) -> Iterator[tuple[int, str]]:
    """Yields (number, text) of the chunks [first, last) of a UTF-8 file, line ends included.

    `file` must be seekable if `first` > 0. A byte order mark is dropped. An empty file has one
    empty chunk. Raises UserError unless it is UTF-8.
    """
    begun = b""
    at = first * LONGEST_TEXT
    if first:
        file.seek(at)
        # The rest of the line belongs to the previous chunk, except for a split character.
        line, begun = _rest_of_line(file)
        at += len(line)
    number = first
    while last is None or number < last:
        start = at
        body = begun + file.read((number + 1) * LONGEST_TEXT - at - len(begun))
        at += len(body)
        line, begun = _rest_of_line(file)
        at += len(line)
        if not body and number > 0:
            return
        text = body + line
        if number == 0 and text.startswith(codecs.BOM_UTF8):
            start, text = len(codecs.BOM_UTF8), text[len(codecs.BOM_UTF8) :]
        yield number, decode(text, place, start)
        if not line and not begun:
            return
        number += 1


def _rest_of_line(file: BinaryIO) -> tuple[bytes, bytes]:
    """Returns the rest of the chunk before a split, and the partial character after it."""
    line = file.readline(LONGEST_TEXT // _SEARCHED_SHARE)
    if line.endswith(b"\n") or len(line) < LONGEST_TEXT // _SEARCHED_SHARE:
        return line, b""
    begun = _begun_character(line)
    return line[: len(line) - begun], line[len(line) - begun :]


def _begun_character(data: bytes) -> int:
    """Returns how many bytes at the end are an incomplete UTF-8 character."""
    for count in range(1, min(3, len(data)) + 1):
        byte = data[-count]
        if byte >= 0xC0:
            length = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return count if length > count else 0
        if byte < 0x80:
            return 0
    return 0
