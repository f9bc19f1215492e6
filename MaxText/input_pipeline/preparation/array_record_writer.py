"""Writes ArrayRecord files: `ArrayRecordWriter`. Imports no jax."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from array_record.python import (
    array_record_module,  # pyright: ignore[reportAttributeAccessIssue]
)

# Grain and our reader fetch single records: groups of 1 keep each one separately readable.
_OPTIONS = "group_size:1"


class ArrayRecordWriter:
    """Writes an ArrayRecord file; what goes wrong is an OSError, as with other files."""

    def __init__(self, path: Path):
        """Creates the file, replacing what was there.

        Raises:
          OSError: it cannot be made.
        """
        with _failures_of_the_disk():
            self._writer: Any = array_record_module.ArrayRecordWriter(str(path), _OPTIONS)

    def write(self, record: bytes) -> None:
        """Appends one record.

        Raises:
          OSError: the disk is full, or fails.
        """
        with _failures_of_the_disk():
            self._writer.write(record)

    def close(self) -> None:
        """Writes what is left and the index; only then the file can be read.

        Raises:
          OSError: the disk is full, or fails.
        """
        with _failures_of_the_disk():
            self._writer.close()


@contextmanager
def _failures_of_the_disk() -> Iterator[None]:
    try:
        yield
    except (RuntimeError, ValueError) as error:
        raise OSError(str(error)) from error
