"""Run folders with imported parameters as their only checkpoint.

    checkpoints/0/items       {params}, Orbax
    checkpoints/0/metadata    as written by train.py, with checksums, plus the import's record
    config.yml                model keys
    tokenizer/                tokenizer files

tokenizer/ exists only if the source has one.
"""

import contextlib
import math
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
from etils import epath

from MaxText.checkpointing import checkpoint_files
from MaxText.checkpointing.checksums import host_checksum
from MaxText.checkpointing.compatibility import checkpoint_metadata
from MaxText.config.schema import flatten
from MaxText.config.serialization import section_lines
from MaxText.conversion.tokenizer_copy import RUN_FOLDER_NAME
from MaxText.conversion.weight_source import WeightSource, unflatten
from MaxText.errors import UserError
from MaxText.storage.paths import LiteralPath

CONFIG_YML = "config.yml"
_WRITE_BYTES = 256 << 20  # of parameters in memory at once


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


def _write_arrays(folder: epath.Path, weights: WeightSource) -> dict[str, str]:
    """Writes the parameters as the items of a checkpoint; returns their checksums by name.

    Orbax gets a few arrays at a time, as it copies what it saves: at once, a model of 1.6 GB needs
    2.9 GB of memory.
    """
    import orbax.checkpoint.experimental.v1 as ocp

    from MaxText.checkpointing import verified_save

    context = ocp.Context()
    context.array.saving.use_zarr3 = False
    context.memory.deepcopy_host_arrays = False
    partial = folder.parent / "partial"
    checksums = {}
    with context:
        for names in _groups(weights):
            arrays = {name: weights.read(name) for name in names}
            checksums |= {name: host_checksum(array) for name, array in arrays.items()}
            ocp.partial.save(partial, {"params": unflatten(arrays)})
        ocp.partial.finalize(partial)
    # Orbax writes parts under one name only, that of its own training states.
    (partial / "state").rename(folder)
    partial.rmtree()
    verified_save.verify_arrays(folder)
    return checksums


def _groups(weights: WeightSource) -> Iterator[list[str]]:
    """Yields the names of all parameters, in groups of at most `_WRITE_BYTES`, or one parameter."""
    group: list[str] = []
    num_bytes = 0
    for name, spec in weights.model.parameters.items():
        size = math.prod(spec.shape) * weights.formats[name].itemsize
        if group and num_bytes + size > _WRITE_BYTES:
            yield group
            group = []
            num_bytes = 0
        group.append(name)
        num_bytes += size
    yield group


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
    folder.mkdir()
    step = LiteralPath(os.path.abspath(folder / checkpoint_files.CHECKPOINTS / "0"))
    step.mkdir(parents=True)
    checksums = _write_arrays(step / checkpoint_files.ITEMS, weights)
    specs = {
        name: jax.ShapeDtypeStruct(spec.shape, weights.formats[name])
        for name, spec in weights.model.parameters.items()
    }
    metadata = {
        **checkpoint_metadata(flatten(weights.config), unflatten(specs)),
        checkpoint_files.PARAMETERS_ONLY: True,
        **extra_metadata,
    }
    checksums = {f"params/{name}": checksum for name, checksum in checksums.items()}
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
