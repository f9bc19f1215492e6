"""Fills the arrays of a batch from token ranges.

Array operations fill the sequences of all datasets of a batch together.

Legend: B rows of a batch, T tokens of a sequence, P token ranges, Q starts of documents in the
batch, N tokens that were read.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from MaxText.input_pipeline.sequences.slicing import (
    SequenceSlicer,
    TokenRanges,
    concatenated_ranges,
)
from MaxText.input_pipeline.token_store.token_reader import TokenReader

BatchArrays = Mapping[str, np.ndarray]
"""Arrays [B, T] by name.

  tokens: int32.
  targets: int32, the id to predict at each position.
  weights: float32, 1 for targets that count in the loss, else 0.
  positions: int32, from the first token of the document in the sequence; only with documents.
  segments: int32, number of the document within the row from 1, 0 for padding; only with documents.
"""


class BatchPart(NamedTuple):
    """Sequences of a batch from one token dataset."""

    slicer: SequenceSlicer
    rows: np.ndarray  # int64, rows of these sequences in the batch, ascending
    token_ranges: TokenRanges  # `row_P` indexes `rows`


def fill_batch(parts: Sequence[BatchPart], has_documents: bool) -> dict[str, np.ndarray]:
    """Returns the arrays of a batch, named as in BatchArrays.

    A weight is 0 without a target, and with `has_documents` also if the target begins another
    document.

    Args:
      parts: Together they have each row of the batch once.
      has_documents: Adds `positions` and `segments`.

    Raises:
      FileReadError: A file is missing, truncated or damaged.
    """
    alike: dict[tuple[bool, bool], list[BatchPart]] = {}
    for part in parts:
        key = (part.slicer.ranges_are_joined, part.slicer.dataset.labels is not None)
        alike.setdefault(key, []).append(part)
    groups = [_fill(group, has_documents) for group in alike.values()]
    rows = np.concatenate([part.rows for group in alike.values() for part in group])
    if np.all(rows[1:] > rows[:-1]) and len(groups) == 1:
        return groups[0]
    order = np.argsort(rows)
    return {name: _concatenated([arrays[name] for arrays in groups])[order] for name in groups[0]}


@dataclasses.dataclass(frozen=True)
class _Layout:
    """Where the tokens of some parts lie in the rows that these parts fill together."""

    parts: Sequence[BatchPart]
    ranges: Sequence[TokenRanges]  # of each part; `row_P` counts over the rows of all parts
    row_P: np.ndarray  # of all ranges
    size_P: np.ndarray  # tokens of each range
    pad_id_B: np.ndarray
    num_tokens_B: np.ndarray  # tokens of each row before its padding
    length: int  # T

    @classmethod
    def of(cls, parts: Sequence[BatchPart]) -> "_Layout":
        """Returns the layout of parts whose rows follow each other."""
        counts = [len(part.rows) for part in parts]
        first_rows = itertools.accumulate(counts, initial=0)
        ranges = [
            part.token_ranges._replace(row_P=part.token_ranges.row_P + first_row)
            for part, first_row in zip(parts, first_rows, strict=False)
        ]
        row_P = np.concatenate([part_ranges.row_P for part_ranges in ranges])
        size_P = np.concatenate([part.stop_P - part.start_P for part in ranges])
        num_tokens_B = np.zeros(sum(counts), np.int64)
        np.add.at(num_tokens_B, row_P, size_P)
        return cls(
            parts=parts,
            ranges=ranges,
            row_P=row_P,
            size_P=size_P,
            pad_id_B=np.repeat([part.slicer.dataset.pad_id for part in parts], counts),
            num_tokens_B=num_tokens_B,
            length=parts[0].slicer.length,
        )

    @property
    def num_rows(self) -> int:
        """Number of sequences, B."""
        return len(self.num_tokens_B)

    def read(self, stores: Sequence[TokenReader]) -> np.ndarray:
        """Returns the ids (int32 [N]) of all ranges, from one store per part."""
        return _concatenated(
            [
                store.read(ranges.start_P, ranges.stop_P)
                for store, ranges in zip(stores, self.ranges, strict=True)
            ]
        )


def _fill(parts: Sequence[BatchPart], has_documents: bool) -> dict[str, np.ndarray]:
    """Returns the arrays of parts whose ranges and targets are of one kind.

    All of them have joined ranges or none, and all of them have labels or none. Row i of the result
    is the i-th sequence of the parts, one part after the other.
    """
    slicer = parts[0].slicer
    layout = _Layout.of(parts)
    ids_N = layout.read([part.slicer.dataset.store for part in parts])
    if slicer.ranges_are_joined:
        arrays = _fill_joined(ids_N, layout)
        num_used_B = layout.num_tokens_B
    else:
        # The last token of each range is only a target, and fills no position.
        num_used_B = layout.num_tokens_B - np.bincount(layout.row_P, minlength=layout.num_rows)
        arrays = _fill_separate(ids_N, layout, num_used_B)
    labels = [part.slicer.dataset.labels for part in parts]
    label_stores = [store for store in labels if store is not None]
    if label_stores:
        arrays |= _fill_labels(layout.read(label_stores), layout, num_used_B)
    if any(part.slicer.dataset.loss_mask is not None for part in parts):
        arrays["weights"] *= _target_mask(layout, num_used_B)
    _clear_context_weights(arrays["weights"], layout.ranges)
    if has_documents:
        _add_documents(arrays, layout, num_used_B)
    if not slicer.options.zero_loss:
        arrays["weights"] *= arrays["targets"] != 0
    return arrays


def _fill_joined(ids_N: np.ndarray, layout: _Layout) -> dict[str, np.ndarray]:
    """Returns the arrays of rows whose ranges are consecutive.

    The first token of a range is the target of the token before it.
    """
    length = layout.length
    ids_BT1 = _pad_rows(ids_N, layout.num_tokens_B, layout.pad_id_B, length + 1)
    num_targets_B1 = layout.num_tokens_B[:, None] - 1
    return {
        "tokens": ids_BT1[:, :-1],
        "targets": ids_BT1[:, 1:],
        "weights": (np.arange(length) < num_targets_B1).astype(np.float32),
    }


def _fill_separate(
    ids_N: np.ndarray, layout: _Layout, num_used_B: np.ndarray
) -> dict[str, np.ndarray]:
    """Returns the arrays of rows whose ranges do not predict each other.

    A range has as inputs all of its tokens but the last, and as targets all but the first.
    """
    length = layout.length
    end_P = np.cumsum(layout.size_P)
    inputs_N = np.delete(ids_N, end_P - 1)
    targets_N = np.delete(ids_N, end_P - layout.size_P)
    return {
        "tokens": _pad_rows(inputs_N, num_used_B, layout.pad_id_B, length),
        "targets": _pad_rows(targets_N, num_used_B, layout.pad_id_B, length),
        "weights": (np.arange(length) < num_used_B[:, None]).astype(np.float32),
    }


def _fill_labels(
    labels_N: np.ndarray, layout: _Layout, num_used_B: np.ndarray
) -> dict[str, np.ndarray]:
    """Returns targets and weights from labels, of which negative ones do not count."""
    is_target_N = (labels_N >= 0).astype(np.float32)
    length = layout.length
    return {
        "targets": _pad_rows(np.maximum(labels_N, 0), num_used_B, layout.pad_id_B, length),
        "weights": _pad_rows(is_target_N, num_used_B, np.zeros(layout.num_rows), length),
    }


def _target_mask(layout: _Layout, num_used_B: np.ndarray) -> np.ndarray:
    """Returns the loss masks of datasets at the targets of each row (bool [B, T])."""
    masks = []
    for part, ranges in zip(layout.parts, layout.ranges, strict=True):
        store = part.slicer.dataset.loss_mask
        if store is None:
            masks.append(np.ones(int((ranges.stop_P - ranges.start_P).sum()), bool))
        else:
            masks.append(store.read_loss_mask(ranges.start_P, ranges.stop_P))
    mask_N = _concatenated(masks)
    if layout.parts[0].slicer.ranges_are_joined:
        padding_B = np.zeros(layout.num_rows, bool)
        return _pad_rows(mask_N, layout.num_tokens_B, padding_B, layout.length + 1)[:, 1:]
    first_P = np.cumsum(layout.size_P) - layout.size_P
    padding_B = np.zeros(layout.num_rows, bool)
    return _pad_rows(np.delete(mask_N, first_P), num_used_B, padding_B, layout.length)


def _clear_context_weights(weights_BT: np.ndarray, ranges: Sequence[TokenRanges]) -> None:
    """Sets the weights of targets that only serve as context to zero."""
    for part_ranges in ranges:
        if part_ranges.num_context_P is None:
            continue
        contexts = zip(
            part_ranges.row_P, part_ranges.position_P, part_ranges.num_context_P, strict=True
        )
        for row, position, num_context in contexts:
            weights_BT[row, position : position + num_context] = 0


def _concatenated(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Returns the arrays as one; a single one without a copy."""
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def _pad_rows(
    values_N: np.ndarray, num_used_B: np.ndarray, pad_value_B: np.ndarray, width: int
) -> np.ndarray:
    """Returns the values as rows [B, width], of which each takes its number and is padded."""
    num_rows = len(num_used_B)
    if len(values_N) == num_rows * width:  # no padding: no copy
        return values_N.reshape(-1, width)
    padded = np.empty((num_rows, width), values_N.dtype)
    padded[:] = pad_value_B[:, None]
    start = 0
    for row_values, num_used in zip(padded, num_used_B.tolist(), strict=True):
        row_values[:num_used] = values_N[start : start + num_used]
        start += num_used
    return padded


def _add_documents(arrays: dict[str, np.ndarray], layout: _Layout, num_used_B: np.ndarray) -> None:
    """Adds positions and segments to the arrays of a batch, in place.

    With joined ranges, the weights of targets in another document become zero. `num_used_B` is the
    number of positions of each row before its padding (with joined ranges, also the last target).
    """
    length = layout.length
    num_rows = layout.num_rows
    row_Q, position_Q = _document_starts(layout)
    if layout.parts[0].slicer.ranges_are_joined:
        # The target before a document start belongs to another document.
        later = position_Q > 0
        arrays["weights"][row_Q[later], position_Q[later] - 1] = 0
    is_token = position_Q < length  # the others are only targets
    row_Q = row_Q[is_token]
    position_Q = position_Q[is_token]
    segment_Q = np.arange(1, len(row_Q) + 1) - np.searchsorted(row_Q, row_Q)
    # As indices of the flat batch: a segment lasts until the next document or row starts.
    start_Q = row_Q * length + position_Q
    size_Q = np.diff(start_Q, append=num_rows * length)
    segments_BT = np.repeat(segment_Q.astype(np.int32), size_Q).reshape(num_rows, length)
    positions_BT = np.repeat(-start_Q.astype(np.int32), size_Q).reshape(num_rows, length)
    positions_BT += np.arange(positions_BT.size, dtype=np.int32).reshape(num_rows, length)
    if num_used_B.min(initial=length) < length:
        is_padding_BT = np.arange(length) >= num_used_B[:, None]
        segments_BT[is_padding_BT] = 0
        positions_BT[is_padding_BT] = 0
    arrays["positions"] = positions_BT
    arrays["segments"] = segments_BT


def _document_starts(layout: _Layout) -> tuple[np.ndarray, np.ndarray]:
    """Returns row and position (int64 [Q] each) of starts of documents, in order.

    These are the starts of rows, of ranges, and of documents within ranges. A position T means that
    the last target of the row begins a document.
    """
    stride = layout.length + 1
    # Row and position as one number: row * stride + position.
    starts = [np.arange(layout.num_rows) * stride]
    for part, ranges in zip(layout.parts, layout.ranges, strict=True):
        if part.slicer.options.cross_document_attention:
            continue  # a whole sequence is one document
        offsets = part.slicer.dataset.store.document_offsets
        # Documents that begin within each range, after its first token.
        first_P = np.searchsorted(offsets, ranges.start_P, side="right")
        count_P = np.searchsorted(offsets, ranges.stop_P, side="left") - first_P
        range_start_P = ranges.row_P * stride + ranges.position_P
        # Start of a document in the batch = its offset in the store + shift.
        shift_Q = np.repeat(range_start_P - ranges.start_P, count_P)
        starts.append(range_start_P)
        starts.append(shift_Q + offsets[concatenated_ranges(first_P, count_P)])
    # An empty document starts where the next one does.
    return np.divmod(np.unique(np.concatenate(starts)), stride)
