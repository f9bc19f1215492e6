"""Excluded samples of a run.

A run counts the samples that it reads; the data number all of them. After an excluded range the two
differ by its size.

Legend: N numbers.
"""

from collections.abc import Iterable, Sequence

import numpy as np

from MaxText.errors import UserError

# Numbers of samples stay far from the end of 64 bits, so that sums of them do too.
_LARGEST = 2**61


class Holes:
    """Disjoint ranges (first, end) of excluded samples, in order."""

    def __init__(self, pairs: Iterable[Sequence[int]] = ()):
        """Joins ranges (first, end), 0 <= first < end, that overlap or touch, in any order.

        Raises:
          UserError: A pair is not such a range.
        """
        merged: list[tuple[int, int]] = []
        for first, end in sorted((int(first), int(end)) for first, end in pairs):
            if not 0 <= first < end <= _LARGEST:
                raise UserError(
                    f"excluded_samples: [{first}, {end}] is no range of samples. Give the first "
                    "sample to leave out and the one after the last, 0 <= first < end."
                )
            if merged and first <= merged[-1][1]:
                merged[-1] = merged[-1][0], max(end, merged[-1][1])
            else:
                merged.append((first, end))
        self.pairs = tuple(merged)

    def __bool__(self) -> bool:
        return bool(self.pairs)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Holes) and self.pairs == other.pairs

    def __hash__(self) -> int:
        return hash(self.pairs)

    def __or__(self, other: "Holes") -> "Holes":
        return Holes((*self.pairs, *other.pairs))

    def within(self, first: int, end: int = _LARGEST) -> "Holes":
        """Returns the parts of the ranges in [first, end)."""
        clipped = ((max(first, start), min(end, stop)) for start, stop in self.pairs)
        return Holes(pair for pair in clipped if pair[0] < pair[1])

    def count(self) -> int:
        """Excluded samples."""
        return sum(end - first for first, end in self.pairs)

    def ahead(self, start: int, numbers_N: np.ndarray) -> np.ndarray:
        """Returns the numbers in the data (int64 [N]) of samples read in order from `start` on.

        Args:
          start: Number of a sample in the data.
          numbers_N: int64, 0 for the first sample from `start` on that is not excluded.
        """
        ahead = self.within(start)
        if not ahead:
            return start + numbers_N
        bounds = np.array(ahead.pairs, np.int64)
        skipped = np.concatenate([[0], np.cumsum(bounds[:, 1] - bounds[:, 0])])
        # Samples that are read before each hole.
        before = bounds[:, 0] - start - skipped[:-1]
        return start + numbers_N + skipped[np.searchsorted(before, numbers_N, side="right")]

    def behind(self, start: int, numbers_N: np.ndarray) -> np.ndarray:
        """Reads backwards: 1 is the last sample before `start` that is not excluded."""
        mirrored = Holes((start - end, start - first) for first, end in self.within(0, start).pairs)
        return start - 1 - mirrored.ahead(0, numbers_N - 1)

    def __str__(self) -> str:
        return ", ".join(f"{first} to {end - 1}" for first, end in self.pairs) or "none"


NO_HOLES = Holes()
