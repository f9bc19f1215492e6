"""Bytes of local and remote files, decompressed, and what can go wrong with them in words."""

import bz2
import functools
import gzip
import io
import lzma
import os
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO, cast

import zstandard

from MaxText.errors import UserError
from MaxText.input_pipeline.storage import is_url, open_stream

_BUFFER_BYTES = 2**18

# Decompressed at a time. What comes back of xz and bz2 has a bound of its own. Of zstd it is all
# that a piece stands for, which is 32,768 times as much where a file is nothing but repetition.
_PIECE_BYTES = 2**14
_ZSTD_PIECE_BYTES = 2**11
_MOST_CONTENTS = 2**20
# `zstd --long=31` is the widest there is, and what large published dumps are made with.
_ZSTD_WINDOW_BYTES = 2**31
# What the header of an xz file may make its reader ask for; xz -9 takes 65 MB.
_XZ_MEMORY_BYTES = 2**30


@contextmanager
def reading(place: str) -> Iterator[None]:
    """Turns what damaged or missing files raise into a UserError that names `place`."""
    try:
        yield
    except UserError:
        raise
    except (EOFError, zlib.error, gzip.BadGzipFile, lzma.LZMAError, zstandard.ZstdError) as error:
        raise UserError(
            f"{place} is not a whole compressed file: {error}. Copy it again or leave it out of "
            "prepare_source."
        ) from error
    except (tarfile.TarError, zipfile.BadZipFile) as error:
        raise UserError(
            f"{place} is not a whole archive: {error}. Copy it again or leave it out of "
            "prepare_source."
        ) from error
    except OSError as error:
        raise UserError(
            f"{place} cannot be read: {error.strerror or error}. Mend that, or leave it out of "
            "prepare_source."
        ) from error


def decode(data: bytes, place: str, offset: int | None = None) -> str:
    """`data` as UTF-8 text.

    Args:
      place: the file or row, for the message.
      offset: of `data` in the file, where it is known.

    Raises:
      UserError: it is not UTF-8; names the first byte that is wrong.
    """
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        byte = f"byte 0x{error.object[error.start]:02x}"
        if offset is not None:
            byte += f" at offset {offset + error.start}"
        raise UserError(
            f"{place} is not UTF-8 text ({byte}: {error.reason}). Convert it (iconv -t UTF-8) or "
            "leave it out of prepare_source."
        ) from error


def open_bytes(path: str, size: int | None = None) -> BinaryIO:
    """Opens a file for reading; it can seek.

    Args:
      path: local path or URL.
      size: bytes that a local file had when it was found; None checks nothing.

    Raises:
      UserError: its size is another now.
      OSError: it cannot be opened.
    """
    if is_url(path):
        return open_stream(path)
    file = open(path, "rb", buffering=_BUFFER_BYTES)  # noqa: SIM115 - the caller closes it
    found = os.fstat(file.fileno()).st_size
    if size is not None and found != size:
        file.close()
        raise UserError(
            f"{path} has {found} bytes and had {size} when it was found: files of prepare_source "
            "changed while they were read. Run again when nothing writes to them."
        )
    return file


def buffered(file: BinaryIO) -> io.BufferedReader:
    """`file` itself if it can look ahead (peek), else a stream of it that can."""
    if hasattr(file, "peek"):
        return cast(io.BufferedReader, file)
    return io.BufferedReader(cast(io.RawIOBase, file), _BUFFER_BYTES)


def decompressed(file: BinaryIO, compression: str) -> io.BufferedReader:
    """The contents of a compressed stream; all frames of a file that has several.

    Args:
      file: compressed bytes; stays open when the returned stream is closed.
      compression: "gz", "zst", "xz" or "bz2".

    Raises:
      EOFError: there is not a single byte. Reading raises it too where the file ends early.
    """
    file = cast(BinaryIO, buffered(file))
    if not cast(Any, file).peek(1):
        raise EOFError("it is empty")
    begin: dict[str, Callable[[], Any]] = {
        "xz": functools.partial(lzma.LZMADecompressor, memlimit=_XZ_MEMORY_BYTES),
        "bz2": bz2.BZ2Decompressor,
        "zst": zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW_BYTES).decompressobj,
    }
    contents = (
        gzip.GzipFile(fileobj=file, mode="rb")
        if compression == "gz"
        else _Frames(file, begin[compression], is_zstd=compression == "zst")
    )
    return io.BufferedReader(cast(io.RawIOBase, contents), _BUFFER_BYTES)


class _Frames(io.RawIOBase):
    """Decompresses zstd frames, xz or bz2 streams that follow one another, to the last one.

    The readers of the libraries are not strict enough: zstandard's takes a frame that is cut short
    for the end, and those for xz and bz2 take damage between two streams for it.
    """

    def __init__(self, file: BinaryIO, begin: Callable[[], Any], is_zstd: bool):
        """Reads `file` with the decompressors, one per frame, that `begin` makes."""
        self._file = file
        self._begin = begin
        self._piece_bytes = _ZSTD_PIECE_BYTES if is_zstd else _PIECE_BYTES
        self._bound = () if is_zstd else (_MOST_CONTENTS,)
        self._frame: Any = None
        self._waiting = b""
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        while not self._ready:
            # A decompressor that has reached its bound goes on without being given more.
            if not self._waiting and getattr(self._frame, "needs_input", True):
                self._waiting = self._file.read(self._piece_bytes)
                if not self._waiting:
                    if self._frame is not None:
                        raise EOFError("it ends in the middle of its compressed data")
                    return 0
            self._ready = memoryview(self._decompress())
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count

    def _decompress(self) -> bytes:
        piece, self._waiting = self._waiting, b""
        if self._frame is None:
            # xz files may have zeros between streams; no frame of any kind begins with one.
            piece = piece.lstrip(b"\0")
            if not piece:
                return b""
            self._frame = self._begin()
        contents = self._frame.decompress(piece, *self._bound)
        if self._frame.eof:
            self._waiting = self._frame.unused_data
            self._frame = None
        return contents
