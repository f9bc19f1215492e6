"""Files of JSON objects, one a line, that survive a crash and can be cut back to a step."""

import json
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, AnyStr

from etils import epath

from MaxText.buckets.paths import is_bucket
from MaxText.monitoring.latest_object import LatestObject

# The longest that the end of a run waits for what records and shows it elsewhere.
SECONDS_TO_CLOSE = 60.0


class JsonLines:
    """A growing file of JSON rows. Locally a row is on its way to disk when `append` returns.

    Object stores (gs://) cannot append: there the rows are kept in memory, and a thread writes the
    whole file after `flush`. Failures there cost a warning, and the next `flush` tries again.
    """

    def __init__(self, path: str | epath.Path, keep: Callable[[dict[str, Any]], bool]):
        """Opens the file; a last line cut off by a crash is dropped, and so is what is no row.

        Args:
          path: created if absent, with its folder.
          keep: rows of an existing file for which it is false are removed, all at once.
        """
        self.path = epath.Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._object: LatestObject | None = None
        self._changed = False  # since the object was handed over
        self._file = None
        self._lines = self._open(keep)
        if self._is_object_store():
            self._object = LatestObject(self.path)

    def _open(self, keep: Callable[[dict[str, Any]], bool]) -> list[str]:
        kept = self._kept(keep)
        if self._is_object_store():
            return kept
        # One write per line, so that a killed process loses no finished row.
        self._file = open(self.path, "a", buffering=1)  # noqa: SIM115
        return []

    def cut_back(self, keep: Callable[[dict[str, Any]], bool]) -> None:
        """Removes the rows for which `keep` is false, all at once."""
        if self._file is None:
            self._lines = [line for line, row in _rows(self._lines) if keep(row)]
            self._changed = True
        else:
            self.close()
            self._open(keep)

    def append(self, row: Mapping[str, Any]) -> None:
        """Adds a row. Numbers that JSON does not have (NaN, infinity) become null."""
        line = json.dumps({name: _plain(value) for name, value in row.items()}, allow_nan=False)
        if self._file is None:
            self._lines.append(line)
            self._changed = True
        else:
            self._file.write(line + "\n")

    def flush(self) -> None:
        """Makes rows durable: locally at once, in an object store soon, see `settle`."""
        if self._object is not None:
            if self._changed:
                # A copy, as rows may come or go while it is written.
                lines = list(self._lines)
                self._object.write(lambda: "".join(f"{line}\n" for line in lines).encode())
                self._changed = False
        elif self._file is not None and not self._file.closed:
            self._file.flush()
            os.fsync(self._file.fileno())

    def settle(self, until: float) -> None:
        """Waits until what was flushed is durable, or could not be written now.

        Args:
          until: of time.monotonic, when to wait no longer.
        """
        if self._object is not None:
            self._object.settle(until)

    def close(self) -> None:
        """Flushes and closes; the rows in an object store are waited for. Safe to call twice."""
        if self._object is not None:
            self.flush()
            self._object.close(time.monotonic() + SECONDS_TO_CLOSE)
        elif self._file is not None:
            self.flush()
            self._file.close()

    def _is_object_store(self) -> bool:
        return is_bucket(self.path)

    def _kept(self, keep: Callable[[dict[str, Any]], bool]) -> list[str]:
        if not self.path.exists():
            return []
        content = self.path.read_bytes()
        kept = [line for line, row in _rows(content.split(b"\n")) if keep(row)]
        wanted = b"".join(line + b"\n" for line in kept)
        if wanted != content:
            temporary = self.path.parent / f"{self.path.name}.rewriting"
            temporary.write_bytes(wanted)
            temporary.replace(self.path)
        return [line.decode() for line in kept]


def read_rows(path: str | epath.Path) -> list[dict[str, Any]]:
    """All whole rows of a file; none if it does not exist."""
    path = epath.Path(path)
    return [row for _, row in _rows(path.read_bytes().split(b"\n"))] if path.exists() else []


def stream_rows(path: str | epath.Path) -> Iterator[dict[str, Any]]:
    """The same one at a time, without holding the file: that of a long run is large."""
    path = epath.Path(path)
    if path.exists():
        with path.open("rb") as lines:
            yield from (row for _, row in _rows(lines))


def _rows(lines: Iterable[AnyStr]) -> Iterator[tuple[AnyStr, dict[str, Any]]]:
    """Lines with what they hold, one at a time: those of a long run are many."""
    for line in lines:
        try:
            # Left to itself, json guesses the encoding of bytes.
            row = json.loads(line.decode() if isinstance(line, bytes) else line)
        except (ValueError, RecursionError):
            continue  # cut off by a crash, damaged, or empty
        if isinstance(row, dict):
            yield line, row


def _plain(value: Any) -> Any:
    """A value as JSON has it: scalars of NumPy and JAX become numbers."""
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, str | int | float | bool | None) else str(value)
