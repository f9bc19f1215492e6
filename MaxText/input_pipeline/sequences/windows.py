"""Cuts a token stream into rows of a fixed length, each with targets, weights and segments.

Everything is computed when a row is read, from the document offsets: no index is stored (but for
documents that are packed whole, see packing.py), and any window can be read without the others.

Legend: B rows, T tokens of a window, P spans, D documents.
"""

import abc
import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from MaxText.input_pipeline.data_errors import BadRecord
from MaxText.input_pipeline.token_store.token_data import TokenData

# Index that stands for "no window": a row whose weights and segments are all 0.
EMPTY = -1


class Spans(NamedTuple):
    """Pieces of the stream that make up rows, ordered by row and place.

    Attributes:
      row_P: int64, the row that a piece belongs to.
      place_P: int64, where in the row its first token stands.
      start_P: int64, its first token in the stream.
      stop_P: int64, the end of its tokens, targets included.
    """

    row_P: np.ndarray
    place_P: np.ndarray
    start_P: np.ndarray
    stop_P: np.ndarray


@dataclasses.dataclass(frozen=True)
class Cutting:
    """How rows are cut.

    Attributes:
      length: T, tokens of a window.
      attend_across_documents: whether documents of one row are one sequence.
      zero_loss: whether targets with id 0 count.
      truncate: whether a document's tokens beyond one window are dropped.
    """

    length: int
    attend_across_documents: bool = False
    zero_loss: bool = True
    truncate: bool = False


class Windows(abc.ABC):
    """What all ways of cutting share: rows filled from pieces of the stream.

    Attributes:
      data: the tokens.
      cutting: see Cutting.
      joined: True when the pieces of a row follow each other as one sequence, in which the first
        token of a piece is the target of the token before it. False when each piece of n tokens
        fills n - 1 places on its own.
      has_documents: whether rows carry positions and segments.
      has_own_order: whether windows come in an order that shuffling must not change.
      padding_share: of the positions of all windows, those without a target because nothing is
        packed; 0 where documents are.
    """

    joined = True
    has_own_order = False
    padding_share = 0.0

    def __init__(self, data: TokenData, cutting: Cutting):
        self.data = data
        self.cutting = cutting
        self.length = cutting.length
        self.has_documents = not (cutting.attend_across_documents or self._single_documents())

    def _single_documents(self) -> bool:
        """Whether no row ever holds two documents."""
        return False

    @property
    @abc.abstractmethod
    def description(self) -> str:
        """How rows are cut, in words that differ where rows would."""

    @abc.abstractmethod
    def __len__(self) -> int:
        """Number of windows."""

    @abc.abstractmethod
    def spans(self, windows: np.ndarray, draws: np.ndarray) -> Spans:
        """The pieces of rows; none for a row that is EMPTY.

        Args:
          windows: int64 [B], indices in [0, len) or EMPTY.
          draws: uint64 [B], a random number for each row.
        """

    @abc.abstractmethod
    def first_window(self, documents: np.ndarray) -> np.ndarray:
        """First window of each of `documents` (int64); len(self) for the number of documents."""

    def read(
        self,
        windows: np.ndarray,
        draws: np.ndarray,
        on_bad: Callable[[BadRecord], None] | None = None,
    ) -> dict[str, np.ndarray]:
        """Reads rows; one call per batch lets the stream read each file once.

        Args:
          windows: int64 [B], indices in [0, len) or EMPTY for a row that counts nowhere.
          draws: uint64 [B], a random number for each row.
          on_bad: takes each record that cannot be read; its row then counts nowhere. None raises.

        Returns:
          Arrays [B, T] by the names of Batch without its suffix: int32 `tokens` and `targets`,
          float32 `weights`, and with `has_documents` int32 `positions` and `segments`.

          A position counts from the first token of its document that is in the row, so it is below
          T. A weight is 0 where there is no target, and with `has_documents` also where the target
          begins another document.

        Raises:
          BadRecord: a record cannot be read and `on_bad` is None.
        """
        spans = self.spans(windows, draws)
        rows = self._filled(len(windows), spans, on_bad)
        if not self.cutting.zero_loss:
            rows["weights"] *= rows["targets"] != 0
        return rows

    def _filled(
        self, num_rows: int, spans: Spans, on_bad: Callable[[BadRecord], None] | None
    ) -> dict[str, np.ndarray]:
        places = list(zip(spans.start_P.tolist(), spans.stop_P.tolist(), strict=True))
        try:
            whole = self._gathered(num_rows, spans)
            if whole is not None:
                return self._with_documents(whole, spans)
            pieces: list[Any] = self.data.stream.ranges(places)
            labels = None if self.data.labels is None else self.data.labels.ranges(places)
        except BadRecord:
            if on_bad is None:
                raise
            good = self._readable(spans, places, on_bad)
            spans = Spans(*(array[good] for array in spans))
            return self._filled(num_rows, spans, None)
        rows = self._empty(num_rows)
        tokens, targets, weights = rows["tokens"], rows["targets"], rows["weights"]
        bounds = zip(spans.row_P.tolist(), spans.place_P.tolist(), pieces, strict=True)
        for index, (row, place, piece) in enumerate(bounds):
            end = place + piece.size
            if labels is not None:
                tokens[row, place:end] = piece
                targets[row, place:end] = np.maximum(labels[index], 0)
                weights[row, place:end] = labels[index] >= 0
                continue
            tokens[row, place : min(end, self.length)] = piece[: self.length - place]
            # The first token of a joined piece is the target of the token before it.
            first = 0 if self.joined and place else 1
            targets[row, place + first - 1 : end - 1] = piece[first:]
            weights[row, place + first - 1 : end - 1] = 1
            if not self.joined and end - 1 < self.length:
                tokens[row, end - 1] = self.data.filler_id
        return self._with_documents(rows, spans)

    def _readable(
        self, spans: Spans, places: list[tuple[int, int]], on_bad: Callable[[BadRecord], None]
    ) -> np.ndarray:
        """bool [P]: the pieces of rows all of whose pieces can be read."""
        bad_rows = set()
        for row, place in zip(spans.row_P.tolist(), places, strict=True):
            if row in bad_rows:
                continue
            try:
                self.data.stream.ranges([place])
                if self.data.labels is not None:
                    self.data.labels.ranges([place])
            except BadRecord as problem:
                on_bad(problem)
                bad_rows.add(row)
        return ~np.isin(spans.row_P, sorted(bad_rows))

    def _empty(self, num_rows: int) -> dict[str, np.ndarray]:
        shape = (num_rows, self.length)
        return {
            "tokens": np.full(shape, self.data.filler_id, np.int32),
            "targets": np.full(shape, self.data.filler_id, np.int32),
            "weights": np.zeros(shape, np.float32),
        }

    def _gathered(self, num_rows: int, spans: Spans) -> dict[str, np.ndarray] | None:
        """Rows of one whole piece each, by one call, where the stream can do that."""
        gather = getattr(self.data.stream, "gather", None)
        if gather is None or self.data.labels is not None or len(spans.row_P) != num_rows:
            return None
        if not self.joined or np.any(spans.stop_P - spans.start_P != self.length + 1):
            return None
        ids = gather(spans.start_P, self.length + 1)
        weights = np.ones((num_rows, self.length), np.float32)
        return {"tokens": ids[:, :-1], "targets": ids[:, 1:], "weights": weights}

    def _with_documents(self, rows: dict[str, np.ndarray], spans: Spans) -> dict[str, np.ndarray]:
        """Adds positions and segments, and takes the weight from targets in another document."""
        if not self.has_documents:
            return rows
        num_rows = len(rows["tokens"])
        row_Q, place_Q = self._beginnings(spans)
        if self.joined:
            # The target before it is of another document.
            later = place_Q > 0
            rows["weights"][row_Q[later], place_Q[later] - 1] = 0
        here = place_Q < self.length
        row_Q, place_Q = row_Q[here], place_Q[here]
        segments = np.zeros((num_rows, self.length), np.int32)
        segments[row_Q, place_Q] = 1
        np.cumsum(segments, axis=1, out=segments)
        # A sum of steps of 1, which falls back to 0 where a document begins.
        positions = np.ones((num_rows, self.length), np.int32)
        before_Q = np.zeros_like(place_Q)
        before_Q[1:] = np.where(row_Q[1:] == row_Q[:-1], place_Q[:-1], 0)
        positions[row_Q, place_Q] = 1 - (place_Q - before_Q)
        positions[:, 0] = 0
        np.cumsum(positions, axis=1, out=positions)
        if not self._full(spans, num_rows):
            used = np.zeros(num_rows, np.int64)
            np.maximum.at(used, spans.row_P, spans.place_P + self._places(spans))
            beyond = np.arange(self.length) >= used[:, None]
            segments[beyond] = 0
            positions[beyond] = 0
        rows["positions"], rows["segments"] = positions, segments
        return rows

    def _beginnings(self, spans: Spans) -> tuple[np.ndarray, np.ndarray]:
        """Where documents begin, in order: (row, place), each once.

        Where documents attend to each other a row is one: segments then only show its filling.
        """
        if self.cutting.attend_across_documents:
            first_P = spans.place_P == 0
            return spans.row_P[first_P], spans.place_P[first_P]
        # At pieces, and inside them.
        span_Q, inside_Q = _boundaries(self.data.stream.document_offsets, spans)
        row_Q = np.concatenate([spans.row_P, spans.row_P[span_Q]])
        place_Q = np.concatenate([spans.place_P, spans.place_P[span_Q] + inside_Q])
        order = np.lexsort((place_Q, row_Q))
        row_Q, place_Q = row_Q[order], place_Q[order]
        # Empty documents begin where the one after them does.
        new_Q = np.ones(row_Q.size, bool)
        new_Q[1:] = (np.diff(row_Q) != 0) | (np.diff(place_Q) != 0)
        return row_Q[new_Q], place_Q[new_Q]

    def _places(self, spans: Spans) -> np.ndarray:
        """Places that pieces fill with inputs, their last token included where there is room."""
        sizes = spans.stop_P - spans.start_P
        return sizes if self.joined or self.data.labels is not None else sizes - 1

    def _full(self, spans: Spans, num_rows: int) -> bool:
        if len(spans.row_P) != num_rows:
            return False
        return bool(np.all(self._places(spans) >= self.length))

    def origin(self, window: int, draw: int) -> list[tuple[int, int, int]]:
        """Documents in a row: (document, first token of it in the row, number of tokens there)."""
        spans = self.spans(np.array([window]), np.array([draw], np.uint64))
        offsets = self.data.stream.document_offsets
        found = []
        for start, stop in zip(spans.start_P.tolist(), spans.stop_P.tolist(), strict=True):
            at = start
            while at < stop:
                document = int(np.searchsorted(offsets, at, side="right")) - 1
                end = min(stop, int(offsets[document + 1]))
                found.append((document, at - int(offsets[document]), end - at))
                at = end
        return found


def _boundaries(offsets: np.ndarray, spans: Spans) -> tuple[np.ndarray, np.ndarray]:
    """Where documents begin strictly inside pieces: (index of the piece, place in the piece)."""
    first = np.searchsorted(offsets, spans.start_P, side="right")
    last = np.searchsorted(offsets, spans.stop_P, side="left")
    counts = last - first
    span_P = np.repeat(np.arange(len(counts)), counts)
    number = np.arange(len(span_P)) - np.repeat(np.cumsum(counts) - counts, counts)
    inside = np.asarray(offsets[first[span_P] + number]) - spans.start_P[span_P]
    return span_P, inside


def one_per_row(rows: np.ndarray, starts: np.ndarray, stops: np.ndarray) -> Spans:
    """Spans of rows that are one piece each."""
    return Spans(rows, np.zeros(len(rows), np.int64), starts, stops)


class PackedWindows(Windows):
    """Documents laid end to end, cut every T tokens.

    Window i reads tokens [i T, i T + T) and predicts [i T + 1, i T + T + 1), so each token of
    the stream but the first is a target once. The last window is filled up, not dropped.
    """

    @property
    def description(self) -> str:
        return "documents end to end"

    def __len__(self) -> int:
        return max(0, -(-(len(self.data.stream) - 1) // self.length))

    def spans(self, windows: np.ndarray, draws: np.ndarray) -> Spans:
        rows = np.flatnonzero(windows != EMPTY)
        starts = windows[rows] * self.length
        stops = np.minimum(starts + self.length + 1, len(self.data.stream))
        return one_per_row(rows, starts, stops)

    def first_window(self, documents: np.ndarray) -> np.ndarray:
        offsets = np.asarray(self.data.stream.document_offsets[documents])
        return np.where(offsets >= len(self.data.stream), len(self), offsets // self.length)


class DocumentWindows(Windows):
    """Each document (or record) begins a window of its own; long ones continue in further ones.

    A document of n tokens makes ceil((n - 1) / T) windows: one of a single token, which predicts
    nothing, makes none. With `truncate` it makes one at most. Keeps 8 bytes per document in memory.
    """

    def __init__(self, data: TokenData, cutting: Cutting):
        super().__init__(data, cutting)
        # Records with labels have a target at each token.
        self._ahead = 0 if data.labels is not None else 1
        sizes = np.diff(data.stream.document_offsets) - self._ahead
        counts = np.maximum(-(-sizes // self.length), 0)
        if cutting.truncate:
            counts = np.minimum(counts, 1)
        self._first_window = np.concatenate([[0], np.cumsum(counts)])
        num_targets = np.minimum(np.maximum(sizes, 0), counts * self.length).sum()
        self.padding_share = 1 - float(num_targets) / max(len(self) * self.length, 1)

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
        offsets = self.data.stream.document_offsets
        starts = offsets[documents] + (windows - self._first_window[documents]) * self.length
        stops = np.minimum(starts + self.length + self._ahead, offsets[documents + 1])
        return one_per_row(rows, starts, stops)

    def first_window(self, documents: np.ndarray) -> np.ndarray:
        return self._first_window[documents]


class StitchedWindows(Windows):
    """One window out of `stitch` documents that follow each other (GPT-Neo's documents_* modes).

    Legend: s tokens of the stitched documents. `random` begins the window at a place drawn evenly
    from 0..s - (T + 1), otherwise it begins at 0. Where s is less than T + 1, all is read and
    the row is filled up. What lies outside the window is not seen in that epoch.
    """

    def __init__(self, data: TokenData, cutting: Cutting, stitch: int, random: bool):
        super().__init__(data, cutting)
        self._stitch = stitch
        self._random = random

    @property
    def description(self) -> str:
        place = "a random place" if self._random else "the beginning"
        return f"a window from {place} of {self._stitch} documents"

    def __len__(self) -> int:
        return -(-(len(self.data.stream.document_offsets) - 1) // self._stitch)

    def spans(self, windows: np.ndarray, draws: np.ndarray) -> Spans:
        rows = np.flatnonzero(windows != EMPTY)
        offsets = self.data.stream.document_offsets
        first = windows[rows] * self._stitch
        last = np.minimum(first + self._stitch, len(offsets) - 1)
        starts, ends = np.asarray(offsets[first]), np.asarray(offsets[last])
        if self._random:
            places = np.maximum(ends - starts - self.length, 1).astype(np.uint64)
            starts = starts + (draws[rows] % places).astype(np.int64)
        stops = np.minimum(starts + self.length + 1, ends)
        # Empty documents make a row that counts nowhere.
        filled = stops > starts
        return one_per_row(rows[filled], starts[filled], stops[filled])

    def first_window(self, documents: np.ndarray) -> np.ndarray:
        return -(-documents // self._stitch)
