"""Layouts: the same numbers in the order of another program.

A layout is two patterns, such as "(N J H) D" and "D N H" for GPT-NeoX's fused projection: brackets
hold what is one dimension there, J numbers our arrays that share the tensor. Both directions come
from the same pair and only move numbers, so a round trip is exact.

Letters: D emb_dim, N query heads, K key/value heads, H head_dim, F mlp_dim, V vocab_size, P rows of
the position table, J arrays of ours in one tensor of theirs; slots of Pattention: Q of query, key
and value each, O of the output projection, S of the feed-forward; dense connections: C streams, L
hidden states that are summed, W hidden width of what makes the weights; E experts. Sizes may differ
by layer.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Mapping, Sequence

import numpy as np

Sizes = Mapping[str, int]

_GROUP = re.compile(r"\(([A-Z ]+)\)|([A-Z])")


@dataclasses.dataclass(frozen=True)
class Layout:
    """A Hugging Face tensor and our arrays."""

    theirs: str  # for example "(N J H) D"
    ours: str  # letters of one array of ours, for example "D N H"; the same letters without J

    def __post_init__(self):
        letters = "".join(self._groups)
        assert sorted(letters.replace("J", "")) == sorted(self.ours.split()), self
        assert len(set(letters)) == len(letters), self

    @functools.cached_property
    def _groups(self) -> list[str]:
        return ["".join(match).replace(" ", "") for match in _GROUP.findall(self.theirs)]

    @functools.cached_property
    def _letters(self) -> str:
        return "".join(self._groups)

    @functools.cached_property
    def _order(self) -> list[int]:
        """Returns the indices of J (if present) and our letters among theirs."""
        ours = ("J" if "J" in self._letters else "") + self.ours.replace(" ", "")
        return [self._letters.index(letter) for letter in ours]

    def sizes(self, shape: Sequence[int]) -> dict[str, int]:
        """Returns sizes by letter, from the shape of one array of ours."""
        return dict(zip(self.ours.split(), shape, strict=True))

    def shape(self, sizes: Sizes, count: int) -> tuple[int, ...]:
        """Returns the shape of their tensor for `count` arrays of ours."""
        sizes = {**sizes, "J": count}
        return tuple(math.prod(sizes[letter] for letter in group) for group in self._groups)

    def split(self, tensor: np.ndarray, sizes: Sizes, count: int) -> list[np.ndarray]:
        """Returns our arrays in a tensor of theirs, as views."""
        sizes = {**sizes, "J": count}
        spread = tensor.reshape([sizes[letter] for letter in self._letters])
        moved = spread.transpose(self._order)
        return list(moved) if "J" in self._letters else [moved]

    def join(self, arrays: Sequence[np.ndarray], sizes: Sizes) -> np.ndarray:
        """Returns the tensor of theirs that our arrays make; undoes `split`."""
        moved = np.stack(arrays) if "J" in self._letters else arrays[0]
        spread = moved.transpose(np.argsort(self._order))
        return np.ascontiguousarray(spread.reshape(self.shape(sizes, len(arrays))))
