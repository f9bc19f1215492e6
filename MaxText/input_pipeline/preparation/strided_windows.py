"""Overlapping windows with labels, as in jax-lm-training's preprocessing.

A window is S + 1 tokens of a document, control tokens included: S inputs, and S labels shifted by
one. Differences from the original: bos and eos only where the document has them; padding is marked
by the mask, so id 0 is a regular id; windows inside the previous one are omitted; dropped tokens
are counted.

Legend: D documents, W windows, S inputs of a window.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class StridedWindows(NamedTuple):
    """Token ranges of windows, last label included, and counts of what is in no window."""

    starts_W: np.ndarray
    stops_W: np.ndarray
    dropped_documents: int = 0
    dropped_tokens: int = 0


def strided_windows(
    document_offsets: np.ndarray, min_length: int, max_length: int, stride: int
) -> StridedWindows:
    """Returns the windows of contiguous documents (int64 [D + 1] offsets), every `stride` tokens.

    Windows have `min_length` to `max_length` labels; shorter ones are dropped. `stride` is at most
    `max_length`, so that each token of a document but its first is a label.
    """
    assert 1 <= min_length <= max_length, (min_length, max_length)
    assert 1 <= stride <= max_length, (stride, max_length)
    begins_D, ends_D = document_offsets[:-1], document_offsets[1:]
    sizes_D = ends_D - begins_D
    # The first window that reaches the end is the last: later ones would be inside it.
    counts_D = 1 + np.maximum(-(-(sizes_D - (max_length + 1)) // stride), 0)
    document_W = np.repeat(np.arange(sizes_D.size), counts_D)
    first_W = np.cumsum(counts_D) - counts_D
    number_W = np.arange(document_W.size) - first_W[document_W]
    starts_W = begins_D[document_W] + number_W * stride
    stops_W = np.minimum(starts_W + max_length + 1, ends_D[document_W])
    kept_W = stops_W - starts_W > min_length
    starts_W, stops_W, document_W = starts_W[kept_W], stops_W[kept_W], document_W[kept_W]
    # Only the last window of a document can be too short, so the others cover a prefix.
    covered_D = begins_D.astype(np.int64)
    np.maximum.at(covered_D, document_W, stops_W)
    return StridedWindows(
        starts_W,
        stops_W,
        dropped_documents=int(sizes_D.size - np.unique(document_W).size),
        dropped_tokens=int((ends_D - covered_D).sum()),
    )


def rows_of_windows(
    pieces: Sequence[np.ndarray], max_length: int, filler_id: int, ignore_label: int
) -> dict[str, np.ndarray]:
    """Returns arrays [W, S] of windows with 2 to S + 1 tokens each.

    They are int32 `input_ids`, int8 `attention_mask` (1 for tokens), and int32 `labels`, the token
    after each input; `filler_id` and `ignore_label` are padding.
    """
    shape = (len(pieces), max_length)
    rows = {
        "input_ids": np.full(shape, filler_id, np.int32),
        "attention_mask": np.zeros(shape, np.int8),
        "labels": np.full(shape, ignore_label, np.int32),
    }
    for row, piece in enumerate(pieces):
        num_inputs = min(piece.size, max_length)
        rows["input_ids"][row, :num_inputs] = piece[:num_inputs]
        rows["attention_mask"][row, :num_inputs] = 1
        rows["labels"][row, : piece.size - 1] = piece[1:]
    return rows
