"""Reads documents from streams and archives, including nested ones.

Members are streamed from the archive: nothing is written to disk, and member names never become
paths.
"""

import tarfile
from collections.abc import Iterator
from typing import Any, BinaryIO, cast

from MaxText.errors import UserError
from MaxText.input_pipeline.document_sources.byte_streams import (
    decompressed,
    read_errors_as_user_error,
)
from MaxText.input_pipeline.document_sources.document_formats import (
    NOT_TEXT,
    SEEKING,
    FileFormat,
    Layout,
    format_of_member,
)
from MaxText.input_pipeline.document_sources.text_streams import (
    Skipped,
    json_texts,
    text_chunks,
)

_BUFFER_BYTES = 2**18

# Metadata members, such as long names, which tarfile reads whole whatever length they claim.
_ABOUT_THE_NEXT = {
    tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK,
    tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE,
}  # fmt: skip
_LONGEST_ABOUT = 1 << 20


class _StrictHeader(tarfile.TarInfo):
    """A member header with strict checks.

    It raises if it is damaged or claims an impossible length. tarfile would treat a damaged header
    as the end of the archive.
    """

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> tarfile.TarInfo:
        header = super().frombuf(buf, encoding, errors)
        if header.size < 0 or (header.type in _ABOUT_THE_NEXT and header.size > _LONGEST_ABOUT):
            raise tarfile.ReadError(f"a header claims {header.size:,} bytes")
        return header

    @classmethod
    def fromtarfile(  # pyright: ignore[reportIncompatibleMethodOverride]
        cls, archive: tarfile.TarFile
    ) -> tarfile.TarInfo:
        try:
            return super().fromtarfile(archive)
        except tarfile.HeaderError as error:
            # Zero blocks are the end; tarfile's exception for them is private.
            if type(error).__name__ == "EOFHeaderError":
                raise
            raise tarfile.ReadError(
                f"at byte {archive.offset}: {error}, where the next member or the end must be"
            ) from error
        except ValueError as error:
            raise tarfile.ReadError(f"at byte {archive.offset}: {error}") from error


def scan_members(file: BinaryIO, path: str) -> Iterator[tuple[tarfile.TarInfo, BinaryIO | None]]:
    """Yields the header of each member, with contents if a plain file.

    The contents are valid until the next member. Raises tarfile.TarError for damage or truncation,
    UserError for concatenated archives.
    """
    with tarfile.open(
        fileobj=file, mode="r|", tarinfo=_StrictHeader, bufsize=_BUFFER_BYTES
    ) as archive:
        while (member := archive.next()) is not None:
            # tarfile keeps every member seen, and there may be millions.
            cast(Any, archive).members.clear()
            if member.size < 0:  # an extended header may say so
                raise tarfile.ReadError(f"a header claims {member.size:,} bytes")
            contents = archive.extractfile(member) if member.isreg() else None
            yield member, cast(BinaryIO | None, contents)
        rest = cast(BinaryIO, archive.fileobj)
        while chunk := rest.read(_BUFFER_BYTES):
            if any(chunk):
                raise UserError(
                    f"{path} continues after its end, as archives joined by cat do. Unpack it (tar "
                    "-x --ignore-zeros) and name the files to read."
                )


_MAX_DEPTH = 4  # OpenWebText nests archives once; deeper nesting is not a corpus


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
            may_be_list = layout is Layout.JSON
            yield from json_texts(
                stream, where, text_field, may_be_list=may_be_list, skipped=skipped
            )
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
