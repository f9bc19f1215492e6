"""Slices a token store into sequences of fixed length with targets, weights and segments.

Everything is computed from the document offsets when a sequence is read: no index is stored (except
for documents that are packed whole, see packing.py).

Legend: B sequences (rows), T tokens of a window, P spans, D documents, Q beginnings of documents.
"""

import abc
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from MaxText.input_pipeline.array_cache import cached_arrays
from MaxText.input_pipeline.token_store.store import TokenData

# Documents that are looked at at a time.
_BLOCK = 2**20

# Index that stands for "no window": a row whose weights and segments are all 0.
EMPTY = -1


class Spans(NamedTuple):
    """Token ranges that make up sequences, ordered by row and position.

    Attributes:
      row_P: int64, row of each range.
      place_P: int64, position of its first token in the row.
      start_P, stop_P: int64, the range in the store, targets included.
    """

    row_P: np.ndarray
    place_P: np.ndarray
    start_P: np.ndarray
    stop_P: np.ndarray


@dataclasses.dataclass(frozen=True)
class Cutting:
    """Options for slicing.

    Attributes:
      length: T, tokens of a window.
      attend_across_documents: Treat the documents of a sequence as one.
      zero_loss: Count targets with id 0.
      truncate: Drop a document's tokens beyond one window.
    """

    length: int
    attend_across_documents: bool = False
    zero_loss: bool = True
    truncate: bool = False


class Windows(abc.ABC):
    """Base class of all slicings: sequences filled from ranges of the token store.

    Attributes:
      joined: Ranges of a sequence are contiguous: the first token of a range is the target of the
        token before it. Otherwise each range of n tokens fills n - 1 positions.
      has_documents: Sequences have positions and segments.
      has_own_order: Windows come in an order that shuffling must not change.
      random: `spans` uses its random numbers.
      padding_share: Share of positions without a target because nothing is packed; 0 with packing.
    """

    joined = True
    has_own_order = False
    random = False
    padding_share = 0.0

    def __init__(self, data: TokenData, cutting: Cutting):
        self.data = data
        self.cutting = cutting
        self.length = cutting.length
        self.has_documents = not (cutting.attend_across_documents or self._single_documents())

    def _single_documents(self) -> bool:
        """Whether no sequence ever holds two documents."""
        return False

    @property
    @abc.abstractmethod
    def description(self) -> str:
        """Text that differs where sequences would."""

    @abc.abstractmethod
    def __len__(self) -> int:
        pass

    @abc.abstractmethod
    def spans(self, windows: np.ndarray, draws: np.ndarray) -> Spans:
        """Returns the ranges of sequences; none for one that is EMPTY.

        Args:
          windows: int64 [B], indices in [0, len) or EMPTY.
          draws: uint64 [B], a random number for each, used if `random`.
        """

    @abc.abstractmethod
    def first_window(self, documents: np.ndarray) -> np.ndarray:
        """Returns the first window of each document (int64); len(self) for their number."""

    def without_weight(self, spans: Spans, windows: np.ndarray) -> np.ndarray | None:
        """Returns how many first targets of each range do not count (int64 [P]); None for none."""
        return None

    def beginnings(self, spans: Spans) -> tuple[np.ndarray, np.ndarray]:
        """Returns the beginnings of documents in order: (row, position), int64 [Q] each.

        If documents attend to each other a sequence is one: segments then only show padding.
        """
        if self.cutting.attend_across_documents:
            first_P = spans.place_P == 0
            return spans.row_P[first_P], spans.place_P[first_P]
        # At pieces, and inside them.
        span_Q, inside_Q = _boundaries(self.data.store.document_offsets, spans)
        row_Q = np.concatenate([spans.row_P, spans.row_P[span_Q]])
        place_Q = np.concatenate([spans.place_P, spans.place_P[span_Q] + inside_Q])
        order = np.lexsort((place_Q, row_Q))
        row_Q, place_Q = row_Q[order], place_Q[order]
        # Empty documents begin where the one after them does.
        new_Q = np.ones(row_Q.size, bool)
        new_Q[1:] = (np.diff(row_Q) != 0) | (np.diff(place_Q) != 0)
        return row_Q[new_Q], place_Q[new_Q]

    def origin(self, window: int, draw: int) -> list[tuple[str, int, int]]:
        """Returns (document, its first token here, number of tokens) for each document."""
        spans = self.spans(np.array([window]), np.array([draw], np.uint64))
        store = self.data.store
        offsets = store.document_offsets
        found = []
        for start, stop in zip(spans.start_P.tolist(), spans.stop_P.tolist(), strict=True):
            at = start
            while at < stop:
                document = int(np.searchsorted(offsets, at, side="right")) - 1
                end = min(stop, int(offsets[document + 1]))
                name = store.document_name(document)
                found.append((name, at - int(offsets[document]), end - at))
                at = end
        return found


def _boundaries(offsets: np.ndarray, spans: Spans) -> tuple[np.ndarray, np.ndarray]:
    """Returns document boundaries strictly inside ranges: (index of the range, position in it)."""
    first = np.searchsorted(offsets, spans.start_P, side="right")
    last = np.searchsorted(offsets, spans.stop_P, side="left")
    counts = last - first
    span_P = np.repeat(np.arange(len(counts)), counts)
    number = np.arange(len(span_P)) - np.repeat(np.cumsum(counts) - counts, counts)
    inside = np.asarray(offsets[first[span_P] + number]) - spans.start_P[span_P]
    return span_P, inside


def one_per_row(rows: np.ndarray, starts: np.ndarray, stops: np.ndarray) -> Spans:
    """Returns spans of sequences that are one range each."""
    return Spans(rows, np.zeros(len(rows), np.int64), starts, stops)


class PackedWindows(Windows):
    """Documents concatenated, then split every T tokens.

    Window i reads tokens [i T, i T + T) and predicts [i T + 1, i T + T + 1), so each token but the
    first is a target once. The last window is padded, not dropped.
    """

    @property
    def description(self) -> str:
        return "documents end to end"

    def __len__(self) -> int:
        return max(0, -(-(len(self.data.store) - 1) // self.length))

    def spans(self, windows: np.ndarray, draws: np.ndarray) -> Spans:
        rows = np.flatnonzero(windows != EMPTY)
        starts = windows[rows] * self.length
        stops = np.minimum(starts + self.length + 1, len(self.data.store))
        return one_per_row(rows, starts, stops)

    def first_window(self, documents: np.ndarray) -> np.ndarray:
        offsets = np.asarray(self.data.store.document_offsets[documents])
        return np.where(offsets >= len(self.data.store), len(self), offsets // self.length)


class DocumentWindows(Windows):
    """Each document (or record) begins a window of its own; long ones continue in further ones.

    A document of n tokens makes ceil((n - 1) / T) windows; a single token, which predicts nothing,
    makes none. With `truncate` it makes one at most. Maps 8 bytes per document.
    """

    def __init__(self, data: TokenData, cutting: Cutting, cache_dir: Path):
        super().__init__(data, cutting)
        # Records with labels have a target at each token.
        self._ahead = 0 if data.labels is not None else 1
        self._arrays = cached_arrays(
            cache_dir,
            "windows1",
            f"{data.fingerprint} {self.length} {cutting.truncate} {self._ahead}",
            self._plan,
        )
        num_places = max(len(self) * self.length, 1)
        self.padding_share = 1 - float(self._arrays["num_targets"][0]) / num_places

    def _plan(self) -> Iterator[dict[str, np.ndarray]]:
        offsets, total, num_targets = self.data.store.document_offsets, 0, 0
        for first in range(0, len(offsets) - 1, _BLOCK):
            sizes = np.diff(offsets[first : first + _BLOCK + 1]) - self._ahead
            counts = np.maximum(-(-sizes // self.length), 0)
            if self.cutting.truncate:
                counts = np.minimum(counts, 1)
            num_targets += int(np.minimum(np.maximum(sizes, 0), counts * self.length).sum())
            ends = np.cumsum(counts)
            yield {"first_window": total + ends - counts, "num_targets": np.empty(0, np.int64)}
            total += int(ends[-1])
        yield {"first_window": np.array([total]), "num_targets": np.array([num_targets])}

    @property
    def _first_window(self) -> np.ndarray:
        return self._arrays["first_window"]

    def _single_documents(self) -> bool:
        return True

    @property
    def description(self) -> str:
        kind = "one document per row"
        return f"{kind}, cut off" if self.cutting.truncate else f"{kind}, continued"

    def __len__(self) -> int:
        return int(self._first_window[-1])

    def spans(self, windows: np.ndarray, draws: np.ndarray) -> Spans:
        rows = np.flatnonzero(windows != EMPTY)
        windows = windows[rows]
        documents = np.searchsorted(self._first_window, windows, side="right") - 1
        offsets = self.data.store.document_offsets
        starts = offsets[documents] + (windows - self._first_window[documents]) * self.length
        stops = np.minimum(starts + self.length + self._ahead, offsets[documents + 1])
        return one_per_row(rows, starts, stops)

    def first_window(self, documents: np.ndarray) -> np.ndarray:
        return self._first_window[documents]


class StitchedWindows(Windows):
    """A window out of `stitch` consecutive documents (GPT-Neo's documents_* modes).

    Legend: s tokens of the stitched documents. `random` begins the window at a position drawn
    evenly from 0..s - (T + 1), otherwise it begins at 0. If s is less than T + 1, the sequence is
    padded. Tokens outside the window are not seen in that epoch.
    """

    def __init__(self, data: TokenData, cutting: Cutting, stitch: int, random: bool):
        super().__init__(data, cutting)
        self._stitch = stitch
        self.random = random

    @property
    def description(self) -> str:
        place = "a random place" if self.random else "the beginning"
        return f"a window from {place} of {self._stitch} documents"

    def __len__(self) -> int:
        return -(-(len(self.data.store.document_offsets) - 1) // self._stitch)

    def spans(self, windows: np.ndarray, draws: np.ndarray) -> Spans:
        rows = np.flatnonzero(windows != EMPTY)
        offsets = self.data.store.document_offsets
        first = windows[rows] * self._stitch
        last = np.minimum(first + self._stitch, len(offsets) - 1)
        starts, ends = np.asarray(offsets[first]), np.asarray(offsets[last])
        if self.random:
            places = np.maximum(ends - starts - self.length, 1).astype(np.uint64)
            starts = starts + (draws[rows] % places).astype(np.int64)
        stops = np.minimum(starts + self.length + 1, ends)
        # Empty documents make a row that counts nowhere.
        filled = stops > starts
        return one_per_row(rows[filled], starts[filled], stops[filled])

    def first_window(self, documents: np.ndarray) -> np.ndarray:
        return -(-documents // self._stitch)
