"""Conversions between layouts of Hugging Face tensors and parameters.

A layout is two patterns, such as "(N J H) D" and "D N H" for GPT-NeoX's fused projection.
Parentheses group a fused dimension, and J counts the parameters that share the tensor. Conversions
only permute numbers, so round trips are exact.

Letters: D emb_dim, N query heads, K key/value heads, H head_dim, F mlp_dim, V vocab_size, P
positions, J parameters per tensor, E experts. Pattention slots: Q of each of query, key and value;
O of the output projection; S of the feed-forward. Dense connections: C streams, L aggregated hidden
states, W hidden width of the weight network. Sizes may differ by layer.
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
class TensorLayout:
    """A pair of patterns for a Hugging Face tensor and its parameters."""

    hf_axes: str  # for example "(N J H) D"
    param_axes: str  # for example "D N H"; the same letters without J

    def __post_init__(self):
        assert sorted(self._letters.replace("J", "")) == sorted(self.param_axes.split()), self
        assert len(set(self._letters)) == len(self._letters), self

    @functools.cached_property
    def _groups(self) -> list[str]:
        return ["".join(match).replace(" ", "") for match in _GROUP.findall(self.hf_axes)]

    @functools.cached_property
    def _letters(self) -> str:
        return "".join(self._groups)

    @functools.cached_property
    def _order(self) -> list[int]:
        """Indices of J and the parameter's letters among those of the tensor."""
        axes = ("J" if "J" in self._letters else "") + self.param_axes.replace(" ", "")
        return [self._letters.index(letter) for letter in axes]

    def sizes(self, shape: Sequence[int]) -> dict[str, int]:
        """Returns sizes by letter, from the shape of one parameter."""
        return dict(zip(self.param_axes.split(), shape, strict=True))

    def shape(self, sizes: Sizes, count: int) -> tuple[int, ...]:
        """Returns the shape of the Hugging Face tensor for `count` parameters."""
        sizes = {**sizes, "J": count}
        return tuple(math.prod(sizes[letter] for letter in group) for group in self._groups)

    def split(self, tensor: np.ndarray, sizes: Sizes, count: int) -> list[np.ndarray]:
        """Splits a Hugging Face tensor into parameters, as views."""
        sizes = {**sizes, "J": count}
        spread = tensor.reshape([sizes[letter] for letter in self._letters])
        moved = spread.transpose(self._order)
        return list(moved) if "J" in self._letters else [moved]

    def join(self, arrays: Sequence[np.ndarray], sizes: Sizes) -> np.ndarray:
        """Joins parameters into the Hugging Face tensor; the inverse of `split`."""
        moved = np.stack(arrays) if "J" in self._letters else arrays[0]
        spread = moved.transpose(np.argsort(self._order))
        return np.ascontiguousarray(spread.reshape(self.shape(sizes, len(arrays))))
