"""Measures a data set: ids, lengths of documents, duplicates, and how full its rows are.

Memory does not grow with the number of tokens: the stream is read block by block, all of it or
evenly spread blocks. To find equal ones, 16 bytes are kept per document or window that is read.
Imports no jax.

Legend: N ids of a block, S sequences, V ids that are counted, L distinct lengths, B rows, T tokens
of a window.
"""

import dataclasses
from collections.abc import Callable

import numpy as np

from MaxText.input_pipeline.sequences.order import OrderedWindows, random_words
from MaxText.input_pipeline.token_store.store import TokenData

# Tokens read at a time: a few times 8 MB in memory, and far more than a read costs to begin.
BLOCK_TOKENS = 2**20

# Documents are equal when their lengths and this many first tokens are: what is read beyond the
# end of a block stays small against the block, however long its last document is.
COMPARED_TOKENS = 2**16

# Ids from here on are not counted one by one; no vocabulary is that large.
_COUNTED_IDS = 2**22

# Document offsets looked at a time.
_BLOCK_DOCUMENTS = 2**20


@dataclasses.dataclass(frozen=True)
class Repeats:
    """Sequences that equal an earlier one.

    Attributes:
      num_sequences: compared with each other.
      num_repeats: of these, equal to one before.
      most_often: times that the most frequent one occurs, 1 where none repeats, 0 without any.
      example: the first two places of the most frequent one, None where none repeats.
    """

    num_sequences: int
    num_repeats: int
    most_often: int
    example: tuple[int, int] | None


def find_repeats(hashes_S: np.ndarray, numbers_S: np.ndarray) -> Repeats:
    """Counts equal hashes (uint64 [S]) of the sequences `numbers_S` (int64 [S], increasing)."""
    if hashes_S.size == 0:
        return Repeats(0, 0, 0, None)
    order = np.argsort(hashes_S, kind="stable")
    hashes_S = hashes_S[order]
    first = np.flatnonzero(np.append(True, hashes_S[1:] != hashes_S[:-1]))
    counts = np.diff(np.append(first, hashes_S.size))
    most = int(counts.argmax())
    example = None
    if counts[most] > 1:
        before, after = numbers_S[order[first[most] : first[most] + 2]].tolist()
        example = before, after
    return Repeats(hashes_S.size, hashes_S.size - first.size, int(counts[most]), example)


def _words(ids: np.ndarray, places: np.ndarray) -> np.ndarray:
    """uint64 that look random, one for each id at its place; a sequence's hash is their sum.

    Among n sequences two different ones look equal with a probability of n^2 / 2^65.
    """
    return random_words(0, (places.astype(np.uint64) << np.uint64(32)) + ids.astype(np.uint64))


@dataclasses.dataclass(frozen=True)
class Lengths:
    """How long documents are.

    Attributes:
      tokens_L: int64, the lengths that occur, in order.
      documents_L: int64, documents of each.
    """

    tokens_L: np.ndarray
    documents_L: np.ndarray

    @property
    def num_documents(self) -> int:
        """Documents, empty ones included."""
        return int(self.documents_L.sum())

    @property
    def num_tokens(self) -> int:
        """Tokens of all documents."""
        return int((self.tokens_L * self.documents_L).sum())

    def quantile(self, share: float) -> int:
        """The smallest length that at least `share` (0 to 1) of the documents do not exceed."""
        reached = np.cumsum(self.documents_L) >= share * self.num_documents
        return int(self.tokens_L[reached.argmax()])


def document_lengths(offsets: np.ndarray) -> Lengths:
    """Counts the lengths of documents.

    Args:
      offsets: int64 [documents + 1], first token of each document and the end; may be a file
        mapped into memory.
    """
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
    """What the tokens of a split are.

    Attributes:
      num_tokens: in the split.
      num_read: of these, read.
      smallest_id, largest_id: of what was read.
      largest_document: the document where the largest id occurs first, and its token there.
      counts_V: int64, how often each id occurs; larger ids are in `num_uncounted`.
      num_uncounted: tokens with an id that is not in counts_V.
      documents: those that begin in what was read and are not empty. Equal are those of one
        length and the same first COMPARED_TOKENS tokens.
    """

    num_tokens: int
    num_read: int
    smallest_id: int
    largest_id: int
    largest_document: tuple[int, int]
    counts_V: np.ndarray
    num_uncounted: int
    documents: Repeats

    def occurrences(self, token: int) -> int:
        """How often an id below 2**22 occurs."""
        return int(self.counts_V[token]) if 0 <= token < self.counts_V.size else 0

    def num_from(self, token: int) -> int:
        """Tokens with this id or a larger one."""
        return int(self.counts_V[token:].sum()) + self.num_uncounted


def measure_tokens(
    data: TokenData, most_tokens: int, progress: Callable[[int], None]
) -> TokenStatistics:
    """Reads the tokens of a split.

    Args:
      data: the split.
      most_tokens: where there are more, blocks of 2**20 tokens that are evenly spread are read.
      progress: takes the tokens read since its last call.

    Raises:
      UnreadableFile: a file cannot be read.
    """
    offsets, num_tokens = data.store.document_offsets, len(data.store)
    num_read = num_uncounted = 0
    smallest, largest, largest_place = -1, -1, 0
    counts_V = np.zeros(0, np.int64)
    hashes, documents = [np.zeros(0, np.uint64)], [np.zeros(0, np.int64)]
    for block in spread(-(-num_tokens // BLOCK_TOKENS), most_tokens // BLOCK_TOKENS).tolist():
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
        documents=find_repeats(np.concatenate(hashes), np.concatenate(documents)),
    )


def spread(count: int, most: int) -> np.ndarray:
    """int64: all of 0..count - 1, or where there are more than `most`, that many, evenly spread."""
    most = max(most, 1)
    return np.arange(count) if count <= most else np.arange(most) * count // most


def _document_hashes(ids_N: np.ndarray, begins_S: np.ndarray, sizes_S: np.ndarray) -> np.ndarray:
    """Hashes (uint64 [S]) of documents that follow each other.

    Args:
      ids_N: ids. The last document may continue beyond them.
      begins_S: int64, first token of each document.
      sizes_S: int64, its tokens, above 0.
    """
    ids_N = ids_N[begins_S[0] :]
    begins_S = begins_S - begins_S[0]
    places_N = np.arange(ids_N.size) - np.repeat(begins_S, np.diff(np.append(begins_S, ids_N.size)))
    words_N = _words(ids_N, places_N)
    words_N[places_N >= COMPARED_TOKENS] = 0
    return np.add.reduceat(words_N, begins_S) + random_words(1, sizes_S)


@dataclasses.dataclass(frozen=True)
class RowStatistics:
    """How the rows of one epoch look.

    Attributes:
      num_windows: rows of an epoch.
      num_read: of these, read.
      num_places: places of the rows read.
      num_counted: of these, with a target that counts in the loss.
      largest_target: largest id among these targets, -1 where there is none.
      windows: of the rows with a target, those with the same tokens as another one.
    """

    num_windows: int
    num_read: int
    num_places: int
    num_counted: int
    largest_target: int
    windows: Repeats


def measure_rows(
    source: OrderedWindows, most_tokens: int, progress: Callable[[int], None]
) -> RowStatistics:
    """Reads the rows of an epoch, in the order of the stream.

    Args:
      source: the rows.
      most_tokens: where an epoch has more places, evenly spread groups of rows are read.
      progress: takes the places read since its last call.

    Raises:
      UnreadableFile: a file cannot be read.
    """
    windows, length = source.windows, source.windows.length
    in_order = source.in_order()
    rows_of_block = max(1, BLOCK_TOKENS // length)
    num_read = num_counted = 0
    largest_target = -1
    hashes, numbers = [np.zeros(0, np.uint64)], [np.zeros(0, np.int64)]
    places_T = np.arange(length)
    num_blocks = -(-len(windows) // rows_of_block)
    for block in spread(num_blocks, most_tokens // (rows_of_block * length)).tolist():
        first = block * rows_of_block
        rows_B = np.arange(first, min(first + rows_of_block, len(windows)))
        rows = in_order.read(rows_B)
        counted_BT = rows["weights"] > 0
        counted_B = np.count_nonzero(counted_BT, axis=1)
        largest = rows["targets"].max(initial=-1, where=counted_BT)
        largest_target = max(largest_target, int(largest))
        num_read += rows_B.size
        num_counted += int(counted_B.sum())
        hashes_B = _words(rows["tokens"], places_T).sum(axis=1, dtype=np.uint64)
        hashes.append(hashes_B[counted_B > 0])
        numbers.append(rows_B[counted_B > 0])
        progress(rows_B.size * length)
    return RowStatistics(
        num_windows=len(windows),
        num_read=num_read,
        num_places=num_read * length,
        num_counted=num_counted,
        largest_target=largest_target,
        windows=find_repeats(np.concatenate(hashes), np.concatenate(numbers)),
    )
