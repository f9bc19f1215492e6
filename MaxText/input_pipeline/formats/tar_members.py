"""Files inside tar archives: where they lie, for reading them at any place."""

import tarfile
from typing import BinaryIO, NamedTuple

from MaxText.input_pipeline.data_errors import BadRecord

_BLOCK = 512

# Members that say something about the next one, its long name for example. tarfile reads such a
# member as a whole, whatever length it claims.
_ABOUT_THE_NEXT = {
    tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK,
    tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE,
}  # fmt: skip
_LONGEST_ABOUT = 1 << 20


class BoundedHeader(tarfile.TarInfo):
    """A member's header; one with a length that no program writes is an error."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> "BoundedHeader":
        """See tarfile.TarInfo.

        Raises:
          tarfile.ReadError: a negative size, or a name of megabytes.
        """
        header = super().frombuf(buf, encoding, errors)
        if header.size < 0 or (header.type in _ABOUT_THE_NEXT and header.size > _LONGEST_ABOUT):
            raise tarfile.ReadError(f"a header claims {header.size:,} bytes")
        return header  # pyright: ignore[reportReturnType]


class Member(NamedTuple):
    """One file of an archive: its name, and its contents at [offset, offset + size)."""

    name: str
    offset: int
    size: int


def members(stream: BinaryIO, path: str) -> list[Member]:
    """The plain files of an uncompressed archive, in order, found by their headers.

    Names may use GNU's or POSIX' extensions for long ones; they are never used as paths.

    Raises:
      BadRecord: no archive, damaged or cut short.
    """
    found = []
    end = 0
    try:
        # Buffered by tarfile itself; it seeks over the contents.
        with tarfile.open(
            fileobj=stream, mode="r:", tarinfo=BoundedHeader, errorlevel=2
        ) as archive:
            for member in archive:
                # An extended header may say so; tarfile would go backwards.
                if member.size < 0:
                    raise tarfile.ReadError(f"a header claims {member.size:,} bytes")
                end = member.offset_data + -(-member.size // _BLOCK) * _BLOCK
                if member.isreg() and not member.issparse():
                    found.append(Member(member.name, member.offset_data, member.size))
                if not member.isreg():
                    end = member.offset_data
    except (tarfile.TarError, EOFError, ValueError) as error:
        raise BadRecord(path, end, f"no tar archive, damaged or cut short ({error})") from error
    # tarfile takes a damaged header or a missing end for the end of the archive.
    stream.seek(end)
    block = stream.read(_BLOCK)
    if len(block) < _BLOCK or any(block):
        raise BadRecord(
            path, end, "the archive has no end mark here: it is damaged or was cut short"
        )
    return found
