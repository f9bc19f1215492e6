"""Paths as users type them, local or in a bucket."""

import importlib.util
import re

from etils import epath

from MaxText.errors import UserError

# Orbax writes this last into a step in a bucket; a step without it is incomplete.
COMMIT_MARK = "commit_success.txt"


def is_object_store_path(path: object) -> bool:
    return "://" in str(path)


def natural_key(name: str) -> list[tuple[int, int, str]]:
    """Returns a sort key for numbers by value: shard-2 before shard-10."""
    parts = re.split(r"(\d+)", name)
    return [(1, int(part), part) if part.isdecimal() else (0, 0, part) for part in parts]


def parse_path(text: str, key: str) -> epath.Path:
    """Returns a user's local or gs:// path; UserError names `key`."""
    if text.startswith("gs://"):
        register_filesystems(f"{key}={text}")
    elif is_object_store_path(text):
        scheme = text.partition("://")[0]
        raise UserError(
            f"{key}={text}: storage of the kind {scheme}:// is not known here. Name a local path, "
            "or one that begins with gs://."
        )
    try:
        return epath.Path(text).expanduser()
    except RuntimeError as error:
        raise UserError(f"{key}={text}: {error}.") from error


def register_filesystems(what: str) -> None:
    """Registers RetryingGCSFileSystem with fsspec and etils.epath."""
    if importlib.util.find_spec("gcsfs") is None:
        raise UserError(
            f"{what} needs the package gcsfs, which is not installed: pip install 'MaxText[gcs]'"
        )
    import fsspec

    name = "MaxText.storage.file_system.RetryingGCSFileSystem"
    for protocol in ("gs", "gcs"):
        fsspec.register_implementation(protocol, name, clobber=True)
