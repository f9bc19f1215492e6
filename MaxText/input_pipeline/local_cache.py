"""Caches on local disk: copies of small remote files, and computed arrays.

    <cache_dir>/copies/<digest>/              tokenizers, manifests, document offsets
    <cache_dir>/<kind>-<digest>/<name>.npy    arrays that grow with the documents of a dataset
    <cache_dir>/imported, text, text_digests, prepared/    see import_records and prepare

The digest of copies covers the source and its version tags, so a changed file is copied again. All
processes of a machine share the pages of memory-mapped arrays, and the kernel can reclaim them.
Entries unused for half a year are deleted when a new one is made.
"""

import contextlib
import hashlib
import itertools
import mmap
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np

from MaxText.config.data_sections import DataConfig
from MaxText.errors import UserError
from MaxText.storage import file_access
from MaxText.storage.atomic import apply_umask, sync_file
from MaxText.storage.errors import FileReadError
from MaxText.storage.file_access import FileInfo

MIN_ITEMS = 2**20  # below this total size, recomputing is faster than caching in files
_MAX_AGE_SECONDS = 180 * 86400
# Exactly the names of entries and of their leftovers: the folder may hold files of the user too.
_LOCK = r"\.lock(\.(break|restore)\.\d+\.[0-9a-f]{32})?"
_ENTRIES = {
    ".": r"(gpt_neox|megatron|packing|windows)\d+-[0-9a-f]{24}(\.[a-z0-9_]{8})?",
    **dict.fromkeys(("copies", "imported", "prepared"), rf"[0-9a-f]{{24}}({_LOCK})?"),
    "text": rf"[0-9a-f]{{32}}(\.preparing|{_LOCK})?",
    "text_digests": r"[0-9a-f]{32}(\.[0-9a-f]{16}\.writing)?",
}


class Arrays:
    """Named arrays, memory-mapped (and pickled as a path) or in memory."""

    def __init__(self, folder: Path | None, arrays: Mapping[str, np.ndarray] | None = None):
        self.folder = folder
        self._arrays = dict(arrays or {})
        self._maps: dict[str, mmap.mmap] = {}

    def __getitem__(self, name: str) -> np.ndarray:
        array = self._arrays.get(name)
        mapped = self._maps.get(name)
        if mapped is not None and mapped.size() < len(mapped):
            array = None  # reading what was cut off would kill the process
        if array is None:
            assert self.folder is not None, name
            path = self.folder / f"{name}.npy"
            try:
                loaded = np.load(path, mmap_mode="r", allow_pickle=False)
                if mapped is not None and loaded.shape != (old := self._arrays[name]).shape:
                    raise ValueError(f"it has {loaded.size:,} items, and had {old.size:,}")
            # A damaged header can raise anything.
            except Exception as error:
                if isinstance(error, OSError) and not isinstance(error, FileNotFoundError):
                    raise  # trouble with the storage, which may pass
                raise (FileReadError if mapped else UserError)(  # the former is tried again
                    f"{path} is damaged ({error}). Delete {self.folder}: a cache is rebuilt, and a "
                    "data set has to be prepared or copied again."
                ) from error
            self._maps[name] = loaded._mmap
            # A plain ndarray view: slicing np.memmap is several times slower.
            array = self._arrays[name] = loaded.view(np.ndarray)
        return array

    def __reduce__(self):
        return Arrays, (self.folder, None if self.folder else self._arrays)


def cached_arrays(
    cache_dir: Path, kind: str, key: str, compute: Callable[[], Iterable[dict[str, np.ndarray]]]
) -> Arrays:
    """Returns the arrays of `compute`, cached if large.

    `compute` yields blocks, each with a chunk of every array. `kind` is the name and version of the
    computation, and `key` is everything that the result depends on. Raises UserError if `cache_dir`
    cannot be written.
    """
    folder = cache_dir / f"{kind}-{hashlib.sha256(key.encode()).hexdigest()[:24]}"
    assert re.fullmatch(_ENTRIES["."], folder.name), kind  # else it would stay forever
    if mark_used(folder):
        return Arrays(folder)
    blocks = iter(compute())
    first = []
    num_items = 0
    for block in blocks:
        first.append(block)
        num_items += sum(array.size for array in block.values())
        if num_items >= MIN_ITEMS:
            break
    else:
        return Arrays(None, {name: np.concatenate([b[name] for b in first]) for name in first[0]})
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        delete_unused(cache_dir)
        staging = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=cache_dir))
        try:
            write_arrays(staging, itertools.chain(first, blocks))
            apply_umask(staging)  # mkdtemp's folders are closed to the other users of a cache
            with contextlib.suppress(OSError):  # another process was faster
                staging.rename(folder)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    except OSError as error:
        raise cache_write_error(cache_dir, error) from error
    return Arrays(folder)


def write_arrays(folder: Path, blocks: Iterable[dict[str, np.ndarray]]) -> None:
    """Appends blocks to .npy files, fills in headers, and syncs them.

    Sequentially, so that a full disk is an error; with a memory map it would kill the process.
    """
    counts: dict[str, int] = {}

    def write_header(file: BinaryIO, dtype: np.dtype, count: int) -> None:
        header = {"descr": dtype.str, "fortran_order": False, "shape": (count,)}
        np.lib.format.write_array_header_1_0(file, header)

    with contextlib.ExitStack() as stack:
        files: dict[str, BinaryIO] = {}
        block: dict[str, np.ndarray] = {}
        for block in blocks:
            for name, array in block.items():
                if name not in files:
                    files[name] = stack.enter_context(open(folder / f"{name}.npy", "wb"))
                    write_header(files[name], array.dtype, 0)
                files[name].write(array.tobytes())
                counts[name] = counts.get(name, 0) + array.size
        for name, file in files.items():
            file.seek(0)
            write_header(file, block[name].dtype, counts[name])
            file.flush()
            os.fsync(file.fileno())
    sync_file(folder)


def cache_write_error(cache_dir: Path | str, error: Exception) -> UserError:
    # Next to a URL, the default folder is used.
    key = "data_cache_dir=" * (cache_dir != DataConfig().local_cache_dir)
    return UserError(
        f"{key}{cache_dir} cannot be written ({file_access.reason(error)}). Correct that, or set "
        "data_cache_dir to a local folder with free space where this host may write."
    )


def mark_used(entry: Path) -> bool:
    """Keeps an entry from delete_unused; returns whether it exists."""
    with contextlib.suppress(OSError):  # the cache may be read-only
        os.utime(entry)
    return entry.exists()


def delete_unused(cache_dir: Path) -> None:
    """Deletes entries without mark_used for half a year, and their leftovers."""
    oldest = time.time() - _MAX_AGE_SECONDS
    for parent, name in _ENTRIES.items():
        pattern = re.compile(rf"\.*({name})(\.unused)*")
        for entry in (cache_dir / parent).glob("*"):
            with contextlib.suppress(OSError):
                if pattern.fullmatch(entry.name) and entry.stat().st_mtime < oldest:
                    # Renamed at first: half an entry must not look like a whole one.
                    doomed = entry.rename(entry.with_name(f".{entry.name}.unused"))
                    shutil.rmtree(doomed) if doomed.is_dir() else doomed.unlink()


def copy_folder(url: str, cache_dir: Path) -> Path | None:
    """Copies the files directly in a folder; returns None if there are none.

    They are small: the contents of those without a version tag identify the copy.
    """
    files = file_access.files_in(url)
    if not files:
        return None
    identity = [f"{file.size} {file.tag}" for file in files]
    for file in (file for file in files if not file.tag):
        with file_access.open_stream(file.path) as stream:
            identity.append(hashlib.sha256(stream.read()).hexdigest())
    digest = hashlib.sha256("\n".join([url, *identity]).encode()).hexdigest()[:24]
    folder = cache_dir / "copies" / digest
    if not mark_used(folder):
        delete_unused(cache_dir)
    copy_files(files, folder)
    return folder


def copy_files(files: Sequence[FileInfo], folder: Path) -> None:
    """Copies missing remote files to a local folder.

    Raises FileReadError for the source and UserError for the target folder.
    """
    missing = [file for file in files if not (folder / _name(file)).exists()]
    if not missing:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Renamed when complete: safe against interruption and concurrent copies.
        with tempfile.TemporaryDirectory(prefix=".", dir=folder) as staging:
            for file in missing:
                copy = os.path.join(staging, _name(file))
                try:
                    system, name = file_access.file_system(file.path)
                    system.get_file(name, copy)
                except UserError:
                    raise
                except Exception as error:  # fsspec backends raise their own errors
                    problem = f"{file.path} cannot be read ({file_access.reason(error)})"
                    raise FileReadError(problem) from error
                if os.path.getsize(copy) != file.size:
                    raise FileReadError(f"{file.path} ended early while it was copied")
                os.replace(copy, folder / _name(file))
    except UserError:
        raise
    except OSError as error:
        depth = 1 if folder.parent.name == "copies" else 2  # of a data set or of its split
        raise cache_write_error(folder.parents[depth], error) from error


def upload(files: Mapping[str, Path], url: str, last: str) -> None:
    """Uploads files under their names, and `last` when all others are there."""
    system, path = file_access.file_system(url)
    for names in ([name for name in files if name != last], [last]):
        copies = [f"{path}/{name}" for name in names]
        system.put([str(files[name]) for name in names], copies, batch_size=8)


def _name(file: FileInfo) -> str:
    return file.path.rsplit("/", 1)[-1]
