"""Block variants: parallel, post-norm, sandwich, of one part, two mixers, Macaron, ReZero, ..."""

import functools
import types
from typing import Any, ClassVar

import jax
from flax import nnx

from MaxText.config.model_sections import LayerConfig
from MaxText.layers.assembly.block import (
    FEED_FORWARD_STREAM,
    MIXER_STREAM,
    Block,
)
from MaxText.layers.attention.parallel_mixer import BesideMixer
from MaxText.layers.attention.static_sgu import BesideStaticSGU
from MaxText.layers.capture import record, scope
from MaxText.layers.context import ForwardContext
from MaxText.layers.dense import Dense
from MaxText.layers.feed_forward.activations import ACTIVATIONS
from MaxText.layers.feed_forward.mlp import MLP
from MaxText.layers.normalization import Norm
from MaxText.layers.params import Init, constant, param
from MaxText.layers.part import DecodeState, LayerInputs, Mixer, PreNormalized, Scalars
from MaxText.layers.part_scalars import add_scalars
from MaxText.layers.per_layer_inputs import PerLayerInputs, layer_input
from MaxText.parallelism.logical_sharding import HIDDEN, with_logical_constraint

# RNG stream ids; block.py has the others
_MACARON_STREAM = 5
_MACARON_RANDOM_SLOPES = 11


def block_class(layer: LayerConfig) -> type[Block]:
    """Returns the class of a layer: a base arrangement, and the variants that are configured.

    Each variant is a mixin that changes one or two methods of Block and calls the next class for
    the rest. Those later in this function wrap those before: ReZero gates a Macaron block's
    branches.
    """
    config = layer.config
    block = config.block
    has_mixer = block.mixer != "none"
    mixes_inputs = config.dense_connections.mixes_attention_inputs
    variants: list[tuple[bool, type[Block]]] = [
        (has_mixer and config.attention.static_sgu, WithStaticSGU),
        (has_mixer and block.parallel_mixer != "none", WithParallelMixer),
        (has_mixer and mixes_inputs, WithSeparateNorms),
        (block.norm_placement in ("post", "sandwich"), SandwichNorms),
        (block.norm_placement == "post", WithoutPreNorms),
        (block.use_macaron, Macaron),
        (block.use_rezero, ReZero),
        (config.embedding.hidden_size_per_layer_input > 0, WithPerLayerInput),
        (block.use_layer_scalar, WithLayerScalar),
    ]
    bases = [_arrangement(layer), *(variant for is_chosen, variant in variants if is_chosen)]
    return combine(*reversed(bases))


def _arrangement(layer: LayerConfig) -> type[Block]:
    """Returns the class of a layer without variants."""
    if layer.config.block.mixer == "none":
        return BlockWithoutMixer
    if layer.config.feed_forward.feed_forward_type == "none":
        return BlockWithoutFeedForward
    return ParallelBlock if layer.config.block.block_arrangement == "parallel" else Block


@functools.cache
def combine(*bases: type) -> Any:
    """Returns a class of all bases, the same one for the same bases.

    The class of a combination is made when it is first used, as most combinations never are. Its
    name is that of the first base.
    """
    return bases[0] if len(bases) == 1 else types.new_class(bases[0].__name__, bases)


def mixer_class(layer: LayerConfig) -> type[Mixer] | None:
    """Returns the class of a layer's mixer; None for a layer without one."""
    if layer.config.block.mixer == "none":
        return None
    return block_class(layer).mixer_class(layer)


class ParallelBlock(Block):
    """y = x + mixer(norm(x)) + mlp(norm'(x)) (GPT-NeoX-20B; GPT-J).

    With parallel_residual_shared_norm both branches read norm(x), which is computed once.
    """

    not_recomputed = ("self_attention", "mlp")

    def build_feed_forward(self, layer: LayerConfig, init: Init, rngs: nnx.Rngs) -> None:
        """Builds the feed-forward; its norm only if it does not share the mixer's."""
        if not layer.config.block.parallel_residual_shared_norm:
            return super().build_feed_forward(layer, init, rngs)
        self.pre_mlp_layer_norm = None
        self.mlp = self.feed_forward_class(layer).build(layer, init, rngs)
        return None

    def __call__(
        self, inputs: LayerInputs, context: ForwardContext, state: DecodeState = None
    ) -> tuple[jax.Array, Scalars, DecodeState]:
        """Adds both branches of the same input to it; as Block.__call__."""
        normed = self.mixer_input(inputs)
        out, scalars, state = self.mix(normed, context, state)
        h_BTD = inputs.r + self.finish_branch(out, context, MIXER_STREAM)
        if self.pre_mlp_layer_norm is None:
            out, mlp_scalars = self.run_mlp(normed[0], context)
        else:
            out, mlp_scalars = self.feed_forward(inputs.r, context)
        y_BTD = h_BTD + self.finish_branch(out, context, FEED_FORWARD_STREAM)
        y_BTD = with_logical_constraint(y_BTD, *HIDDEN)
        return y_BTD, add_scalars(scalars, mlp_scalars), state


class BlockWithoutMixer(Block):
    """y = x + mlp(norm(x)).

    With gpt_neo_none_attention_bug x is doubled first, as in GPT-Neo's layers of attention type
    "none": its code adds the layer's input to the residual stream in place of a mixer's output. In
    the parallel arrangement the feed-forward still reads norm(x).
    """

    def build_mixer(self, layer: LayerConfig, init: Init, rngs: nnx.Rngs) -> None:
        """Builds nothing, and stores what stands in for the mixer."""
        self.doubles = layer.config.attention.gpt_neo_none_attention_bug
        self.is_parallel = layer.config.block.block_arrangement == "parallel"

    def __call__(
        self, inputs: LayerInputs, context: ForwardContext, state: DecodeState = None
    ) -> tuple[jax.Array, Scalars, DecodeState]:
        """Applies the feed-forward alone; the decode state is passed on as it is."""
        h_BTD = inputs.r + inputs.r if self.doubles else inputs.r
        out, scalars = self.feed_forward(inputs.r if self.is_parallel else h_BTD, context)
        y_BTD = h_BTD + self.finish_branch(out, context, FEED_FORWARD_STREAM)
        y_BTD = with_logical_constraint(y_BTD, *HIDDEN)
        return y_BTD, scalars, state


class BlockWithoutFeedForward(Block):
    """y = x + mixer(norm(x)), as in Mamba-2 and the layers of Nemotron-H."""

    not_recomputed = ("self_attention",)

    def build_feed_forward(self, layer: LayerConfig, init: Init, rngs: nnx.Rngs) -> None:
        """Builds nothing."""

    def __call__(
        self, inputs: LayerInputs, context: ForwardContext, state: DecodeState = None
    ) -> tuple[jax.Array, Scalars, DecodeState]:
        """Adds the mixer's output to the residual stream; as Block.__call__."""
        out, scalars, state = self.mix(self.mixer_input(inputs), context, state)
        y_BTD = inputs.r + self.finish_branch(out, context, MIXER_STREAM)
        return with_logical_constraint(y_BTD, *HIDDEN), scalars, state


class WithParallelMixer(Block):
    """A second mixer that reads the same norm; both outputs are added (Falcon-H1)."""

    @classmethod
    def mixer_class(cls, layer: LayerConfig) -> Any:
        """Returns the layer's mixer, derived from BesideMixer as well."""
        return combine(BesideMixer, super().mixer_class(layer))


class WithStaticSGU(Block):
    """Static SGU on half of the channels, the mixer on the other half."""

    @classmethod
    def mixer_class(cls, layer: LayerConfig) -> type[Mixer]:
        """Returns the layer's mixer, derived from BesideStaticSGU as well."""
        return combine(BesideStaticSGU, super().mixer_class(layer))


class WithSeparateNorms(Block):
    """Separate inputs and norms of q, k and v, from dense connections (Xiao et al. 2025).

    An input that the aggregation over depth has normalized already (PreNormalized) skips its norm.
    """

    def build_mixer(self, layer: LayerConfig, init: Init, rngs: nnx.Rngs) -> None:
        """Builds the mixer and three norms, pre_self_attention_layer_norm_q, _k and _v."""
        for stream in "qkv":
            setattr(self, self._name(stream), self.norm(layer, init, rngs))
        self.self_attention = self.mixer_class(layer).build(layer, init, rngs)

    def mixer_input(self, inputs: LayerInputs) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns q, k and v, each normalized by its own norm."""
        q_BTD, k_BTD, v_BTD = (
            x.x_BTD if isinstance(x, PreNormalized) else getattr(self, self._name(stream))(x)
            for stream, x in zip("qkv", inputs[:3], strict=True)
        )
        return q_BTD, k_BTD, v_BTD

    @property
    def stream_norms(self) -> dict[str, nnx.Module]:
        """The three norms by stream, without those that ReZero replaces by the identity."""
        norms = {stream: getattr(self, self._name(stream)) for stream in "qkv"}
        return {stream: norm for stream, norm in norms.items() if not isinstance(norm, Identity)}

    @staticmethod
    def _name(stream: str) -> str:
        """Returns the attribute of a stream's norm."""
        return f"pre_self_attention_layer_norm_{stream}"


class SandwichNorms(Block):
    """Norms of the branches' outputs, too: x + norm2(f(norm1(x))) (Ding et al. 2021; Gemma 2)."""

    not_recomputed = ()  # these norms read all outputs

    def build_mixer(self, layer: LayerConfig, init: Init, rngs: nnx.Rngs) -> None:
        """Builds the mixer with its norms, post_self_attention_layer_norm the second one."""
        super().build_mixer(layer, init, rngs)
        if layer.config.block.mixer != "none":
            self.post_self_attention_layer_norm = Block.norm(self, layer, init, rngs)

    def build_feed_forward(self, layer: LayerConfig, init: Init, rngs: nnx.Rngs) -> None:
        """Builds the feed-forward with its norms, post_mlp_layer_norm the second one."""
        super().build_feed_forward(layer, init, rngs)
        if layer.config.feed_forward.feed_forward_type != "none":
            self.post_mlp_layer_norm = Block.norm(self, layer, init, rngs)

    def finish_branch(self, x_BTD: jax.Array, context: ForwardContext, stream: int) -> jax.Array:
        """Returns what a branch adds to the residual stream, from its normalized output."""
        if stream == MIXER_STREAM:
            norm = self.post_self_attention_layer_norm
        else:
            norm = self.post_mlp_layer_norm
        return super().finish_branch(norm(x_BTD), context, stream)


class WithoutPreNorms(Block):
    """No norms of the branches' inputs: with SandwichNorms, x + norm(f(x)) (OLMo 2)."""

    def norm(self, layer: LayerConfig, init: Init, rngs: nnx.Rngs) -> Norm:
        """Returns the identity: branches read the residual stream itself."""
        return Identity()


class Macaron(Block):
    """Half a feed-forward before and after the mixer (Lu et al. 2019).

        x' = x + mlp_1(norm(x)) / 2;  then the block, with its feed-forward halved, too

    The first feed-forward is a plain MLP. Its norm is absent without macaron_prenorm.
    """

    def __init__(self, layer: LayerConfig, init: Init, rngs: nnx.Rngs):
        super().__init__(layer, init, rngs)
        config = layer.config
        self.macaron_mlp = MLP(config.feed_forward, init, rngs, _MACARON_RANDOM_SLOPES)
        has_norm = config.block.macaron_prenorm
        self.macaron_layer_norm = self.norm(layer, init, rngs) if has_norm else Identity()

    def __call__(
        self, inputs: LayerInputs, context: ForwardContext, state: DecodeState = None
    ) -> tuple[jax.Array, Scalars, DecodeState]:
        """Applies the first half feed-forward, then the block to the sum."""
        with scope("macaron_mlp"):
            half, scalars = self.macaron_mlp(self.macaron_layer_norm(inputs.r), context)
            record(half, "feed_forward_output")
        x_BTD = inputs.r + self.finish_branch(0.5 * half, context, _MACARON_STREAM)
        y_BTD, block_scalars, state = super().__call__(LayerInputs.all(x_BTD), context, state)
        return y_BTD, add_scalars(scalars, block_scalars), state

    def feed_forward(self, x_BTD: jax.Array, context: ForwardContext) -> tuple[jax.Array, Scalars]:
        """Applies norm and feed-forward, and halves the output."""
        out, scalars = super().feed_forward(x_BTD, context)
        return 0.5 * out, scalars


class ReZero(Block):
    """Learned gates instead of norms (Bachlechner et al. 2020): x + g f(x), g initially 0.

    So every layer starts as the identity. Each branch has a scalar gate of its own.
    """

    not_recomputed = ()  # gates read all outputs

    def __init__(self, layer: LayerConfig, init: Init, rngs: nnx.Rngs):
        super().__init__(layer, init, rngs)
        block = layer.config.block
        if block.mixer != "none":
            self.attention_gate = LearnedScalar(0.0, init, rngs)
        if layer.config.feed_forward.feed_forward_type != "none":
            self.mlp_gate = LearnedScalar(0.0, init, rngs)
        if block.use_macaron and block.macaron_prenorm:
            self.macaron_gate = LearnedScalar(0.0, init, rngs)

    def norm(self, layer: LayerConfig, init: Init, rngs: nnx.Rngs) -> Norm:
        """Returns the identity: there are no norms."""
        return Identity()

    def finish_branch(self, x_BTD: jax.Array, context: ForwardContext, stream: int) -> jax.Array:
        names = {
            MIXER_STREAM: "attention_gate",
            FEED_FORWARD_STREAM: "mlp_gate",
            _MACARON_STREAM: "macaron_gate",
        }
        gate = getattr(self, names[stream], None)
        return super().finish_branch(x_BTD if gate is None else gate(x_BTD), context, stream)


class WithPerLayerInput(Block):
    """A third branch, y + norm(W_p(act(W_g y) * e)), with the layer's input e (Gemma 4)."""

    not_recomputed = ()  # the norm and the product read all outputs
    rows: ClassVar = dict.fromkeys(
        ("per_layer_input_gate", "per_layer_projection"), PerLayerInputs.rows
    )

    def __init__(self, layer: LayerConfig, init: Init, rngs: nnx.Rngs):
        super().__init__(layer, init, rngs)
        D = init.dimensions.emb_dim
        P = layer.config.embedding.hidden_size_per_layer_input
        draw = init.initializers
        self.gate_activation = layer.config.feed_forward.mlp_activations[0]
        self.per_layer_input_gate = Dense((D,), (P,), ("embed", None), draw.kernel, init, rngs)
        self.per_layer_projection = Dense((P,), (D,), (None, "embed"), draw.output, init, rngs)
        self.post_per_layer_input_norm = Block.norm(self, layer, init, rngs)

    def __call__(
        self, inputs: LayerInputs, context: ForwardContext, state: DecodeState = None
    ) -> tuple[jax.Array, Scalars, DecodeState]:
        """Adds the branch of the per-layer input to the layer's output; as Block.__call__."""
        y_BTD, scalars, state = super().__call__(inputs, context, state)
        with scope("per_layer_input"):
            per_layer_input_BTP = layer_input(context)
            gate_BTP = ACTIVATIONS[self.gate_activation](self.per_layer_input_gate(y_BTD))
            out_BTD = self.per_layer_projection(gate_BTP * per_layer_input_BTP)
        y_BTD = y_BTD + self.post_per_layer_input_norm(out_BTD)
        return with_logical_constraint(y_BTD, *HIDDEN), scalars, state


class WithLayerScalar(Block):
    """A learned scalar factor of the layer's output, initially 1 (Gemma 4's layer_scalar)."""

    not_recomputed = ()  # the scalar's gradient reads all outputs

    def __init__(self, layer: LayerConfig, init: Init, rngs: nnx.Rngs):
        super().__init__(layer, init, rngs)
        self.layer_scalar = LearnedScalar(1.0, init, rngs)

    def __call__(
        self, inputs: LayerInputs, context: ForwardContext, state: DecodeState = None
    ) -> tuple[jax.Array, Scalars, DecodeState]:
        """Returns the layer's output times the scalar; as Block.__call__."""
        y_BTD, scalars, state = super().__call__(inputs, context, state)
        return with_logical_constraint(self.layer_scalar(y_BTD), *HIDDEN), scalars, state


class Identity(nnx.Module):
    """The identity, in place of a norm."""

    def __call__(self, x: jax.Array) -> jax.Array:
        return x


class LearnedScalar(nnx.Module):
    """A learned scalar factor, of a branch or of a layer."""

    rows = "gates"

    def __init__(self, initial: float, init: Init, rngs: nnx.Rngs):
        self.scale = param(rngs, (), (), constant(initial), dtype=init.weight_dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x * self.scale[...].astype(x.dtype)
