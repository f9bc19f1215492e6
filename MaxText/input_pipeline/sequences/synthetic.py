"""Random tokens, for benchmarks and for tests without data."""

import sys

import numpy as np

# Streams have independent tokens for the same seed.
TRAIN_STREAM, EVAL_STREAM = 0, 1


class SyntheticRows:
    """Uniformly random sequences, a pure function of (seed, number). Implements order.Rows."""

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
