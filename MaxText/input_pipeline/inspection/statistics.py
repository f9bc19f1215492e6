"""Dataset statistics: ids, document lengths, duplicates, and sequence utilization.

Tokens are read in blocks, all or evenly spaced, so memory does not grow with their number.
Duplicate detection keeps 16 bytes per document read.

Legend: N ids of a block, S documents, V ids that are counted, L distinct lengths.
"""

import dataclasses
from collections.abc import Callable

import numpy as np

from MaxText.input_pipeline.sequences.order import OrderedWindows, random_words
from MaxText.input_pipeline.token_store.store import TokenData

BLOCK_TOKENS = 2**20  # a few times 8 MB in memory

# Documents are duplicates if their lengths and this many leading tokens are equal.
COMPARED_TOKENS = 2**16

_COUNTED_IDS = 2**22  # larger ids are not counted individually; no vocabulary is that large

_BLOCK_DOCUMENTS = 2**20


@dataclasses.dataclass(frozen=True)
class Duplicates:
    """Documents that equal an earlier one."""

    num_documents: int
    num_repeats: int
    max_copies: int  # occurrences of the most frequent document; 0 without documents
    example: tuple[int, int] | None  # first two numbers of the most frequent duplicate


def find_duplicates(hashes_S: np.ndarray, numbers_S: np.ndarray) -> Duplicates:
    """Counts equal hashes (uint64 [S]) of documents with increasing `numbers_S` (int64 [S])."""
    if hashes_S.size == 0:
        return Duplicates(0, 0, 0, None)
    order = np.argsort(hashes_S, kind="stable")
    _, first, counts = np.unique(hashes_S[order], return_index=True, return_counts=True)
    most = int(counts.argmax())
    example = None
    if counts[most] > 1:
        before, after = numbers_S[order[first[most] : first[most] + 2]].tolist()
        example = before, after
    return Duplicates(hashes_S.size, hashes_S.size - first.size, int(counts[most]), example)


@dataclasses.dataclass(frozen=True)
class Lengths:
    """Distinct document lengths (int64 [L], increasing), and the document count of each."""

    tokens_L: np.ndarray
    documents_L: np.ndarray

    @property
    def num_documents(self) -> int:
        return int(self.documents_L.sum())

    @property
    def num_tokens(self) -> int:
        return int((self.tokens_L * self.documents_L).sum())

    def quantile(self, share: float) -> int:
        """Returns the smallest length that at least `share` of the documents do not exceed."""
        reached = np.cumsum(self.documents_L) >= share * self.num_documents
        return int(self.tokens_L[reached.argmax()])


def document_lengths(offsets: np.ndarray) -> Lengths:
    """Counts lengths, given the first token of each document and the end (may be mapped)."""
    tokens_L, documents_L = np.zeros(0, np.int64), np.zeros(0, np.int64)
    for first in range(0, len(offsets) - 1, _BLOCK_DOCUMENTS):
        sizes = np.diff(offsets[first : first + _BLOCK_DOCUMENTS + 1])
        found, counts = np.unique(sizes, return_counts=True)
        tokens_L, index = np.unique(np.concatenate([tokens_L, found]), return_inverse=True)
        merged = np.zeros(tokens_L.size, np.int64)
        np.add.at(merged, index, np.concatenate([documents_L, counts]))
        documents_L = merged
    return Lengths(tokens_L, documents_L)


@dataclasses.dataclass(frozen=True)
class TokenStatistics:
    """Statistics of the tokens of a split."""

    num_tokens: int
    num_read: int
    smallest_id: int
    largest_id: int
    largest_document: tuple[int, int]  # (document, token in it) of the first largest id
    counts_V: np.ndarray  # int64; `num_uncounted` tokens have larger ids
    num_uncounted: int
    documents: Duplicates  # among nonempty documents that start in the blocks read

    def occurrences(self, token: int) -> int:
        return int(self.counts_V[token]) if 0 <= token < self.counts_V.size else 0

    def num_from(self, token: int) -> int:
        """Returns the number of tokens with this id or a larger one."""
        return int(self.counts_V[token:].sum()) + self.num_uncounted


def measure_tokens(
    data: TokenData, max_tokens: int, progress: Callable[[int], None]
) -> TokenStatistics:
    """Reads evenly spaced blocks of 2**20 tokens, about `max_tokens` in all and at least one."""
    offsets, num_tokens = data.store.document_offsets, len(data.store)
    num_read = num_uncounted = 0
    smallest, largest, largest_position = -1, -1, 0
    counts_V = np.zeros(0, np.int64)
    hashes, documents = [np.zeros(0, np.uint64)], [np.zeros(0, np.int64)]
    for block in evenly_spaced_indices(
        -(-num_tokens // BLOCK_TOKENS), max_tokens // BLOCK_TOKENS
    ).tolist():
        start = block * BLOCK_TOKENS
        stop = min(start + BLOCK_TOKENS, num_tokens)
        first, last = np.searchsorted(offsets, (start, stop)).tolist()
        begins = np.asarray(offsets[first : last + 1])
        compared = begins[-1]
        if last > first:
            compared = min(compared, begins[-2] + COMPARED_TOKENS)
        ids_N = data.store.read(np.array([start]), np.array([max(stop, int(compared))]))
        inside = ids_N[: stop - start]
        num_read += inside.size
        low, high = int(inside.min()), int(inside.max())
        smallest = low if smallest < 0 else min(smallest, low)
        if high > largest:
            largest, largest_position = high, start + int(inside.argmax())
        countable = inside[inside < _COUNTED_IDS]
        num_uncounted += inside.size - countable.size
        found = np.bincount(countable, minlength=counts_V.size)
        found[: counts_V.size] += counts_V
        counts_V = found
        sizes = np.diff(begins)
        filled = np.flatnonzero(sizes)
        if filled.size:
            ids_N = ids_N[: int(compared) - start]
            hashes.append(_document_hashes(ids_N, begins[filled] - start, sizes[filled]))
            documents.append(first + filled)
        progress(stop - start)
    document = int(np.searchsorted(offsets, largest_position, side="right")) - 1
    return TokenStatistics(
        num_tokens=num_tokens,
        num_read=num_read,
        smallest_id=smallest,
        largest_id=largest,
        largest_document=(document, largest_position - int(offsets[document])),
        counts_V=counts_V,
        num_uncounted=num_uncounted,
        documents=find_duplicates(np.concatenate(hashes), np.concatenate(documents)),
    )


def evenly_spaced_indices(count: int, limit: int) -> np.ndarray:
    """Returns 0..count - 1 as int64, or `limit` evenly spaced ones of them."""
    limit = max(limit, 1)
    return np.arange(count) if count <= limit else np.arange(limit) * count // limit


def _document_hashes(ids_N: np.ndarray, begins_S: np.ndarray, sizes_S: np.ndarray) -> np.ndarray:
    """Returns hashes (uint64 [S]) of adjacent documents; `ids_N` may end within the last one.

    A hash is the sum of one random word per (id, position); two different documents among n collide
    with probability n^2 / 2^65.
    """
    ids_N = ids_N[begins_S[0] :]
    begins_S = begins_S - begins_S[0]
    sizes = np.diff(np.append(begins_S, ids_N.size))
    positions_N = np.arange(ids_N.size) - np.repeat(begins_S, sizes)
    words_N = random_words(0, (positions_N.astype(np.uint64) << np.uint64(32)) + ids_N.astype("u8"))
    words_N[positions_N >= COMPARED_TOKENS] = 0
    return np.add.reduceat(words_N, begins_S) + random_words(1, sizes_S)


@dataclasses.dataclass(frozen=True)
class SequenceStatistics:
    """Statistics of the sequences of an epoch."""

    num_sequences: int
    num_read: int
    num_counted: int  # targets with nonzero weight
    largest_target: int  # among counted targets; -1 without any


def measure_sequences(
    source: OrderedWindows, max_tokens: int, progress: Callable[[int], None]
) -> SequenceStatistics:
    """Reads evenly spaced groups of sequences, about `max_tokens` in all and at least one."""
    windows, length = source.windows, source.windows.length
    in_order = source.in_order()
    group = max(1, BLOCK_TOKENS // length)
    num_read = num_counted = 0
    largest_target = -1
    for block in evenly_spaced_indices(
        -(-len(windows) // group), max_tokens // (group * length)
    ).tolist():
        numbers = np.arange(block * group, min((block + 1) * group, len(windows)))
        arrays = in_order.read(numbers)
        counted_BT = arrays["weights"] > 0
        largest = arrays["targets"].max(initial=-1, where=counted_BT)
        largest_target = max(largest_target, int(largest))
        num_read += numbers.size
        num_counted += int(np.count_nonzero(counted_BT))
        progress(numbers.size * length)
    return SequenceStatistics(len(windows), num_read, num_counted, largest_target)
