"""Writer of ArrayRecord files."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from array_record.python import (
    array_record_module,  # pyright: ignore[reportAttributeAccessIssue]
)

# Groups of 1 keep each record separately readable, for Grain's random access.
_OPTIONS = "group_size:1"


class ArrayRecordWriter:
    """Writes an ArrayRecord file; disk failures raise OSError."""

    def __init__(self, path: Path):
        with _failures_of_the_disk():
            self._writer: Any = array_record_module.ArrayRecordWriter(str(path), _OPTIONS)

    def write(self, record: bytes) -> None:
        with _failures_of_the_disk():
            self._writer.write(record)

    def close(self) -> None:
        """Writes the index, without which the file cannot be read."""
        with _failures_of_the_disk():
            self._writer.close()


@contextmanager
def _failures_of_the_disk() -> Iterator[None]:
    try:
        yield
    except (RuntimeError, ValueError) as error:
        raise OSError(str(error)) from error
