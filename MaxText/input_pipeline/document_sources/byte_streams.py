"""Opens local, remote and compressed files, and archives.

Errors name the file.
"""

import bz2
import functools
import gzip
import io
import lzma
import os
import shutil
import sys
import tarfile
import tempfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO, cast

from MaxText.errors import UserError
from MaxText.storage.file_access import is_url, local_path, open_stream

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

_BUFFER_BYTES = 2**18

_CHUNK_BYTES = 2**14
# Large published dumps use the maximum, `zstd --long=31`.
_ZSTD_OPTIONS: dict[int, int] = {zstd.DecompressionParameter.window_log_max: 31}
_XZ_MEMORY_BYTES = 2**30  # memory limit for xz headers; xz -9 takes 65 MB
_DECOMPRESSORS: dict[str, Callable[[], Any]] = {
    "zst": functools.partial(zstd.ZstdDecompressor, options=_ZSTD_OPTIONS),
    "xz": functools.partial(lzma.LZMADecompressor, memlimit=_XZ_MEMORY_BYTES),
    "bz2": bz2.BZ2Decompressor,
}

_COMPRESSION_ERRORS = (EOFError, zlib.error, gzip.BadGzipFile, lzma.LZMAError, zstd.ZstdError)
READ_ERRORS = (*_COMPRESSION_ERRORS, tarfile.TarError, OSError)
"""What reading a damaged or missing file raises."""


def describe_error(error: Exception) -> str:
    """Returns text for one of READ_ERRORS, to follow the file name."""
    if isinstance(error, _COMPRESSION_ERRORS):
        return f"is not a complete compressed file: {error}"
    if isinstance(error, tarfile.TarError):
        return f"is not a complete archive: {error}"
    return f"cannot be read: {getattr(error, 'strerror', None) or error}"


@contextmanager
def read_errors_as_user_error(where: str) -> Iterator[None]:
    """Converts READ_ERRORS to a UserError about `where`."""
    try:
        yield
    except UserError:
        raise
    except READ_ERRORS as error:
        is_damaged = getattr(error, "errno", None) is None
        remedy = "Copy it again" if is_damaged else "Fix that"
        raise UserError(
            f"{where} {describe_error(error)}. {remedy}, or remove it from prepare_source."
        ) from error


def decode(data: bytes, where: str, offset: int | None = None) -> str:
    """Decodes UTF-8; UserError with `where` and the first wrong byte."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        byte = f"byte 0x{error.object[error.start]:02x}"
        if offset is not None:
            byte += f" at offset {offset + error.start}"
        raise UserError(
            f"{where} is not UTF-8 text ({byte}: {error.reason}). Convert it (iconv -t UTF-8) or "
            "remove it from prepare_source."
        ) from error


def open_bytes(path: str, size: int | None = None) -> BinaryIO:
    """Opens a seekable file or URL; UserError if the size is not `size`."""
    if is_url(path):
        return open_stream(path)
    file = open(local_path(path), "rb", buffering=_BUFFER_BYTES)  # noqa: SIM115 - the caller closes
    found = os.fstat(file.fileno()).st_size
    if size is not None and found != size:
        file.close()
        raise UserError(
            f"{path} has {found} bytes and had {size} when it was listed: it changed while it was "
            "read. Run again when nothing writes to the files of prepare_source."
        )
    return file


@contextmanager
def local_file(path: str) -> Iterator[str]:
    """Yields a local path of a file; a temporary copy for a URL."""
    if not is_url(path):
        yield local_path(path)
        return
    with tempfile.NamedTemporaryFile(suffix=os.path.basename(path)) as copy:
        with open_stream(path) as remote:
            shutil.copyfileobj(remote, copy, _BUFFER_BYTES)
        copy.flush()
        yield copy.name


def decompressed(file: BinaryIO, compression: str) -> io.BufferedReader:
    """Returns a reader of all frames of a stream; `file` stays open.

    Compression is "gz", "zst", "xz", "bz2" or "". Raises EOFError for empty compressed data, and on
    reading if the file is truncated.
    """
    if not hasattr(file, "peek"):
        file = io.BufferedReader(cast(io.RawIOBase, file), _BUFFER_BYTES)
    source = cast(io.BufferedReader, file)
    if not compression:
        return source
    if not source.peek(1):
        raise EOFError("it is empty")
    if compression == "gz":
        contents = gzip.GzipFile(fileobj=source, mode="rb")
    else:
        contents = _Frames(source, _DECOMPRESSORS[compression])
    return io.BufferedReader(cast(io.RawIOBase, contents), _BUFFER_BYTES)


class _Frames(io.RawIOBase):
    """Decompresses all concatenated zstd frames, or xz or bz2 streams.

    lzma.open and bz2.open would treat damage between two streams as the end.
    """

    def __init__(self, file: BinaryIO, begin: Callable[[], Any]):
        self._file = file
        self._begin = begin
        self._frame: Any = None
        self._unused = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        while True:
            chunk, self._unused = self._unused, b""
            # A decompressor that filled the buffer continues without more input.
            if not chunk and (self._frame is None or self._frame.needs_input):
                chunk = self._file.read(_CHUNK_BYTES)
                if not chunk and self._frame is not None:
                    raise EOFError("it ends in the middle of its compressed data")
                if not chunk:
                    return 0
            if self._frame is None:
                # xz allows zero padding between streams; no frame of any kind starts with one.
                chunk = chunk.lstrip(b"\0")
                if not chunk:
                    continue
                self._frame = self._begin()
            contents = self._frame.decompress(chunk, len(buffer))
            if self._frame.eof:
                self._unused = self._frame.unused_data
                self._frame = None
            if contents:
                buffer[: len(contents)] = contents
                return len(contents)


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
