"""Bad: attention behind a gate that is almost closed at first, sigmoid(-6) = 0.0025.

We expect a loss: in so few steps the gates hardly open, and tokens hardly see each other.

Legend: B sequences, T tokens, D emb_dim, N query heads, H head_dim.
"""

import jax
from flax import nnx

from MaxText.config.model_sections import ModelConfig
from MaxText.layers.attention.attention import Attention
from MaxText.layers.params import constant, param
from MaxText.layers.part import ForwardContext, Init, MixerInput, register


@register("mixer", "closed_gate_attention")
class ClosedGateAttention(Attention):
    """Attention whose output is multiplied by a learned gate per channel."""

    def __init__(self, config: ModelConfig, init: Init, rngs: nnx.Rngs):
        super().__init__(config, init, rngs)
        D = init.dimensions.emb_dim
        self.openness = param(rngs, (D,), ("norm",), constant(-6.0), dtype=init.weight_dtype)

    def project_output(
        self, o_BTNH: jax.Array, x: MixerInput, context: ForwardContext
    ) -> jax.Array:
        """Returns the gated output [B, T, D] of the heads' outputs."""
        y_BTD = super().project_output(o_BTNH, x, context)
        return y_BTD * jax.nn.sigmoid(self.openness[...]).astype(y_BTD.dtype)
