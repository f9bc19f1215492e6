"""Neutral: an MLP with a learned gain per output channel, 1 at first.

We expect no effect: the matrix before it can scale its outputs as well.

Legend: B sequences, T tokens, D emb_dim.
"""

import jax
from flax import nnx

from MaxText.config.layer_sections import FeedForwardConfig
from MaxText.config.model_sections import LayerConfig
from MaxText.layers.feed_forward.mlp import MLP
from MaxText.layers.params import constant, param
from MaxText.layers.part import FeedForward, ForwardContext, Init, Scalars, register


@register("feed_forward", "scaled_mlp")
class ScaledMLP(FeedForward):
    """gain * MLP(x)."""

    @classmethod
    def config_of(cls, layer: LayerConfig) -> FeedForwardConfig:
        """Returns the keys of the MLP."""
        return layer.config.feed_forward

    def __init__(self, config: FeedForwardConfig, init: Init, rngs: nnx.Rngs):
        D = init.dimensions.emb_dim
        self.mlp = MLP(config, init, rngs)
        self.gain = param(rngs, (D,), ("norm",), constant(1.0), dtype=init.weight_dtype)

    def __call__(self, x_BTD: jax.Array, context: ForwardContext) -> tuple[jax.Array, Scalars]:
        """Returns the output [B, T, D], and no scalars."""
        y_BTD, scalars = self.mlp(x_BTD, context)
        return y_BTD * self.gain[...].astype(y_BTD.dtype), scalars
