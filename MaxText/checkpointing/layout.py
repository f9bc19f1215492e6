"""Checkpoint layout: `<run>/checkpoints/<step>/{items,iter,metadata}`.

Listing works without Orbax, whose import takes a third of a second.
"""

import dataclasses
from concurrent.futures import ThreadPoolExecutor

from etils import epath

from MaxText.errors import UserError
from MaxText.storage.paths import COMMIT_MARK, is_bucket, path_of

CHECKPOINTS = "checkpoints"
ITEMS = "items"  # the train state, an Orbax PyTree
POSITION = "iter"  # JSON: data position
METADATA = "metadata"  # JSON: configuration, schema version, parameter hash
PARAMETERS_ONLY = "parameters_only"  # in METADATA: true if convert.py imported parameters

# Orbax writes these last if the folder cannot be renamed atomically.
_ITEMS_FILES = ("_METADATA", "manifest.ocdbt")
_PARALLEL_REQUESTS = 32


@dataclasses.dataclass(frozen=True)
class Stored:
    """A checkpoint on disk; `step` is None for a moved `items` folder."""

    items: epath.Path
    step: int | None

    @property
    def folder(self) -> epath.Path:
        return self.items.parent

    def __str__(self) -> str:
        return str(self.folder if self.step is not None else self.items)


def complete_steps(folder: epath.Path) -> list[int]:
    """Returns the steps with a complete checkpoint, ascending.

    Killed saves are not listed: Orbax writes to `<step>.orbax-checkpoint-tmp` and renames it at the
    end; in object stores, which cannot rename, it writes a marker last.
    """
    saved = [child for child in children(folder) if child.name.isdigit()]
    if is_bucket(folder) and saved:
        with ThreadPoolExecutor(_PARALLEL_REQUESTS) as pool:
            whole = list(pool.map(is_complete, saved))
    else:
        whole = map(is_complete, saved)
    return sorted(int(child.name) for child, is_whole in zip(saved, whole, strict=True) if is_whole)


def children(folder: epath.Path) -> list[epath.Path]:
    """Returns the contents of a folder, empty if it does not exist.

    Checking existence first would race: a bucket folder vanishes with its last object.
    """
    try:
        return list(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def is_complete(step_folder: epath.Path) -> bool:
    if is_bucket(step_folder):
        return (step_folder / COMMIT_MARK).exists()
    return (step_folder / ITEMS).is_dir()


def withdraw(step_folder: epath.Path, name: str) -> epath.Path:
    """Makes a step incomplete atomically, renaming it if possible; returns the folder to delete."""
    if is_bucket(step_folder):
        (step_folder / COMMIT_MARK).unlink(missing_ok=True)
        return step_folder
    return step_folder.rename(step_folder.parent / name)


def find(path: str, key: str) -> Stored:
    """Resolves a run, `checkpoints`, step or `items` folder to a checkpoint (the newest of a run).

    Raises UserError, which lists nearby steps, if nothing is there or storage fails.
    """
    try:
        return _find(path, key)
    except OSError as error:
        raise UserError(f"{key}={path} cannot be read: {error.strerror or error}.") from error


def _find(path: str, key: str) -> Stored:
    given = path_of(path, key)
    if "://" not in path:
        given = given.absolute()  # Orbax requires absolute paths
    if any((given / name).exists() for name in _ITEMS_FILES):
        name = given.parent.name
        return Stored(given, int(name) if name.isdigit() else None)
    if any((given / ITEMS / name).exists() for name in _ITEMS_FILES):
        return Stored(given / ITEMS, int(given.name) if given.name.isdigit() else None)
    for folder in (given / CHECKPOINTS, given):
        if steps := complete_steps(folder):
            return Stored(folder / str(steps[-1]) / ITEMS, steps[-1])
    raise UserError(_nothing_found(given, key))


def _nothing_found(given: epath.Path, key: str) -> str:
    lines = [
        f"{key}: no checkpoint at {given}"
        + ("" if given.exists() else ", which does not exist")
        + ".",
        "  Looked for: a run folder (<run>/checkpoints/<step>/items), its checkpoints folder, a "
        "step folder, or its items.",
    ]
    for folder in (given.parent, given.parent.parent):
        if steps := complete_steps(folder):
            shown = ", ".join(map(str, steps[-10:]))
            more = f" (the newest 10 of {len(steps)})" if len(steps) > 10 else ""
            lines.append(f"  Steps in {folder}: {shown}{more}.")
            break
    return "\n".join(lines)
