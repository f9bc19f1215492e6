"""State across layers: value residuals, and the embedding.

    v_l = a_l v_l + b_l v_1       values of layer l, with those of the first (Zhou et al. 2024)
    x_l = c_l x_l + d_l x_0       what layer l reads, with the embedding (modded-nanogpt)

Legend: B sequences, T tokens, D emb_dim, K key/value heads, H head_dim, L layers.
"""

import jax.numpy as jnp

from MaxText.layers.attention.attention import Attention
from MaxText.layers.params import constant, param
from MaxText.layers.part import Connection, LayerInputs, register


@register("connection", "value_residual")
class ValueResidual(Connection):
    """Carries the residual stream, the embedding, and the first values."""

    def __init__(self, config, init, rngs):
        _, _, K, H = init.dimensions[:4]
        self.values_shape = (K, H)
        self.dtype = init.dtype
        L = init.dimensions.num_layers
        dtype = init.weight_dtype
        self.of_stream = param(rngs, (L,), (None,), constant(1.0), dtype=dtype)
        self.of_embedding = param(rngs, (L,), (None,), constant(0.0), dtype=dtype)

    def begin(self, x_BTD):
        return x_BTD, x_BTD, jnp.zeros((*x_BTD.shape[:2], *self.values_shape), self.dtype)

    def read(self, index, carry, norms):
        x_BTD, x0_BTD, _ = carry
        c, d = (w[...][index].astype(x_BTD.dtype) for w in (self.of_stream, self.of_embedding))
        return LayerInputs.all(c * x_BTD + d * x0_BTD), carry

    def shared(self, carry):
        return {"first_values": carry[2]}

    def write(self, index, carry, y_BTD, shared):
        return y_BTD, carry[1], shared["first_values"]

    def end(self, carry):
        return carry[0]


@register("mixer", "value_residual_attention")
class ValueResidualAttention(Attention):
    """Attention on a learned mean of its own and the first layer's values."""

    def __init__(self, config, init, rngs):
        super().__init__(config, init, rngs)
        self.value_scales = param(rngs, (2,), (None,), constant(0.5), dtype=init.weight_dtype)

    def values(self, v_BTD, context):
        v_BTKH = super().values(v_BTD, context)
        first_BTKH = jnp.where(context.layer == 0, v_BTKH, context.shared["first_values"])
        context.shared["first_values"] = first_BTKH
        a, b = self.value_scales[...].astype(v_BTKH.dtype)
        return a * v_BTKH + b * first_BTKH
