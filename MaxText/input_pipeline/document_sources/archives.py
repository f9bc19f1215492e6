"""Documents of streams: text, rows and archives, and archives inside archives.

Members are read as a file of their name would be, straight out of the archive: nothing is written
to disk and no name of a member becomes a path.
"""

import io
import struct
import tarfile
import zipfile
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, BinaryIO, cast

from MaxText.errors import UserError
from MaxText.input_pipeline.document_sources.compressed import (
    buffered,
    decode,
    decompressed,
    reading,
)
from MaxText.input_pipeline.document_sources.corpus import Skipped
from MaxText.input_pipeline.document_sources.file_formats import (
    NOT_TEXT,
    READ_ENDINGS,
    SEEKING,
    Format,
    Kind,
    kind_of_member,
)
from MaxText.input_pipeline.document_sources.json_rows import (
    LONGEST_ROW,
    begins_list,
    list_texts,
    row_texts,
)
from MaxText.input_pipeline.document_sources.plain_text import text_pieces
from MaxText.input_pipeline.formats.tar_members import BoundedHeader

# OpenWebText has archives in an archive; deeper ones are no corpus.
_DEEPEST = 4
_COUNT_BYTES = 16
_BUFFER_BYTES = 2**18
_PIECE_BYTES = 2**24
# Of what is read as a whole and may be compressed: a length of damage, or an archive in an archive.
_LARGEST_WHOLE = 2**28

Members = Iterator[tuple[str, BinaryIO]]


def stream_texts(
    file: BinaryIO, kind: Kind, place: str, text_field: str, skipped: Skipped, depth: int = 0
) -> Iterator[tuple[int, str]]:
    """Reads the documents of a whole stream.

    Args:
      file: its bytes, compressed as `kind` says.
      kind: of the stream; any format that is read from front to back, or zip.
      place: the file and the members of archives that led here, for messages.
      text_field: field of a row that holds the text.
      skipped: counts members of archives that are left out, by reason.
      depth: archives around this stream.

    Yields:
      Number and text of each document; in an archive numbers run through all its members.

    Raises:
      UserError: it cannot be read; names the place.
    """
    with reading(place), ExitStack() as stack:
        if kind.compression:
            stream = stack.enter_context(decompressed(file, kind.compression))
        else:
            stream = buffered(file)
        if kind.format in (Format.TAR, Format.ZIP):
            members = tar_members if kind.format is Format.TAR else zip_members
            opened = members(cast(BinaryIO, stream), place, skipped)
            yield from enumerate(_member_texts(opened, place, text_field, skipped, depth))
        elif kind.format is Format.ROWS:
            yield from row_texts(stream, place, text_field, skipped=skipped)
        elif kind.format is Format.JSON:
            if begins_list(stream):
                yield from list_texts(stream, place, text_field)
            else:
                yield from row_texts(stream, place, text_field, skipped=skipped)
        elif kind.format is Format.COUNTED:
            yield from _counted_texts(stream, place)
        elif kind.format is Format.LINES:
            for number, line in enumerate(iter(lambda: stream.readline(LONGEST_ROW), b"")):
                if len(line) >= LONGEST_ROW:
                    raise UserError(
                        f"{place}:{number + 1} is longer than {LONGEST_ROW} bytes. Cut it, or name "
                        "the file .txt.gz if it holds no lines."
                    )
                yield number, decode(line.rstrip(b"\r\n"), f"{place}:{number + 1}")
        else:
            assert kind.format is Format.TEXT, kind
            yield from text_pieces(cast(BinaryIO, stream), place)


def _member_texts(
    members: Members, place: str, text_field: str, skipped: Skipped, depth: int
) -> Iterator[str]:
    for name, file in members:
        member_place = f"{place}, member {name!r},"
        kind = kind_of_member(place, name)
        ending = "." + name.rsplit(".", 1)[-1].lower()
        seeking = kind.format in SEEKING and kind != Kind(Format.ZIP)
        if seeking or kind.format is Format.TFRECORD or ending in NOT_TEXT:
            raise UserError(
                f"{member_place} is no text: {ending} files are not read out of archives. Unpack "
                "the archive and name the files to read."
            )
        if depth == _DEEPEST:
            raise UserError(f"{member_place} lies in more than {_DEEPEST} archives. Unpack some.")
        if kind.format is Format.ZIP:
            # Its list of members is at its end.
            with reading(member_place):
                inner = file.read(_LARGEST_WHOLE + 1)
            if len(inner) > _LARGEST_WHOLE:
                raise UserError(
                    f"{member_place} is an archive of more than {_LARGEST_WHOLE:,} bytes in "
                    "another one. Unpack the outer one."
                )
            file = io.BytesIO(inner)
        for _, text in stream_texts(file, kind, member_place, text_field, skipped, depth + 1):
            yield text


class _StrictHeader(BoundedHeader):
    """A member's header; one that is damaged is an error, where tarfile takes it for the end."""

    @classmethod
    def fromtarfile(cls, tarfile: tarfile.TarFile) -> "_StrictHeader":
        return _read_header(cls, tarfile)


def _read_header(header: type[_StrictHeader], archive: tarfile.TarFile) -> _StrictHeader:
    try:
        return super(_StrictHeader, header).fromtarfile(archive)  # pyright: ignore[reportReturnType]
    except tarfile.HeaderError as error:
        # Blocks of zeros are the end; tarfile has no public name for this one.
        if type(error).__name__ == "EOFHeaderError":
            raise
        raise tarfile.ReadError(
            f"at byte {archive.offset}: {error}, where the next member or the end must be"
        ) from error
    except ValueError as error:
        raise tarfile.ReadError(f"at byte {archive.offset}: {error}") from error


def tar_members(file: BinaryIO, place: str, skipped: Counter[str]) -> Members:
    """Reads a tar archive once from front to back; a member is gone when the next is asked for.

    Args:
      file: the archive, decompressed.
      place: the archive, for messages.
      skipped: counts hidden files, also those in hidden folders, and links.

    Yields:
      Name and contents of each file.

    Raises:
      UserError: it is damaged or has no end.
    """
    with (
        reading(place),
        tarfile.open(
            fileobj=file, mode="r|", tarinfo=_StrictHeader, bufsize=_BUFFER_BYTES
        ) as archive,
    ):
        while (member := archive.next()) is not None:
            # tarfile remembers each member it has seen, and there may be millions.
            cast(Any, archive).members.clear()
            if member.size < 0:
                raise tarfile.ReadError(f"a header claims {member.size:,} bytes")
            if member.isreg() and not _left_out(member.name, skipped):
                contents = archive.extractfile(member)
                assert contents is not None
                yield member.name, cast(BinaryIO, contents)
            elif not member.isreg() and not member.isdir():
                skipped["links and devices in archives"] += 1
        _check_end(archive, place)


def _check_end(archive: tarfile.TarFile, place: str) -> None:
    """Makes sure that only zeros follow the end mark: another archive would be lost there."""
    rest = cast(BinaryIO, archive.fileobj)
    while piece := rest.read(_BUFFER_BYTES):
        if any(piece):
            raise UserError(
                f"{place} goes on behind its end, as archives do that were put together with cat. "
                "Unpack it (tar -x --ignore-zeros) and name the files to read."
            )


def zip_members(file: BinaryIO, place: str, skipped: Counter[str]) -> Members:
    """Reads a zip archive in the order of its list of members.

    Args:
      file: the archive; must seek.
      place: the archive, for messages.
      skipped: counts hidden files.

    Yields:
      Name and contents of each file.

    Raises:
      UserError: it is damaged, encrypted, or compressed in a way that Python does not read.
    """
    with reading(place), _opened_zip(file) as archive:
        for member in archive.infolist():
            if member.is_dir() or _left_out(member.filename, skipped):
                continue
            try:
                if member.compress_type == zipfile.ZIP_BZIP2:
                    # Decompressed without bound: 4 KB may become 5 GB.
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
    # Of a damaged list of members zipfile tells more kinds of errors than its own.
    except (NotImplementedError, ValueError, OverflowError, struct.error) as error:
        raise zipfile.BadZipFile(f"its list of members is damaged: {error}") from error


def _left_out(name: str, skipped: Counter[str]) -> bool:
    hidden = any(part.startswith(".") and part.strip(".") for part in name.split("/"))
    if hidden:
        skipped["hidden files in archives"] += 1
    return hidden


def _counted_texts(file: io.BufferedReader, place: str) -> Iterator[tuple[int, str]]:
    """Documents behind their lengths in bytes, 16 decimal digits each."""
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
    """`length` bytes or what is left; a length that is damage is not believed at once."""
    if length <= _PIECE_BYTES:
        return file.read(length)
    pieces = []
    while length and (piece := file.read(min(length, _PIECE_BYTES))):
        pieces.append(piece)
        length -= len(piece)
    return b"".join(pieces)
