"""What a checkpoint says of itself, in JSON beside its arrays. Imports no jax."""

import json
from typing import Any

from MaxText.checkpointing import layout
from MaxText.configuration.schema import SCHEMA_VERSION
from MaxText.errors import UserError


class Unreadable(Exception):
    """A checkpoint is damaged: a file is missing, truncated or not what it should be."""


def read_position(stored: layout.Stored) -> dict[str, Any] | None:
    """The data position saved with the state, or None if the run had none.

    Raises:
      Unreadable: the file is damaged or missing.
    """
    return _read_json(stored, layout.POSITION) or None


def read_metadata(stored: layout.Stored) -> dict[str, Any]:
    """What `checkpoint_metadata` wrote.

    Raises:
      Unreadable: the file is damaged or missing.
      UserError: a newer version of this program wrote it.
    """
    metadata = _read_json(stored, layout.METADATA)
    version = metadata.get("schema_version", SCHEMA_VERSION)
    if version > SCHEMA_VERSION:
        raise UserError(
            f"{stored} was written by a newer version of this program (schema {version}, this one "
            f"reads up to {SCHEMA_VERSION}). Update the program."
        )
    return metadata


def _read_json(stored: layout.Stored, name: str) -> dict[str, Any]:
    path = stored.folder / name / "metadata"  # Orbax's name for the file of a JSON item
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise Unreadable(f"{path}: {error}") from error
    if not isinstance(value, dict):
        raise Unreadable(f"{path}: not a JSON object")
    return value


def metadata_if_any(stored: layout.Stored) -> dict[str, Any]:
    """What a checkpoint says of itself; empty where it says nothing that can be read."""
    try:
        return read_metadata(stored)
    except Unreadable:
        return {}
