"""Slices a token store into fixed-length sequences with targets, weights and segments.

Everything is computed from document offsets on reading; only plans for whole documents are cached.

Legend: B sequences (rows), T tokens of a window, P ranges, D documents, Q document starts.
"""

import abc
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from MaxText.input_pipeline.local_cache import cached_arrays
from MaxText.input_pipeline.token_store.store import TokenData

_BLOCK = 2**20  # documents processed at a time

EMPTY = -1  # index for "no window": a row of padding, with weights and segments 0


class TokenRanges(NamedTuple):
    """Token ranges that make up sequences, int64 [P], ordered by row and position."""

    row_P: np.ndarray  # row of each range
    position_P: np.ndarray  # position of its first token in the row
    start_P: np.ndarray  # range in the store, targets included
    stop_P: np.ndarray


@dataclasses.dataclass(frozen=True)
class SequenceOptions:
    """Options for slicing."""

    length: int  # T, tokens of a window
    attend_across_documents: bool = False  # treat the documents of a sequence as one
    zero_loss: bool = True  # count targets with id 0
    truncate: bool = False  # drop the tokens of a document beyond one window


class Windows(abc.ABC):
    """Base class for slicing the token store into sequences."""

    joined = True  # ranges of a sequence are contiguous; else n tokens fill n - 1 positions
    has_own_order = False  # whether shuffling must keep the order of windows
    random = False  # whether `spans` uses its random numbers
    padding_share = 0.0  # share of positions without a target; 0 with packing

    def __init__(self, data: TokenData, options: SequenceOptions):
        self.data = data
        self.options = options
        self.length = options.length
        self.has_documents = not (options.attend_across_documents or self._single_documents())

    def _single_documents(self) -> bool:
        return False

    @property
    @abc.abstractmethod
    def description(self) -> str:
        """Text that differs whenever the sequences would; part of the data identity."""

    @abc.abstractmethod
    def __len__(self) -> int:
        pass

    @abc.abstractmethod
    def spans(self, windows: np.ndarray, draws: np.ndarray) -> TokenRanges:
        """Returns the ranges of sequences; none for one that is EMPTY.

        `windows` are int64 [B], in [0, len) or EMPTY; `draws` are uint64 [B] random numbers, used
        if `random` is set.
        """

    @abc.abstractmethod
    def first_window(self, documents: np.ndarray) -> np.ndarray:
        """Returns the first window of each document (int64); len(self) for the document count."""

    def without_weight(self, spans: TokenRanges, windows: np.ndarray) -> np.ndarray | None:
        """Returns how many leading targets of each range have weight 0 (int64 [P]), or None."""
        return None

    def beginnings(self, spans: TokenRanges) -> tuple[np.ndarray, np.ndarray]:
        """Returns (row, position) of each document start in order, int64 [Q] each.

        With attend_across_documents a whole sequence is one document.
        """
        if self.options.attend_across_documents:
            first_P = spans.position_P == 0
            return spans.row_P[first_P], spans.position_P[first_P]
        # Documents start at ranges, and inside them.
        span_Q, inside_Q = _boundaries(self.data.store.document_offsets, spans)
        row_Q = np.concatenate([spans.row_P, spans.row_P[span_Q]])
        position_Q = np.concatenate([spans.position_P, spans.position_P[span_Q] + inside_Q])
        order = np.lexsort((position_Q, row_Q))
        row_Q, position_Q = row_Q[order], position_Q[order]
        # An empty document starts where the next one does.
        new_Q = np.ones(row_Q.size, bool)
        new_Q[1:] = (np.diff(row_Q) != 0) | (np.diff(position_Q) != 0)
        return row_Q[new_Q], position_Q[new_Q]

    def origin(self, window: int, draw: int) -> list[tuple[str, int, int]]:
        """Returns (document, first token in it, number of tokens) for each document."""
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


def _boundaries(offsets: np.ndarray, spans: TokenRanges) -> tuple[np.ndarray, np.ndarray]:
    """Returns document boundaries strictly inside ranges: (index of the range, position in it)."""
    first = np.searchsorted(offsets, spans.start_P, side="right")
    last = np.searchsorted(offsets, spans.stop_P, side="left")
    span_P = np.repeat(np.arange(len(first)), last - first)
    return span_P, np.asarray(offsets[expand(first, last - first)]) - spans.start_P[span_P]


def expand(first_G: np.ndarray, counts_G: np.ndarray) -> np.ndarray:
    """Returns the concatenated ranges [first, first + count) of G groups, int64."""
    before_G = np.cumsum(counts_G) - counts_G
    return np.arange(int(counts_G.sum())) + np.repeat(first_G - before_G, counts_G)


def one_per_row(rows: np.ndarray, starts: np.ndarray, stops: np.ndarray) -> TokenRanges:
    return TokenRanges(rows, np.zeros(len(rows), np.int64), starts, stops)


def ranges_in_rows(row_P: np.ndarray, starts_P: np.ndarray, stops_P: np.ndarray) -> TokenRanges:
    """Returns ranges that follow each other in their rows; n tokens fill n - 1 positions."""
    sizes_P = stops_P - starts_P - 1
    before_P = np.cumsum(sizes_P) - sizes_P
    # Tokens before the first range of the row.
    first_P = before_P[np.searchsorted(row_P, row_P)]
    return TokenRanges(row_P, before_P - first_P, starts_P, stops_P)


class ConcatThenSplit(Windows):
    """Documents concatenated, then split every T tokens.

    Window i reads tokens [i T, i T + T) and predicts the tokens one later, so each token but the
    first is a target once. The last window is padded, not dropped.
    """

    @property
    def description(self) -> str:
        return "documents end to end"

    def __len__(self) -> int:
        return max(0, -(-(len(self.data.store) - 1) // self.length))

    def spans(self, windows: np.ndarray, draws: np.ndarray) -> TokenRanges:
        rows = np.flatnonzero(windows != EMPTY)
        starts = windows[rows] * self.length
        stops = np.minimum(starts + self.length + 1, len(self.data.store))
        return one_per_row(rows, starts, stops)

    def first_window(self, documents: np.ndarray) -> np.ndarray:
        offsets = np.asarray(self.data.store.document_offsets[documents])
        return np.where(offsets >= len(self.data.store), len(self), offsets // self.length)


class DocumentWindows(Windows):
    """Each document (or record) starts a new window; long ones continue in further windows.

    A document of n tokens makes ceil((n - 1) / T) windows, at most one with `truncate`. A single
    token, which predicts nothing, makes none. Maps 8 bytes per document.
    """

    def __init__(self, data: TokenData, options: SequenceOptions, cache_dir: Path):
        super().__init__(data, options)
        # With labels every token has a target.
        self._ahead = 0 if data.labels is not None else 1
        self._arrays = cached_arrays(
            cache_dir,
            "windows1",
            f"{data.fingerprint} {self.length} {options.truncate} {self._ahead}",
            self._plan,
        )
        num_positions = max(len(self) * self.length, 1)
        self.padding_share = 1 - float(self._arrays["num_targets"][0]) / num_positions

    def _plan(self) -> Iterator[dict[str, np.ndarray]]:
        offsets, total, num_targets = self.data.store.document_offsets, 0, 0
        for first in range(0, len(offsets) - 1, _BLOCK):
            sizes = np.diff(offsets[first : first + _BLOCK + 1]) - self._ahead
            counts = np.maximum(-(-sizes // self.length), 0)
            if self.options.truncate:
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
        return f"{kind}, cut off" if self.options.truncate else f"{kind}, continued"

    def __len__(self) -> int:
        return int(self._first_window[-1])

    def spans(self, windows: np.ndarray, draws: np.ndarray) -> TokenRanges:
        rows = np.flatnonzero(windows != EMPTY)
        windows = windows[rows]
        documents = np.searchsorted(self._first_window, windows, side="right") - 1
        offsets = self.data.store.document_offsets
        starts = offsets[documents] + (windows - self._first_window[documents]) * self.length
        stops = np.minimum(starts + self.length + self._ahead, offsets[documents + 1])
        return one_per_row(rows, starts, stops)

    def first_window(self, documents: np.ndarray) -> np.ndarray:
        return self._first_window[documents]


class JoinedDocuments(Windows):
    """One window from `stitch` concatenated documents (GPT-Neo's documents_* modes).

    With s tokens in these documents, the window starts at 0, or with `random` uniformly in
    0..s - (T + 1). If s < T + 1 it is padded. Tokens outside it are not seen in that epoch.
    """

    def __init__(self, data: TokenData, options: SequenceOptions, stitch: int, random: bool):
        super().__init__(data, options)
        self._stitch = stitch
        self.random = random

    @property
    def description(self) -> str:
        place = "a random place" if self.random else "the beginning"
        return f"a window from {place} of {self._stitch} documents"

    def __len__(self) -> int:
        return -(-(len(self.data.store.document_offsets) - 1) // self._stitch)

    def spans(self, windows: np.ndarray, draws: np.ndarray) -> TokenRanges:
        rows = np.flatnonzero(windows != EMPTY)
        offsets = self.data.store.document_offsets
        first = windows[rows] * self._stitch
        last = np.minimum(first + self._stitch, len(offsets) - 1)
        starts, ends = np.asarray(offsets[first]), np.asarray(offsets[last])
        if self.random:
            places = np.maximum(ends - starts - self.length, 1).astype(np.uint64)
            starts = starts + (draws[rows] % places).astype(np.int64)
        stops = np.minimum(starts + self.length + 1, ends)
        filled = stops > starts
        return one_per_row(rows[filled], starts[filled], stops[filled])

    def first_window(self, documents: np.ndarray) -> np.ndarray:
        return -(-documents // self._stitch)
