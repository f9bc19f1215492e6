"""The feed-forward part: a plain MLP or a gated one.

Legend: B sequences, T tokens, D emb_dim, F mlp_dim.
"""

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from MaxText.configuration.layer_sections import FeedForward as FeedForwardSection
from MaxText.layers.activations import ACTIVATIONS
from MaxText.layers.building import Building
from MaxText.layers.dense import Dense
from MaxText.parallelism.constraints import constrain

Scalars = dict[str, jax.Array]


class MLP(nnx.Module):
    """wo(prod_i activation_i(wi_i x)).

    One activation is the MLP of Vaswani et al. 2017, (silu, linear) the SwiGLU of Shazeer 2020,
    equation 6. Input kernels are named wi, or wi_0, wi_1, ... when there are several.
    """

    def __init__(self, section: FeedForwardSection, building: Building, rngs: nnx.Rngs):
        D, F = building.dimensions.emb_dim, building.dimensions.mlp_dim
        init = building.initializers
        bias = {"use_bias": section.ffn_bias}
        self.activations = section.mlp_activations
        many = len(self.activations) > 1
        self.input_names = [f"wi_{i}" if many else "wi" for i in range(len(self.activations))]
        for name in self.input_names:
            dense = Dense((D,), (F,), ("embed", "mlp"), init.kernel, building, rngs, **bias)
            setattr(self, name, dense)
        self.wo = Dense((F,), (D,), ("mlp", "embed"), init.output, building, rngs, **bias)

    def __call__(self, x_BTD: jax.Array) -> tuple[jax.Array, Scalars]:
        """Returns y_BTD and scalars to be summed over layers (none here)."""
        h_BTF = None
        for name, activation in zip(self.input_names, self.activations, strict=True):
            branch = checkpoint_name(getattr(self, name)(x_BTD), "mlpwi")
            branch = ACTIVATIONS[activation](branch)
            h_BTF = branch if h_BTF is None else h_BTF * branch
        assert h_BTF is not None
        h_BTF = constrain(h_BTF, "activation_batch", "activation_length", "activation_mlp")
        return checkpoint_name(self.wo(h_BTF), "mlpwo"), {}
