"""The JSON metadata of a checkpoint, stored next to its arrays."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from MaxText.checkpointing import layout
from MaxText.config.schema import SCHEMA_VERSION
from MaxText.errors import UserError
from MaxText.storage.bucket_errors import BucketFailure, is_storage_error

# Metadata key of {"arrays": {path: checksum}, "position": SHA-256, "metadata": SHA-256}.
_INTEGRITY = "integrity"


class Unreadable(Exception):
    """Raised for a damaged checkpoint: a file is missing, truncated or malformed."""


class Description(NamedTuple):
    """Metadata (empty if there is none) and checksums (None in older checkpoints)."""

    metadata: dict[str, Any]
    checksums: dict[str, str] | None
    position_sha256: str | None


def sealed(
    metadata: Mapping[str, Any], position: Mapping[str, Any], arrays: Mapping[str, str]
) -> dict[str, Any]:
    """Returns `metadata` with checksums of the arrays, the data position and itself."""
    content = {name: value for name, value in metadata.items() if name != _INTEGRITY}
    content[_INTEGRITY] = {"arrays": dict(arrays), "position": _digest(position)}
    return {**content, _INTEGRITY: {**content[_INTEGRITY], "metadata": _digest(content)}}


def write_metadata(
    stored: layout.Stored, metadata: Mapping[str, Any], arrays: Mapping[str, str]
) -> None:
    """Writes the metadata of arrays that were saved without a data position."""
    path = _path(stored, layout.METADATA)
    path.parent.mkdir()
    path.write_text(json.dumps(sealed(metadata, {}, arrays)))


def read_position(
    stored: layout.Stored, described: Description | None = None
) -> dict[str, Any] | None:
    """Returns the data position, or None if the run had none; raises like `describe`."""
    position = _read_json(stored, layout.POSITION)
    wanted = (described or describe(stored)).position_sha256
    if wanted is not None and _digest(position) != wanted:
        raise Unreadable(f"{_path(stored, layout.POSITION)}: not what was saved (SHA-256 differs)")
    return position or None


def metadata_if_any(stored: layout.Stored) -> dict[str, Any]:
    """Returns the metadata, empty if damaged."""
    try:
        return describe(stored).metadata
    except Unreadable:
        return {}


def describe(stored: layout.Stored, *, is_own: bool = False) -> Description:
    """Reads a checkpoint's metadata, which must exist if `is_own` (the run resumes from it).

    Raises Unreadable if damaged, UserError if a newer version of this program wrote it.
    """
    if not is_own and not (stored.folder / layout.METADATA).exists():
        return Description({}, None, None)
    metadata = _read_json(stored, layout.METADATA)
    integrity = metadata.get(_INTEGRITY)
    path = _path(stored, layout.METADATA)
    parts = [value for value in metadata.values() if isinstance(value, dict)]
    if integrity is None and any({"arrays", "metadata"} <= value.keys() for value in parts):
        raise Unreadable(f"{path}: its checksums have another name")  # a bit flip in the key's name
    if integrity is not None:
        arrays = integrity.get("arrays") if isinstance(integrity, dict) else None
        if not isinstance(arrays, dict) or not all(isinstance(x, str) for x in arrays.values()):
            raise Unreadable(f"{path}: not what was saved")
        kept = {name: value for name, value in integrity.items() if name != "metadata"}
        if _digest({**metadata, _INTEGRITY: kept}) != integrity.get("metadata"):
            raise Unreadable(f"{path}: not what was saved (SHA-256 differs)")
        del metadata[_INTEGRITY]
    version = metadata.get("schema_version", SCHEMA_VERSION)
    if isinstance(version, int) and version > SCHEMA_VERSION:
        raise UserError(
            f"{stored} was written by a newer version of this program (schema {version}, this one "
            f"reads up to {SCHEMA_VERSION}). Update the program."
        )
    if integrity is None:
        return Description(metadata, None, None)
    return Description(metadata, arrays, integrity.get("position", ""))


def _digest(value: Any) -> str:
    plain = json.loads(json.dumps(value))  # normalizes tuples to lists and number keys to strings
    return hashlib.sha256(
        json.dumps(plain, sort_keys=True, separators=(",", ":")).encode()
    ).hexdigest()


def _path(stored: layout.Stored, name: str) -> Any:
    return stored.folder / name / "metadata"  # Orbax's file name of a JSON item


def _read_json(stored: layout.Stored, name: str) -> dict[str, Any]:
    path = _path(stored, name)
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        if isinstance(error, BucketFailure):  # says nothing about the file
            raise
        if is_storage_error(error):
            raise BucketFailure(
                f"a checkpoint cannot be read now: {path}: {error}. Nothing was changed; the same "
                "command tries again."
            ) from error
        raise Unreadable(f"{path}: {error}") from error
    if not isinstance(value, dict):
        raise Unreadable(f"{path}: not a JSON object")
    return value
