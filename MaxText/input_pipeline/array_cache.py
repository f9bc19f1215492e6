"""Arrays computed once, cached in a folder and mapped from there.

    <cache_dir>/<kind>-<digest>/<name>.npy
    <cache_dir>/<kind>-<digest>/arrays.json   length of each; a folder with this file is complete

Their size grows with the documents of a dataset. Mapped pages are shared by all processes of a
machine and reclaimed when memory is short.
"""

import contextlib
import hashlib
import itertools
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import BinaryIO

import numpy as np

from MaxText.errors import UserError

# Fewer items than this (of all arrays together) are computed in less time than files take.
_MIN_ITEMS = 2**20
_LENGTHS_NAME = "arrays.json"
# What nobody opened for so long is deleted when something is added.
_MAX_AGE_SECONDS = 180 * 86400


class Arrays:
    """Arrays by name, mapped from a folder or in memory. A mapped one is pickled as its path."""

    def __init__(self, folder: Path | None, arrays: Mapping[str, np.ndarray] | None = None):
        """Takes a `folder` of NAME.npy files, or `arrays` in memory."""
        self.folder = folder
        self._arrays = dict(arrays or {})

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self._arrays:
            assert self.folder is not None, name
            loaded = np.load(self.folder / f"{name}.npy", mmap_mode="r", allow_pickle=False)
            # A plain array over the map: slicing numpy's memmap class costs several times as much.
            self._arrays[name] = loaded.view(np.ndarray)
        return self._arrays[name]

    def __reduce__(self):
        return Arrays, (self.folder, None if self.folder else self._arrays)


def cached_arrays(
    cache_dir: Path, kind: str, key: str, compute: Callable[[], Iterable[dict[str, np.ndarray]]]
) -> Arrays:
    """Returns the arrays that `compute` yields, from the cache if possible.

    Small ones are not cached.

    Args:
      kind: Name and version of their computation, a part of the folder's name.
      key: Everything that they depend on.
      compute: Yields them block by block; each block has a part of every array.

    Raises:
      UserError: `cache_dir` cannot be written.
    """
    folder = cache_dir / f"{kind}-{hashlib.sha256(key.encode()).hexdigest()[:24]}"
    if (kept := _load(folder)) is not None:
        return kept
    blocks = iter(compute())
    first, num_items = [], 0
    for block in blocks:
        first.append(block)
        num_items += sum(array.size for array in block.values())
        if num_items >= _MIN_ITEMS:
            break
    else:
        return Arrays(None, {name: np.concatenate([b[name] for b in first]) for name in first[0]})
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        delete_unused(cache_dir)
        staging = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=cache_dir))
        try:
            lengths = _write(staging, itertools.chain(first, blocks))
            (staging / _LENGTHS_NAME).write_text(json.dumps(lengths))
            with contextlib.suppress(OSError):  # another process was faster
                staging.rename(folder)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    except OSError as error:
        raise unwritable(cache_dir, error) from error
    return Arrays(folder)


def _load(folder: Path) -> Arrays | None:
    """Returns the arrays in a folder, or None; deletes damaged ones."""
    try:
        lengths = json.loads((folder / _LENGTHS_NAME).read_text(encoding="utf-8"))
        arrays = Arrays(folder)
        if all(len(arrays[name]) == length for name, length in lengths.items()):
            with contextlib.suppress(OSError):  # the cache may be read-only
                os.utime(folder)  # see delete_unused
            return arrays
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError:
        raise
    except Exception:  # what a damaged header raises is any kind of error
        pass
    shutil.rmtree(folder)
    return None


def _write(folder: Path, blocks: Iterable[dict[str, np.ndarray]]) -> dict[str, int]:
    """Appends blocks to .npy files with room for the final header; returns the lengths."""
    counts: dict[str, int] = {}
    dtypes: dict[str, np.dtype] = {}
    with contextlib.ExitStack() as stack:
        files: dict[str, BinaryIO] = {}
        for block in blocks:
            for name, array in block.items():
                if name not in files:
                    files[name] = stack.enter_context(open(folder / f"{name}.npy", "wb"))
                    counts[name], dtypes[name] = 0, array.dtype
                    _write_header(files[name], array.dtype, 0)
                files[name].write(array.tobytes())
                counts[name] += array.size
        for name, file in files.items():
            file.seek(0)
            _write_header(file, dtypes[name], counts[name])
    return counts


def _write_header(file: BinaryIO, dtype: np.dtype, count: int) -> None:
    header = {"descr": dtype.str, "fortran_order": False, "shape": (count,)}
    np.lib.format.write_array_header_1_0(file, header)


def unwritable(cache_dir: Path, error: OSError) -> UserError:
    """Returns the error for a cache folder that cannot be written."""
    return UserError(
        f"data_cache_dir={cache_dir} cannot be written ({error.strerror or error}). Set "
        "data_cache_dir to a folder on a disk with room."
    )


def delete_unused(folder: Path) -> None:
    """Deletes folders of a cache that have not been opened for half a year."""
    oldest = time.time() - _MAX_AGE_SECONDS
    for entry in folder.iterdir():
        with contextlib.suppress(OSError):
            if entry.is_dir() and entry.stat().st_mtime < oldest:
                shutil.rmtree(entry)
