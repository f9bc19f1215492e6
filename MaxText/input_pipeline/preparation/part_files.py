"""Tokens on their way into a data set: what one unit gives to one split. Imports no jax.

<name>.tokens    ids, little-endian, documents end to end with their control ids
<name>.lengths   int64, ids of each document
<name>.rows      int64, row of each document in its source file
"""

import array
import contextlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pydantic

from MaxText.input_pipeline.sync import publish, writing_name

_TOKENS, _LENGTHS, _ROWS = ".tokens", ".lengths", ".rows"

# Ids held in memory before they are written.
_PENDING_TOKENS = 2**20


class Part(pydantic.BaseModel):
    """What the files of a part hold.

    Attributes:
      name: their path below the folder of parts, without ending.
      num_tokens: ids, control ids included.
      num_documents: documents.
      num_text_bytes: UTF-8 bytes of the text behind them.
      source_files: (first document, name) of each source file, in order.
    """

    model_config = pydantic.ConfigDict(frozen=True)

    name: str
    num_tokens: int
    num_documents: int
    num_text_bytes: int
    source_files: tuple[tuple[int, str], ...]

    def is_whole(self, folder: Path, dtype: np.dtype) -> bool:
        """Whether its files are there and as long as they should be; without documents it has
        none."""
        if self.num_documents == 0:
            return True
        expected = {
            _TOKENS: self.num_tokens * dtype.itemsize,
            _LENGTHS: self.num_documents * 8,
            _ROWS: self.num_documents * 8,
        }
        for ending, size in expected.items():
            path = folder / (self.name + ending)
            if not path.is_file() or path.stat().st_size != size:
                return False
        return True

    def tokens(self, folder: Path, dtype: np.dtype, start: int, stop: int) -> np.ndarray:
        """Ids [stop - start] of the part from `start` on."""
        path = folder / (self.name + _TOKENS)
        tokens = np.fromfile(path, dtype, count=stop - start, offset=start * dtype.itemsize)
        assert tokens.size == stop - start, (path, start, stop, tokens.size)
        return tokens

    def lengths(self, folder: Path) -> np.ndarray:
        """int64 [num_documents]: ids of each document."""
        return np.fromfile(folder / (self.name + _LENGTHS), np.int64)

    def rows(self, folder: Path) -> np.ndarray:
        """int64 [num_documents]: row of each document in its source file."""
        return np.fromfile(folder / (self.name + _ROWS), np.int64)


class PartWriter:
    """Appends documents to a part.

    Memory: a few MB of ids, and 16 bytes per document.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        dtype: np.dtype,
        before: Sequence[int] = (),
        after: Sequence[int] = (),
    ):
        """Begins the part; its files appear under their names in `finish`.

        Args:
          folder: of the parts; exists.
          name: of this part.
          dtype: type that the ids are stored in.
          before, after: control ids around each document.
        """
        self._name = name
        self._dtype = dtype
        self._before = np.array(before, dtype)
        self._after = np.array(after, dtype)
        self._paths = {ending: folder / (name + ending) for ending in (_TOKENS, _LENGTHS, _ROWS)}
        self._writing = {ending: writing_name(path) for ending, path in self._paths.items()}
        self._tokens = self._writing[_TOKENS].open("wb")
        self._pending: list[np.ndarray] = []
        self._num_pending = self._num_tokens = self._num_text_bytes = 0
        self._lengths = array.array("q")
        self._rows = array.array("q")
        self._source_files: list[tuple[int, str]] = []

    def add(self, ids_N: np.ndarray, num_text_bytes: int, file: str, row: int) -> None:
        """Appends one document.

        Args:
          ids_N: its ids [N] without control ids.
          num_text_bytes: UTF-8 bytes of its text.
          file, row: where it comes from.
        """
        assert ids_N.ndim == 1, ids_N.shape
        length = len(ids_N) + len(self._before) + len(self._after)
        assert length > 0
        if not self._source_files or self._source_files[-1][1] != file:
            self._source_files.append((len(self._lengths), file))
        self._lengths.append(length)
        self._rows.append(row)
        self._num_text_bytes += num_text_bytes
        self._pending += (self._before, ids_N, self._after)
        self._num_pending += length
        if self._num_pending >= _PENDING_TOKENS:
            self._write()

    def _write(self) -> None:
        if self._pending:
            tokens = np.concatenate(self._pending)
            assert tokens.max() <= np.iinfo(self._dtype).max, "an id does not fit its stored type"
            self._tokens.write(tokens.astype(self._dtype).data)
        self._num_tokens += self._num_pending
        self._pending, self._num_pending = [], 0

    def finish(self) -> Part:
        """Writes what is left; the files are on disk and have their names then.

        Without documents there are no files: a small unit often has none that is held out.
        """
        self._write()
        self._tokens.close()
        if not self._lengths:
            self._writing[_TOKENS].unlink()
            return Part(
                name=self._name, num_tokens=0, num_documents=0, num_text_bytes=0, source_files=()
            )
        for ending, numbers in ((_LENGTHS, self._lengths), (_ROWS, self._rows)):
            self._writing[ending].write_bytes(numbers.tobytes())
        for ending, path in self._paths.items():
            publish(self._writing[ending], path)
        return Part(
            name=self._name,
            num_tokens=self._num_tokens,
            num_documents=len(self._lengths),
            num_text_bytes=self._num_text_bytes,
            source_files=tuple(self._source_files),
        )

    def give_up(self) -> None:
        """Deletes what was written."""
        # On a full disk what is still buffered cannot be written, and need not be.
        with contextlib.suppress(OSError):
            self._tokens.close()
        for path in self._writing.values():
            path.unlink(missing_ok=True)
