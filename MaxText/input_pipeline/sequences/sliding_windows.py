"""Overlapping windows for evaluation, which give each target a long context.

Legend: T tokens of a window, S stride, I windows, P ranges of some sequences, R sequences (rows).
"""

import numpy as np

from MaxText.input_pipeline.sequences.windows import EMPTY, Cutting, Spans, Windows
from MaxText.input_pipeline.token_store.store import TokenData


class SlidingWindows(Windows):
    """Windows over each document, or over all tokens if documents attend to each other.

    The first window has the first T targets of a document. Each further window ends S targets later
    (or at the end of the document), starts T targets before its end, and counts only the new
    targets. So each target counts once, with between T - S + 1 and T tokens of context, or all that
    exist. Short documents share a sequence as separate segments. Keeps 20 bytes per window.
    """

    joined = False

    def __init__(self, data: TokenData, cutting: Cutting, stride: int):
        assert 1 <= stride <= cutting.length
        assert data.labels is None
        super().__init__(data, cutting)
        self._stride = stride
        offsets = np.asarray(data.store.document_offsets)
        if cutting.attend_across_documents:
            offsets = offsets[[0, -1]]
        self._start_I, self._stop_I, self._context_I = _windows(offsets, cutting.length, stride)
        self._first_R = _rows(self._stop_I - self._start_I - 1, cutting.length)

    @property
    def description(self) -> str:
        return f"windows that move on by {self._stride} targets"

    @property
    def num_targets(self) -> int:
        return int(np.sum(self._stop_I - self._start_I - 1 - self._context_I))

    def __len__(self) -> int:
        return len(self._first_R) - 1

    def spans(self, windows: np.ndarray, draws: np.ndarray) -> Spans:
        rows_P, pieces_P = self._pieces(windows)
        starts_P, stops_P = self._start_I[pieces_P], self._stop_I[pieces_P]
        filled_P = np.cumsum(stops_P - starts_P - 1) - (stops_P - starts_P - 1)
        # Offset of each row's first range, repeated for all ranges of the row.
        before_P = filled_P[np.searchsorted(rows_P, rows_P)]
        return Spans(rows_P, filled_P - before_P, starts_P, stops_P)

    def without_weight(self, spans: Spans, windows: np.ndarray) -> np.ndarray | None:
        return self._context_I[self._pieces(windows)[1]]

    def _pieces(self, windows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns int64 [P] each: the row in the batch of a range, and its window."""
        rows = np.flatnonzero(windows != EMPTY)
        first, end = self._first_R[windows[rows]], self._first_R[windows[rows] + 1]
        counts = end - first
        before = np.cumsum(counts) - counts
        pieces_P = np.arange(int(counts.sum())) + np.repeat(first - before, counts)
        return np.repeat(rows, counts), pieces_P

    def first_window(self, documents: np.ndarray) -> np.ndarray:
        offsets = np.asarray(self.data.store.document_offsets[documents])
        begins_R = self._start_I[self._first_R[:-1]]
        inside = np.searchsorted(begins_R, offsets, side="right") - 1
        return np.where(offsets >= len(self.data.store), len(self), np.maximum(inside, 0))


def _windows(
    offsets: np.ndarray, length: int, stride: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns first token, end, and number of weight-0 targets of each window, int64 [I]."""
    targets_D = np.maximum(np.diff(offsets) - 1, 0)
    further_D = np.maximum(-(-(targets_D - length) // stride), 0)
    counts_D = (targets_D > 0) + further_D
    document_I = np.repeat(np.arange(len(targets_D)), counts_D)
    number_I = np.arange(len(document_I)) - np.repeat(np.cumsum(counts_D) - counts_D, counts_D)
    end_I = np.minimum(length + number_I * stride, targets_D[document_I])
    counted_before_I = np.where(number_I > 0, length + (number_I - 1) * stride, 0)
    begin_I = np.maximum(end_I - length, 0)
    first_I = offsets[document_I]
    context_I = (counted_before_I - begin_I).astype(np.int32)
    return first_I + begin_I, first_I + end_I + 1, context_I


def _rows(sizes_I: np.ndarray, length: int) -> np.ndarray:
    """Returns int64 [R + 1]: first window of each row, and the end."""
    ends_I = np.cumsum(sizes_I)
    first = [0]
    while first[-1] < len(sizes_I):
        filled = ends_I[first[-1]] - sizes_I[first[-1]]
        first.append(int(np.searchsorted(ends_I, filled + length, side="right")))
    return np.array(first, np.int64)
