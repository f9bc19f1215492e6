"""Overlapping windows for evaluation, which give each target a long context.

Legend: T tokens of a window, S stride, I windows, P ranges of some sequences, R sequences (rows).
"""

import numpy as np

from MaxText.input_pipeline.sequences.windows import (
    EMPTY,
    SequenceOptions,
    TokenRanges,
    Windows,
    expand,
    ranges_in_rows,
)
from MaxText.input_pipeline.token_store.store import TokenData


class SlidingWindows(Windows):
    """Windows over each document, or over all tokens if documents attend to each other.

    The first window has the first T targets of a document. Each further window ends S targets later
    (or at the end of the document), starts T targets before its end, and counts only the new
    targets. So each target counts once, with between T - S + 1 and T tokens of context, or all that
    exist. Short documents share a sequence as separate segments. Keeps 20 bytes per window.
    """

    joined = False

    def __init__(self, data: TokenData, options: SequenceOptions, stride: int):
        assert 1 <= stride <= options.length
        assert data.labels is None
        super().__init__(data, options)
        self._stride = stride
        offsets = np.asarray(data.store.document_offsets)
        if options.attend_across_documents:
            offsets = offsets[[0, -1]]
        self._start_I, self._stop_I, self._context_I = _windows(offsets, options.length, stride)
        self._first_R = _rows(self._stop_I - self._start_I - 1, options.length)

    @property
    def description(self) -> str:
        return f"windows that move on by {self._stride} targets"

    @property
    def num_targets(self) -> int:
        return int(np.sum(self._stop_I - self._start_I - 1 - self._context_I))

    def __len__(self) -> int:
        return len(self._first_R) - 1

    def spans(self, windows: np.ndarray, draws: np.ndarray) -> TokenRanges:
        rows_P, pieces_P = self._pieces(windows)
        starts_P, stops_P = self._start_I[pieces_P], self._stop_I[pieces_P]
        return ranges_in_rows(rows_P, starts_P, stops_P)

    def without_weight(self, spans: TokenRanges, windows: np.ndarray) -> np.ndarray | None:
        return self._context_I[self._pieces(windows)[1]]

    def _pieces(self, windows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns int64 [P] each: the row in the batch of a range, and its window."""
        rows = np.flatnonzero(windows != EMPTY)
        first, end = self._first_R[windows[rows]], self._first_R[windows[rows] + 1]
        return np.repeat(rows, end - first), expand(first, end - first)

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
    number_I = expand(np.zeros_like(counts_D), counts_D)
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
