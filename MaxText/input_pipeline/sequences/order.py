"""Order of the sequences of a run, a pure function of the order index.

`OrderedSequences` shuffles the sequences of one dataset; `SequenceDataset` joins several orders to
that of a run. See the package's docstring for the words.

Legend: B sequences of a batch.
"""

import abc
import bisect
import copy
import functools
import hashlib
import itertools
import math
import sys
from collections.abc import Sequence

import numpy as np
from grain.experimental import index_shuffle

from MaxText.errors import UserError
from MaxText.input_pipeline.sequences.batch_arrays import BatchPart, fill_batch
from MaxText.input_pipeline.sequences.random_bits import random_bits
from MaxText.input_pipeline.sequences.slicing import NO_SEQUENCE, SequenceSlicer, TokenOrigin

# Grain's permutation is a cipher over 32-bit indices. With Grain's own 4 rounds, consecutive
# sequences of 4e9 are only 0.14 of the data apart on average (1/3 is uniform); with 8 it is 0.33.
_MAX_SEQUENCES = 2**32
_ROUNDS = 8
_SHARE_BITS = 40  # mixture shares are multiples of 2**-40: exact counts up to 10^12 sequences

# Streams of random tokens, independent for the same seed.
TRAIN_STREAM = 0
EVAL_STREAM = 1
SECOND_EVAL_STREAM = 2  # of eval_half=second


@functools.lru_cache(maxsize=64)
def _epoch_seed(seed: int, epoch: int) -> int:
    # Hashed together, so that epoch 1 of seed 0 differs from epoch 0 of seed 1.
    digest = hashlib.sha256(f"{seed} {epoch}".encode()).digest()
    return int.from_bytes(digest[:4], "little")


class OrderedSequences:
    """The sequences of one dataset in the order of a run: each once per epoch.

    Lookups are O(1), so seeking is free.
    """

    def __init__(
        self,
        slicer: SequenceSlicer,
        seed: int,
        shuffle: bool,
        num_epoch: int,
        groups: np.ndarray | None = None,
    ):
        """Initializes the order.

        Args:
          slicer: Slices the dataset into sequences.
          seed: Determines the permutation of each epoch.
          shuffle: False visits sequences in the order of the store.
          num_epoch: Passes over the data; -1 is unbounded.
          groups: First sequence of each group of files, then the end (int64). Groups are visited in
            order, and sequences are only shuffled within them. None is one group.

        Raises:
          UserError: The dataset has 2**32 sequences or more.
        """
        self._epoch_size = len(slicer)
        if self._epoch_size >= _MAX_SEQUENCES:
            raise UserError(
                f"{self._epoch_size} windows of max_target_length tokens are too many to shuffle "
                f"(limit {_MAX_SEQUENCES}). Raise max_target_length or split the data set."
            )
        self.slicer = slicer
        self.num_sequences = sys.maxsize if num_epoch == -1 else self._epoch_size * num_epoch
        self._seed = seed
        self._shuffle = shuffle
        self._groups = groups
        self._first = 0  # sequence of the dataset, if only some are visited

    def half(self, *, is_second: bool) -> "OrderedSequences":
        """Returns one pass over the first or the second half of the sequences, in their order.

        The first half is the smaller one of an odd number.

        Args:
          is_second: Which half.
        """
        assert not self._shuffle
        assert self.num_sequences == self._epoch_size
        middle = self._epoch_size // 2
        half = copy.copy(self)
        half._first = middle if is_second else 0
        half._epoch_size = self._epoch_size - middle if is_second else middle
        half.num_sequences = half._epoch_size
        return half

    def sequence_index(self, order_index: int) -> int:
        """Returns the sequence at a place of this order; NO_SEQUENCE past the last epoch."""
        if order_index >= self.num_sequences:
            return NO_SEQUENCE
        epoch, index_in_epoch = divmod(order_index, self._epoch_size)
        if not self._shuffle:
            return self._first + index_in_epoch
        first = 0
        end = self._epoch_size
        if self._groups is not None:
            group = int(np.searchsorted(self._groups, index_in_epoch, side="right"))
            first, end = self._groups[group - 1 : group + 1].tolist()
        # Groups of equal size get different orders.
        seed = (_epoch_seed(self._seed, epoch) + first) % 2**32
        return first + index_shuffle(index_in_epoch - first, end - first - 1, seed, _ROUNDS)

    def batch_part(self, order_indices_B: np.ndarray, rows_B: np.ndarray) -> BatchPart:
        """Returns what `fill_batch` needs to fill these rows with these sequences."""
        sequence_indices_B = np.array(
            [self.sequence_index(order_index) for order_index in order_indices_B.tolist()],
            np.int64,
        )
        bits_B = order_indices_B
        if self.slicer.uses_random_bits:
            bits_B = random_bits(self._seed, order_indices_B)
        return BatchPart(
            slicer=self.slicer,
            rows=rows_B,
            token_ranges=self.slicer.token_ranges(sequence_indices_B, bits_B),
        )

    def origins(self, order_index: int) -> list[TokenOrigin]:
        """Returns which tokens of which documents form a sequence."""
        (bits,) = random_bits(self._seed, np.array([order_index])).tolist()
        return self.slicer.origins(self.sequence_index(order_index), bits)


class SequenceDataset(abc.ABC):
    """Random access by order index to the sequences of one or several datasets.

    Attributes:
      num_sequences: Length of the order; sys.maxsize if unbounded.
      has_documents: Batches hold positions and segment ids.
      orders: The order of each dataset.
    """

    num_sequences: int

    def __init__(self, orders: Sequence[OrderedSequences]):
        """Initializes from the order of each dataset."""
        self.orders = list(orders)
        self.has_documents = any(order.slicer.has_documents for order in orders)

    @abc.abstractmethod
    def locate(self, order_index: int) -> tuple[int, int]:
        """Returns the index of a sequence's dataset, and its order index there."""

    @abc.abstractmethod
    def next_indices(self, order_index: int) -> list[int]:
        """Returns the order index of each dataset's first sequence at or after an order index."""

    def begin_step(self, order_index: int) -> None:
        """Makes streams note their positions at the first sequence of a step over all processes."""
        for order, index in zip(self.orders, self.next_indices(order_index), strict=True):
            order.slicer.begin_step(order.sequence_index(index))

    def read(self, order_indices_B: np.ndarray) -> dict[str, np.ndarray]:
        """Reads sequences (int64 [B]) as fill_batch does; weights are 0 past the end."""
        if len(self.orders) == 1:  # about 1.1 times as fast
            rows_B = np.arange(len(order_indices_B))
            part = self.orders[0].batch_part(order_indices_B, rows_B)
            return fill_batch([part], self.has_documents)
        located = [self.locate(order_index) for order_index in order_indices_B.tolist()]
        located_B2 = np.array(located, np.int64).reshape(-1, 2)
        dataset_B = located_B2[:, 0]
        order_index_B = located_B2[:, 1]
        parts = []
        for dataset in np.unique(dataset_B).tolist():
            rows = np.flatnonzero(dataset_B == dataset)
            parts.append(self.orders[dataset].batch_part(order_index_B[rows], rows))
        return fill_batch(parts, self.has_documents)

    def origins(self, order_index: int) -> list[TokenOrigin]:
        """Returns which tokens of which documents form a sequence."""
        dataset, index_in_dataset = self.locate(order_index)
        return self.orders[dataset].origins(index_in_dataset)


class Mixture(SequenceDataset):
    """Sequences of several datasets in fixed shares, evenly interleaved.

    Sequence n belongs to the first dataset if its share p passes an integer there: floor((n + 1) p)
    > floor(n p). Otherwise it is a sequence of the mixture of the others, with shares scaled up. So
    each dataset always has its share to within one sequence per preceding dataset, and the dataset
    of sequence n follows from n alone.
    """

    num_sequences = sys.maxsize

    def __init__(self, orders: Sequence[OrderedSequences], weights: Sequence[float]):
        assert len(orders) == len(weights) > 0
        super().__init__(orders)
        # Each share is of the sequences left by the datasets before; the last takes all of them.
        self._shares = [
            round(weight / math.fsum(weights[index:]) * 2**_SHARE_BITS)
            for index, weight in enumerate(weights)
        ]

    def locate(self, order_index: int) -> tuple[int, int]:
        """Returns the dataset of a sequence and its index there."""
        remaining_index = order_index  # among the sequences of this and the following datasets
        for dataset, share in enumerate(self._shares):
            index_in_dataset = remaining_index * share >> _SHARE_BITS
            if (remaining_index + 1) * share >> _SHARE_BITS > index_in_dataset:
                return dataset, index_in_dataset
            remaining_index -= index_in_dataset
        raise AssertionError("the last data set takes every row")

    def next_indices(self, order_index: int) -> list[int]:
        """Returns the order index of each dataset's first sequence at or after an order index."""
        remaining_index = order_index
        indices = []
        for share in self._shares:
            index_in_dataset = remaining_index * share >> _SHARE_BITS
            indices.append(index_in_dataset)
            remaining_index -= index_in_dataset
        return indices


class Concatenation(SequenceDataset):
    """Sequences of one dataset, or of several one after the other."""

    def __init__(self, orders: Sequence[OrderedSequences]):
        super().__init__(orders)
        sizes = (order.num_sequences for order in orders)
        self._first_order_index = list(itertools.accumulate(sizes, initial=0))
        self.num_sequences = self._first_order_index[-1]

    def locate(self, order_index: int) -> tuple[int, int]:
        """Returns the dataset of a sequence and its index there."""
        # Sequences past the end belong to the last dataset.
        following = bisect.bisect_right(self._first_order_index, order_index, 1, len(self.orders))
        dataset = following - 1
        return dataset, order_index - self._first_order_index[dataset]

    def next_indices(self, order_index: int) -> list[int]:
        """Returns the order index of each dataset's first sequence at or after an order index."""
        return [
            min(max(order_index - first, 0), order.num_sequences)
            for order, first in zip(self.orders, self._first_order_index, strict=False)
        ]


class SyntheticSequences:
    """Uniformly random tokens, a pure function of (seed, stream, order index)."""

    num_sequences = sys.maxsize
    has_documents = False

    def __init__(self, length: int, vocab_size: int, seed: int, stream: int = TRAIN_STREAM):
        self._length = length
        self._vocab_size = vocab_size
        self._seed = seed % 2**64
        self._stream = stream

    def read(self, order_indices_B: np.ndarray) -> dict[str, np.ndarray]:
        """Returns the arrays of sequences (int64 [B]), without documents."""
        num_sequences = len(order_indices_B)
        ids_BT1 = np.empty((num_sequences, self._length + 1), np.int32)
        for row, order_index in enumerate(order_indices_B.tolist()):
            # One generator per sequence, so that it does not depend on the number of processes.
            bits = np.random.Philox(key=[self._seed, self._stream], counter=[0, 0, 0, order_index])
            ids_BT1[row] = np.random.Generator(bits).integers(
                self._vocab_size, size=self._length + 1, dtype=np.int32
            )
        return {
            "tokens": ids_BT1[:, :-1],
            "targets": ids_BT1[:, 1:],
            "weights": np.ones((num_sequences, self._length), np.float32),
        }

    def begin_step(self, order_index: int) -> None:
        """Does nothing: there is no stream."""

    def next_indices(self, order_index: int) -> list[int]:
        """Returns an empty list: there are no datasets."""
        return []

    def origins(self, order_index: int) -> list[TokenOrigin]:
        """Returns a description in place of a document."""
        return [TokenOrigin(f"random tokens {order_index}", 0, self._length)]
