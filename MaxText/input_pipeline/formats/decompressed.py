"""Plain copies of gzip files, for reading them at any place."""

import gzip
import hashlib
import os
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from MaxText.errors import UserError
from MaxText.input_pipeline.data_errors import BadRecord
from MaxText.input_pipeline.storage import absolute, open_stream, version

# A file that is this many times as large as its gzip file, and larger than the other bound, is
# nothing but repetition: gzip itself ends at 1032. Records of tokens shrink to a half or a tenth.
_MOST_TIMES = 200
_ALWAYS_BYTES = 1 << 26


def decompressed_copy(path: str, cache_dir: Path, show: Callable[[str], None]) -> str:
    """The contents of a .gz or .tgz file as a file in `cache_dir`, made on the first call.

    The name of the copy depends on path, size and time of the file, so a changed one is copied
    again. Several processes may ask at once.

    Raises:
      BadRecord: the file is damaged or cut short, or made to fill the disk.
      UserError: it cannot be read, or the copy not be written.
    """
    size, tag = version(path)
    name = hashlib.sha256(f"{absolute(path)}\n{size}\n{tag}".encode()).hexdigest()[:24]
    ending = {".tgz": ".tar", ".gz": ""}[Path(path).suffix]
    copy = cache_dir / "decompressed" / name / f"{Path(path).stem}{ending}"
    if copy.exists():
        return str(copy)
    show(f"Decompressing {path} ({size / 1e6:,.0f} MB) once into {cache_dir}.")
    try:
        copy.parent.mkdir(parents=True, exist_ok=True)
        number, temporary = tempfile.mkstemp(dir=copy.parent)
    except OSError as error:
        raise _unwritable(cache_dir, error) from error
    try:
        with os.fdopen(number, "wb") as plain, _opened(path) as stream:
            _decompress(path, stream, plain, max(_ALWAYS_BYTES, _MOST_TIMES * size))
            plain.flush()
            os.fsync(plain.fileno())
        os.replace(temporary, copy)
    except OSError as error:
        raise _unwritable(cache_dir, error) from error
    finally:
        Path(temporary).unlink(missing_ok=True)
    return str(copy)


def _decompress(path: str, stream: BinaryIO, plain: BinaryIO, most_bytes: int) -> None:
    try:
        with gzip.open(stream) as contents:
            while piece := contents.read(1 << 20):
                plain.write(piece)
                if plain.tell() > most_bytes:
                    reason = (
                        f"the file grows to more than {_MOST_TIMES} times its size: such a file is "
                        "made to fill a disk. Decompress it yourself if you trust it"
                    )
                    raise BadRecord(path, plain.tell(), reason)
    except EOFError as error:
        raise BadRecord(path, plain.tell(), "the compressed file is cut short") from error
    except (gzip.BadGzipFile, zlib.error) as error:
        reason = f"the compressed file is damaged ({error})"
        raise BadRecord(path, plain.tell(), reason) from error


def _opened(path: str) -> BinaryIO:
    try:
        return open_stream(path)
    except OSError as error:
        reason = error.strerror or error
        raise UserError(f"{path} cannot be read ({reason}). Check that you may read it.") from error


def _unwritable(cache_dir: Path, error: OSError) -> UserError:
    return UserError(
        f"data_cache_dir={cache_dir} cannot be written ({error.strerror or error}). Set "
        "data_cache_dir to a folder on a disk with room."
    )
