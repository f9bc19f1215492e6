"""Copies on this machine of what can only be read from a disk, made once: from buckets and URLs.

    <cache_dir>/copies/<digest>/...

ArrayRecord's library reads local files, and tokenizers and offsets are read whole or mapped. The
name of a copy depends on what it is a copy of, so that what has changed is copied again. Several
processes may ask at once: one copies, the others wait. Imports no jax.
"""

import hashlib
import os
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from MaxText.errors import UserError
from MaxText.input_pipeline.preparation import building_lock
from MaxText.input_pipeline.storage import file_system, is_url, open_file, open_stream, versions
from MaxText.input_pipeline.token_store.manifest import MANIFEST_NAME, Manifest, read_manifest

_PIECE_BYTES = 32 << 20
_FILES_AT_ONCE = 4


class _Wanted(NamedTuple):
    """A file to be copied."""

    url: str
    size: int
    to: Path


def local_copies(files: Sequence[str], cache_dir: Path, show: Callable[[str], None]) -> list[str]:
    """Local paths of files: those that are local already, and copies of the others.

    Args:
      files: paths and URLs.
      cache_dir: folder for the copies.
      show: told what is copied.

    Raises:
      BadRecord: a file cannot be read, or ends early.
      UserError: as storage.version, or `cache_dir` cannot be written.
    """
    remote = [file for file in files if is_url(file)]
    wanted = {}
    for url, (size, tag) in zip(remote, versions(remote), strict=True):
        folder = cache_dir / "copies" / _digest(url, str(size), tag)
        wanted[url] = _Wanted(url, size, folder / url.rsplit("/", 1)[-1])
    _copy(list(wanted.values()), cache_dir, show)
    return [str(wanted[file].to) if file in wanted else file for file in files]


def copied_folder(url: str, cache_dir: Path, show: Callable[[str], None]) -> Path | None:
    """A copy of the files that lie directly in a folder; None where there are none.

    Raises:
      as `local_copies`.
    """
    files = _files_in(url)
    if not files:
        return None
    tags = versions([file for file, _ in files])
    folder = cache_dir / "copies" / _digest(url, *(tag for _, tag in tags))
    _copy([_Wanted(file, size, folder / _name(file)) for file, size in files], cache_dir, show)
    return folder


def copied_data_set(
    url: str, split: str, cache_dir: Path, show: Callable[[str], None]
) -> tuple[Path, Manifest]:
    """A copy of a prepared data set: all of a split but for flat files, which are read in place.

    Returns:
      The folder, and the manifest in it.

    Raises:
      as `local_copies`, and as read_manifest.
    """
    with open_stream(f"{url}/{MANIFEST_NAME}") as stream:
        content = stream.read()
    folder = cache_dir / "copies" / _digest(url, content.decode("utf-8", "replace"))
    _copy(
        [_Wanted(file, size, folder / _name(file)) for file, size in _files_in(url)],
        cache_dir,
        show,
    )
    manifest = read_manifest(str(folder))
    entry = manifest.splits.get(split)
    records = {file.name for file in entry.files} if entry and manifest.format == "bin" else set()
    _copy(
        [
            _Wanted(file, size, folder / split / _name(file))
            for file, size in _files_in(f"{url}/{split}")
            if _name(file) not in records
        ],
        cache_dir,
        show,
    )
    return folder, manifest


def _files_in(url: str) -> list[tuple[str, int]]:
    """The files directly in a folder, with their sizes; none where there is no such folder."""
    system, path = file_system(url)
    try:
        entries = system.ls(path, detail=True)
    except FileNotFoundError:
        return []
    return [
        (system.unstrip_protocol(entry["name"]), int(entry["size"]))
        for entry in entries
        if entry["type"] == "file" and not entry["name"].endswith("/")
    ]


def _copy(wanted: Sequence[_Wanted], cache_dir: Path, show: Callable[[str], None]) -> None:
    """Makes the copies that are not there yet."""
    if not (missing := [file for file in wanted if not _is_copied(file)]):
        return
    lock = cache_dir / "copies" / f".{_digest(*(file.url for file in missing))}.lock"
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        with building_lock.hold(lock, show):
            missing = [file for file in missing if not _is_copied(file)]
            if missing:
                total = sum(file.size for file in missing)
                more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
                show(
                    f"Copying {missing[0].url}{more} ({total / 1e6:,.1f} MB) once into {cache_dir}."
                )
            with ThreadPoolExecutor(_FILES_AT_ONCE) as threads:
                list(threads.map(_copy_file, missing))
    except UserError:
        raise
    except OSError as error:
        raise UserError(
            f"data_cache_dir={cache_dir} cannot be written ({error.strerror or error}). Set "
            "data_cache_dir to a folder on a disk with room."
        ) from error


def _is_copied(file: _Wanted) -> bool:
    return file.to.is_file() and file.to.stat().st_size == file.size


def _copy_file(file: _Wanted) -> None:
    source = open_file(file.url)
    file.to.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.to.with_name(f".{file.to.name}.{uuid.uuid4().hex[:8]}.writing")
    try:
        with open(temporary, "xb") as copy:
            for start in range(0, file.size, _PIECE_BYTES):
                copy.write(source.read(start, min(_PIECE_BYTES, file.size - start)))
            copy.flush()
            os.fsync(copy.fileno())
        os.replace(temporary, file.to)
    finally:
        temporary.unlink(missing_ok=True)


def _name(url: str) -> str:
    return url.rsplit("/", 1)[-1]


def _digest(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:24]
