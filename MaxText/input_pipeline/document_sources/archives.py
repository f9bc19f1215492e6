"""Reads documents from streams of text, rows and archives, including nested ones.

Members are streamed from the archive: nothing is written to disk, and member names never become
paths.
"""

import io
import struct
import zipfile
from collections import Counter
from collections.abc import Iterator
from typing import BinaryIO, cast

from MaxText.errors import UserError
from MaxText.input_pipeline.document_sources.compressed import (
    decode,
    decompressed,
    read_errors_as_user_error,
)
from MaxText.input_pipeline.document_sources.document_formats import (
    NOT_TEXT,
    READ_ENDINGS,
    SEEKING,
    FileFormat,
    Layout,
    format_of_member,
)
from MaxText.input_pipeline.document_sources.documents import Skipped
from MaxText.input_pipeline.document_sources.json_rows import LONGEST_ROW, json_texts
from MaxText.input_pipeline.document_sources.plain_text import text_pieces
from MaxText.input_pipeline.formats.tar_archive import scan_members

# OpenWebText nests archives once; deeper nesting is no corpus.
_DEEPEST = 4
_COUNT_BYTES = 16
_PIECE_BYTES = 2**24
_LARGEST_WHOLE = 2**28  # limit for data read as a whole: corrupt lengths and nested archives


Members = Iterator[tuple[str, BinaryIO]]


def stream_texts(
    file: BinaryIO,
    file_format: FileFormat,
    place: str,
    text_field: str,
    skipped: Skipped,
    depth: int = 0,
) -> Iterator[tuple[int, str]]:
    """Yields (number, text) of each document of a stream, numbered across archive members.

    `file_format` must be streamable, or zip; `place` names the file and enclosing members in
    messages; `depth` counts enclosing archives. Raises UserError if it cannot be read.
    """
    layout, compression = file_format
    with read_errors_as_user_error(place):
        stream = decompressed(file, compression)
        if layout in (Layout.TAR, Layout.ZIP):
            read_members = _tar_members if layout is Layout.TAR else _zip_members
            members = read_members(stream, place, skipped)
            yield from enumerate(_member_texts(members, place, text_field, skipped, depth))
        elif layout in (Layout.JSON_LINES, Layout.JSON):
            may_be_list = layout is Layout.JSON
            yield from json_texts(
                stream, place, text_field, may_be_list=may_be_list, skipped=skipped
            )
        elif layout is Layout.COUNTED:
            yield from _counted_texts(stream, place)
        elif layout is Layout.LINES:
            yield from _line_texts(stream, place)
        else:
            assert layout is Layout.TEXT, layout
            yield from text_pieces(stream, place)


def _member_texts(
    members: Members, place: str, text_field: str, skipped: Skipped, depth: int
) -> Iterator[str]:
    for name, contents in members:
        member_place = f"{place}, member {name!r},"
        file_format = format_of_member(place, name)
        ending = "." + name.rsplit(".", 1)[-1].lower()
        is_zip = file_format == FileFormat(Layout.ZIP)
        seeks = file_format.layout in SEEKING and not is_zip
        if seeks or file_format.layout is Layout.TFRECORD or ending in NOT_TEXT:
            raise UserError(
                f"{member_place} is no text: {ending} files are not read out of archives. Unpack "
                "the archive and name the files to read."
            )
        if depth == _DEEPEST:
            raise UserError(f"{member_place} lies in more than {_DEEPEST} archives. Unpack some.")
        if is_zip:
            # The list of members is at the end of a zip.
            with read_errors_as_user_error(member_place):
                inner = contents.read(_LARGEST_WHOLE + 1)
            if len(inner) > _LARGEST_WHOLE:
                raise UserError(
                    f"{member_place} is an archive of more than {_LARGEST_WHOLE:,} bytes in "
                    "another one. Unpack the outer one."
                )
            contents = io.BytesIO(inner)
        texts = stream_texts(contents, file_format, member_place, text_field, skipped, depth + 1)
        for _, text in texts:
            yield text


def _tar_members(file: BinaryIO, place: str, skipped: Counter[str]) -> Members:
    for member, contents in scan_members(file, place):
        if contents is not None and not _is_hidden(member.name, skipped):
            yield member.name, contents
        elif contents is None and not member.isdir():
            skipped["links and devices in archives"] += 1


def _zip_members(file: BinaryIO, place: str, skipped: Counter[str]) -> Members:
    with _opened_zip(file) as archive:
        for member in archive.infolist():
            if member.is_dir() or _is_hidden(member.filename, skipped):
                continue
            try:
                if member.compress_type == zipfile.ZIP_BZIP2:
                    # zipfile decompresses bzip2 without bound: 4 KB may become 5 GB.
                    raise ValueError("it is compressed by bzip2")
                contents = archive.open(member)
            except (RuntimeError, NotImplementedError, ValueError, struct.error) as error:
                raise UserError(
                    f"{place}, member {member.filename!r}, cannot be read ({error}). Pack the "
                    "archive again without password, with zip's usual compression."
                ) from error
            with contents:
                yield member.filename, cast(BinaryIO, contents)


def _opened_zip(file: BinaryIO) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(file)
    # A damaged list of members raises more than zipfile's own errors.
    except (NotImplementedError, ValueError, OverflowError, struct.error) as error:
        raise zipfile.BadZipFile(f"its list of members is damaged: {error}") from error


def _is_hidden(name: str, skipped: Counter[str]) -> bool:
    hidden = any(part.startswith(".") and part.strip(".") for part in name.split("/"))
    if hidden:
        skipped["hidden files in archives"] += 1
    return hidden


def _line_texts(file: io.BufferedReader, place: str) -> Iterator[tuple[int, str]]:
    number = 0
    while line := file.readline(LONGEST_ROW):
        line_place = f"{place}:{number + 1}"
        if len(line) >= LONGEST_ROW:
            raise UserError(
                f"{line_place} is longer than {LONGEST_ROW} bytes. Cut it, or name the file "
                ".txt.gz if it holds no lines."
            )
        yield number, decode(line.rstrip(b"\r\n"), line_place)
        number += 1


def _counted_texts(file: io.BufferedReader, place: str) -> Iterator[tuple[int, str]]:
    """Yields documents preceded by their lengths in bytes, 16 decimal digits each."""
    at = number = 0
    while count := file.read(_COUNT_BYTES):
        if len(count) < _COUNT_BYTES or not count.isdigit():
            raise UserError(
                f"{place} is damaged at byte {at}: {count!r} is no length of {_COUNT_BYTES} "
                f"digits. Copy it again; known text files are {READ_ENDINGS}."
            )
        length = int(count)
        at += _COUNT_BYTES
        text = _read_exactly(file, min(length, _LARGEST_WHOLE))
        if len(text) == _LARGEST_WHOLE < length:
            raise UserError(
                f"{place}: document {number} at byte {at} has {length:,} bytes; up to "
                f"{_LARGEST_WHOLE:,} are read. Cut it."
            )
        if len(text) < length:
            raise UserError(
                f"{place} ends at byte {at + len(text)}, inside document {number} of {length} "
                f"bytes at byte {at}. Copy it again."
            )
        yield number, decode(text, place, at)
        at += length
        number += 1


def _read_exactly(file: io.BufferedReader, length: int) -> bytes:
    """Reads `length` bytes or the rest in chunks, so that a corrupt length allocates no memory."""
    if length <= _PIECE_BYTES:
        return file.read(length)
    pieces = []
    while length and (piece := file.read(min(length, _PIECE_BYTES))):
        pieces.append(piece)
        length -= len(piece)
    return b"".join(pieces)
