"""SplitMix64 (Steele, Lea and Flood 2014): vectorized pseudorandom numbers from counters.

Unsigned array arithmetic wraps around, as intended.
"""

import numpy as np

INCREMENT = 0x9E3779B97F4A7C15
"""What the counter goes up by: 2**64 over the golden ratio, made odd."""


def mix(words: np.ndarray) -> np.ndarray:
    """Applies SplitMix64's bijection to uint64 words, in place."""
    words ^= words >> 30
    words *= 0xBF58476D1CE4E5B9
    words ^= words >> 27
    words *= 0x94D049BB133111EB
    words ^= words >> 31
    return words


def hash_uint64(words: np.ndarray) -> np.ndarray:
    """Applies two mixed steps of the counter, in place; neighboring words end up far apart."""
    for _ in range(2):
        words += np.uint64(INCREMENT)
        mix(words)
    return words
