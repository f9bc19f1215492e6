"""Position encodings besides rotary: learned tables, axial tables, ALiBi.

Legend: B sequences, T tokens, D emb_dim, N query heads.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from MaxText.config.model_sections import ModelConfig
from MaxText.config.registry import register
from MaxText.layers.dense import Embedding
from MaxText.layers.part import Init, MixerPositions, Position


@register("position", "learned")
class LearnedPositions(Embedding, Position):
    """A table with a row for each position (GPT-2)."""

    def __init__(self, config: ModelConfig, init: Init, rngs: nnx.Rngs):
        """Declares the table, [trainable_position_size or max_target_length, D]."""
        num_rows = config.position.trainable_position_size
        if num_rows == -1:
            num_rows = init.dimensions.max_target_length
        super().__init__(num_rows, "position", init, rngs)

    def embed(self, positions_BT: jax.Array) -> jax.Array:
        """Returns the rows of the positions, [B, T, D]."""
        return self(positions_BT)


@register("position", "axial")
class AxialPositions(Position):
    """Positions from two tables: (first[p // b] + second[p % b]) / 2.

    Ho et al. 2019 with the mean of GPT-Neo; (a, b) is axial_pos_shape.
    """

    def __init__(self, config: ModelConfig, init: Init, rngs: nnx.Rngs):
        """Declares the tables, [a, D] and [b, D]."""
        first, second = config.position.axial_pos_shape
        self.first = Embedding(first, "position", init, rngs)
        self.second = Embedding(second, "position", init, rngs)
        self.period = second

    def embed(self, positions_BT: jax.Array) -> jax.Array:
        """Returns the mean of a row of each table, [B, T, D]."""
        return 0.5 * (
            self.first(positions_BT // self.period) + self.second(positions_BT % self.period)
        )


@register("position", "alibi")
class ALiBi(Position):
    """ALiBi: attention scores fall with distance (Press et al. 2022)."""

    def __init__(self, config: ModelConfig, init: Init, rngs: nnx.Rngs):
        """Stores what the slopes depend on; there are no weights."""
        self.num_heads = init.dimensions.num_query_heads
        self.max_bias = config.position.alibi_max_bias

    def for_mixers(self, positions_BT: jax.Array) -> MixerPositions:
        """Returns the slopes of the heads, which need no positions."""
        return {"slopes_N": jnp.asarray(alibi_slopes(self.num_heads, self.max_bias))}


def alibi_slopes(num_heads: int, max_bias: float = 8.0) -> np.ndarray:
    """Returns the penalty of a score per token of distance, float32 [N].

    2^(-max_bias i / N) for i = 1..N if N is a power of two. Otherwise the slopes of the power of
    two below N, followed by every other slope of twice that power.

    Args:
      num_heads: N.
      max_bias: Exponent of the smallest slope; 8 in the paper.
    """
    power = 2 ** (num_heads.bit_length() - 1)
    slopes = 2.0 ** (-max_bias * np.arange(1, power + 1) / power)
    extra_slopes = 2.0 ** (-max_bias * np.arange(1, 2 * (num_heads - power), 2) / (2 * power))
    return np.concatenate([slopes, extra_slopes]).astype(np.float32)
