"""Run folders with imported parameters as their only checkpoint.

    checkpoints/0/items       {params}, Orbax
    checkpoints/0/metadata    as written by train.py, with checksums, plus the import's record
    config.yml                model keys
    tokenizer/                tokenizer files

tokenizer/ exists only if the source has one.
"""

import contextlib
import functools
import math
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from MaxText.checkpointing import checkpoint_files
from MaxText.checkpointing.checksums import host_checksum
from MaxText.checkpointing.compatibility import checkpoint_metadata
from MaxText.config.schema import flatten
from MaxText.config.serialization import section_lines
from MaxText.conversion.tokenizer_copy import RUN_FOLDER_NAME
from MaxText.conversion.weight_source import WeightSource, unflatten
from MaxText.errors import UserError
from MaxText.storage.paths import LiteralPath

if TYPE_CHECKING:
    import orbax.checkpoint as ocp

CONFIG_YML = "config.yml"


def require_absent(target: Path) -> None:
    """Refuses an existing target, except an empty folder."""
    if re.match(r"\w+:/", str(target)):
        raise UserError(f"to={target} is in a bucket; write to a local disk and copy the result.")
    try:
        taken = target.exists() and not (target.is_dir() and not any(target.iterdir()))
    except OSError as error:
        raise UserError(f"to={target} cannot be used: {error.strerror}.") from error
    if taken:
        raise UserError(f"to={target} already exists. Remove it, or choose another path.")


@contextlib.contextmanager
def atomic_target(target: Path) -> Iterator[Path]:
    """Yields a staging path, renamed at the end and removed on errors."""
    target = Path(os.path.abspath(target))
    partial = target.parent / f".{target.name}.partial-{os.getpid()}"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        yield partial
        if target.is_dir():
            target.rmdir()
        partial.rename(target)
    except OSError as error:
        raise UserError(f"to={target} cannot be written: {error}.") from error
    finally:
        _remove(partial)


def _remove(path: Path) -> None:
    """Removes a path despite late writes of interrupted Orbax threads."""
    for _ in range(50):
        if os.path.isfile(path):
            path.unlink()
        shutil.rmtree(path, ignore_errors=True)
        if not os.path.lexists(path):
            return
        time.sleep(0.1)


class _LazyArray:
    """An array read on writing; `checksum` is "" until then."""

    def __init__(self, weights: WeightSource, name: str):
        self.shape = weights.model.parameters[name].shape
        self.dtype = weights.formats[name]
        self.size = math.prod(self.shape)
        self.nbytes = self.size * self.dtype.itemsize
        self.checksum = ""
        self._read = functools.partial(weights.read, name)

    def read(self) -> np.ndarray:
        """Returns the array and remembers its checksum."""
        array = self._read()
        assert (array.shape, array.dtype) == (self.shape, self.dtype), (array.shape, self.shape)
        self.checksum = host_checksum(array)
        return array


def _streaming_type_handlers(
    failures: list[BaseException],
) -> "ocp.type_handlers.TypeHandlerRegistry":
    """Returns Orbax's type handlers, extended by lazily read arrays.

    Orbax copies all arrays before writing: 2.9 GB instead of 1.1 GB for a model of 1.6 GB.
    `failures` receives exceptions from reading. Orbax ends the save for one, before it waits for
    files that are missing. Ctrl-C is not raised through Orbax: it would leave threads behind that
    block the exit for five minutes.
    """
    import orbax.checkpoint as ocp

    class LazyHandler(ocp.type_handlers.NumpyHandler):
        async def serialize(self, values, infos, args=None):
            args = args or [ocp.SaveArgs()] * len(values)
            for value, info, arg in zip(values, infos, args, strict=True):
                assert isinstance(value, _LazyArray)
                try:
                    array = value.read()
                except Exception as error:
                    failures.append(error)
                    raise
                except BaseException as interruption:
                    failures.append(interruption)
                    return []
                for written in await super().serialize([array], [info], [arg]):
                    written.result()
            return []

    return ocp.type_handlers.create_type_handler_registry(
        (_LazyArray, LazyHandler(deepcopy_host_arrays=False)),
        (jax.Array, ocp.type_handlers.ArrayHandler()),
    )


def write_run(
    folder: Path,
    weights: WeightSource,
    keys: Mapping[str, Any],
    comment: list[str],
    extra_metadata: Mapping[str, Any],
) -> None:
    """Writes a run folder.

    Args:
      folder: Must not exist.
      keys: The keys of its config.yml.
      comment: The lines at the top of config.yml.
      extra_metadata: Added to train.py's metadata of the checkpoint.
    """
    import orbax.checkpoint as ocp

    from MaxText.checkpointing import verified_save

    folder.mkdir()
    lazy_arrays = {name: _LazyArray(weights, name) for name in weights.model.parameters}
    failures: list[BaseException] = []
    registry = _streaming_type_handlers(failures)
    handlers = verified_save.handler_registry(
        checkpoint_files.ITEMS, type_handler_registry=registry
    )
    step = LiteralPath(os.path.abspath(folder / checkpoint_files.CHECKPOINTS / "0"))
    metadata = {
        **checkpoint_metadata(flatten(weights.config), unflatten(lazy_arrays)),
        checkpoint_files.PARAMETERS_ONLY: True,
        **extra_metadata,
    }
    try:
        with ocp.Checkpointer(
            ocp.CompositeCheckpointHandler(handler_registry=handlers)
        ) as checkpointer:
            items = ocp.args.PyTreeSave({"params": unflatten(lazy_arrays)})
            checkpointer.save(step, args=ocp.args.Composite(items=items))
    except Exception:
        if not failures:
            raise
    if failures:
        raise failures[0]
    checksums = {f"params/{name}": array.checksum for name, array in lazy_arrays.items()}
    stored = checkpoint_files.StoredCheckpoint(step / checkpoint_files.ITEMS, 0)
    stored.write_metadata(metadata, checksums)
    text = section_lines([f"# {line}".rstrip() for line in comment], keys)
    (folder / CONFIG_YML).write_text(text, encoding="utf-8")


def log_next_command(target: Path, tokenizer: list[str], log: Callable[[str], None]) -> None:
    """Reports the written files and how to train from them.

    Args:
      tokenizer: The files of the tokenizer, if one was copied.
    """
    copied = f", {RUN_FOLDER_NAME} ({', '.join(tokenizer)})" if tokenizer else ""
    log(f"Wrote {target}: {CONFIG_YML}, checkpoints/0{copied}")
    log(
        f"Train from it: python MaxText/train.py {target / CONFIG_YML} "
        f"load_parameters_path={target} run_name=NAME dataset_path=FOLDER"
    )
