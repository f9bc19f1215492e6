"""Token streams over flat files of ids: Megatron's .bin, and data sets prepared as `bin`."""

import collections
import mmap
import threading
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from MaxText.errors import UserError
from MaxText.input_pipeline.data_errors import BadRecord
from MaxText.input_pipeline.storage import is_url, local_path, open_file, version
from MaxText.input_pipeline.token_store.healing import check_sizes

# Mapped files at once: a map keeps its file open.
_MOST_MAPPED = 128


class FlatFile(NamedTuple):
    """One file of ids: its path, and the token of the stream that it begins with."""

    path: str
    first_token: int


class FlatStream:
    """The ids of some files, end to end. See TokenStream.

    Local files are mapped, others read by ranges, those of one call at the same time.
    """

    def __init__(
        self,
        files: Sequence[FlatFile],
        dtype: np.dtype,
        document_offsets: np.ndarray,
        look: bool = True,
    ):
        """Checks the sizes of the files and opens none.

        Args:
          files: in the order of their tokens, without gaps.
          dtype: integer type of a stored id, little-endian.
          document_offsets: int64 [D + 1]: first token of each document, then the end.
          look: whether to look at the sizes.

        Raises:
          UserError: a file is missing or has another size than its tokens need.
        """
        assert dtype.kind in "iu", dtype
        self._files = [file.path for file in files]
        self._dtype = dtype
        self.document_offsets = document_offsets
        self._num_tokens = int(document_offsets[-1])
        self._first = np.array([*(file.first_token for file in files), self._num_tokens], np.int64)
        assert self._first[0] == 0, self._first
        for path, expected in zip(self._files, np.diff(self._first).tolist(), strict=True):
            size = version(path)[0] if look else expected * dtype.itemsize
            if size != expected * dtype.itemsize:
                raise UserError(
                    f"{path} has {size} bytes, where its {expected} tokens take "
                    f"{expected * dtype.itemsize}: it was cut short, or belongs to another index. "
                    "Copy the data set again."
                )
        self._start()

    def check(self, given_up: Collection[str] = ()) -> None:
        """See TokenStream."""
        sizes = np.diff(self._first) * self._dtype.itemsize
        check_sizes(self._files, sizes.tolist(), given_up)

    def _start(self) -> None:
        self._maps: collections.OrderedDict[int, _MappedFile] = collections.OrderedDict()
        self._lock = threading.Lock()

    def __getstate__(self) -> dict:
        state = self.__dict__.copy()
        del state["_maps"], state["_lock"]
        return state

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        self._start()

    def __len__(self) -> int:
        return self._num_tokens

    def document_name(self, document: int) -> str:
        """`corpus.bin, document 17`: counted from 0 over all files."""
        start = int(self.document_offsets[document])
        file = max(0, int(np.searchsorted(self._first[:-1], start, side="right")) - 1)
        return f"{self._files[file].rsplit('/', 1)[-1]}, document {document}"

    def ranges(self, places: Sequence[tuple[int, int]]) -> list[np.ndarray]:
        """Reads pieces of the stream.

        Args:
          places: pairs (start, stop), 0 <= start <= stop <= len(stream).

        Returns:
          int32 arrays [stop - start].

        Raises:
          BadRecord: a file is gone or was cut short.
        """
        if places and len(self._files) == 1 and not is_url(self._files[0]):
            ids = self._map(0, min(start for start, _ in places))
            assert all(0 <= start <= stop <= ids.size for start, stop in places), places
            return [ids[start:stop].astype(np.int32) for start, stop in places]
        pieces = [np.empty(stop - start, np.int32) for start, stop in places]
        remote: dict[int, list[tuple[np.ndarray, int]]] = {}
        for piece, (start, stop) in zip(pieces, places, strict=True):
            for file, first, part in self._parts(piece, start, stop):
                if is_url(self._files[file]):
                    remote.setdefault(file, []).append((part, first))
                else:
                    part[:] = self._map(file, first)[first : first + part.size]
        for file, parts in remote.items():
            self._fetch(file, parts)
        return pieces

    def gather(self, starts_B: np.ndarray, length: int) -> np.ndarray:
        """Reads pieces of one length by a single copy per file.

        Args:
          starts_B: int64 [B], first token of each piece, start + length <= len(stream).
          length: tokens of each piece.

        Returns:
          int32 [B, length].

        Raises:
          BadRecord: a file is gone or was cut short.
        """
        starts_B = np.asarray(starts_B, np.int64)
        assert not starts_B.size or (
            starts_B.min() >= 0 and starts_B.max() + length <= self._num_tokens
        ), (starts_B, length)
        pieces = np.empty((starts_B.size, length), np.int32)
        files = np.searchsorted(self._first[:-1], starts_B, side="right") - 1
        within = starts_B + length <= self._first[files + 1]
        for file in np.unique(files[within]).tolist() if length else ():
            chosen = np.flatnonzero(within & (files == file))
            first = int(self._first[file])
            if is_url(self._files[file]):
                rows = chosen.tolist()
                self._fetch(file, [(pieces[row], int(starts_B[row]) - first) for row in rows])
                continue
            ids = self._map(file, int(starts_B[chosen].min()) - first)
            windows = np.lib.stride_tricks.sliding_window_view(ids, length)
            pieces[chosen] = windows[starts_B[chosen] - first]
        rows = np.flatnonzero(~within).tolist()
        places = [(int(starts_B[row]), int(starts_B[row]) + length) for row in rows]
        for row, piece in zip(rows, self.ranges(places), strict=True):
            pieces[row] = piece
        return pieces

    def _parts(
        self, piece: np.ndarray, start: int, stop: int
    ) -> Iterator[tuple[int, int, np.ndarray]]:
        """(file, first token in it, the part of `piece` for its tokens) of tokens [start, stop)."""
        assert 0 <= start <= stop <= self._num_tokens, (start, stop, self._num_tokens)
        file = int(np.searchsorted(self._first[:-1], start, side="right")) - 1
        at = start
        while at < stop:
            first, end = int(self._first[file]), int(self._first[file + 1])
            until = min(stop, end)
            if at < until:
                yield file, at - first, piece[at - start : until - start]
            at = until
            file += 1

    def _fetch(self, file: int, parts: Sequence[tuple[np.ndarray, int]]) -> None:
        """Fills arrays with the ids of a remote file from a token on, by one call."""
        width = self._dtype.itemsize
        places = [(first * width, part.size * width) for part, first in parts]
        contents = open_file(self._files[file]).read_many(places)
        for (part, _), content in zip(parts, contents, strict=True):
            part[:] = np.frombuffer(content, self._dtype)

    def _map(self, file: int, first: int) -> np.ndarray:
        """The ids of a local file, to be copied at once: the file is whole now.

        Args:
          file: number of the file.
          first: token in it that is read first, for errors: each place that cannot be read is a
            bad record of its own.
        """
        offset = first * self._dtype.itemsize
        with self._lock:
            if file in self._maps:
                self._maps.move_to_end(file)
            else:
                expected = int(self._first[file + 1] - self._first[file])
                self._maps[file] = _mapped(self._files[file], self._dtype, expected, offset)
                if len(self._maps) > _MOST_MAPPED:
                    self._maps.popitem(last=False)
            mapped = self._maps[file]
        # Reading a map beyond the end of its file ends the process, so the size is asked for anew.
        if mapped.map is not None and (size := mapped.map.size()) < mapped.ids.nbytes:
            raise BadRecord(
                self._files[file],
                offset,
                f"the file was cut short: it ends after {size} of {mapped.ids.nbytes} bytes",
                may_heal=True,
            )
        return mapped.ids


class _MappedFile(NamedTuple):
    """The ids of a file, and the map they lie in; None for an empty file."""

    ids: np.ndarray
    map: mmap.mmap | None


def _mapped(path: str, dtype: np.dtype, expected: int, offset: int) -> _MappedFile:
    if expected == 0:
        return _MappedFile(np.empty(0, dtype), None)  # an empty file cannot be mapped
    try:
        with open(local_path(path), "rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        ids = np.frombuffer(mapped, dtype)
    except (OSError, ValueError) as error:
        reason = f"the file cannot be read ({error})"
        raise BadRecord(path, offset, reason, may_heal=True) from error
    if ids.size != expected:
        reason = f"the file has {ids.size} tokens where {expected} were at first"
        raise BadRecord(path, offset, reason, may_heal=True)
    return _MappedFile(ids, mapped)
