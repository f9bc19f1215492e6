"""Overlapping windows for evaluation, which count each target once (eval_stride).

Legend: D documents, W sliding windows, B sequences of a batch, S sequences of the dataset.
"""

from typing import NamedTuple

import numpy as np

from MaxText.input_pipeline.sequences.slicing import (
    SequenceOptions,
    SequenceSlicer,
    TokenRanges,
    concatenated_ranges,
    planned_ranges,
    side_by_side,
)
from MaxText.input_pipeline.token_store.token_dataset import TokenDataset


class SlidingWindows(SequenceSlicer):
    """Sliding windows over each document, or over all tokens.

    They go over all tokens if documents attend to each other. The first window has the first T
    targets of a document. Each further window ends `stride` targets later (or at the end of the
    document), starts T targets before its end, and counts only the new targets. So each target
    counts once, with between T - stride + 1 and T tokens of context, or all that exist. Windows of
    short documents share a sequence as separate segments. Keeps 20 bytes per window.
    """

    ranges_are_joined = False

    def __init__(self, dataset: TokenDataset, options: SequenceOptions, stride: int):
        assert 1 <= stride <= options.length
        assert dataset.labels is None
        super().__init__(dataset, options)
        offsets = np.asarray(dataset.store.document_offsets)
        if options.cross_document_attention:
            offsets = offsets[[0, -1]]
        self._windows = _slide(offsets, options.length, stride)
        num_targets_W = self._windows.stop_W - self._windows.start_W - 1
        self._first_window_S = _pack_in_order(num_targets_W, options.length)

    def __len__(self) -> int:
        return len(self._first_window_S) - 1

    def _token_ranges(
        self, sequence_indices_B: np.ndarray, random_bits_B: np.ndarray
    ) -> TokenRanges:
        windows = self._windows
        row_P, window_P = planned_ranges(self._first_window_S, sequence_indices_B)
        ranges = side_by_side(row_P, windows.start_W[window_P], windows.stop_W[window_P])
        return ranges._replace(num_context_P=windows.num_context_W[window_P])


class _Windows(NamedTuple):
    """Sliding windows of a dataset."""

    start_W: np.ndarray  # int64, first token in the store
    stop_W: np.ndarray  # int64, token after the last target
    num_context_W: np.ndarray  # int32, leading targets that an earlier window counts


def _slide(offsets: np.ndarray, length: int, stride: int) -> _Windows:
    """Returns the windows of all documents, which begin at `offsets` (int64 [D + 1])."""
    targets_D = np.maximum(np.diff(offsets) - 1, 0)
    further_D = np.maximum(-(-(targets_D - length) // stride), 0)
    count_D = (targets_D > 0) + further_D
    document_W = np.repeat(np.arange(len(targets_D)), count_D)
    index_in_document_W = concatenated_ranges(np.zeros_like(count_D), count_D)
    # Counted in targets of the document:
    end_W = np.minimum(length + index_in_document_W * stride, targets_D[document_W])
    begin_W = np.maximum(end_W - length, 0)
    counted_before_W = np.where(
        index_in_document_W > 0, length + (index_in_document_W - 1) * stride, 0
    )
    offset_W = offsets[document_W]
    return _Windows(
        start_W=offset_W + begin_W,
        stop_W=offset_W + end_W + 1,
        num_context_W=(counted_before_W - begin_W).astype(np.int32),
    )


def _pack_in_order(num_targets_W: np.ndarray, length: int) -> np.ndarray:
    """Returns the first window of each sequence, and the end (int64 [S + 1]).

    A sequence takes the next windows until one does not fit.
    """
    end_W = np.cumsum(num_targets_W)
    first_window_S = [0]
    while first_window_S[-1] < len(num_targets_W):
        first = first_window_S[-1]
        targets_before = end_W[first] - num_targets_W[first]
        first_window_S.append(int(np.searchsorted(end_W, targets_before + length, side="right")))
    return np.array(first_window_S, np.int64)
