"""Rows of a run from one source or from a weighted mixture of several.

Legend: B rows, T tokens of a window.
"""

import abc
import bisect
import dataclasses
import itertools
import math
import sys
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from MaxText.input_pipeline.data_errors import BadRecord
from MaxText.input_pipeline.sequences.order import WindowOrder
from MaxText.input_pipeline.sequences.splitmix import INCREMENT, scatter
from MaxText.input_pipeline.sequences.windows import Windows

OnBad = Callable[[BadRecord], None] | None

# Shares of a mixture are multiples of 2**-40: rows up to 10^12 come out in the right numbers.
_SHARE_BITS = 40


class Rows(Protocol):
    """Random access to the rows of a run."""

    @property
    def num_rows(self) -> int:
        """Rows there are; sys.maxsize for no end."""
        ...

    @property
    def has_documents(self) -> bool:
        """Whether rows carry positions and segments."""
        ...

    def read(self, rows: np.ndarray, on_bad: OnBad = None) -> dict[str, np.ndarray]:
        """Reads rows (int64 [B]), see Windows.read; rows past the end count nowhere."""
        ...

    def origin(self, row: int) -> list[tuple[str, int, int]]:
        """What a row holds: (document, first token of it in the row, number of tokens there)."""
        ...


def draws(seed: int, rows: np.ndarray) -> np.ndarray:
    """uint64 [B] that look random: splitmix64 of the seed and the number of each row."""
    start = ((seed + 1) * INCREMENT) & (2**64 - 1)
    words = rows.astype(np.uint64) * np.uint64(0xD1B54A32D192ED03) + np.uint64(start)
    return scatter(words)


@dataclasses.dataclass(frozen=True)
class Source:
    """Rows of one data set, see Rows.

    Attributes:
      windows: how it is cut.
      order: which window is the n-th.
      seed: of the random numbers that windows are drawn with.
    """

    windows: Windows
    order: WindowOrder
    seed: int

    @property
    def num_rows(self) -> int:
        return self.order.num_rows

    @property
    def has_documents(self) -> bool:
        return self.windows.has_documents

    def read(self, rows: np.ndarray, on_bad: OnBad = None) -> dict[str, np.ndarray]:
        return self.windows.read(self.order[rows], draws(self.seed, rows), on_bad)

    def origin(self, row: int) -> list[tuple[str, int, int]]:
        (window,) = self.order[np.array([row])].tolist()
        (draw,) = draws(self.seed, np.array([row])).tolist()
        name = self.windows.data.stream.document_name
        return [
            (name(document), first, count)
            for document, first, count in self.windows.origin(window, draw)
        ]


class _Several(abc.ABC):
    """Rows of several sources, all with positions and segments or none, see Rows."""

    def __init__(self, sources: Sequence[Source]):
        self._sources = list(sources)
        self.has_documents = any(source.has_documents for source in sources)
        for source in sources:
            source.windows.has_documents = self.has_documents

    @abc.abstractmethod
    def place(self, row: int) -> tuple[int, int]:
        """The source of a row, and its number among that source's rows."""

    def read(self, rows: np.ndarray, on_bad: OnBad = None) -> dict[str, np.ndarray]:
        places = np.array([self.place(row) for row in rows.tolist()], np.int64).reshape(-1, 2)
        batch: dict[str, np.ndarray] = {}
        for index in np.unique(places[:, 0]).tolist():
            chosen = np.flatnonzero(places[:, 0] == index)
            part = self._sources[index].read(places[chosen, 1], on_bad)
            for name, values in part.items():
                whole = batch.setdefault(name, np.empty((len(rows), values.shape[1]), values.dtype))
                whole[chosen] = values
        return batch

    def origin(self, row: int) -> list[tuple[str, int, int]]:
        index, place = self.place(row)
        return self._sources[index].origin(place)


class Mixture(_Several):
    """Rows of several sources in fixed shares, as evenly spread as whole rows allow, see Rows.

    Row n belongs to the first source when its share passes a whole number there:
    floor((n + 1) p) > floor(n p). Otherwise it is a row of the mixture of the other sources, with
    their shares scaled up, counted without the first one's. So after n rows each source has had
    its share of them to within one row for each source before it, and which row of which source
    the n-th is follows from n alone.
    """

    num_rows = sys.maxsize

    def __init__(self, sources: Sequence[Source], weights: Sequence[float]):
        """Args: `weights`: one of each source, above 0; any sum."""
        assert len(sources) == len(weights) > 0
        super().__init__(sources)
        # Each share is of the rows that the sources before left; the last one takes all of them.
        self._shares = [
            round(weight / math.fsum(weights[index:]) * 2**_SHARE_BITS)
            for index, weight in enumerate(weights)
        ]

    def place(self, row: int) -> tuple[int, int]:
        """The source of a row of the mixture, and its number among that source's rows."""
        for index, share in enumerate(self._shares):
            before = row * share >> _SHARE_BITS
            if (row + 1) * share >> _SHARE_BITS > before:
                return index, before
            row -= before
        raise AssertionError("the last source takes every row")


class Chain(_Several):
    """Rows of several sources one after the other, each once, see Rows; for evaluation."""

    def __init__(self, sources: Sequence[Source]):
        super().__init__(sources)
        self._first_row = list(itertools.accumulate((s.num_rows for s in sources), initial=0))

    @property
    def num_rows(self) -> int:
        return self._first_row[-1]

    def place(self, row: int) -> tuple[int, int]:
        """The source of a row, and its number among that source's rows."""
        # Rows past the end are rows past the end of the last source.
        index = bisect.bisect_right(self._first_row, row, hi=len(self._sources)) - 1
        return index, row - self._first_row[index]
