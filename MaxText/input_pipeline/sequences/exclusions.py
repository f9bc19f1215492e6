"""Excluded samples: a run numbers only those it reads (N), while the data number all."""

from collections.abc import Iterable, Sequence

import numpy as np

from MaxText.errors import UserError

_LARGEST = 2**61  # far below 2**63, so that sums of sample numbers do not overflow


class Holes:
    """Disjoint ranges (first, end) of excluded samples, in order."""

    def __init__(self, pairs: Iterable[Sequence[int]] = ()):
        """Merges ranges (first, end), in any order. Raises UserError unless 0 <= first < end."""
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
        clipped = ((max(first, start), min(end, stop)) for start, stop in self.pairs)
        return Holes(pair for pair in clipped if pair[0] < pair[1])

    def count(self) -> int:
        return sum(end - first for first, end in self.pairs)

    def ahead(self, start: int, numbers_N: np.ndarray) -> np.ndarray:
        """Returns the data numbers (int64 [N]) of included samples from `start` on, by index."""
        ahead = self.within(start)
        if not ahead:
            return start + numbers_N
        bounds = np.array(ahead.pairs, np.int64)
        skipped = np.concatenate([[0], np.cumsum(bounds[:, 1] - bounds[:, 0])])
        # Samples read before each excluded range.
        before = bounds[:, 0] - start - skipped[:-1]
        return start + numbers_N + skipped[np.searchsorted(before, numbers_N, side="right")]

    def behind(self, start: int, numbers_N: np.ndarray) -> np.ndarray:
        """Counts included samples backwards: 1 is the last one before `start`."""
        mirrored = Holes((start - end, start - first) for first, end in self.within(0, start).pairs)
        return start - 1 - mirrored.ahead(0, numbers_N - 1)

    def __str__(self) -> str:
        return ", ".join(f"{first} to {end - 1}" for first, end in self.pairs) or "none"


NO_HOLES = Holes()
