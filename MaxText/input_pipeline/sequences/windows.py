"""Slices a token store into fixed-length training sequences.

Everything is computed from document offsets on reading; only plans for whole documents are cached.
Array operations fill the sequences of all datasets of a batch together.

Legend: B sequences (rows), T tokens of a window, P ranges, D documents, Q document starts, S
stride, I sliding windows, R sequences of an epoch.
"""

import abc
import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from MaxText.input_pipeline.local_cache import cached_arrays
from MaxText.input_pipeline.token_store.store import TokenSplit, document_sizes

EMPTY = -1  # index for "no window": a row of padding, with weights and segments 0


class TokenRanges(NamedTuple):
    """Token ranges of sequences, int64 [P], ordered by row and position."""

    row_P: np.ndarray  # row of each range
    position_P: np.ndarray  # position of its first token in the row
    start_P: np.ndarray  # range in the store, targets included
    stop_P: np.ndarray
    context_P: np.ndarray | None = None  # number of its leading targets without weight


@dataclasses.dataclass(frozen=True)
class SequenceOptions:
    """Options for slicing."""

    length: int  # T, tokens of a window
    cross_document_attention: bool = False  # treat the documents of a sequence as one
    zero_loss: bool = True  # count targets with id 0
    truncate: bool = False  # drop the tokens of a document beyond one window


class Windows(abc.ABC):
    """Base class for slicing the token store into sequences."""

    joined = True  # ranges of a sequence are contiguous; else n tokens fill n - 1 positions
    single_documents = False  # whether no sequence has more than one
    has_own_order = False  # whether shuffling must keep the order of windows
    random = False  # whether `spans` uses its random numbers
    padding_share = 0.0  # share of positions without a target; 0 with packing
    description = ""  # identifies the sequences in the data identity

    def __init__(self, data: TokenSplit, options: SequenceOptions):
        self.data = data
        self.options = options
        self.length = options.length
        self.has_documents = not (options.cross_document_attention or self.single_documents)

    @abc.abstractmethod
    def __len__(self) -> int:
        pass

    def spans(self, windows: np.ndarray, draws: np.ndarray) -> TokenRanges:
        """Returns the ranges of sequences; none for EMPTY ones.

        `windows` are int64 [B], in [0, len) or EMPTY; `draws` are uint64 [B] random numbers, used
        if `random` is set.
        """
        rows = np.flatnonzero(windows != EMPTY)
        ranges = self._ranges(windows[rows], draws[rows])
        return ranges._replace(row_P=rows[ranges.row_P])

    @abc.abstractmethod
    def _ranges(self, windows: np.ndarray, draws: np.ndarray) -> TokenRanges:
        """Returns the ranges of windows in [0, len), one a row."""

    def first_window(self, documents: np.ndarray) -> np.ndarray:
        """Returns the first window of each document (int64), then len(self)."""
        raise NotImplementedError  # evaluation has no groups of files

    def origin(self, window: int, draw: int) -> list[tuple[str, int, int]]:
        """Returns (document, first token, tokens) for each document."""
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


def expand(first_G: np.ndarray, counts_G: np.ndarray) -> np.ndarray:
    """Returns the concatenated ranges [first, first + count) of G groups."""
    before_G = np.cumsum(counts_G) - counts_G
    return np.arange(int(counts_G.sum())) + np.repeat(first_G - before_G, counts_G)


def items_of_rows(first_R: np.ndarray, windows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the row and the number of each item of windows with several."""
    first = first_R[windows]
    end = first_R[windows + 1]
    return np.repeat(np.arange(len(windows)), end - first), expand(first, end - first)


def single_segment(starts: np.ndarray, stops: np.ndarray) -> TokenRanges:
    return TokenRanges(np.arange(len(starts)), np.zeros(len(starts), np.int64), starts, stops)


def ranges_in_rows(row_P: np.ndarray, starts_P: np.ndarray, stops_P: np.ndarray) -> TokenRanges:
    """Returns consecutive ranges in their rows; n tokens fill n - 1."""
    sizes_P = stops_P - starts_P - 1
    before_P = np.cumsum(sizes_P) - sizes_P
    first_P = before_P[np.searchsorted(row_P, row_P)]
    return TokenRanges(row_P, before_P - first_P, starts_P, stops_P)


class ConcatThenSplit(Windows):
    """Documents concatenated, then split every T tokens.

    Window i reads tokens [i T, i T + T) and predicts the tokens one later, so each token but the
    first is a target once. The last window is padded, not dropped.
    """

    description = "documents end to end"

    def __len__(self) -> int:
        return max(0, -(-(len(self.data.store) - 1) // self.length))

    def _ranges(self, windows: np.ndarray, draws: np.ndarray) -> TokenRanges:
        starts = windows * self.length
        return single_segment(starts, np.minimum(starts + self.length + 1, len(self.data.store)))

    def first_window(self, documents: np.ndarray) -> np.ndarray:
        offsets = np.asarray(self.data.store.document_offsets[documents])
        return np.where(offsets >= len(self.data.store), len(self), offsets // self.length)


class DocumentWindows(Windows):
    """Each document starts a new window; long ones take several.

    A document of n tokens makes ceil((n - 1) / T) windows, at most one with `truncate`. A single
    token, which predicts nothing, makes none. Maps 8 bytes per document.
    """

    single_documents = True

    def __init__(self, data: TokenSplit, options: SequenceOptions, cache_dir: Path):
        super().__init__(data, options)
        end = "cut off" if options.truncate else "continued"
        self.description = f"one document per row, {end}"
        # With labels every token has a target.
        self._ahead = 0 if data.labels is not None else 1
        key = f"{data.fingerprint} {self.length} {options.truncate} {self._ahead}"
        self._arrays = cached_arrays(cache_dir, "windows1", key, self._plan)
        num_positions = max(len(self) * self.length, 1)
        self.padding_share = 1 - float(self._arrays["num_targets"][0]) / num_positions

    def _plan(self) -> Iterator[dict[str, np.ndarray]]:
        offsets = self.data.store.document_offsets
        total = 0
        num_targets = 0
        for block in document_sizes(offsets):
            sizes = block - self._ahead
            counts = np.maximum(-(-sizes // self.length), 0)
            if self.options.truncate:
                counts = np.minimum(counts, 1)
            num_targets += int(np.minimum(np.maximum(sizes, 0), counts * self.length).sum())
            ends = np.cumsum(counts)
            yield {"first_window": total + ends - counts, "num_targets": np.empty(0, np.int64)}
            total += int(ends[-1])
        yield {"first_window": np.array([total]), "num_targets": np.array([num_targets])}

    def __len__(self) -> int:
        return int(self._arrays["first_window"][-1])

    def _ranges(self, windows: np.ndarray, draws: np.ndarray) -> TokenRanges:
        first_window = self._arrays["first_window"]
        offsets = self.data.store.document_offsets
        documents = np.searchsorted(first_window, windows, side="right") - 1
        starts = offsets[documents] + (windows - first_window[documents]) * self.length
        stops = np.minimum(starts + self.length + self._ahead, offsets[documents + 1])
        return single_segment(starts, stops)

    def first_window(self, documents: np.ndarray) -> np.ndarray:
        return self._arrays["first_window"][documents]


class JoinedDocuments(Windows):
    """One window from `stitch` documents (GPT-Neo's documents_* modes).

    With s tokens in these documents, the window starts at 0, or with `random` uniformly in
    0..s - (T + 1). If s < T + 1 it is padded. Tokens outside it are not seen in that epoch.
    """

    def __init__(self, data: TokenSplit, options: SequenceOptions, stitch: int, random: bool):
        super().__init__(data, options)
        self._stitch = stitch
        self.random = random
        place = "a random place" if random else "the beginning"
        self.description = f"a window from {place} of {stitch} documents"

    def __len__(self) -> int:
        return -(-(len(self.data.store.document_offsets) - 1) // self._stitch)

    def _ranges(self, windows: np.ndarray, draws: np.ndarray) -> TokenRanges:
        offsets = self.data.store.document_offsets
        first = windows * self._stitch
        last = np.minimum(first + self._stitch, len(offsets) - 1)
        starts = np.asarray(offsets[first])
        ends = np.asarray(offsets[last])
        if self.random:
            places = np.maximum(ends - starts - self.length, 1).astype(np.uint64)
            starts = starts + (draws % places).astype(np.int64)
        stops = np.minimum(starts + self.length + 1, ends)
        filled = np.flatnonzero(stops > starts)
        return single_segment(starts[filled], stops[filled])._replace(row_P=filled)

    def first_window(self, documents: np.ndarray) -> np.ndarray:
        return -(-documents // self._stitch)


class BatchPart(NamedTuple):
    """Token ranges of some sequences of a batch, from one dataset."""

    windows: Windows
    rows: np.ndarray  # int64, batch indices of the sequences
    spans: TokenRanges  # `row_P` counts within `rows`


def fill_batch(parts: Sequence[BatchPart], has_documents: bool) -> dict[str, np.ndarray]:
    """Returns the sequences of a batch.

    `parts` together have each sequence once. Arrays [B, T] are named as in Batch: int32 `tokens`
    and `targets`, float32 `weights`, and with `has_documents` int32 `positions` (from the first
    token of the document in the sequence) and `segments`. A weight is 0 without a target, and with
    `has_documents` also if the target begins another document. Raises FileReadError.
    """
    alike: dict[tuple[bool, bool], list[BatchPart]] = {}
    for part in parts:
        key = (part.windows.joined, part.windows.data.labels is not None)
        alike.setdefault(key, []).append(part)
    groups = [_fill(group, has_documents) for group in alike.values()]
    rows = np.concatenate([part.rows for group in alike.values() for part in group])
    if np.all(rows[1:] > rows[:-1]) and len(groups) == 1:
        return groups[0]
    order = np.argsort(rows)
    return {name: _concatenated([of[name] for of in groups])[order] for name in groups[0]}


def _fill(parts: Sequence[BatchPart], has_documents: bool) -> dict[str, np.ndarray]:
    first = parts[0].windows
    counts = [len(part.rows) for part in parts]
    length = first.length
    num_rows = sum(counts)
    spans = [
        part.spans._replace(row_P=part.spans.row_P + before)
        for part, before in zip(parts, itertools.accumulate(counts, initial=0), strict=False)
    ]
    row_P = np.concatenate([ranges.row_P for ranges in spans])
    sizes_P = np.concatenate([ranges.stop_P - ranges.start_P for ranges in spans])
    pad_B = np.repeat([part.windows.data.pad_id for part in parts], counts)

    def read(store: str) -> np.ndarray:
        stores = (getattr(part.windows.data, store) for part in parts)
        pairs = zip(stores, spans, strict=True)
        return _concatenated([one.read(ranges.start_P, ranges.stop_P) for one, ranges in pairs])

    ids = read("store")
    used_B = np.zeros(num_rows, np.int64)
    np.add.at(used_B, row_P, sizes_P)
    if first.joined:
        # The first token of a joined range is the target of the token before it.
        rows = _spread(ids, used_B, pad_B, length + 1)
        tokens_BT = rows[:, :-1]
        targets_BT = rows[:, 1:]
        weights_BT = (np.arange(length) < used_B[:, None] - 1).astype(np.float32)
    else:
        ends_P = np.cumsum(sizes_P)
        used_B -= np.bincount(row_P, minlength=num_rows)
        tokens_BT = _spread(np.delete(ids, ends_P - 1), used_B, pad_B, length)
        targets_BT = _spread(np.delete(ids, ends_P - sizes_P), used_B, pad_B, length)
        weights_BT = (np.arange(length) < used_B[:, None]).astype(np.float32)
    if first.data.labels is not None:
        labels = read("labels")
        is_target = (labels >= 0).astype(np.float32)
        targets_BT = _spread(np.maximum(labels, 0), used_B, pad_B, length)
        weights_BT = _spread(is_target, used_B, np.zeros(num_rows), length)
    for row_P, position_P, _, _, context_P in spans:
        if context_P is not None:
            for row, position, count in zip(row_P, position_P, context_P, strict=True):
                weights_BT[row, position : position + count] = 0
    arrays = {"tokens": tokens_BT, "targets": targets_BT, "weights": weights_BT}
    if has_documents:
        _add_documents(arrays, parts, spans, used_B)
    if not first.options.zero_loss:
        weights_BT *= targets_BT != 0
    return arrays


def _concatenated(arrays: list[np.ndarray]) -> np.ndarray:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def _spread(values: np.ndarray, used_B: np.ndarray, pad_B: np.ndarray, width: int) -> np.ndarray:
    if len(values) == len(used_B) * width:  # no padding: no copy
        return values.reshape(-1, width)
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
    spans: Sequence[TokenRanges],
    used_B: np.ndarray,
) -> None:
    """Adds positions and segments to the arrays of a batch.

    The weights of targets in another document become zero. `used_B` is the number of tokens in each
    row before its padding.
    """
    num_rows, length = arrays["tokens"].shape
    stride = length + 1  # the last target may begin a document
    keys = [np.arange(num_rows) * stride]
    for part, ranges in zip(parts, spans, strict=True):
        if part.windows.options.cross_document_attention:
            continue  # a whole sequence is one document
        offsets = part.windows.data.store.document_offsets
        first_P = np.searchsorted(offsets, ranges.start_P, side="right")
        counts_P = np.searchsorted(offsets, ranges.stop_P, side="left") - first_P
        key_P = ranges.row_P * stride + ranges.position_P
        key_Q = np.repeat(key_P - ranges.start_P, counts_P)
        keys += (key_P, key_Q + offsets[expand(first_P, counts_P)])
    # An empty document starts where the next one does.
    row_Q, position_Q = np.divmod(np.unique(np.concatenate(keys)), stride)
    if parts[0].windows.joined:
        # The target before a document start belongs to another document.
        later = position_Q > 0
        arrays["weights"][row_Q[later], position_Q[later] - 1] = 0
    here = position_Q < length
    row_Q = row_Q[here]
    position_Q = position_Q[here]
    number_Q = np.arange(1, len(row_Q) + 1) - np.searchsorted(row_Q, row_Q)
    flat_Q = row_Q * length + position_Q
    counts_Q = np.diff(flat_Q, append=num_rows * length)
    segments = np.repeat(number_Q.astype(np.int32), counts_Q).reshape(num_rows, length)
    positions = np.repeat(-flat_Q.astype(np.int32), counts_Q).reshape(num_rows, length)
    positions += np.arange(positions.size, dtype=np.int32).reshape(num_rows, length)
    if used_B.min(initial=length) < length:
        beyond = np.arange(length) >= used_B[:, None]
        segments[beyond] = 0
        positions[beyond] = 0
    arrays["positions"], arrays["segments"] = positions, segments


class SlidingWindows(Windows):
    """Sliding windows over each document, or over all tokens.

    They go over all tokens if documents attend to each other. The first window has the first T
    targets of a document. Each further window ends S targets later (or at the end of the document),
    starts T targets before its end, and counts only the new targets. So each target counts once,
    with between T - S + 1 and T tokens of context, or all that exist. Short documents share a
    sequence as separate segments. Keeps 20 bytes per window.
    """

    joined = False

    def __init__(self, data: TokenSplit, options: SequenceOptions, stride: int):
        assert 1 <= stride <= options.length
        assert data.labels is None
        super().__init__(data, options)
        offsets = np.asarray(data.store.document_offsets)
        if options.cross_document_attention:
            offsets = offsets[[0, -1]]
        self._start_I, self._stop_I, self._context_I = _windows(offsets, options.length, stride)
        self._first_R = _rows(self._stop_I - self._start_I - 1, options.length)

    def __len__(self) -> int:
        return len(self._first_R) - 1

    def _ranges(self, windows: np.ndarray, draws: np.ndarray) -> TokenRanges:
        row_P, item_P = items_of_rows(self._first_R, windows)
        ranges = ranges_in_rows(row_P, self._start_I[item_P], self._stop_I[item_P])
        return ranges._replace(context_P=self._context_I[item_P])


def _windows(
    offsets: np.ndarray, length: int, stride: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns first token, end, and number of uncounted targets of windows."""
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


INCREMENT = 0x9E3779B97F4A7C15
"""Step of the counter of SplitMix64 (Steele, Lea and Flood 2014): random bits from numbers."""


def mix(words: np.ndarray) -> np.ndarray:
    """Applies SplitMix64's bijection to uint64 words, in place."""
    words ^= words >> 30
    words *= 0xBF58476D1CE4E5B9
    words ^= words >> 27
    words *= 0x94D049BB133111EB
    words ^= words >> 31
    return words


def hash_uint64(words: np.ndarray) -> np.ndarray:
    """Hashes words in place by two mixed steps of the counter.

    Neighboring words end up far apart.
    """
    for _ in range(2):
        words += np.uint64(INCREMENT)
        mix(words)
    return words
