"""Assembles the sequences of a batch: tokens, targets, weights and documents.

Array operations fill the sequences of all datasets of a batch together.

Legend: B sequences (rows), T tokens of a window, P ranges, Q document starts.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from MaxText.input_pipeline.sequences.windows import TokenRanges, Windows


class BatchPart(NamedTuple):
    """Token ranges of some sequences of a batch, from one dataset."""

    windows: Windows
    rows: np.ndarray  # int64, batch indices of the sequences
    spans: TokenRanges  # `row_P` counts within `rows`
    without_weight: np.ndarray | None = None


def fill_batch(parts: Sequence[BatchPart], has_documents: bool) -> dict[str, np.ndarray]:
    """Returns the sequences of a batch, of which `parts` together have each one once.

    Arrays [B, T] are named as in Batch: int32 `tokens` and `targets`, float32 `weights`, and with
    `has_documents` int32 `positions` (from the first token of the document in the sequence) and
    `segments`. A weight is 0 without a target, and with `has_documents` also if the target begins
    another document. Raises UnreadableFile.
    """
    alike: dict[tuple[bool, bool], list[BatchPart]] = {}
    for part in parts:
        key = (part.windows.joined, part.windows.data.labels is not None)
        alike.setdefault(key, []).append(part)
    filled = [_fill(group, has_documents) for group in alike.values()]
    rows = np.concatenate([part.rows for group in alike.values() for part in group])
    if np.all(rows[1:] > rows[:-1]) and len(filled) == 1:
        return filled[0]
    order = np.argsort(rows)
    return {name: _concatenated([one[name] for one in filled])[order] for name in filled[0]}


def _fill(parts: Sequence[BatchPart], has_documents: bool) -> dict[str, np.ndarray]:
    first = parts[0].windows
    length, num_rows = first.length, sum(len(part.rows) for part in parts)
    before = np.cumsum([0, *(len(part.rows) for part in parts)])
    row_P = np.concatenate([p.spans.row_P + n for p, n in zip(parts, before, strict=False)])
    position_P = np.concatenate([part.spans.position_P for part in parts])
    sizes_P = np.concatenate([part.spans.stop_P - part.spans.start_P for part in parts])
    ids = _concatenated(
        [part.windows.data.store.read(part.spans.start_P, part.spans.stop_P) for part in parts]
    )
    arrays: dict[str, np.ndarray] = {}
    whole = len(ids) == num_rows * (length + 1)
    if whole and first.joined and first.data.labels is None:  # fast path
        rows = ids.reshape(num_rows, length + 1)
        arrays |= {"tokens": rows[:, :-1], "targets": rows[:, 1:]}
        arrays["weights"] = np.ones((num_rows, length), np.float32)
        return _finished(arrays, parts, before, None, has_documents)
    pad_B = np.repeat([p.windows.data.pad_id for p in parts], [len(p.rows) for p in parts])
    used_B = np.zeros(num_rows, np.int64)
    if first.data.labels is not None:
        labels = _concatenated(
            [
                part.windows.data.labels.read(part.spans.start_P, part.spans.stop_P)
                for part in parts
                if part.windows.data.labels is not None
            ]
        )
        used_B[row_P] = sizes_P
        arrays["tokens"] = _spread(ids, used_B, pad_B, length)
        arrays["targets"] = _spread(np.maximum(labels, 0), used_B, pad_B, length)
        arrays["weights"] = _spread(
            (labels >= 0).astype(np.float32), used_B, np.zeros(num_rows), length
        )
    elif first.joined:
        # The first token of a joined range is the target of the token before it.
        np.maximum.at(used_B, row_P, position_P + sizes_P)
        rows = _spread(ids, used_B, pad_B, length + 1)
        arrays |= {"tokens": rows[:, :-1], "targets": rows[:, 1:]}
        arrays["weights"] = _ones(used_B - 1, length)
    else:
        # A range of n tokens fills n - 1 positions.
        np.maximum.at(used_B, row_P, position_P + sizes_P - 1)
        ends_P = np.cumsum(sizes_P)
        is_input, is_target = np.ones(len(ids), bool), np.ones(len(ids), bool)
        is_input[ends_P - 1] = False
        is_target[ends_P - sizes_P] = False
        arrays["tokens"] = _spread(ids[is_input], used_B, pad_B, length)
        arrays["targets"] = _spread(ids[is_target], used_B, pad_B, length)
        arrays["weights"] = _ones(used_B, length)
    return _finished(arrays, parts, before, np.minimum(used_B, length), has_documents)


def _finished(
    arrays: dict[str, np.ndarray],
    parts: Sequence[BatchPart],
    before: np.ndarray,
    used_B: np.ndarray | None,
    has_documents: bool,
) -> dict[str, np.ndarray]:
    for part, first_row in zip(parts, before.tolist(), strict=False):
        if part.without_weight is not None:
            counts = part.without_weight.tolist()
            spans = part.spans
            for row, position, count in zip(spans.row_P, spans.position_P, counts, strict=True):
                arrays["weights"][first_row + row, position : position + count] = 0
    if has_documents:
        _add_documents(arrays, parts, before, used_B)
    if not parts[0].windows.options.zero_loss:
        arrays["weights"] *= arrays["targets"] != 0
    return arrays


def _concatenated(arrays: list[np.ndarray]) -> np.ndarray:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def _ones(used_B: np.ndarray, width: int) -> np.ndarray:
    return (np.arange(width) < used_B[:, None]).astype(np.float32)


def _spread(values: np.ndarray, used_B: np.ndarray, pad_B: np.ndarray, width: int) -> np.ndarray:
    spread = np.empty((len(used_B), width), values.dtype)
    spread[:] = pad_B[:, None]
    at = 0
    for row, used in zip(spread, used_B.tolist(), strict=True):
        row[:used] = values[at : at + used]
        at += used
    return spread


def _add_documents(
    arrays: dict[str, np.ndarray],
    parts: Sequence[BatchPart],
    before: np.ndarray,
    used_B: np.ndarray | None,
) -> None:
    """Adds positions and segments, and zeroes the weights of targets in another document.

    `used_B` is the number of tokens in each row before its padding; None if there is none.
    """
    num_rows, length = arrays["tokens"].shape
    begins = [part.windows.beginnings(part.spans) for part in parts]
    row_Q = np.concatenate([rows + n for (rows, _), n in zip(begins, before, strict=False)])
    position_Q = np.concatenate([positions for _, positions in begins])
    if parts[0].windows.joined:
        # The target before a document start belongs to another document.
        later = position_Q > 0
        arrays["weights"][row_Q[later], position_Q[later] - 1] = 0
    here = position_Q < length
    row_Q, position_Q = row_Q[here], position_Q[here]
    segments = np.zeros((num_rows, length), np.int32)
    segments[row_Q, position_Q] = 1
    np.cumsum(segments, axis=1, out=segments)
    # A cumulative sum of ones, reset to 0 at each document start.
    positions = np.ones((num_rows, length), np.int32)
    before_Q = np.zeros_like(position_Q)
    before_Q[1:] = np.where(row_Q[1:] == row_Q[:-1], position_Q[:-1], 0)
    positions[row_Q, position_Q] = 1 - (position_Q - before_Q)
    positions[:, 0] = 0
    np.cumsum(positions, axis=1, out=positions)
    if used_B is not None:
        beyond = np.arange(length) >= used_B[:, None]
        segments[beyond] = 0
        positions[beyond] = 0
    arrays["positions"], arrays["segments"] = positions, segments
