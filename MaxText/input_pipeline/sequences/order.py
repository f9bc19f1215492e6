"""Order of the sequences of a run, a pure function of their number.

Legend: B sequences (rows).
"""

import abc
import bisect
import functools
import hashlib
import itertools
import math
import sys
from collections.abc import Sequence

import numpy as np
from grain.experimental import index_shuffle

from MaxText.errors import UserError
from MaxText.input_pipeline.sequences.windows import (
    EMPTY,
    INCREMENT,
    BatchPart,
    Windows,
    fill_batch,
    hash_uint64,
)

# Grain's permutation is a cipher over 32-bit indices. With Grain's own 4 rounds, consecutive rows
# of 4e9 windows are only 0.14 of the data apart on average (1/3 is uniform); with 8 it is 0.33.
_MAX_WINDOWS = 2**32
_ROUNDS = 8
_SHARE_BITS = 40  # mixture shares are multiples of 2**-40: exact counts up to 10^12 rows

# Streams of random tokens, independent for the same seed.
TRAIN_STREAM = 0
EVAL_STREAM = 1


@functools.lru_cache(maxsize=64)
def _epoch_seed(seed: int, epoch: int) -> int:
    # Hashed together, so that epoch 1 of seed 0 differs from epoch 0 of seed 1.
    digest = hashlib.sha256(f"{seed} {epoch}".encode()).digest()
    return int.from_bytes(digest[:4], "little")


def random_words(seed: int, rows: np.ndarray) -> np.ndarray:
    """Returns SplitMix64 hashes (uint64 [B]) of the seed and each number."""
    start = ((seed + 1) * INCREMENT) & (2**64 - 1)
    words = rows.astype(np.uint64) * np.uint64(0xD1B54A32D192ED03) + np.uint64(start)
    return hash_uint64(words)


class OrderedWindows:
    """Sequences of one dataset by number: each window once per epoch.

    Lookups are O(1), so seeking is free.
    """

    def __init__(
        self,
        windows: Windows,
        seed: int,
        shuffle: bool,
        num_epoch: int,
        groups: np.ndarray | None = None,
    ):
        """Initializes the order; num_epoch=-1 is unbounded.

        `groups` (int64: first window of each group, then the end) are visited in order, and windows
        are only shuffled within them. Raises UserError for 2**32 windows or more.
        """
        self._num_windows = len(windows)
        if self._num_windows >= _MAX_WINDOWS:
            raise UserError(
                f"{self._num_windows} windows of max_target_length tokens are too many to shuffle "
                f"(limit {_MAX_WINDOWS}). Raise max_target_length or split the data set."
            )
        self.windows = windows
        self.num_rows = sys.maxsize if num_epoch == -1 else self._num_windows * num_epoch
        self._seed = seed
        self._shuffle = shuffle
        self._groups = groups

    def window(self, number: int) -> int:
        """Returns the window of a sequence; EMPTY past the last epoch."""
        if number >= self.num_rows:
            return EMPTY
        epoch, window = divmod(number, self._num_windows)
        if not self._shuffle:
            return window
        first = 0
        end = self._num_windows
        if self._groups is not None:
            group = int(np.searchsorted(self._groups, window, side="right"))
            first, end = self._groups[group - 1 : group + 1].tolist()
        # Groups of equal size get different orders.
        seed = (_epoch_seed(self._seed, epoch) + first) % 2**32
        return first + index_shuffle(window - first, end - first - 1, seed, _ROUNDS)

    def batch_part(self, numbers: np.ndarray, rows: np.ndarray) -> BatchPart:
        windows = np.array([self.window(number) for number in numbers.tolist()], np.int64)
        draws = random_words(self._seed, numbers) if self.windows.random else numbers
        return BatchPart(self.windows, rows, self.windows.spans(windows, draws))

    def origin(self, number: int) -> list[tuple[str, int, int]]:
        (draw,) = random_words(self._seed, np.array([number])).tolist()
        return self.windows.origin(self.window(number), draw)


class SequenceDataset(abc.ABC):
    """Random access to the sequences of one or several datasets."""

    num_rows: int  # number of sequences; sys.maxsize if unbounded

    def __init__(self, sources: Sequence[OrderedWindows]):
        self._sources = list(sources)
        self.has_documents = any(source.windows.has_documents for source in sources)

    @abc.abstractmethod
    def locate(self, row: int) -> tuple[int, int]:
        """Returns the dataset of a sequence, and its number there."""

    def read(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        """Reads sequences (int64 [B]) as fill_batch; weight 0 past the end."""
        if len(self._sources) == 1:  # about 1.1 times as fast
            part = self._sources[0].batch_part(rows, np.arange(len(rows)))
            return fill_batch([part], self.has_documents)
        positions = np.array([self.locate(row) for row in rows.tolist()], np.int64).reshape(-1, 2)
        parts = []
        for index in np.unique(positions[:, 0]).tolist():
            chosen = np.flatnonzero(positions[:, 0] == index)
            parts.append(self._sources[index].batch_part(positions[chosen, 1], chosen))
        return fill_batch(parts, self.has_documents)

    def origin(self, row: int) -> list[tuple[str, int, int]]:
        """Returns (document, first token, tokens) for each document."""
        index, number = self.locate(row)
        return self._sources[index].origin(number)


class Mixture(SequenceDataset):
    """Sequences of several datasets in fixed shares, evenly interleaved.

    Sequence n belongs to the first dataset if its share p passes an integer there: floor((n + 1) p)
    > floor(n p). Otherwise it is a sequence of the mixture of the others, with shares scaled up. So
    each dataset always has its share to within one sequence per preceding dataset, and the dataset
    of sequence n follows from n alone.
    """

    num_rows = sys.maxsize

    def __init__(self, sources: Sequence[OrderedWindows], weights: Sequence[float]):
        assert len(sources) == len(weights) > 0
        super().__init__(sources)
        # Each share is of the rows left by the ones before; the last one takes all of them.
        self._shares = [
            round(weight / math.fsum(weights[index:]) * 2**_SHARE_BITS)
            for index, weight in enumerate(weights)
        ]

    def locate(self, row: int) -> tuple[int, int]:
        for index, share in enumerate(self._shares):
            before = row * share >> _SHARE_BITS
            if (row + 1) * share >> _SHARE_BITS > before:
                return index, before
            row -= before
        raise AssertionError("the last data set takes every row")


class Concatenation(SequenceDataset):
    """Sequences of one dataset, or of several one after the other."""

    def __init__(self, sources: Sequence[OrderedWindows]):
        super().__init__(sources)
        self._first_row = list(itertools.accumulate((s.num_rows for s in sources), initial=0))
        self.num_rows = self._first_row[-1]

    def locate(self, row: int) -> tuple[int, int]:
        # Sequences past the end belong to the last dataset.
        index = bisect.bisect_right(self._first_row, row, 1, len(self._sources)) - 1
        return index, row - self._first_row[index]


class SyntheticSequences:
    """Uniformly random tokens, a pure function of (seed, number)."""

    num_rows = sys.maxsize
    has_documents = False

    def __init__(self, length: int, vocab_size: int, seed: int, stream: int = TRAIN_STREAM):
        self._length = length
        self._vocab_size = vocab_size
        self._seed = seed % 2**64
        self._stream = stream

    def read(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        ids = np.empty((len(rows), self._length + 1), np.int32)
        for index, row in enumerate(rows.tolist()):
            # One generator per row, so that rows do not depend on the number of hosts.
            bits = np.random.Philox(key=[self._seed, self._stream], counter=[0, 0, 0, row])
            ids[index] = np.random.Generator(bits).integers(
                self._vocab_size, size=self._length + 1, dtype=np.int32
            )
        return {
            "tokens": ids[:, :-1],
            "targets": ids[:, 1:],
            "weights": np.ones((len(rows), self._length), np.float32),
        }

    def origin(self, row: int) -> list[tuple[str, int, int]]:
        return [(f"random tokens {row}", 0, self._length)]
