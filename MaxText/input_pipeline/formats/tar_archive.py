"""Streaming reader of tar archives."""

import tarfile
from collections.abc import Iterator
from typing import Any, BinaryIO, cast

from MaxText.errors import UserError

_BUFFER_BYTES = 2**18

# Metadata members, such as long names, which tarfile reads whole whatever length they claim.
_ABOUT_THE_NEXT = {
    tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK,
    tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE,
}  # fmt: skip
_LONGEST_ABOUT = 1 << 20


class _StrictHeader(tarfile.TarInfo):
    """A member header that raises if it is damaged or claims an impossible length.

    tarfile would treat a damaged header as the end of the archive.
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
    """Yields each member's header, and contents if a plain file (valid until the next member).

    Raises tarfile.TarError for damage or truncation, UserError for concatenated archives.
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
