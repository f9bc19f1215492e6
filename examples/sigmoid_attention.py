"""Sigmoid attention (Ramapuram et al. 2024, arXiv 2409.04431) as a mixer.

    o_i = sum_j sigmoid(q_i . k_j / sqrt(H) + b) v_j

Its weights do not compete: each depends on its own score alone. b starts at -log(length), so that
they sum to about 1 at first. sigmoid_attention.yml uses it.
"""

import math

import jax
from flax import nnx

from MaxText.config.model_sections import ModelConfig
from MaxText.layers.attention.attention import Attention
from MaxText.layers.params import constant, param
from MaxText.layers.part import Init, register


@register("mixer", "sigmoid_attention")
class SigmoidAttention(Attention):
    """Attention with a sigmoid in place of the softmax, and a learned bias for each head."""

    weights_scope = "score"

    def __init__(self, config: ModelConfig, init: Init, rngs: nnx.Rngs):
        super().__init__(config, init, rngs)
        first = constant(-math.log(init.dimensions.max_target_length))
        num_heads = init.dimensions.num_query_heads
        self.bias = param(rngs, (num_heads,), ("q_heads",), first, dtype=init.weight_dtype)

    def score(
        self, scores_BNTS: jax.Array, q_pos: jax.Array, k_pos: jax.Array, head: jax.Array
    ) -> jax.Array:
        """Returns the scores with the biases of their heads."""
        return scores_BNTS + self.bias[...][head]

    def weights(self, scores_BNTS: jax.Array, mask_B1TS: jax.Array) -> jax.Array:
        """Returns the weights of the values; that of a masked score, -inf, is 0."""
        return jax.nn.sigmoid(scores_BNTS)
