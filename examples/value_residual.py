"""State across layers: value residuals, and the embedding.

    v_l = a_l v_l + b_l v_1       values of layer l, with those of the first (Zhou et al. 2024)
    x_l = c_l x_l + d_l x_0       what layer l reads, with the embedding (modded-nanogpt)

A connection carries the state from layer to layer. It lends the first layer's values to mixers in
`context.shared`, and takes them back after the layer. value_residual.yml uses both parts.

Legend: B sequences, T tokens, D emb_dim, K key/value heads, H head_dim, L layers.
"""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from MaxText.config.model_sections import ModelConfig
from MaxText.layers.attention.attention import Attention
from MaxText.layers.params import constant, param
from MaxText.layers.part import (
    Connection,
    ForwardContext,
    Init,
    LayerIndex,
    LayerInputs,
    register,
)


class ResidualState(NamedTuple):
    """What the connection carries."""

    x_BTD: jax.Array  # the residual stream
    embedding_BTD: jax.Array  # x_0
    first_values_BTKH: jax.Array  # v_1; zeros before the first layer


@register("connection", "value_residual")
class ValueResidual(Connection):
    """Carries the residual stream, the embedding, and the first values."""

    def __init__(self, config: ModelConfig, init: Init, rngs: nnx.Rngs):
        _, _, K, H = init.dimensions[:4]
        self.values_shape = (K, H)
        self.dtype = init.dtype
        L = init.dimensions.num_layers
        dtype = init.weight_dtype
        self.of_stream = param(rngs, (L,), (None,), constant(1.0), dtype=dtype)  # c
        self.of_embedding = param(rngs, (L,), (None,), constant(0.0), dtype=dtype)  # d

    def begin(self, x_BTD: jax.Array) -> ResidualState:
        """Returns the state for the first layer, from the embedding."""
        batch, length, _ = x_BTD.shape
        values = jnp.zeros((batch, length, *self.values_shape), self.dtype)
        return ResidualState(x_BTD, x_BTD, values)

    def read(
        self, index: LayerIndex, carry: ResidualState, norms: Mapping[str, nnx.Module]
    ) -> tuple[LayerInputs, ResidualState]:
        """Returns the inputs of a layer, and the state as it is.

        Args:
          index: Index of the layer; an array inside a scan.
          carry: The state.
          norms: Norms that this connection does not need.
        """
        c = self.of_stream[...][index].astype(carry.x_BTD.dtype)
        d = self.of_embedding[...][index].astype(carry.x_BTD.dtype)
        return LayerInputs.all(c * carry.x_BTD + d * carry.embedding_BTD), carry

    def shared(self, carry: ResidualState) -> dict[str, jax.Array]:
        """Returns what mixers find in `context.shared`."""
        return {"first_values": carry.first_values_BTKH}

    def write(
        self,
        index: LayerIndex,
        carry: ResidualState,
        y_BTD: jax.Array,
        shared: dict[str, jax.Array],
    ) -> ResidualState:
        """Returns the state for the next layer from a layer's output."""
        return carry._replace(x_BTD=y_BTD, first_values_BTKH=shared["first_values"])

    def end(self, carry: ResidualState) -> jax.Array:
        """Returns the hidden state for the final norm."""
        return carry.x_BTD


@register("mixer", "value_residual_attention")
class ValueResidualAttention(Attention):
    """Attention on a learned mean of its own and the first layer's values."""

    def __init__(self, config: ModelConfig, init: Init, rngs: nnx.Rngs):
        super().__init__(config, init, rngs)
        self.value_scales = param(rngs, (2,), (None,), constant(0.5), dtype=init.weight_dtype)

    def values(self, v_BTD: jax.Array, context: ForwardContext) -> jax.Array:
        """Returns a v_l + b v_1, [B, T, K, H]; the first layer also stores its v_l as v_1."""
        v_BTKH = super().values(v_BTD, context)
        first_BTKH = jnp.where(context.layer == 0, v_BTKH, context.shared["first_values"])
        context.shared["first_values"] = first_BTKH
        a, b = self.value_scales[...].astype(v_BTKH.dtype)
        return a * v_BTKH + b * first_BTKH
