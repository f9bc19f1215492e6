"""Which documents are held out: a hash of the seed and the document's number decides."""

import math
from dataclasses import dataclass

import numpy as np

from MaxText.input_pipeline.sequences.splitmix import INCREMENT, scatter

TRAIN, VALIDATION, TEST = "train", "validation", "test"
"""Names of splits; a corpus without splits of its own is divided into the first two."""

HELD_OUT, SAMPLED = 0, 1
"""Purposes, whose hashes have nothing to do with each other."""

_BITS = 2**64 - 1
_PURPOSE_STEP = 0xD1B54A32D192ED03

# Units hold fewer documents than this, and a corpus fewer than 2**24 units.
_UNIT_BITS = 40


def document_number(unit: int, index: int) -> int:
    """Number of document `index` of a unit in its corpus.

    Numbers grow along the corpus, with gaps between units: nobody needs to know how many documents
    the units before have.
    """
    assert index < 2**_UNIT_BITS, index
    return (unit << _UNIT_BITS) + index


def unit_of(number: int) -> int:
    """The unit of a document with this number."""
    return number >> _UNIT_BITS


def hashes(seed: int, purpose: int, numbers_N: np.ndarray) -> np.ndarray:
    """Numbers uint64 [N] that look random: splitmix64 of seed, purpose and each number.

    Args:
      seed: 0 or more.
      purpose: HELD_OUT or SAMPLED.
      numbers_N: integers [N], 0 or more.
    """
    start = (seed * INCREMENT + purpose * _PURPOSE_STEP) & _BITS
    return scatter(numbers_N.astype(np.uint64) + np.uint64(start))


def ranks(seed: int, numbers_N: np.ndarray) -> np.ndarray:
    """Ranks uint64 [N] of documents: those of the lowest are held out."""
    return hashes(seed, HELD_OUT, numbers_N)


def lowest_rank_of_training(fraction: float) -> int:
    """Ranks below it are held out; `fraction` of all hashes are."""
    return math.ceil(fraction * 2**64)


@dataclass(frozen=True)
class HeldOut:
    """Which documents are validation, by their number in the corpus.

    Each is, with probability `fraction`, by a hash of the seed and its number. Of two documents
    or more, the one with the smallest hash always is and the one with the largest never is, so
    that neither part is empty.

    Attributes:
      seed: of the hash.
      fraction: 0 <= fraction < 1.
      first, last: numbers of the documents with the smallest and the largest hash; None where
        they are not known.
    """

    seed: int
    fraction: float
    first: int | None = None
    last: int | None = None

    def __contains__(self, number: object) -> bool:
        assert isinstance(number, int)
        if self.fraction == 0 or (self.first is not None and self.first == self.last):
            return False
        if number in (self.first, self.last):
            return number == self.first
        rank = int(ranks(self.seed, np.array([number], np.uint64))[0])
        return rank < lowest_rank_of_training(self.fraction)
