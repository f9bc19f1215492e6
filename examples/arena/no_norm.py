"""Bad: a gain per channel in place of each norm.

We expect a loss, or divergence: nothing limits the inputs of the layers.
"""

import jax
from flax import nnx

from MaxText.config.layer_sections import BlockConfig
from MaxText.layers.params import constant, param
from MaxText.layers.part import Init, register


class Gain(nnx.Module):
    """Multiplies channels by learned numbers, 1 at first."""

    def __init__(self, init: Init, rngs: nnx.Rngs):
        size = init.dimensions.emb_dim
        self.scale = param(rngs, (size,), ("norm",), constant(1.0), dtype=init.weight_dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns x with its channels multiplied."""
        return x * self.scale[...].astype(x.dtype)


@register("norm", "no_norm")
def no_norm(config: BlockConfig, init: Init, rngs: nnx.Rngs, *, parametric: bool) -> nnx.Module:
    """Builds a gain; `parametric` has no effect."""
    return Gain(init, rngs)
