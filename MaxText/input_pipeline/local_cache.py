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
from typing import Any, BinaryIO

import numpy as np

from MaxText.config.data_sections import DataConfig
from MaxText.errors import UserError
from MaxText.storage import file_access
from MaxText.storage.atomic import apply_umask, sync_file
from MaxText.storage.errors import FileReadError
from MaxText.storage.file_access import FileInfo

MIN_ITEMS = 2**20  # with fewer items in all, recomputing is faster than caching in files
_MAX_AGE_SECONDS = 180 * 86400
# Subfolder -> names of entries and of their leftovers, exactly: the folder may hold files of the
# user too.
_LOCK = r"\.lock(\.(break|restore)\.\d+\.[0-9a-f]{32})?"
_ENTRIES = {
    ".": r"(flat|gpt_neox|lengths|megatron|packing|windows)\d+-[0-9a-f]{24}(\.[a-z0-9_]{8})?",
    **dict.fromkeys(("copies", "imported", "prepared"), rf"[0-9a-f]{{24}}({_LOCK})?"),
    "text": rf"[0-9a-f]{{32}}(\.preparing|{_LOCK})?",
    "text_digests": r"[0-9a-f]{32}(\.[0-9a-f]{16}\.writing)?",
}


class Arrays:
    """Named arrays, memory-mapped (and pickled as a path) or in memory.

    Attributes:
      folder: Folder of their .npy files; None in memory.
    """

    def __init__(self, folder: Path | None, arrays: Mapping[str, np.ndarray] | None = None):
        """Initializes without reading; `arrays` are used if there is no folder."""
        self.folder = folder
        self._arrays = dict(arrays or {})
        self._maps: dict[str, mmap.mmap] = {}

    def __getitem__(self, name: str) -> np.ndarray:
        """Returns an array, which is mapped at the first call.

        Raises:
          UserError: The file is missing or damaged.
          FileReadError: It was truncated or replaced while it was mapped.
          OSError: The storage failed.
        """
        mapped = self._maps.get(name)
        # Reading what was cut off would kill the process.
        is_truncated = mapped is not None and mapped.size() < len(mapped)
        if name in self._arrays and not is_truncated:
            return self._arrays[name]
        assert self.folder is not None, name
        memory_map = self._open_map(name, self.folder)
        self._maps[name] = memory_map._mmap
        # A plain ndarray view: slicing np.memmap is several times slower.
        self._arrays[name] = memory_map.view(np.ndarray)
        return self._arrays[name]

    def _open_map(self, name: str, folder: Path) -> Any:  # np.memmap, whose _mmap has no type
        """Maps a file, for the first time or again; raises as `__getitem__`."""
        path = folder / f"{name}.npy"
        previous = self._arrays.get(name)
        try:
            memory_map = np.load(path, mmap_mode="r", allow_pickle=False)
            if previous is not None and memory_map.shape != previous.shape:
                raise ValueError(f"it has {memory_map.size:,} items, and had {previous.size:,}")
        # A damaged header can raise anything.
        except Exception as error:
            if isinstance(error, OSError) and not isinstance(error, FileNotFoundError):
                raise  # a storage failure, which may be transient
            # Reads of what was there before are tried again.
            error_type = UserError if previous is None else FileReadError
            raise error_type(
                f"{path} is damaged ({error}). Delete {folder}: a cache is rebuilt, and a "
                "data set has to be prepared or copied again."
            ) from error
        return memory_map

    def __reduce__(self):
        return Arrays, (self.folder, None if self.folder else self._arrays)


def cached_arrays(
    cache_dir: Path, kind: str, key: str, compute: Callable[[], Iterable[dict[str, np.ndarray]]]
) -> Arrays:
    """Returns the arrays of a computation, cached if large.

    Args:
      cache_dir: Folder of the cache.
      kind: Name and version of the computation, such as `packing2`.
      key: Everything that the result depends on.
      compute: Yields blocks, each with a chunk of every array.

    Raises:
      UserError: `cache_dir` cannot be written.
    """
    folder = cache_dir / f"{kind}-{hashlib.sha256(key.encode()).hexdigest()[:24]}"
    assert re.fullmatch(_ENTRIES["."], folder.name), kind  # else it would stay forever
    if mark_used(folder):
        return Arrays(folder)
    blocks = iter(compute())
    first_blocks = []
    num_items = 0
    for block in blocks:
        first_blocks.append(block)
        num_items += sum(array.size for array in block.values())
        if num_items >= MIN_ITEMS:
            break
    else:
        return Arrays(None, _concatenate_blocks(first_blocks))
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        delete_unused(cache_dir)
        staging = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=cache_dir))
        try:
            write_arrays(staging, itertools.chain(first_blocks, blocks))
            apply_umask(staging)  # mkdtemp's folders are closed to the other users of a cache
            with contextlib.suppress(OSError):  # another process was faster
                staging.rename(folder)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    except OSError as error:
        raise cache_write_error(cache_dir, error) from error
    return Arrays(folder)


def _concatenate_blocks(blocks: Sequence[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    return {name: np.concatenate([block[name] for block in blocks]) for name in blocks[0]}


def write_arrays(folder: Path, blocks: Iterable[dict[str, np.ndarray]]) -> None:
    """Writes blocks, each with a chunk of every array, one after the other to .npy files.

    The files are synced to disk. They are written sequentially, so that a full disk is an error;
    with a memory map it would kill the process.
    """
    files: dict[str, BinaryIO] = {}
    dtypes: dict[str, np.dtype] = {}
    counts: dict[str, int] = {}
    with contextlib.ExitStack() as stack:
        for block in blocks:
            for name, array in block.items():
                if name not in files:
                    files[name] = stack.enter_context(open(folder / f"{name}.npy", "wb"))
                    counts[name] = 0
                    _write_header(files[name], array.dtype, 0)  # completed below
                files[name].write(array.tobytes())
                counts[name] += array.size
                dtypes[name] = array.dtype
        for name, file in files.items():
            file.seek(0)
            _write_header(file, dtypes[name], counts[name])
            file.flush()
            os.fsync(file.fileno())
    sync_file(folder)


def _write_header(file: BinaryIO, dtype: np.dtype, count: int) -> None:
    """Writes the header of a .npy file; its size does not depend on `count`."""
    header = {"descr": dtype.str, "fortran_order": False, "shape": (count,)}
    np.lib.format.write_array_header_1_0(file, header)


def cache_write_error(cache_dir: Path | str, error: Exception) -> UserError:
    """Returns the error for a cache that cannot be written."""
    setting = str(cache_dir)
    # Next to a URL, the default folder is used.
    if cache_dir != DataConfig().local_cache_dir:
        setting = f"data_cache_dir={cache_dir}"
    return UserError(
        f"{setting} cannot be written ({file_access.reason(error)}). Correct that, or set "
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
            if not pattern.fullmatch(entry.name):
                continue
            with contextlib.suppress(OSError):  # another process deletes it
                if entry.stat().st_mtime < oldest:
                    _delete(entry)


def _delete(entry: Path) -> None:
    """Deletes a file or folder of the cache."""
    # Renamed at first: half an entry must not look like a whole one.
    renamed = entry.rename(entry.with_name(f".{entry.name}.unused"))
    if renamed.is_dir():
        shutil.rmtree(renamed)
    else:
        renamed.unlink()


def copy_folder(url: str, cache_dir: Path) -> Path | None:
    """Copies the files directly in a remote folder to the cache.

    They are small: the contents of those without a version tag identify the copy.

    Returns:
      The local folder; None if there are no files.
    """
    files = file_access.files_in(url)
    if not files:
        return None
    identity = [url, *(f"{file.size} {file.tag}" for file in files)]
    for file in files:
        if not file.tag:
            with file_access.open_stream(file.path) as stream:
                identity.append(hashlib.sha256(stream.read()).hexdigest())
    digest = hashlib.sha256("\n".join(identity).encode()).hexdigest()[:24]
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
                staged = os.path.join(staging, _name(file))
                _download(file, staged)
                os.replace(staged, folder / _name(file))
    except UserError:
        raise
    except OSError as error:
        depth = 1 if folder.parent.name == "copies" else 2  # of a data set or of its split
        raise cache_write_error(folder.parents[depth], error) from error


def _download(file: FileInfo, target: str) -> None:
    """Copies one remote file; FileReadError if it cannot be read or ends early."""
    try:
        system, name = file_access.file_system(file.path)
        system.get_file(name, target)
    except UserError:
        raise
    except Exception as error:  # fsspec backends raise their own errors
        problem = f"{file.path} cannot be read ({file_access.reason(error)})"
        raise FileReadError(problem) from error
    if os.path.getsize(target) != file.size:
        raise FileReadError(f"{file.path} ended early while it was copied")


def upload(files: Mapping[str, Path], url: str, last: str) -> None:
    """Uploads files under their names, and `last` when all others are there."""
    system, path = file_access.file_system(url)
    first_names = [name for name in files if name != last]
    for names in (first_names, [last]):
        targets = [f"{path}/{name}" for name in names]
        system.put([str(files[name]) for name in names], targets, batch_size=8)


def _name(file: FileInfo) -> str:
    return file.path.rsplit("/", 1)[-1]
