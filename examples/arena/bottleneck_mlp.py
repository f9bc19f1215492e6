"""Bad: an MLP whose output passes through 2 channels.

We expect a loss: the MLP can write only 2 directions of the residual stream.

Legend: B sequences, T tokens, D emb_dim, R channels of the bottleneck.
"""

import jax
from flax import nnx

from MaxText.config.layer_sections import FeedForwardConfig
from MaxText.config.model_sections import LayerConfig
from MaxText.layers.dense import Dense
from MaxText.layers.feed_forward.mlp import MLP
from MaxText.layers.part import FeedForward, ForwardContext, Init, Scalars, register

R = 2


@register("feed_forward", "bottleneck_mlp")
class BottleneckMLP(FeedForward):
    """W_up W_down MLP(x)."""

    @classmethod
    def config_of(cls, layer: LayerConfig) -> FeedForwardConfig:
        """Returns the keys of the MLP."""
        return layer.config.feed_forward

    def __init__(self, config: FeedForwardConfig, init: Init, rngs: nnx.Rngs):
        D = init.dimensions.emb_dim
        draw = init.initializers
        self.mlp = MLP(config, init, rngs)
        self.down = Dense((D,), (R,), ("embed", None), draw.kernel, init, rngs)
        self.up = Dense((R,), (D,), (None, "embed"), draw.output, init, rngs)

    def __call__(self, x_BTD: jax.Array, context: ForwardContext) -> tuple[jax.Array, Scalars]:
        """Returns the output [B, T, D], and no scalars."""
        y_BTD, scalars = self.mlp(x_BTD, context)
        return self.up(self.down(y_BTD)), scalars
