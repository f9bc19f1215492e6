"""A layer: a mixer and a feed-forward around the residual stream."""

import functools
import types
from typing import Any, ClassVar

import jax
from flax import nnx

from MaxText.config.model_sections import LayerConfig
from MaxText.config.registry import lookup
from MaxText.layers.capture import scope
from MaxText.layers.context import ForwardContext
from MaxText.layers.dropout import drop_path, dropout
from MaxText.layers.mlp import MLP as PlainMLP
from MaxText.layers.normalization import make_norm
from MaxText.layers.params import Init, param, zeros
from MaxText.layers.part import LayerInputs, Mixer, PreNormalized, Scalars
from MaxText.layers.part_outputs import check_output
from MaxText.layers.static_sgu import BesideStaticSGU
from MaxText.parallelism.logical_sharding import BRANCH_INPUT, HIDDEN, with_logical_constraint

# RNG stream ids within a layer. Elsewhere: 0 attention dropout, 9 routing, 10 random slopes of
# activations. Drop path uses the id of dropout plus _PATH.
ATTENTION, MLP, _PATH = 1, 2, 2
_MACARON, _MACARON_RANDOM_SLOPES = 5, 11


def block_class(layer: LayerConfig) -> type["Block"]:
    config = layer.config
    has_mixer = config.block.mixer != "none"
    bases = [ParallelBlock if config.block.block_arrangement == "parallel" else Block]
    if has_mixer and config.attention.static_sgu:
        bases.append(WithStaticSGU)
    if has_mixer and config.dense_connections.mixes_attention_inputs:
        bases.append(WithSeparateNorms)
    if config.block.use_macaron:
        bases.append(Macaron)
    if config.block.use_rezero:
        bases.append(ReZero)
    return combine(*reversed(bases))


@functools.cache
def combine(*bases: type) -> Any:
    """Returns a class of all bases, the same one for the same bases."""
    return bases[0] if len(bases) == 1 else types.new_class(bases[0].__name__, bases)


def mixer_class(layer: LayerConfig) -> type[Mixer]:
    return block_class(layer).mixer_class(layer)


class Block(nnx.Module):
    """Pre-norm block (Radford et al. 2019): h = x + mixer(norm(x)); ..."""

    not_recomputed: ClassVar[tuple[str, ...]] = ("mlp",)  # as in layers/part.py
    is_parallel: ClassVar = False  # whether the feed-forward reads what the mixer reads
    positions = 0  # which positions of the decoder it has
    self_attention: Any  # None without a mixer
    pre_mlp_layer_norm: Any  # None if shared with the mixer

    def __init__(self, layer: LayerConfig, init: Init, rngs: nnx.Rngs):
        config = layer.config
        self.dropout_rate = config.dropout.rate("residual")
        self.path_rate = config.dropout.rate("path")
        self.path_ramps = config.dropout.drop_path_schedule == "linear"
        self.num_layers = layer.dimensions.num_layers
        if config.block.mixer == "none":
            self.self_attention, shares_norm = None, False
            self.doubles = config.attention.gpt_neo_none_attention_bug
        else:
            self.build_norms(layer, init, rngs)
            self.self_attention = self.mixer_class(layer).build(layer, init, rngs)
            shares_norm = self.is_parallel and config.block.parallel_residual_shared_norm
        self.pre_mlp_layer_norm = None if shares_norm else self.norm(layer, init, rngs)
        feed_forward = lookup("feed_forward", config.feed_forward.feed_forward_type)
        self.mlp = feed_forward.build(layer, init, rngs)

    def build_norms(self, layer: LayerConfig, init: Init, rngs: nnx.Rngs) -> None:
        """Builds the norms before the mixer."""
        self.pre_self_attention_layer_norm = self.norm(layer, init, rngs)

    @classmethod
    def mixer_class(cls, layer: LayerConfig) -> type[Mixer]:
        return lookup("mixer", layer.config.block.mixer)

    def norm(self, layer: LayerConfig, init: Init, rngs: nnx.Rngs) -> Any:
        config = layer.config.block
        return make_norm(config, init, rngs, parametric=config.block_norm_parametric)

    def __call__(
        self, inputs: LayerInputs, context: ForwardContext, state: Any = None
    ) -> tuple[jax.Array, Scalars, Any]:
        """Returns y_BTD, scalars to sum over layers, and the mixer's decode state."""
        h_BTD, scalars = inputs.r, {}
        if self.self_attention is not None:
            normed = self.mixer_input(inputs)
            out, scalars, state = self.mix(normed, context, state)
            h_BTD = inputs.r + self.branch(out, context, ATTENTION)
        elif self.doubles:
            h_BTD = inputs.r + inputs.r
        if self.pre_mlp_layer_norm is None:
            out, more = self.run_mlp(normed[0], context)  # pyright: ignore (shares_norm implies a mixer)
        else:
            out, more = self.feed_forward(inputs.r if self.is_parallel else h_BTD, context)
        y_BTD = with_logical_constraint(h_BTD + self.branch(out, context, MLP), *HIDDEN)
        return y_BTD, add_scalars(scalars, more), state

    def mixer_input(self, inputs: LayerInputs) -> tuple[jax.Array, jax.Array, jax.Array]:
        y_BTD = self.pre_self_attention_layer_norm(inputs.q)
        return y_BTD, y_BTD, y_BTD

    def mix(
        self, normed: tuple[jax.Array, jax.Array, jax.Array], context: ForwardContext, state: Any
    ) -> tuple[jax.Array, Scalars, Any]:
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
            return *check_output(mixer, "__call__", mixer(x_BTD, context), normed[0]), None

    def feed_forward(self, x_BTD: jax.Array, context: ForwardContext) -> tuple[jax.Array, Scalars]:
        return self.run_mlp(self.pre_mlp_layer_norm(x_BTD), context)

    def run_mlp(self, x_BTD: jax.Array, context: ForwardContext) -> tuple[jax.Array, Scalars]:
        x_BTD = with_logical_constraint(x_BTD, *BRANCH_INPUT)
        with scope("mlp"):
            return check_output(self.mlp, "__call__", self.mlp(x_BTD, context), x_BTD)

    def branch(self, x_BTD: jax.Array, context: ForwardContext, stream: int) -> jax.Array:
        """Applies dropout and drop path to a branch's output."""
        x_BTD = with_logical_constraint(x_BTD, *HIDDEN)
        x_BTD = dropout(x_BTD, self.dropout_rate, context.key_for(stream))
        key = context.key_for(stream + _PATH)
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


def add_scalars(first: Scalars, second: Scalars) -> Scalars:
    both = {name: first[name] + second[name] for name in first if name in second}
    return first | second | both


class ParallelBlock(Block):
    """y = x + mixer(norm(x)) + mlp(norm'(x)) (GPT-NeoX-20B; GPT-J)."""

    not_recomputed = ("self_attention", "mlp")
    is_parallel = True


class WithStaticSGU(Block):
    """Static SGU on half of the channels, the mixer on the other half."""

    @classmethod
    def mixer_class(cls, layer: LayerConfig) -> Any:
        return combine(BesideStaticSGU, super().mixer_class(layer))


class WithSeparateNorms(Block):
    """Separate inputs and norms of q, k and v."""

    def build_norms(self, layer: LayerConfig, init: Init, rngs: nnx.Rngs) -> None:
        for stream in "qkv":
            setattr(self, f"pre_self_attention_layer_norm_{stream}", self.norm(layer, init, rngs))

    def mixer_input(self, inputs: LayerInputs) -> tuple[jax.Array, jax.Array, jax.Array]:
        q_BTD, k_BTD, v_BTD = (
            x.x_BTD if isinstance(x, PreNormalized) else norm(x)
            for x, norm in zip(inputs[:3], self._norms().values(), strict=True)
        )
        return q_BTD, k_BTD, v_BTD

    @property
    def stream_norms(self) -> dict[str, nnx.Module]:
        return {x: norm for x, norm in self._norms().items() if isinstance(norm, nnx.Module)}

    def _norms(self) -> dict[str, Any]:
        return {x: getattr(self, f"pre_self_attention_layer_norm_{x}") for x in "qkv"}


class Macaron(Block):
    """Half a feed-forward before and after the mixer (Lu et al. 2019)."""

    def __init__(self, layer: LayerConfig, init: Init, rngs: nnx.Rngs):
        super().__init__(layer, init, rngs)
        config = layer.config
        self.macaron_mlp = PlainMLP(config.feed_forward, init, rngs, _MACARON_RANDOM_SLOPES)
        has_norm = config.block.macaron_prenorm
        self.macaron_layer_norm = self.norm(layer, init, rngs) if has_norm else identity

    def __call__(
        self, inputs: LayerInputs, context: ForwardContext, state: Any = None
    ) -> tuple[jax.Array, Scalars, Any]:
        half, scalars = self.macaron_mlp(self.macaron_layer_norm(inputs.r), context)
        x_BTD = inputs.r + self.branch(0.5 * half, context, _MACARON)
        y_BTD, more, state = super().__call__(LayerInputs.all(x_BTD), context, state)
        return y_BTD, add_scalars(scalars, more), state

    def feed_forward(self, x_BTD: jax.Array, context: ForwardContext) -> tuple[jax.Array, Scalars]:
        out, scalars = super().feed_forward(x_BTD, context)
        return 0.5 * out, scalars


class ReZero(Block):
    """Learned gates, initially 0, instead of norms (Bachlechner et al. 2020)."""

    rows: ClassVar = dict.fromkeys(("attention_gate", "mlp_gate", "macaron_gate"), "gates")
    not_recomputed = ()  # gates read all outputs

    def __init__(self, layer: LayerConfig, init: Init, rngs: nnx.Rngs):
        super().__init__(layer, init, rngs)
        block = layer.config.block

        def gate() -> nnx.Dict:
            return nnx.Dict(scale=param(rngs, (), (), zeros, dtype=init.weight_dtype))

        if block.mixer != "none":
            self.attention_gate = gate()
        self.mlp_gate = gate()
        if block.use_macaron and block.macaron_prenorm:
            self.macaron_gate = gate()

    def norm(self, layer: LayerConfig, init: Init, rngs: nnx.Rngs) -> Any:
        return identity

    def branch(self, x_BTD: jax.Array, context: ForwardContext, stream: int) -> jax.Array:
        names = {ATTENTION: "attention_gate", MLP: "mlp_gate", _MACARON: "macaron_gate"}
        if (gate := getattr(self, names[stream], None)) is not None:
            x_BTD = x_BTD * gate["scale"][...].astype(x_BTD.dtype)
        return super().branch(x_BTD, context, stream)


def identity(x: jax.Array) -> jax.Array:
    return x
