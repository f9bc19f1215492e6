"""Files inside tar archives: where they lie, for reading them at any place."""

import tarfile
from typing import NamedTuple

from MaxText.input_pipeline.formats.tar_archive import BoundedHeader
from MaxText.input_pipeline.storage import ReadableFile, open_stream
from MaxText.input_pipeline.streams.bad_record import BadRecord

_BLOCK = 512


class Member(NamedTuple):
    """One file of an archive: its name, and its contents at [offset, offset + size)."""

    name: str
    offset: int
    size: int


def members(file: ReadableFile) -> list[Member]:
    """The plain files of an uncompressed archive, in order, found by their headers.

    Names may use GNU's or POSIX' extensions for long ones; they are never used as paths.

    Raises:
      BadRecord: no archive, damaged or cut short.
      UserError: the file cannot be read.
    """
    found = []
    end = 0
    try:
        # Buffered by tarfile itself; it seeks over the contents.
        with (
            open_stream(file.path) as stream,
            tarfile.open(fileobj=stream, mode="r:", tarinfo=BoundedHeader, errorlevel=2) as archive,
        ):
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
        raise BadRecord(
            file.path, end, f"no tar archive, damaged or cut short ({error})"
        ) from error
    except OSError as error:
        raise BadRecord(file.path, end, f"the file cannot be read ({error})") from error
    # tarfile takes a damaged header or a missing end for the end of the archive.
    if file.size < end + _BLOCK or any(file.read(end, _BLOCK)):
        raise BadRecord(
            file.path, end, "the archive has no end mark here: it is damaged or was cut short"
        )
    return found
