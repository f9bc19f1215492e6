"""Paths as users type them, local or in a bucket."""

import glob
import importlib.util
import re
from collections.abc import Iterator

from etils import epath
from etils.epath import gpath

from MaxText.errors import UserError

# Orbax writes this last into a step in a bucket; a step without it is incomplete.
COMMIT_MARK = "commit_success.txt"


@epath.register_path_cls
class LiteralPath(gpath.PosixGPath):
    """A path, local or gs://, whose own name is never read as a pattern.

    etils and Orbax match `glob` against the whole path: in a folder named `a[1]` they find nothing,
    and in `a*` the files of other runs. Folders derived from this one, also by Orbax, are of the
    same class.
    """

    def glob(self, pattern: str) -> Iterator["LiteralPath"]:
        """Yields the matches of `pattern` in this folder."""
        escaped = gpath.PosixGPath(glob.escape(str(self)))
        return (type(self)(path) for path in escaped.glob(pattern))


def is_object_store_path(path: object) -> bool:
    """Returns whether a path is a URL such as gs://bucket/folder."""
    return "://" in str(path)


def natural_key(name: str) -> list[tuple[int, int, str]]:
    """Returns a sort key for numbers by value: shard-2 before shard-10."""
    parts = re.split(r"(\d+)", name)
    return [(1, int(part), part) if part.isdecimal() else (0, 0, part) for part in parts]


def parse_path(text: str, key: str) -> epath.Path:
    """Returns the path that a user typed, local or gs://, with ~ expanded.

    Args:
      text: The path as typed.
      key: Its configuration key, for messages.

    Raises:
      UserError: Storage of another kind, or the home folder is unknown.
    """
    if text.startswith("gs://"):
        register_filesystems(f"{key}={text}")
    elif is_object_store_path(text):
        scheme = text.partition("://")[0]
        raise UserError(
            f"{key}={text}: storage of the kind {scheme}:// is not known here. Name a local path, "
            "or one that begins with gs://."
        )
    try:
        return LiteralPath(text).expanduser()
    except RuntimeError as error:
        raise UserError(f"{key}={text}: {error}.") from error


def check_checkpoint_path(path: object, key: str) -> None:
    """Refuses a path below which no checkpoint could be written or read; UserError names `key`."""
    if "\\" in str(path):
        raise UserError(
            f"{key}: checkpoints cannot be stored below {path}, because TensorStore, which writes "
            "and reads them, takes the backslash for a slash. Choose a path without a backslash."
        )


def register_filesystems(requested_by: str) -> None:
    """Registers RetryingGCSFileSystem with fsspec and etils.epath for gs://.

    Args:
      requested_by: The path that needs it, for the message of the UserError without gcsfs.
    """
    if importlib.util.find_spec("gcsfs") is None:
        raise UserError(
            f"{requested_by} needs the package gcsfs, which is not installed: "
            "pip install 'jaxpretrain[gcs]'"
        )
    import fsspec

    name = "MaxText.storage.file_system.RetryingGCSFileSystem"
    for protocol in ("gs", "gcs"):
        fsspec.register_implementation(protocol, name, clobber=True)
