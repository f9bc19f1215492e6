"""Which window is the n-th of a run: a keyed permutation of each epoch, computed without state."""

import functools
import hashlib
import sys

import numpy as np
from grain.experimental import index_shuffle

from MaxText.errors import UserError
from MaxText.input_pipeline.sequences.windows import EMPTY

# Grain's permutation is a cipher over 32-bit indices. After the 4 rounds that Grain itself takes,
# rows that follow each other still lie near each other in large data: of 4e9 windows 0.14 of the
# data apart on average, where 1/3 is even. After 8 it is 0.33, for 0.3 us more per row.
_MAX_WINDOWS = 2**32
_ROUNDS = 8


class WindowOrder:
    """Maps a row of a source (0, 1, 2, ... over all steps and hosts) to a window.

    Each window comes once per epoch. A row costs a few microseconds wherever it is, so a run
    continues at row 10^9 as fast as at row 0.
    """

    def __init__(
        self,
        num_windows: int,
        seed: int,
        shuffle: bool,
        num_epoch: int,
        groups: np.ndarray | None = None,
    ):
        """Fixes the order.

        Args:
          num_windows: windows in the split.
          seed: of the permutations.
          shuffle: False visits windows in stream order.
          num_epoch: passes, or -1 for no end.
          groups: int64, first window of each group and the end: groups are visited in order and
            only their windows are permuted. None is one group.

        Raises:
          UserError: num_epoch is 0, or there are 2**32 windows or more.
        """
        if num_epoch == 0:
            raise UserError(
                "num_epoch=0 reads no data: use -1 (repeat until `steps`) or 1 and above."
            )
        if num_windows >= _MAX_WINDOWS:
            raise UserError(
                f"{num_windows} windows of max_target_length tokens are more than the shuffle can "
                f"order ({_MAX_WINDOWS}). Raise max_target_length or split the data set."
            )
        assert num_windows > 0
        self._num_windows = num_windows
        self._seed = seed
        self._shuffle = shuffle
        self._groups = groups
        self.num_rows = sys.maxsize if num_epoch == -1 else num_windows * num_epoch

    def __getitem__(self, rows: np.ndarray) -> np.ndarray:
        """Windows of `rows` (int64 [B]), EMPTY past the last epoch."""
        return np.array([self._window(row) for row in rows.tolist()], np.int64)

    def _window(self, row: int) -> int:
        if row >= self.num_rows:
            return EMPTY
        epoch, place = divmod(row, self._num_windows)
        if not self._shuffle:
            return place
        seed = _epoch_seed(self._seed, epoch)
        first, size = 0, self._num_windows
        if self._groups is not None:
            group = int(np.searchsorted(self._groups, place, side="right")) - 1
            first = int(self._groups[group])
            size = int(self._groups[group + 1]) - first
        # Groups of one size get orders of their own.
        return first + index_shuffle(
            place - first, max_index=size - 1, seed=(seed + first) % 2**32, rounds=_ROUNDS
        )


@functools.lru_cache(maxsize=64)
def _epoch_seed(seed: int, epoch: int) -> int:
    # Hashed together, so that epoch 1 of seed 0 is not epoch 0 of seed 1.
    digest = hashlib.sha256(f"{seed} {epoch}".encode()).digest()
    return int.from_bytes(digest[:4], "little")
