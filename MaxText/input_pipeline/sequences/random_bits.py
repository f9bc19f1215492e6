"""Random bits that depend on numbers only: SplitMix64 (Steele, Lea and Flood, OOPSLA 2014).

The generator adds INCREMENT to a 64-bit counter and applies a bijection (`mix`) to each value. Used
here as a hash: the n-th value of a stream follows from n alone, so masks and starts of sequences
are the same on any number of processes and after a resume.

Legend: N numbers.
"""

import numpy as np

INCREMENT = 0x9E3779B97F4A7C15
"""Step of the counter: 2**64 over the golden ratio, made odd."""

_INDEX_FACTOR = 0xD1B54A32D192ED03  # odd, so that different indices start at different counters


def mix(states_N: np.ndarray) -> np.ndarray:
    """Applies SplitMix64's bijection to uint64 values, in place; returns the same array."""
    states_N ^= states_N >> 30
    states_N *= 0xBF58476D1CE4E5B9
    states_N ^= states_N >> 27
    states_N *= 0x94D049BB133111EB
    states_N ^= states_N >> 31
    return states_N


def hash_uint64(states_N: np.ndarray) -> np.ndarray:
    """Hashes uint64 values in place; returns the same array.

    Two mixed steps of the counter: after one, neighboring values are still correlated.
    """
    for _ in range(2):
        states_N += np.uint64(INCREMENT)
        mix(states_N)
    return states_N


def random_bits(seed: int, indices_N: np.ndarray) -> np.ndarray:
    """Returns 64 random bits (uint64 [N]) for a seed and each index."""
    start = ((seed + 1) * INCREMENT) & (2**64 - 1)
    states_N = indices_N.astype(np.uint64) * np.uint64(_INDEX_FACTOR) + np.uint64(start)
    return hash_uint64(states_N)
