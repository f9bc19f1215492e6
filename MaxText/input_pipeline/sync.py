"""Forces files to disk, so that a rename never makes half-written data visible."""

import os
import secrets
from pathlib import Path

# Names of files that are being written end in a random number and this.
WRITING_SUFFIX = ".writing"


def sync_file(path: Path) -> None:
    """Blocks until the file's contents, or the folder's list of names, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def writing_name(path: Path) -> Path:
    """A name beside `path` to write to before `publish`; no two calls give the same.

    Two processes that write the same file (one of them given up for dead) do not disturb each
    other.
    """
    return path.with_name(f"{path.name}.{secrets.token_hex(8)}{WRITING_SUFFIX}")


def publish(writing: Path, path: Path) -> None:
    """Gives a complete file its final name once its contents are on disk."""
    sync_file(writing)
    writing.replace(path)


def write_whole(path: Path, contents: str) -> None:
    """Writes a small text file: under its name there is all of it or what was there before."""
    writing = writing_name(path)
    writing.write_text(contents, encoding="utf-8")
    publish(writing, path)
    sync_file(path.parent)
