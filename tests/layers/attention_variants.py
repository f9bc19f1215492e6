"""Registered variants of attention that use its hooks; tests import it as a user's module.

Legend as in MaxText/layers/attention/attention.py.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from MaxText.config.layer_sections import AttentionConfig
from MaxText.config.model_sections import ModelConfig
from MaxText.layers.attention.attention import Attention
from MaxText.layers.params import Init, normal_fan_in, param
from MaxText.layers.part import ForwardContext, register
from tests.layers.attention_ideas import CHUNK, PREFIX, selective, softpick


@register("mixer", "distance_bias_attention")
class DistanceBiasAttention(Attention):
    """A learned number by head and distance is added to scores (T5, Raffel et al. 2020)."""

    def __init__(self, config: ModelConfig, init: Init, rngs: nnx.Rngs):
        super().__init__(config, init, rngs)
        shape = (init.dimensions.num_query_heads, 4)
        dtype = init.weight_dtype
        self.table = param(rngs, shape, ("q_heads", None), normal_fan_in, dtype=dtype)

    def score(
        self, scores_BNTS: jax.Array, q_pos: jax.Array, k_pos: jax.Array, head: jax.Array
    ) -> jax.Array:
        """Returns the scores with the bias of their head and distance."""
        return scores_BNTS + self.table[...][head, jnp.minimum(jnp.abs(q_pos - k_pos), 3)]


@register("mixer", "chunked_attention")
class ChunkedAttention(Attention):
    """Attention within chunks of the document (Llama 4)."""

    @classmethod
    def sliding_window(cls, config: AttentionConfig) -> int | None:
        """Returns the size of a chunk."""
        return CHUNK

    def mask(self, q_pos: jax.Array, k_pos: jax.Array) -> jax.Array:
        """Returns whether query and key are in the same chunk."""
        return q_pos // CHUNK == k_pos // CHUNK


@register("mixer", "prefix_attention")
class PrefixAttention(Attention):
    """All tokens see the first ones of their document (prefix LM, Raffel et al. 2020)."""

    @classmethod
    def is_causal(cls, config: AttentionConfig) -> bool:
        """Returns False: the mask opens later keys."""
        return False

    def mask(self, q_pos: jax.Array, k_pos: jax.Array) -> jax.Array:
        """Returns whether a key is in the prefix, or not later than the query."""
        return (k_pos <= q_pos) | (k_pos < PREFIX)


@register("mixer", "softpick_attention")
class SoftpickAttention(Attention):
    """Softpick in place of softmax (Zuhri et al. 2025, arXiv 2504.20966)."""

    def weights(self, scores_BNTS: jax.Array, mask_B1TS: jax.Array) -> jax.Array:
        """Returns softpick of the scores."""
        return softpick(scores_BNTS, mask_B1TS)


@register("mixer", "selective_attention")
class SelectiveAttention(Attention):
    """Tokens select which earlier ones are forgotten (Leviathan et al. 2024)."""

    weights_scope = "sequence"

    def weights(self, scores_BNTS: jax.Array, mask_B1TS: jax.Array) -> jax.Array:
        """Returns the softmax of scores that earlier queries have lowered."""
        return selective(scores_BNTS, mask_B1TS)


@register("mixer", "mean_attention")
class MeanAttention(Attention):
    """The mean of the values so far, by an `attend` of its own."""

    has_softmax = False

    def attend(
        self, q_BTNH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array, context: ForwardContext
    ) -> jax.Array:
        """Returns the means, the same for all query heads of a key/value head."""
        counts_T11 = jnp.arange(1, v_BTKH.shape[1] + 1)[:, None, None]
        means_BTKH = jnp.cumsum(v_BTKH, axis=1) / counts_T11
        return jnp.repeat(means_BTKH, q_BTNH.shape[2] // v_BTKH.shape[2], axis=2)
