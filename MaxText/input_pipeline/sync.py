"""Forces files to disk, so that a rename never makes half-written data visible."""

import os
from pathlib import Path


def sync_file(path: Path) -> None:
    """Blocks until the file's contents, or the folder's list of names, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
