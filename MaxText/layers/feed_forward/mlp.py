"""The feed-forward part: a plain or gated MLP.

Legend: B sequences, T tokens, D emb_dim, F mlp_dim.
"""

import dataclasses

import jax
from flax import nnx

from MaxText.config.layer_sections import FeedForwardConfig, MoEConfig
from MaxText.config.model_sections import LayerConfig
from MaxText.config.registry import register
from MaxText.layers.capture import record, tag
from MaxText.layers.context import ForwardContext
from MaxText.layers.dense import Dense, scaled
from MaxText.layers.feed_forward.activations import (
    ACTIVATIONS,
    LEARNED,
    OVER_FEATURES,
    LearnedActivation,
    clamped,
    rrelu,
)
from MaxText.layers.feed_forward.moe import RoutedMoE, input_kernel_names
from MaxText.layers.params import Init
from MaxText.layers.part import FeedForward, Scalars
from MaxText.parallelism.logical_sharding import BRANCH_INPUT, with_logical_constraint

_RANDOM_SLOPES = 10  # RNG stream id within a layer; block.py has the others


@register("feed_forward", "mlp")
class MLP(FeedForward):
    """wo(prod_i activation_i(wi_i x)), plain or gated.

    One activation is the feed-forward of Vaswani et al. 2017, equation 2; (silu, linear) is the
    SwiGLU of Shazeer 2020, equation 6. Kernels wi_i are [D, F], wo is [F, D]. A single wi is called
    wi, several are wi_0, wi_1, ...; learned scalars of activations are in activation, or in
    activation_0, ...
    """

    not_recomputed = ("wo",)

    @classmethod
    def build(cls, layer: LayerConfig, init: Init, rngs: nnx.Rngs) -> "MLP | RoutedMoE":
        """Builds an MLP, or with num_experts > 1 a mixture of experts; see `Part.build`."""
        config = layer.config.feed_forward
        experts = layer.config.mixture_of_experts
        if experts.num_experts == 1:
            return cls(config, init, rngs)
        shared = None
        if experts.shared_experts:
            shared = _shared_experts(experts, config, init, rngs)
        return RoutedMoE(experts, config, init, rngs, shared_experts=shared)

    @classmethod
    def sharded_sizes(cls, layer: LayerConfig) -> dict[str, tuple[str, int]]:
        """Returns the widths of an expert and of a shared expert."""
        experts = layer.config.mixture_of_experts
        if experts.num_experts == 1:
            return {}
        mlp_dim = layer.dimensions.mlp_dim
        sizes = {"moe_mlp_dim": ("mlp", experts.width(mlp_dim))}
        if experts.shared_experts:
            shared_width = experts.shared_width(mlp_dim) // experts.shared_experts
            sizes["shared_expert_mlp_dim"] = ("mlp", shared_width)
        return sizes

    def __init__(
        self,
        config: FeedForwardConfig,
        init: Init,
        rngs: nnx.Rngs,
        rng_stream: int = _RANDOM_SLOPES,
    ):
        """Declares the weights.

        Args:
          config: Activations and biases.
          init: Sizes, initializers and dtypes.
          rngs: RNG streams that weights are drawn from.
          rng_stream: RNG stream id of random slopes (rrelu) within a layer.
        """
        D = init.dimensions.emb_dim
        F = init.dimensions.mlp_dim
        draw = init.initializers
        bias = config.ffn_bias
        self.activations = config.mlp_activations
        self.limit = config.mlp_activations_limit
        self.gate_multiplier, self.out_multiplier = config.mlp_multipliers or (1.0, 1.0)
        self.input_names = input_kernel_names(self.activations)
        for name in self.input_names:
            dense = Dense((D,), (F,), ("embed", "mlp"), draw.kernel, init, rngs, use_bias=bias)
            setattr(self, name, dense)
        for name, activation in zip(self.input_names, self.activations, strict=True):
            if activation in LEARNED:
                learned = LearnedActivation(activation, init, rngs)
                setattr(self, name.replace("wi", "activation"), learned)
        self.rng_stream = rng_stream
        self.wo = Dense((F,), (D,), ("mlp", "embed"), draw.output, init, rngs, use_bias=bias)

    def __call__(self, x_BTD: jax.Array, context: ForwardContext) -> tuple[jax.Array, Scalars]:
        """Returns the output [B, T, D], and no losses."""
        h_BTF = None
        branches = zip(self.input_names, self.activations, strict=True)
        for index, (name, activation) in enumerate(branches):
            branch_BTF = tag(getattr(self, name)(x_BTD), "mlpwi")
            if index == 0:
                branch_BTF = scaled(branch_BTF, self.gate_multiplier)
            branch_BTF = clamped(branch_BTF, index, self.limit)
            branch_BTF = self._activated(name, activation, branch_BTF, context)
            h_BTF = branch_BTF if h_BTF is None else h_BTF * branch_BTF
        assert h_BTF is not None
        h_BTF = with_logical_constraint(h_BTF, *BRANCH_INPUT[:2], "activation_mlp")
        record(h_BTF, "activations")
        return scaled(tag(self.wo(h_BTF), "mlpwo"), self.out_multiplier), {}

    def _activated(
        self, name: str, activation: str, x: jax.Array, context: ForwardContext
    ) -> jax.Array:
        """Returns an activation of x, with its learned scalars or random slopes.

        Args:
          name: Name of the kernel before it.
          activation: Name of the activation.
          x: Output of that kernel, [B, T, F].
          context: Facts about the batch.
        """
        if activation in LEARNED:
            return getattr(self, name.replace("wi", "activation"))(x)
        if activation == "rrelu":
            key = context.key_for(self.rng_stream) if context.training else None
            if key is not None:
                key = jax.random.fold_in(key, self.input_names.index(name))
            return rrelu(x, key)
        return (ACTIVATIONS | OVER_FEATURES)[activation](x)


class GatedMLP(MLP):
    """sigmoid(x w) MLP(x), with w [D, 1]: an MLP that each token turns on or off (Qwen)."""

    not_recomputed = ()  # the gate reads the output

    def __init__(self, config: FeedForwardConfig, init: Init, rngs: nnx.Rngs):
        """Declares the weights of the MLP and of the gate.

        Args:
          config: Activations and biases.
          init: Sizes, initializers and dtypes.
          rngs: RNG streams that weights are drawn from.
        """
        super().__init__(config, init, rngs)
        D = init.dimensions.emb_dim
        self.gate = Dense((D,), (1,), ("embed", None), init.initializers.kernel, init, rngs)

    def __call__(self, x_BTD: jax.Array, context: ForwardContext) -> tuple[jax.Array, Scalars]:
        """Returns the output [B, T, D], and no losses."""
        y_BTD, losses = super().__call__(x_BTD, context)
        return jax.nn.sigmoid(self.gate(x_BTD)) * y_BTD, losses


def _shared_experts(
    experts: MoEConfig, feed_forward: FeedForwardConfig, init: Init, rngs: nnx.Rngs
) -> MLP:
    """Returns the MLP of the experts that every token visits.

    Args:
      experts: Their number, width, activations and biases.
      feed_forward: Activations if experts have none of their own.
      init: Sizes, initializers and dtypes.
      rngs: RNG streams that weights are drawn from.
    """
    keys = {
        "mlp_activations": experts.moe_activations or feed_forward.mlp_activations,
        "ffn_bias": experts.expert_bias,
        "mlp_multipliers": (),
    }
    width = experts.shared_width(init.dimensions.mlp_dim)
    init = dataclasses.replace(init, dimensions=init.dimensions._replace(mlp_dim=width))
    part = GatedMLP if experts.shared_expert_gate else MLP
    return part(feed_forward.model_copy(update=keys), init, rngs)
