"""The linear head: logits from the final hidden states.

Legend: B sequences, T tokens, D emb_dim, V vocab_size.
"""

import math

import jax
import jax.numpy as jnp
from flax import nnx

from MaxText.config.model_sections import LayerConfig, ModelConfig
from MaxText.config.registry import lookup, register
from MaxText.layers.dense import Dense, Embedding
from MaxText.layers.part import DecodeState, Head, Init


def head_and_layer(config: ModelConfig) -> tuple[type[Head], LayerConfig]:
    """Returns the class of the model's head, and what `Part.build` builds it from."""
    return lookup("head", config.head.name), LayerConfig(config, config.shape.dimensions)


@register("head", "linear")
class LinearHead(Head):
    """An output matrix or the tied token table, with scaling and soft cap."""

    def __init__(self, config: ModelConfig, init: Init, rngs: nnx.Rngs):
        self.config = head = config.head
        self.dtype = jnp.dtype(jnp.float32) if head.logits_dot_in_fp32 else init.dtype
        D = init.dimensions.emb_dim
        V = init.dimensions.vocab_size
        if head.logits_via_embedding:
            self.logits_dense = None
        else:
            self.logits_dense = Dense(
                (D,),
                (V,),
                ("embed", "vocab"),
                init.initializers.kernel,
                init,
                rngs,
                use_bias=head.logits_bias,
                used_in=self.dtype,
            )

    def __call__(
        self, h_BTD: jax.Array, table: Embedding, state: DecodeState, positions_BT: jax.Array
    ) -> jax.Array:
        """Returns float32 logits [B, T, V]; see `Head.__call__`."""
        head = self.config
        if self.logits_dense is None:
            rounded = None if head.logits_embedding_dtype == "auto" else jnp.dtype(jnp.bfloat16)
            logits_BTV = table.attend(h_BTD, self.dtype, rounded)
            if head.normalize_embedding_logits:
                logits_BTV = logits_BTV / math.sqrt(h_BTD.shape[-1])
        else:
            logits_BTV = self.logits_dense(h_BTD)
        logits_BTV = logits_BTV.astype(jnp.float32)
        if head.logits_scaling != 1.0:
            logits_BTV = logits_BTV / head.logits_scaling
        if head.final_logits_soft_cap:
            cap = head.final_logits_soft_cap
            logits_BTV = cap * jnp.tanh(logits_BTV / cap)
        return logits_BTV

    @classmethod
    def reads_table(cls, config: ModelConfig) -> bool:
        """Returns whether the head is tied to the token table."""
        return config.head.logits_via_embedding
