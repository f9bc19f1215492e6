"""Statistics of a dataset: ids, lengths of documents, duplicates, and how full sequences are.

Memory does not grow with the number of tokens. All tokens are read in blocks, or evenly spread
blocks of them. To find duplicates, 16 bytes are kept for each document that is read.

Legend: N ids of a block, S documents, V ids that are counted, L distinct lengths.
"""

import dataclasses
from collections.abc import Callable

import numpy as np

from MaxText.input_pipeline.sequences.order import OrderedWindows, random_words
from MaxText.input_pipeline.token_store.store import TokenData

# A few times 8 MB in memory.
BLOCK_TOKENS = 2**20

# Documents are duplicates if their lengths and this many first tokens are equal. This bounds what
# is read beyond the end of a block.
COMPARED_TOKENS = 2**16

# Larger ids are not counted one by one; no vocabulary is that large.
_COUNTED_IDS = 2**22

_BLOCK_DOCUMENTS = 2**20


@dataclasses.dataclass(frozen=True)
class Duplicates:
    """Documents that equal an earlier one.

    Attributes:
      max_copies: Occurrences of the most frequent document; 0 without documents.
      example: The first two numbers of the most frequent one, None if nothing repeats.
    """

    num_documents: int
    num_repeats: int
    max_copies: int
    example: tuple[int, int] | None


def find_duplicates(hashes_S: np.ndarray, numbers_S: np.ndarray) -> Duplicates:
    """Counts equal hashes (uint64 [S]) of the documents `numbers_S` (int64 [S], increasing)."""
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
    """The lengths of documents that occur (int64 [L], increasing), and how many have each."""

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
        tokens_L, place = np.unique(np.concatenate([tokens_L, found]), return_inverse=True)
        merged = np.zeros(tokens_L.size, np.int64)
        np.add.at(merged, place, np.concatenate([documents_L, counts]))
        documents_L = merged
    return Lengths(tokens_L, documents_L)


@dataclasses.dataclass(frozen=True)
class TokenStatistics:
    """Statistics of the tokens of a split.

    Attributes:
      largest_document: Document in which the largest id occurs first, and the token there.
      counts_V: int64, occurrences of each id; `num_uncounted` tokens have larger ids.
      documents: Duplicates among the nonempty documents that begin in what was read.
    """

    num_tokens: int
    num_read: int
    smallest_id: int
    largest_id: int
    largest_document: tuple[int, int]
    counts_V: np.ndarray
    num_uncounted: int
    documents: Duplicates

    def occurrences(self, token: int) -> int:
        return int(self.counts_V[token]) if 0 <= token < self.counts_V.size else 0

    def num_from(self, token: int) -> int:
        """Returns the number of tokens with this id or a larger one."""
        return int(self.counts_V[token:].sum()) + self.num_uncounted


def measure_tokens(
    data: TokenData, max_tokens: int, progress: Callable[[int], None]
) -> TokenStatistics:
    """Reads the tokens of a split.

    Args:
      max_tokens: If there are more, evenly spread blocks of 2**20 tokens are read.
      progress: Takes the tokens read since its last call.

    Raises:
      UnreadableFile: A file cannot be read.
    """
    offsets, num_tokens = data.store.document_offsets, len(data.store)
    num_read = num_uncounted = 0
    smallest, largest, largest_place = -1, -1, 0
    counts_V = np.zeros(0, np.int64)
    hashes, documents = [np.zeros(0, np.uint64)], [np.zeros(0, np.int64)]
    for block in spread(-(-num_tokens // BLOCK_TOKENS), max_tokens // BLOCK_TOKENS).tolist():
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
            largest, largest_place = high, start + int(inside.argmax())
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
    document = int(np.searchsorted(offsets, largest_place, side="right")) - 1
    return TokenStatistics(
        num_tokens=num_tokens,
        num_read=num_read,
        smallest_id=smallest,
        largest_id=largest,
        largest_document=(document, largest_place - int(offsets[document])),
        counts_V=counts_V,
        num_uncounted=num_uncounted,
        documents=find_duplicates(np.concatenate(hashes), np.concatenate(documents)),
    )


def spread(count: int, limit: int) -> np.ndarray:
    """Returns 0..count - 1 as int64, or if there are more than `limit`, that many of them."""
    limit = max(limit, 1)
    return np.arange(count) if count <= limit else np.arange(limit) * count // limit


def _document_hashes(ids_N: np.ndarray, begins_S: np.ndarray, sizes_S: np.ndarray) -> np.ndarray:
    """Returns hashes (uint64 [S]) of adjacent documents; `ids_N` may end within the last one.

    A hash is the sum of random words, one for each id at its position: among n documents two
    different ones are taken for equal with a probability of n^2 / 2^65.
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
    """Statistics of the sequences of an epoch.

    Attributes:
      num_sequences, num_read: Sequences of an epoch, and those of them that were read.
      num_counted: Targets that count in the loss.
      largest_target: Largest id among them, -1 without any.
    """

    num_sequences: int
    num_read: int
    num_counted: int
    largest_target: int


def measure_sequences(
    source: OrderedWindows, max_tokens: int, progress: Callable[[int], None]
) -> SequenceStatistics:
    """Reads the sequences of an epoch in the order of the token stream.

    Args:
      max_tokens: If an epoch has more, evenly spread groups of sequences are read.
      progress: Takes the tokens read since its last call.

    Raises:
      UnreadableFile: A file cannot be read.
    """
    windows, length = source.windows, source.windows.length
    in_order = source.in_order()
    group = max(1, BLOCK_TOKENS // length)
    num_read = num_counted = 0
    largest_target = -1
    for block in spread(-(-len(windows) // group), max_tokens // (group * length)).tolist():
        numbers = np.arange(block * group, min((block + 1) * group, len(windows)))
        arrays = in_order.read(numbers)
        counted_BT = arrays["weights"] > 0
        largest = arrays["targets"].max(initial=-1, where=counted_BT)
        largest_target = max(largest_target, int(largest))
        num_read += numbers.size
        num_counted += int(np.count_nonzero(counted_BT))
        progress(numbers.size * length)
    return SequenceStatistics(len(windows), num_read, num_counted, largest_target)
