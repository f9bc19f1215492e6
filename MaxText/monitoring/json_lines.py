"""Files of JSON objects, one a line, that survive a crash and can be cut back to a step."""

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from etils import epath


class JsonLines:
    """A growing file of JSON rows. Locally a row is on its way to disk when `append` returns.

    Object stores (gs://) cannot append: there the rows are kept in memory and the whole file is
    written by `flush`.
    """

    def __init__(self, path: str | epath.Path, keep: Callable[[dict[str, Any]], bool]):
        """Opens the file; a last line cut off by a crash is dropped.

        Args:
          path: created if absent, with its folder.
          keep: rows of an existing file for which it is false are removed, all at once.
        """
        self.path = epath.Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        kept = self._cut_back(keep)
        self._lines: list[str] = []
        self._changed = False
        self._file = None
        if self._is_object_store():
            self._lines = kept
        else:
            # One write per line, so that a killed process loses no finished row.
            self._file = open(self.path, "a", buffering=1)  # noqa: SIM115

    def append(self, row: Mapping[str, Any]) -> None:
        """Adds a row. Numbers that JSON does not have (NaN, infinity) become null."""
        line = json.dumps({name: _plain(value) for name, value in row.items()}, allow_nan=False)
        if self._file is None:
            self._lines.append(line)
            self._changed = True
        else:
            self._file.write(line + "\n")

    def flush(self) -> None:
        """Makes rows durable: they survive the machine locally, the process in an object store."""
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())
        elif self._changed:
            self.path.write_text("".join(line + "\n" for line in self._lines))
            self._changed = False

    def close(self) -> None:
        """Flushes and closes. Safe to call twice."""
        if self._file is None or not self._file.closed:
            self.flush()
        if self._file is not None:
            self._file.close()

    def _is_object_store(self) -> bool:
        return str(self.path).startswith("gs://")

    def _cut_back(self, keep: Callable[[dict[str, Any]], bool]) -> list[str]:
        if not self.path.exists():
            return []
        text = self.path.read_text()
        kept = [line for line, row in _rows(text.split("\n")) if keep(row)]
        wanted = "".join(line + "\n" for line in kept)
        if wanted != text:
            temporary = self.path.parent / f"{self.path.name}.rewriting"
            temporary.write_text(wanted)
            temporary.replace(self.path)
        return kept


def read_rows(path: str | epath.Path) -> list[dict[str, Any]]:
    """All whole rows of a file; none if it does not exist."""
    path = epath.Path(path)
    return [row for _, row in _rows(path.read_text().split("\n"))] if path.exists() else []


def stream_rows(path: str | epath.Path) -> Iterator[dict[str, Any]]:
    """The same one at a time, without holding the file: that of a long run is large."""
    path = epath.Path(path)
    if path.exists():
        with path.open() as lines:
            yield from (row for _, row in _rows(lines))


def _rows(lines: Iterable[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Lines with what they hold, one at a time: those of a long run are many."""
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:
            continue  # cut off by a crash, or empty
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
