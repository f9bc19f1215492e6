"""SplitMix64 (Steele, Lea and Flood 2014): numbers that look random, from counters.

A counter, multiplied and mixed, computes a whole batch in a few array operations and any number of
it without the others, where a generator object per number costs more than the number. Arithmetic
of unsigned integers in arrays wraps around, which is what is meant.
"""

import numpy as np

INCREMENT = 0x9E3779B97F4A7C15
"""What the counter goes up by: 2**64 over the golden ratio, made odd."""


def mix(words: np.ndarray) -> np.ndarray:
    """SplitMix64's bijection of uint64 words, in place."""
    words ^= words >> 30
    words *= 0xBF58476D1CE4E5B9
    words ^= words >> 27
    words *= 0x94D049BB133111EB
    words ^= words >> 31
    return words


def scatter(words: np.ndarray) -> np.ndarray:
    """Two steps of the counter, each mixed, in place: neighbouring words end up far apart."""
    for _ in range(2):
        words += np.uint64(INCREMENT)
        mix(words)
    return words
