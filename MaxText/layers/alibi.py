"""ALiBi: biases that lower attention scores with distance (Press et al. 2022, arXiv 2108.12409)."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from MaxText.config.model_sections import Model as ModelSection
from MaxText.config.registry import register
from MaxText.layers.part import Init, Position


@register("position", "alibi")
class ALiBi(Position):
    """ALiBi slopes, which softmax attention applies to its scores."""

    def __init__(self, keys: ModelSection, init: Init, rngs: nnx.Rngs):
        self.num_heads = init.dimensions.num_query_heads
        self.max_bias = keys.position.alibi_max_bias

    def for_mixers(self, positions_BT: jax.Array) -> dict[str, Any]:
        return {"slopes_N": jnp.asarray(slopes(self.num_heads, self.max_bias))}


def slopes(num_heads: int, max_bias: float = 8.0) -> np.ndarray:
    """Returns the penalty of a score per token of distance, float32 [N].

    2^(-max_bias i / N) for i = 1..N if N is a power of two. Otherwise the slopes of the power of
    two below N, followed by every other slope of twice that power.
    """
    power = 2 ** (num_heads.bit_length() - 1)
    first = 2.0 ** (-max_bias * np.arange(1, power + 1) / power)
    rest = 2.0 ** (-max_bias * np.arange(1, 2 * (num_heads - power), 2) / (2 * power))
    return np.concatenate([first, rest]).astype(np.float32)
