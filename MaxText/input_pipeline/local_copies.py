"""Local copies of small remote files: tokenizers, manifests and document offsets.

They are stored in `<cache_dir>/copies/<digest>/`, where the digest covers the source and its
version tags, so a changed file is copied again. Token files are read in place.
"""

import hashlib
import os
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from MaxText.errors import UserError
from MaxText.input_pipeline.array_cache import unwritable
from MaxText.storage import file_access
from MaxText.storage.errors import UnreadableFile
from MaxText.storage.file_access import FileInfo

_FILES_AT_ONCE = 4


def copied_folder(url: str, cache_dir: Path) -> Path | None:
    """Copies the files directly in a folder; returns None if there are none."""
    files = file_access.files_in(url)
    if not files:
        return None
    folder = copies_folder(cache_dir, url, *(f"{file.size} {file.tag}" for file in files))
    copy_files(files, folder)
    return folder


def copies_folder(cache_dir: Path, *identity: str) -> Path:
    digest = hashlib.sha256("\n".join(identity).encode()).hexdigest()[:24]
    return cache_dir / "copies" / digest


def copy_files(files: Sequence[FileInfo], folder: Path) -> None:
    """Copies remote files that are missing from a local folder.

    Raises UnreadableFile for the source and UserError for the target folder.
    """
    missing = [file for file in files if not (folder / _name(file)).exists()]
    if not missing:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with ThreadPoolExecutor(_FILES_AT_ONCE) as threads:
            list(threads.map(lambda file: _copy(file, folder / _name(file)), missing))
    except UserError:
        raise
    except OSError as error:
        raise unwritable(folder.parent.parent, error) from error


def _name(file: FileInfo) -> str:
    return file.path.rsplit("/", 1)[-1]


def _copy(file: FileInfo, to: Path) -> None:
    # Copied under a unique name, then renamed: safe against interruption and concurrent copies.
    temporary = to.with_name(f".{to.name}.{uuid.uuid4().hex}")
    try:
        system, name = file_access.file_system(file.path)
        try:
            system.get_file(name, str(temporary))
        except Exception as error:  # fsspec backends raise their own errors
            if isinstance(error, UserError):
                raise
            problem = f"{file.path} cannot be read ({file_access.reason(error)})"
            raise UnreadableFile(problem, file.path) from error
        if temporary.stat().st_size != file.size:
            raise UnreadableFile(f"{file.path} ended early while it was copied", file.path)
        os.replace(temporary, to)
    finally:
        temporary.unlink(missing_ok=True)
