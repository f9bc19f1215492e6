"""The documents that the sources of `numbered` give."""

import numpy as np

NUM_DOCUMENTS = 60


def document_of(index: int, longest: int = 40) -> np.ndarray:
    """Document `index`: 1..longest random ids, ended by 0."""
    rng = np.random.default_rng([7, index])
    return np.append(rng.integers(1, 50_000, rng.integers(0, longest)), 0)


def mask_of(index: int, longest: int = 40) -> np.ndarray:
    """The loss mask of document `index`."""
    return np.arange(len(document_of(index, longest))) % 3 != 1
