"""Neutral: every layer also reads the embedding, times a learned number that is 0 at first.

We expect no effect in 4 layers; in deeper models it helps (modded-nanogpt).

Legend: B sequences, T tokens, D emb_dim, L layers.
"""

from collections.abc import Mapping
from typing import NamedTuple

import jax
from flax import nnx

from MaxText.config.model_sections import ModelConfig
from MaxText.layers.params import param, zeros
from MaxText.layers.part import Connection, Init, LayerIndex, LayerInputs, register


class StreamAndEmbedding(NamedTuple):
    """What the connection carries."""

    x_BTD: jax.Array
    embedding_BTD: jax.Array


@register("connection", "embedding_skip")
class EmbeddingSkip(Connection):
    """A residual stream to which each layer adds a share of the embedding."""

    def __init__(self, config: ModelConfig, init: Init, rngs: nnx.Rngs):
        L = init.dimensions.num_layers
        self.shares = param(rngs, (L,), (None,), zeros, dtype=init.weight_dtype)

    def begin(self, x_BTD: jax.Array) -> StreamAndEmbedding:
        """Returns the state for the first layer, from the embedding."""
        return StreamAndEmbedding(x_BTD, x_BTD)

    def read(
        self, index: LayerIndex, carry: StreamAndEmbedding, norms: Mapping[str, nnx.Module]
    ) -> tuple[LayerInputs, StreamAndEmbedding]:
        """Returns the inputs of a layer, and the state as it is."""
        share = self.shares[...][index].astype(carry.x_BTD.dtype)
        return LayerInputs.all(carry.x_BTD + share * carry.embedding_BTD), carry

    def write(
        self,
        index: LayerIndex,
        carry: StreamAndEmbedding,
        y_BTD: jax.Array,
        shared: dict[str, jax.Array],
    ) -> StreamAndEmbedding:
        """Returns the state for the next layer from a layer's output."""
        return carry._replace(x_BTD=y_BTD)

    def end(self, carry: StreamAndEmbedding) -> jax.Array:
        """Returns the hidden state for the final norm."""
        return carry.x_BTD
