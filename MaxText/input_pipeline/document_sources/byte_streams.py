"""Opens remote and compressed files, and archives; recognizes stand-ins for missing files."""

import bz2
import functools
import gzip
import io
import lzma
import os
import re
import sys
import tarfile
import tempfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO, cast

from MaxText.errors import UserError
from MaxText.storage.file_access import file_system, is_url, local_path, open_stream, reason

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

_BUFFER_BYTES = 2**18
_CHUNK_BYTES = 2**14

_DECOMPRESSORS: dict[str, Callable[[BinaryIO], Any]] = {
    "gz": gzip.open,
    # Large published dumps use the maximum, `zstd --long=31`.
    "zst": functools.partial(
        zstd.ZstdFile, options={zstd.DecompressionParameter.window_log_max: 31}
    ),
    "xz": lambda file: _Frames(file, lzma.LZMADecompressor),
    "bz2": lambda file: _Frames(file, bz2.BZ2Decompressor),
}

READ_ERRORS = (EOFError, zlib.error, lzma.LZMAError, zstd.ZstdError, tarfile.TarError, OSError)
"""What reading a damaged or missing file raises."""

# What Git LFS and git-annex leave in place of a file whose contents were not downloaded.
_POINTERS = {
    "Git LFS": (re.compile(rb"version https?://(git-lfs|hawser)\S*/spec/"), "git lfs pull"),
    "git-annex": (re.compile(rb"/annex/objects/\S+\s*$"), "git annex get"),
}
_POINTER_SIZE = re.compile(rb"(?m)^size (\d{1,18})$|-s(\d{1,18})-")
_LONGEST_POINTER = 1024  # by the specification of Git LFS


class PointerFileError(UserError):
    """A file holds a pointer to its contents; `num_bytes` is their size, 0 if unknown."""

    def __init__(self, message: str, num_bytes: int):
        super().__init__(message)
        self.num_bytes = num_bytes

    def __reduce__(self):
        return PointerFileError, (str(self), self.num_bytes)


def check_no_pointer(head: bytes, location: str) -> None:
    """Raises PointerFileError if a file's first bytes, `head`, are those of a pointer.

    `location` names the file in the message.
    """
    head = head[:_LONGEST_POINTER]
    for system, (pattern, command) in _POINTERS.items():
        if pattern.match(head):
            size = _POINTER_SIZE.search(head)
            num_bytes = int(size[1] or size[2]) if size else 0
            raise PointerFileError(
                f"{location} is a {system} pointer, not the data that it stands for ({num_bytes:,} "
                f"bytes). Download them ({command}), or leave the file out.",
                num_bytes,
            )


def check_no_pointer_file(path: str) -> None:
    """Raises PointerFileError if a small local file is a pointer; ignores missing files."""
    if not is_url(path):
        try:
            with open_stream(path) as file:
                head = file.read(_LONGEST_POINTER + 1)
        except (OSError, ValueError):
            return
        if len(head) <= _LONGEST_POINTER:
            check_no_pointer(head, path)


@contextmanager
def read_errors_as_user_error(location: str) -> Iterator[None]:
    """Converts READ_ERRORS to a UserError about `location`, the path of a file."""
    try:
        yield
    except READ_ERRORS as error:
        check_no_pointer_file(location)
        problem = reason(error)
        if isinstance(error, FileNotFoundError) and os.path.islink(local_path(location)):
            problem = f"it is a link to {os.readlink(local_path(location))}, which does not exist"
        raise UserError(
            f"{location} cannot be read ({problem}). Copy it again, or leave it out."
        ) from error


def decode(data: bytes, location: str) -> str:
    """Decodes UTF-8; UserError with `location` and the first wrong byte."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise UserError(
            f"{location} is not UTF-8 text ({error}). Convert it (iconv -t UTF-8) or remove it "
            "from prepare_source."
        ) from error


@contextmanager
def local_file(path: str) -> Iterator[str]:
    """Yields a local path of a file; a temporary copy for a URL."""
    if not is_url(path):
        yield local_path(path)
        return
    system, name = file_system(path)
    with tempfile.NamedTemporaryFile() as copy:
        system.get_file(name, copy.name)
        yield copy.name


def decompressed(file: BinaryIO, compression: str) -> io.BufferedReader:
    """Returns a reader of all frames of a stream.

    Compression is "gz", "zst", "xz", "bz2" or "". Raises EOFError on reading if the file is
    truncated.
    """
    source = with_peek(file)
    if not compression:
        return source
    if not source.peek(1):
        raise EOFError("it is empty")
    return with_peek(_DECOMPRESSORS[compression](source))


def with_peek(file: Any) -> io.BufferedReader:
    """Returns a reader that can peek, as files of fsspec cannot."""
    return file if hasattr(file, "peek") else io.BufferedReader(file, _BUFFER_BYTES)


class _Frames(io.RawIOBase):
    """Decompresses all concatenated xz or bz2 streams.

    lzma.open and bz2.open would treat damage between two streams as the end.
    """

    def __init__(self, file: BinaryIO, make_decompressor: Callable[[], Any]):
        """Reads nothing yet; `make_decompressor` is called for each stream."""
        self._file = file
        self._make_decompressor = make_decompressor
        self._decompressor: Any = None  # of the current stream; None between streams
        self._unused = b""  # read, but not part of the stream that ended

    def readable(self) -> bool:
        """Returns True, as io.RawIOBase asks for."""
        return True

    def readinto(self, buffer: Any, /) -> int:
        """Fills a buffer with decompressed bytes; returns their number, 0 at the end.

        Raises:
          EOFError: The file ends inside of a stream.
        """
        while True:
            chunk = self._unused
            self._unused = b""
            # A decompressor that filled the buffer continues without more input.
            if not chunk and (self._decompressor is None or self._decompressor.needs_input):
                chunk = self._file.read(_CHUNK_BYTES)
                if not chunk and self._decompressor is not None:
                    raise EOFError("it ends in the middle of its compressed data")
                if not chunk:
                    return 0
            if self._decompressor is None:
                # xz allows zero padding between streams; no stream starts with one.
                chunk = chunk.lstrip(b"\0")
                if not chunk:
                    continue
                self._decompressor = self._make_decompressor()
            contents = self._decompressor.decompress(chunk, len(buffer))
            if self._decompressor.eof:
                self._unused = self._decompressor.unused_data
                self._decompressor = None
            if contents:
                buffer[: len(contents)] = contents
                return len(contents)


class _StrictHeader(tarfile.TarInfo):
    """A member header with damage as an error.

    tarfile would treat a damaged header as the end of the archive.
    """

    @classmethod
    def fromtarfile(  # pyright: ignore[reportIncompatibleMethodOverride]
        cls, archive: tarfile.TarFile
    ) -> tarfile.TarInfo:
        """Reads the next header; notes in the archive whether its end was seen."""
        archive_state = vars(archive)
        try:
            header = super().fromtarfile(archive)
        except (tarfile.HeaderError, ValueError) as error:
            error_name = type(error).__name__  # the exceptions are private
            if error_name == "EOFHeaderError":  # zeros, which end every archive
                archive_state["has_end"] = True
                raise
            is_end = not archive.offset or archive_state["has_end"]
            if error_name == "EmptyHeaderError" and is_end:
                raise
            raise tarfile.ReadError(f"at byte {archive.offset}: {error}") from error
        archive_state["has_end"] = False
        return header


def scan_members(file: BinaryIO) -> Iterator[tuple[tarfile.TarInfo, BinaryIO]]:
    """Yields plain files of one or several concatenated archives.

    The contents are valid until the next member. Raises tarfile.TarError for damage or truncation.
    """
    with tarfile.open(
        fileobj=file, mode="r|", tarinfo=_StrictHeader, ignore_zeros=True, bufsize=_BUFFER_BYTES
    ) as archive:
        while (member := archive.next()) is not None:
            # tarfile keeps every member seen, and there may be millions.
            cast(Any, archive).members.clear()
            if member.isreg():
                yield member, cast(BinaryIO, archive.extractfile(member))
