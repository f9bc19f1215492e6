"""Overlapping windows with labels, as in jax-lm-training's preprocessing.

A window is S + 1 tokens of a document, control tokens included: S inputs, and S labels that are the
inputs shifted by one. Windows begin every `stride` tokens of a document. Differences from the
original: bos and eos are only where the document has them; padding is marked by the mask, so id 0
is an id like others; a window within the one before it is omitted; dropped tokens are counted.

Legend: D documents, W windows, S inputs of a window.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class StridedWindows(NamedTuple):
    """Token ranges of windows.

    Attributes:
      starts_W, stops_W: int64, in order; the last label is included.
      dropped_documents: Documents without a window.
      dropped_tokens: Tokens in no window.
    """

    starts_W: np.ndarray
    stops_W: np.ndarray
    dropped_documents: int = 0
    dropped_tokens: int = 0


def strided_windows(
    document_offsets: np.ndarray, min_length: int, max_length: int, stride: int
) -> StridedWindows:
    """Finds the windows of contiguous documents.

    Args:
      document_offsets: int64 [D + 1], first token of each document, then the end of the last.
      min_length: Minimum number of labels; shorter windows are dropped.
      max_length: S, at least `min_length`.
      stride: Tokens between the starts of windows; at most `max_length`, so that each token of a
        document but its first is a label.
    """
    assert 1 <= min_length <= max_length, (min_length, max_length)
    assert 1 <= stride <= max_length, (stride, max_length)
    begins_D, ends_D = document_offsets[:-1], document_offsets[1:]
    sizes_D = ends_D - begins_D
    # The last window is the first that reaches the end: all later ones would lie in it.
    counts_D = 1 + np.maximum(-(-(sizes_D - (max_length + 1)) // stride), 0)
    document_W = np.repeat(np.arange(sizes_D.size), counts_D)
    first_W = np.cumsum(counts_D) - counts_D
    number_W = np.arange(document_W.size) - first_W[document_W]
    starts_W = begins_D[document_W] + number_W * stride
    stops_W = np.minimum(starts_W + max_length + 1, ends_D[document_W])
    kept_W = stops_W - starts_W > min_length
    starts_W, stops_W, document_W = starts_W[kept_W], stops_W[kept_W], document_W[kept_W]
    # Only the last window of a document can be too short, so the others cover a beginning of it.
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
    """Returns inputs, mask and labels of windows.

    Args:
      pieces: W int32 arrays, each of 2 to S + 1 tokens.
      filler_id, ignore_label: Input and label without a token.

    Returns:
      Arrays [W, S]: int32 `input_ids`; int8 `attention_mask`, 1 where the input is a token; int32
      `labels`, the token after each input.
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
