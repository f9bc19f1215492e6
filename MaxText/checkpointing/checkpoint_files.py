"""Files of a checkpoint: `<run>/checkpoints/<step>/{items,iter,metadata}`.

Listing works without Orbax, whose import takes a third of a second.
"""

import dataclasses
import errno
import functools
import hashlib
import itertools
import json
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from etils import epath

from MaxText.config.schema import SCHEMA_VERSION, dotted
from MaxText.errors import UserError
from MaxText.storage.errors import ObjectStoreError, is_storage_error
from MaxText.storage.paths import (
    COMMIT_MARK,
    check_checkpoint_path,
    is_object_store_path,
    parse_path,
)
from MaxText.value_types import JsonValue

CHECKPOINTS = "checkpoints"
ITEMS = "items"  # the train state, an Orbax PyTree
POSITION = "iter"  # JSON: data position
METADATA = "metadata"  # JSON: configuration, schema version, parameter hash
JSON_FILE = "metadata"  # Orbax 0's file name of a JSON item, which Orbax 1 reads, too
PARAMETERS_ONLY = "parameters_only"  # in METADATA: true if convert.py imported parameters

# Orbax writes these last if the folder cannot be renamed atomically.
ITEMS_FILES = ("_METADATA", "manifest.ocdbt")
BYTES_PER_GB = 10**9  # of the keys checkpoint_storage.*_gb
_CONCURRENT_REQUESTS = 32
# Metadata key of {"arrays": {path: checksum}, "position": SHA-256, "step": step, "metadata":
# SHA-256}.
_INTEGRITY = "integrity"


class CheckpointCorruptedError(Exception):
    """Raised for damage: a file is missing, truncated or malformed."""


class CheckpointMetadata(NamedTuple):
    """The metadata of a checkpoint, and what its files are verified with.

    Attributes:
      values: Of `compatibility.checkpoint_metadata` and the run; empty without a metadata file.
      checksums: Checksum of each array by path (checksums.py); None without a metadata file.
      position_sha256: Digest of the data position; None without a metadata file.
      step: The step after which the state was saved; None for parameters alone (an import).
    """

    values: dict[str, Any]
    checksums: dict[str, str] | None
    position_sha256: str | None
    step: int | None = None


@dataclasses.dataclass(frozen=True)
class StoredCheckpoint:
    """A checkpoint on disk; `step` is None for a moved `items` folder."""

    items: epath.Path
    step: int | None

    @property
    def folder(self) -> epath.Path:
        """The folder of the step."""
        return self.items.parent

    def __str__(self) -> str:
        return str(self.folder if self.step is not None else self.items)

    @functools.cached_property
    def metadata(self) -> CheckpointMetadata:
        """The metadata, read once; empty if the checkpoint has none.

        Raises CheckpointCorruptedError for damage, UserError for a newer version's checkpoint.
        """
        try:
            values = self._read_json(METADATA)
        except CheckpointCorruptedError:
            if (self.folder / METADATA).exists():
                raise
            return CheckpointMetadata(values={}, checksums=None, position_sha256=None)
        path = self.json_path(METADATA)
        integrity = values.get(_INTEGRITY)
        if not isinstance(integrity, dict):
            raise CheckpointCorruptedError(f"{path}: not the metadata of a checkpoint")
        saved_digest = integrity.pop("metadata", None)
        if _digest(values) != saved_digest:
            raise CheckpointCorruptedError(f"{path}: not what was saved (SHA-256 differs)")
        del values[_INTEGRITY]
        version = values.get("schema_version", SCHEMA_VERSION)
        if isinstance(version, int) and version > SCHEMA_VERSION:
            raise UserError(
                f"{self} was written by a newer version of this program (schema {version}, this "
                f"one reads up to {SCHEMA_VERSION}). Update the program."
            )
        if isinstance(values.get("config"), dict):
            values["config"] = dotted(values["config"])
        return CheckpointMetadata(
            values=values,
            checksums=integrity["arrays"],
            position_sha256=integrity["position"],
            step=integrity["step"],
        )

    def try_metadata(self) -> dict[str, Any]:
        """Returns the metadata, empty if damaged."""
        try:
            return self.metadata.values
        except CheckpointCorruptedError:
            return {}

    def missing_items(self) -> list[str]:
        """Returns the paths of the items that a complete checkpoint of a run has."""
        paths = (self.items, self.json_path(POSITION), self.json_path(METADATA))
        return [str(path) for path in paths if not path.exists()]

    def position(self) -> dict[str, Any] | None:
        """Returns the data position or None; raises like `metadata`."""
        position = self._read_json(POSITION)
        saved_digest = self.metadata.position_sha256
        if saved_digest is not None and _digest(position) != saved_digest:
            path = self.json_path(POSITION)
            raise CheckpointCorruptedError(f"{path}: not what was saved (SHA-256 differs)")
        return position or None

    def write_metadata(self, metadata: Mapping[str, Any], arrays: Mapping[str, str]) -> None:
        """Writes the metadata of arrays saved without a data position."""
        path = self.json_path(METADATA)
        path.parent.mkdir()
        path.write_text(json.dumps(with_digests(metadata, {}, arrays)), encoding="utf-8")

    def json_path(self, name: str) -> epath.Path:
        """Returns the path of a JSON item: POSITION or METADATA."""
        return self.folder / name / JSON_FILE

    def _read_json(self, name: str) -> dict[str, Any]:
        path = self.json_path(name)
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            if isinstance(error, ObjectStoreError):  # says nothing about the file
                raise
            if is_storage_error(error):
                raise unreadable_now(f"{path}: {error}") from error
            raise CheckpointCorruptedError(f"{path}: {error}") from error
        if not isinstance(value, dict):
            raise CheckpointCorruptedError(f"{path}: not a JSON object")
        return value


def unreadable_now(reason: str, *, is_transient: bool = True) -> ObjectStoreError:
    """Returns the error for failing storage, not blaming the checkpoint.

    Args:
      is_transient: Whether reading it again can help.
    """
    return ObjectStoreError(
        errno.EIO if is_transient else errno.EINVAL,
        f"cannot read a checkpoint now: {reason}. Nothing was changed; rerun the command to retry.",
    )


def with_digests(
    metadata: Mapping[str, Any],
    position: Mapping[str, Any],
    arrays: Mapping[str, str],
    step: int | None = None,
) -> dict[str, Any]:
    """Returns `metadata` with the step and checksums of arrays, data position and itself.

    They tell the files of one checkpoint from those of another.
    """
    integrity = {"arrays": dict(arrays), "position": _digest(position), "step": step}
    # A resumed run's metadata may be those of its checkpoint.
    values = {name: value for name, value in metadata.items() if name != _INTEGRITY}
    integrity["metadata"] = _digest({**values, _INTEGRITY: integrity})
    return {**values, _INTEGRITY: integrity}


def _digest(value: JsonValue) -> str:
    """Returns the SHA-256 of a JSON value, whatever the order of its keys."""
    plain = json.loads(json.dumps(value))  # normalizes tuples to lists and number keys to strings
    text = json.dumps(plain, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def finalized_steps(folder: epath.Path, known_steps: Collection[int] = ()) -> list[int]:
    """Returns the steps with a complete checkpoint, ascending.

    Args:
      known_steps: Steps that are known to be complete: storage is not asked about them.

    Killed saves are not listed: Orbax writes to `<step>.orbax-checkpoint-tmp` and renames it at the
    end; in object stores, which cannot rename, it writes a marker last.
    """
    step_folders = [child for child in list_dir(folder) if child.name.isdigit()]

    def is_complete(step_folder: epath.Path) -> bool:
        return int(step_folder.name) in known_steps or is_finalized(step_folder)

    with ThreadPoolExecutor(_CONCURRENT_REQUESTS) as pool:
        complete = itertools.compress(step_folders, pool.map(is_complete, step_folders))
        return sorted(int(step_folder.name) for step_folder in complete)


def incomplete_steps(folder: epath.Path) -> list[int]:
    """Returns the steps of which pieces were lost or deleted after the save.

    Empty for a bucket, where a killed save looks the same.
    """
    if is_object_store_path(folder):
        return []
    step_folders = [child for child in list_dir(folder) if child.name.isdigit() and child.is_dir()]
    return sorted(int(child.name) for child in step_folders if not is_finalized(child))


def list_dir(folder: epath.Path) -> list[epath.Path]:
    """Returns the contents of a folder, empty if it does not exist."""
    # Checking existence first would race: a bucket folder vanishes with its last object.
    try:
        return list(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def is_finalized(step_folder: epath.Path) -> bool:
    """Returns whether a checkpoint is complete, as far as its names say; OSError if unknown."""
    if is_object_store_path(step_folder):
        return (step_folder / COMMIT_MARK).exists()
    return (step_folder / ITEMS).is_dir()


def resolve_checkpoint(path: str, key: str) -> StoredCheckpoint:
    """Resolves a run, `checkpoints`, step or `items` folder to a checkpoint.

    Args:
      path: The folder; of a run or its checkpoints, the newest complete checkpoint is taken.
      key: The configuration key with this value, for messages.

    Raises:
      UserError: If there is no checkpoint, or storage fails.
    """
    folder_path = parse_path(path, key)
    if "://" not in path:
        folder_path = folder_path.absolute()  # Orbax requires absolute paths
    check_checkpoint_path(folder_path, key)
    try:
        for items in (folder_path, folder_path / ITEMS):
            if any((items / name).exists() for name in ITEMS_FILES):
                step = items.parent.name
                return StoredCheckpoint(items, int(step) if step.isdigit() else None)
        for folder in (folder_path / CHECKPOINTS, folder_path):
            if steps := finalized_steps(folder):
                return StoredCheckpoint(folder / str(steps[-1]) / ITEMS, steps[-1])
        absent = "" if folder_path.exists() else ", which does not exist"
        near_steps = ""
        for folder in (folder_path.parent, folder_path.parent.parent):
            if steps := finalized_steps(folder):
                omission = f" (the newest 10 of {len(steps)})" if len(steps) > 10 else ""
                near_steps = f"\n  Steps in {folder}: {', '.join(map(str, steps[-10:]))}{omission}."
                break
    except OSError as error:
        raise UserError(f"cannot read {key}={path}: {error.strerror or error}.") from error
    raise UserError(
        f"{key}: no checkpoint at {folder_path}{absent}.\n"
        "  Looked for: a run folder (<run>/checkpoints/<step>/items), its checkpoints folder, a "
        f"step folder, or its items.{near_steps}"
    )
