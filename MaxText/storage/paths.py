"""Paths as users type them, local or in a bucket. Imports no jax."""

import functools
import importlib.util

from etils import epath

from MaxText.errors import UserError

# Orbax writes it last into a step in a bucket; a step without it is none.
COMMIT_MARK = "commit_success.txt"

_PROTOCOLS = ("gs", "gcs")


def is_bucket(path: object) -> bool:
    """Whether a path is that of an object store: no folders, no renaming, objects appear whole."""
    return "://" in str(path)


def path_of(text: str, key: str) -> epath.Path:
    """A local or remote path as a user typed it, with ~ written out.

    Args:
      key: the configuration key that holds it, for the message.

    Raises:
      UserError: a kind of storage that cannot be read, its package is missing, or ~NAME of nobody.
    """
    if text.startswith("gs://"):
        prepare_clients(f"{key}={text}")
    elif is_bucket(text):
        scheme = text.partition("://")[0]
        raise UserError(
            f"{key}={text}: storage of the kind {scheme}:// is not known here. Name a local path, "
            "or one that begins with gs://."
        )
    try:
        return epath.Path(text).expanduser()
    except RuntimeError as error:
        raise UserError(f"{key}={text}: {error}.") from error


def prepare_clients(what: str) -> None:
    """Makes fsspec, and with it etils.epath, ask buckets through BucketFileSystem.

    Args:
      what: needs a bucket, for the message.

    Raises:
      UserError: the package for it is missing.
    """
    if not _has_client():
        raise UserError(
            f"{what} needs the package gcsfs, which is not installed: pip install 'MaxText[gcs]'"
        )
    _register()


@functools.cache
def _has_client() -> bool:
    return importlib.util.find_spec("gcsfs") is not None


@functools.cache
def _register() -> None:
    import fsspec

    name = "MaxText.storage.file_system.BucketFileSystem"
    for protocol in _PROTOCOLS:
        fsspec.register_implementation(protocol, name, clobber=True)
