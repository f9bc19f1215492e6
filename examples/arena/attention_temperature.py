"""Neutral: attention with a learned temperature per head, 1 at first.

We expect no effect: queries and keys can scale the scores as well.

Legend: B sequences, T queries, S keys, N heads.
"""

import jax
from flax import nnx

from MaxText.config.model_sections import ModelConfig
from MaxText.layers.attention.attention import Attention
from MaxText.layers.params import constant, param
from MaxText.layers.part import Init, register


@register("mixer", "temperature_attention")
class TemperatureAttention(Attention):
    """Attention whose scores are divided by a temperature."""

    def __init__(self, config: ModelConfig, init: Init, rngs: nnx.Rngs):
        super().__init__(config, init, rngs)
        num_heads = init.dimensions.num_query_heads
        self.inverse = param(
            rngs, (num_heads,), ("q_heads",), constant(1.0), dtype=init.weight_dtype
        )

    def score(
        self, scores_BNTS: jax.Array, q_pos: jax.Array, k_pos: jax.Array, head: jax.Array
    ) -> jax.Array:
        """Returns the scores times the inverse temperature of their head."""
        return scores_BNTS * self.inverse[...][head]
