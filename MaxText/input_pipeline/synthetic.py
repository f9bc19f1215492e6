"""Random tokens, for measuring speed and for tests without data.

Legend: B windows, T tokens of a window.
"""

import sys

import numpy as np

# Keeps evaluation's tokens apart from those of training with the same seed.
TRAIN_STREAM, EVAL_STREAM = 0, 1


class SyntheticBatches:
    """Batches of uniformly random ids: `batches[step]` is a pure function of (seed, step, row).

    Every row counts in full, and windows are single documents: no positions, no segments.
    """

    def __init__(
        self,
        length: int,
        vocab_size: int,
        seed: int,
        first_row: int,
        num_rows: int,
        rows_per_step: int,
        num_steps: int = sys.maxsize,
        stream: int = TRAIN_STREAM,
    ):
        """Fixes shape and seed.

        Args:
          length: T, tokens of a window.
          vocab_size: ids are in [0, vocab_size).
          seed: any int >= 0.
          first_row: first row of each global batch that this host holds.
          num_rows: rows this host holds.
          rows_per_step: rows of the global batch.
          num_steps: batches there are.
          stream: one seed gives independent tokens for each number.
        """
        self._length = length
        self._vocab_size = vocab_size
        self._seed = seed % 2**64
        self._first_row = first_row
        self._num_rows = num_rows
        self._rows_per_step = rows_per_step
        self._num_steps = num_steps
        self._stream = stream

    def __len__(self) -> int:
        return self._num_steps

    def __getitem__(self, step: int) -> dict[str, np.ndarray]:
        """Arrays [B, T]: int32 `tokens` and `targets`, float32 `weights` of ones."""
        first = step * self._rows_per_step + self._first_row
        rows = np.empty((self._num_rows, self._length + 1), np.int32)
        for index in range(self._num_rows):
            # A generator per row, so that rows do not depend on how hosts share them.
            bits = np.random.Philox(
                key=[self._seed, self._stream], counter=[0, 0, 0, first + index]
            )
            rows[index] = np.random.Generator(bits).integers(
                self._vocab_size, size=self._length + 1, dtype=np.int32
            )
        return {
            "tokens": rows[:, :-1],
            "targets": rows[:, 1:],
            "weights": np.ones((self._num_rows, self._length), np.float32),
        }
