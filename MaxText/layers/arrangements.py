"""Block variants: parallel, without a mixer, static SGU, Macaron, ReZero."""

import functools
from typing import Any

import jax
from flax import nnx

from MaxText.config.model_sections import Layer
from MaxText.layers.block import ATTENTION, MLP, Block, summed
from MaxText.layers.context import Context
from MaxText.layers.feed_forward import MLP as PlainMLP
from MaxText.layers.part import Inputs, Mixer, Normalized, Scalars
from MaxText.layers.static_sgu import beside_static_sgu
from MaxText.layers.weights import Init, weight, zeros
from MaxText.parallelism.constraints import HIDDEN, constrain

_MACARON, _MACARON_SLOPES = 5, 11  # RNG stream ids; block.py has the others


def block_of(layer: Layer) -> type[Block]:
    own = layer.section.block
    block: type[Block] = ParallelBlock if own.block_arrangement == "parallel" else Block
    if own.mixer == "none":
        block = BlockWithoutMixer
    elif layer.section.attention.static_sgu:
        block = with_static_sgu(block)
    if layer.section.dense_connections.mixes_attention_inputs and own.mixer != "none":
        block = with_separate_norms(block)
    if own.use_macaron:
        block = macaron(block)
    return rezero(block) if own.use_rezero else block


def mixer_of(layer: Layer) -> type[Mixer] | None:
    if layer.section.block.mixer == "none":
        return None
    return block_of(layer).mixer_class(layer)


class ParallelBlock(Block):
    """y = x + mixer(norm(x)) + mlp(norm'(x)) (GPT-NeoX-20B, 2.1.2); GPT-J shares one norm."""

    not_recomputed = ("self_attention", "mlp")

    def build_feed_forward(self, layer: Layer, init: Init, rngs: nnx.Rngs) -> None:
        if not layer.section.block.parallel_residual_shared_norm:
            return super().build_feed_forward(layer, init, rngs)
        self.pre_mlp_layer_norm = None
        self.mlp = self.feed_forward_class(layer).build(layer, init, rngs)
        return None

    def __call__(
        self, inputs: Inputs, context: Context, state: Any = None
    ) -> tuple[jax.Array, Scalars, Any]:
        normed = self.mixer_input(inputs)
        out, scalars, state = self.mix(normed, context, state)
        h_BTD = inputs.r + self.branch(out, context, ATTENTION)
        if self.pre_mlp_layer_norm is None:
            out, more = self.run_mlp(normed[0], context)
        else:
            out, more = self.feed_forward(inputs.r, context)
        y_BTD = constrain(h_BTD + self.branch(out, context, MLP), *HIDDEN)
        return y_BTD, summed(scalars, more), state


class BlockWithoutMixer(Block):
    """y = x + mlp(norm(x))."""

    def build_mixer(self, layer: Layer, init: Init, rngs: nnx.Rngs) -> None:
        self.doubles = layer.section.attention.none_doubles_residual
        self.is_parallel = layer.section.block.block_arrangement == "parallel"

    def __call__(
        self, inputs: Inputs, context: Context, state: Any = None
    ) -> tuple[jax.Array, Scalars, Any]:
        h_BTD = inputs.r + inputs.r if self.doubles else inputs.r
        out, scalars = self.feed_forward(inputs.r if self.is_parallel else h_BTD, context)
        y_BTD = constrain(h_BTD + self.branch(out, context, MLP), *HIDDEN)
        return y_BTD, scalars, state


@functools.cache
def with_static_sgu(block: type[Block]) -> type[Block]:
    """Returns a block with static SGU on half of the channels, its mixer on the other half."""

    class WithStaticSGU(block):  # type: ignore[misc, valid-type]
        @classmethod
        def mixer_class(cls, layer: Layer) -> Any:
            return beside_static_sgu(super().mixer_class(layer))

    return WithStaticSGU


@functools.cache
def with_separate_norms(block: type[Block]) -> type[Block]:
    """Returns a block with separate inputs and norms for q, k and v."""

    class WithSeparateNorms(block):  # type: ignore[misc, valid-type]
        def build_mixer(self, layer: Layer, init: Init, rngs: nnx.Rngs) -> None:
            for way in "qkv":
                setattr(self, self._name(way), self.norm(layer, init, rngs))
            self.self_attention = self.mixer_class(layer).build(layer, init, rngs)

        def mixer_input(self, inputs: Inputs) -> tuple[jax.Array, jax.Array, jax.Array]:
            q_BTD, k_BTD, v_BTD = (
                x.x_BTD if isinstance(x, Normalized) else getattr(self, self._name(way))(x)
                for way, x in zip("qkv", inputs[:3], strict=True)
            )
            return q_BTD, k_BTD, v_BTD

        @property
        def norms_of_ways(self) -> dict[str, nnx.Module]:
            norms = {way: getattr(self, self._name(way)) for way in "qkv"}
            return {way: norm for way, norm in norms.items() if not isinstance(norm, Identity)}

        @staticmethod
        def _name(way: str) -> str:
            return f"pre_self_attention_layer_norm_{way}"

    return WithSeparateNorms


@functools.cache
def macaron(block: type[Block]) -> type[Block]:
    """Returns a block with half a feed-forward before and after its mixer (Lu et al. 2019)."""

    class Macaron(block):  # type: ignore[misc, valid-type]
        def __init__(self, layer: Layer, init: Init, rngs: nnx.Rngs):
            super().__init__(layer, init, rngs)
            section = layer.section
            self.macaron_mlp = PlainMLP(section.feed_forward, init, rngs, _MACARON_SLOPES)
            has_norm = section.block.macaron_prenorm
            self.macaron_layer_norm = self.norm(layer, init, rngs) if has_norm else Identity()

        def __call__(
            self, inputs: Inputs, context: Context, state: Any = None
        ) -> tuple[jax.Array, Scalars, Any]:
            half, scalars = self.macaron_mlp(self.macaron_layer_norm(inputs.r), context)
            x_BTD = inputs.r + self.branch(0.5 * half, context, _MACARON)
            y_BTD, more, state = super().__call__(Inputs.all(x_BTD), context, state)
            return y_BTD, summed(scalars, more), state

        def feed_forward(self, x_BTD: jax.Array, context: Context) -> tuple[jax.Array, Scalars]:
            out, scalars = super().feed_forward(x_BTD, context)
            return 0.5 * out, scalars

    return Macaron


@functools.cache
def rezero(block: type[Block]) -> type[Block]:
    """Returns a block with learned gates instead of norms (Bachlechner et al. 2020)."""

    class ReZero(block):  # type: ignore[misc, valid-type]
        not_recomputed = ()  # gates read all outputs

        def __init__(self, layer: Layer, init: Init, rngs: nnx.Rngs):
            super().__init__(layer, init, rngs)
            own = layer.section.block
            if own.mixer != "none":
                self.attention_gate = Gate(init, rngs)
            self.mlp_gate = Gate(init, rngs)
            if own.use_macaron and own.macaron_prenorm:
                self.macaron_gate = Gate(init, rngs)

        def norm(self, layer: Layer, init: Init, rngs: nnx.Rngs) -> Any:
            return Identity()

        def branch(self, x_BTD: jax.Array, context: Context, stream: int) -> jax.Array:
            names = {ATTENTION: "attention_gate", MLP: "mlp_gate", _MACARON: "macaron_gate"}
            gate = getattr(self, names[stream], None)
            return super().branch(x_BTD if gate is None else gate(x_BTD), context, stream)

    return ReZero


class Identity(nnx.Module):
    """The identity, in place of a norm."""

    def __call__(self, x: jax.Array) -> jax.Array:
        return x


class Gate(nnx.Module):
    """A learned scalar that multiplies a branch, initially 0."""

    rows = "gates"

    def __init__(self, init: Init, rngs: nnx.Rngs):
        self.scale = weight(rngs, (), (), zeros, dtype=init.weight_dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x * self.scale[...].astype(x.dtype)
