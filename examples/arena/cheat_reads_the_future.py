"""A cheat, which the arena refuses: attention that also reads the next token, the one to predict.

check_part.py finds it in its checks of causality.

Legend: B sequences, T tokens, D emb_dim.
"""

import jax
import jax.numpy as jnp

from MaxText.layers.attention.attention import Attention
from MaxText.layers.part import ForwardContext, MixerInput, register


@register("mixer", "future_attention")
class FutureAttention(Attention):
    """Attention whose values come from the token after."""

    def project_inputs(
        self, x: MixerInput, context: ForwardContext
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns queries [B, T, N, H], keys and values [B, T, K, H]."""
        query_input, key_input, value_input = x
        next_BTD = jnp.concatenate([value_input[:, 1:], value_input[:, :1]], axis=1)
        return super().project_inputs((query_input, key_input, next_BTD), context)
