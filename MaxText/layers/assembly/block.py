"""A layer: a mixer and a feed-forward around the residual stream."""

from typing import ClassVar

import jax
from flax import nnx

from MaxText.config.model_sections import LayerConfig
from MaxText.config.registry import lookup
from MaxText.layers.capture import record, scope
from MaxText.layers.context import ForwardContext
from MaxText.layers.dense import scaled
from MaxText.layers.dropout import drop_path, dropout
from MaxText.layers.normalization import Norm, make_norm
from MaxText.layers.params import Init, stream
from MaxText.layers.part import DecodeState, FeedForward, LayerInputs, Mixer, Scalars
from MaxText.layers.part_outputs import check_output
from MaxText.layers.part_scalars import add_scalars
from MaxText.parallelism.logical_sharding import BRANCH_INPUT, HIDDEN, with_logical_constraint

# RNG stream ids within a layer. Elsewhere: 0 dropout of attention probabilities, 5 Macaron branch,
# 9 routing, 10 random slopes of activations, 11 those of Macaron. Drop path of a branch uses the id
# of its dropout plus _PATH_OFFSET: 3, 4 and 7.
MIXER_STREAM = 1
FEED_FORWARD_STREAM = 2
_PATH_OFFSET = 2


class Block(nnx.Module):
    """Pre-norm block (Radford et al. 2019).

    h = x + mixer(norm(x)), y = h + feed_forward(norm'(h)). What is done to the outputs of both
    branches is in `finish_branch`. Variants are in block_variants.py.

    Attributes:
      position_index: Which of the decoder's position encodings its mixer has, as in
        `ForwardContext.for_layer`.
    """

    not_recomputed: ClassVar[tuple[str, ...]] = ("mlp",)  # as in layers/part.py
    position_index = 0

    def __init__(self, layer: LayerConfig, init: Init, rngs: nnx.Rngs):
        """Builds the layer.

        Args:
          layer: Keys and sizes of the layer, which layer_kinds may change.
          init: Sizes, initializers and dtypes.
          rngs: RNG streams that weights are drawn from.
        """
        config = layer.config
        self.dropout_rate = config.dropout.rate("residual")
        self.path_rate = config.dropout.rate("path")
        self.path_ramps = config.dropout.drop_path_schedule == "linear"
        self.num_layers = layer.dimensions.num_layers
        self.residual_multiplier = config.block.residual_multiplier
        self.build_mixer(layer, init, stream(rngs, "mixer"))
        self.build_feed_forward(layer, init, stream(rngs, "feed_forward"))

    def build_mixer(self, layer: LayerConfig, init: Init, rngs: nnx.Rngs) -> None:
        """Builds the mixer and its norm."""
        self.pre_self_attention_layer_norm = self.norm(layer, init, rngs)
        self.self_attention = self.mixer_class(layer).build(layer, init, rngs)

    @classmethod
    def mixer_class(cls, layer: LayerConfig) -> type[Mixer]:
        """Returns the registered mixer of a layer."""
        return lookup("mixer", layer.config.block.mixer)

    def build_feed_forward(self, layer: LayerConfig, init: Init, rngs: nnx.Rngs) -> None:
        """Builds the feed-forward and its norm."""
        self.pre_mlp_layer_norm = self.norm(layer, init, rngs)
        self.mlp = self.feed_forward_class(layer).build(layer, init, rngs)

    def feed_forward_class(self, layer: LayerConfig) -> type[FeedForward]:
        """Returns the registered feed-forward of a layer."""
        return lookup("feed_forward", layer.config.feed_forward.feed_forward_type)

    def norm(self, layer: LayerConfig, init: Init, rngs: nnx.Rngs) -> Norm:
        """Builds a norm of a branch's input."""
        config = layer.config.block
        return make_norm(config, init, rngs, parametric=config.block_norm_parametric)

    def __call__(
        self, inputs: LayerInputs, context: ForwardContext, state: DecodeState = None
    ) -> tuple[jax.Array, Scalars, DecodeState]:
        """Returns y_BTD, scalars to sum over layers, and the mixer's decode state.

        Args:
          inputs: Of the layer, [B, T, D] each: those of the mixer (q, k, v) and the residual stream
            (r). Without dense connections all are the same array.
          context: Positions, segments, random keys.
          state: Decode state of the mixer for the next tokens; None for whole sequences.
        """
        out, scalars, state = self.mix(self.mixer_input(inputs), context, state)
        h_BTD = inputs.r + self.finish_branch(out, context, MIXER_STREAM)
        out, mlp_scalars = self.feed_forward(h_BTD, context)
        y_BTD = h_BTD + self.finish_branch(out, context, FEED_FORWARD_STREAM)
        y_BTD = with_logical_constraint(y_BTD, *HIDDEN)
        return y_BTD, add_scalars(scalars, mlp_scalars), state

    def mixer_input(self, inputs: LayerInputs) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns the normalized inputs of queries, keys and values, [B, T, D] each."""
        assert isinstance(inputs.q, jax.Array), "only separate norms know normalized inputs"
        y_BTD = self.pre_self_attention_layer_norm(inputs.q)
        return y_BTD, y_BTD, y_BTD

    def mix(
        self,
        normed: tuple[jax.Array, jax.Array, jax.Array],
        context: ForwardContext,
        state: DecodeState,
    ) -> tuple[jax.Array, Scalars, DecodeState]:
        """Applies the mixer: to whole sequences, to prompts (prefill), or to the next tokens.

        Args:
          normed: From `mixer_input`.
          context: `capacity` is set for prompts.
          state: Decode state for the next tokens; else None.

        Returns:
          Its output, scalars to sum over layers, and the decode state, None for whole sequences.
        """
        mixer = self.self_attention
        normed = jax.tree.map(lambda x_BTD: with_logical_constraint(x_BTD, *BRANCH_INPUT), normed)
        x_BTD = normed if mixer.has_separate_inputs else normed[0]
        with scope("self_attention"):
            if state is not None:
                output = mixer.decode_step(x_BTD, state, context)
                out, state = check_output(mixer, "decode_step", output, normed[0])
                return out, {}, state
            if context.capacity is not None:
                output = mixer.prefill(x_BTD, context)
                out, state = check_output(mixer, "prefill", output, normed[0])
                return out, {}, state
            output = mixer(x_BTD, context)
            out, scalars = check_output(mixer, "__call__", output, normed[0])
            record(out, "mixer_output")
            return out, scalars, None

    def feed_forward(self, x_BTD: jax.Array, context: ForwardContext) -> tuple[jax.Array, Scalars]:
        """Applies norm and feed-forward."""
        return self.run_mlp(self.pre_mlp_layer_norm(x_BTD), context)

    def run_mlp(self, x_BTD: jax.Array, context: ForwardContext) -> tuple[jax.Array, Scalars]:
        """Applies the feed-forward to its normalized input."""
        x_BTD = with_logical_constraint(x_BTD, *BRANCH_INPUT)
        with scope("mlp"):
            out, scalars = check_output(self.mlp, "__call__", self.mlp(x_BTD, context), x_BTD)
            record(out, "feed_forward_output")
            return out, scalars

    def finish_branch(self, x_BTD: jax.Array, context: ForwardContext, stream: int) -> jax.Array:
        """Returns what a branch adds to the residual stream.

        It is the branch's output times residual_multiplier, after dropout and drop path.

        Args:
          x_BTD: The output of the mixer or feed-forward.
          context: Its `dropout_key` is None outside of training.
          stream: RNG stream id of the branch.
        """
        x_BTD = with_logical_constraint(x_BTD, *HIDDEN)
        x_BTD = scaled(x_BTD, self.residual_multiplier)
        x_BTD = dropout(x_BTD, self.dropout_rate, context.key_for(stream))
        key = context.key_for(stream + _PATH_OFFSET)
        if self.path_rate == 0.0 or key is None:
            return x_BTD
        rate = self.path_rate
        if self.path_ramps:
            assert context.layer is not None
            rate = rate * context.layer / max(self.num_layers - 1, 1)
        return drop_path(x_BTD, rate, key)

    @property
    def stream_norms(self) -> dict[str, nnx.Module]:
        """Separate norms of the inputs "q", "k" and "v"; empty if they share one."""
        return {}
