"""A layer: how a mixer and a feed-forward are arranged around the residual stream.

Legend: B sequences, T tokens, D emb_dim.
"""

import dataclasses
from typing import Any

import jax
from flax import nnx

from MaxText.configuration.model_sections import Layer
from MaxText.configuration.registry import lookup
from MaxText.layers.building import Building
from MaxText.layers.connections import Inputs, Normalized
from MaxText.layers.context import Context
from MaxText.layers.dropout import drop_path, dropout
from MaxText.layers.feed_forward import MLP
from MaxText.layers.normalization import normalization
from MaxText.layers.part import Mixer, Scalars, checked
from MaxText.layers.static_sgu import beside_static_sgu
from MaxText.layers.weights import weight, zeros
from MaxText.parallelism.constraints import constrain

# Places of randomness within a layer; attention's probabilities have 0, routing has 9, random
# slopes of activations 10.
_ATTENTION, _MLP, _MACARON = 1, 2, 5
_PATH = 2  # added for drop path
_MACARON_SLOPES = 11


def mixer_of(layer: Layer) -> type[Mixer] | None:
    """The class of a layer's mixer; None for a layer without one."""
    name = layer.section.block.mixer
    if name == "none":
        return None
    found = lookup("mixer", name)
    return beside_static_sgu(found) if layer.section.attention.static_sgu else found


class Gate(nnx.Module):
    """A learned number that a part is multiplied with, 0 at first (Bachlechner et al. 2020)."""

    def __init__(self, building: Building, rngs: nnx.Rngs):
        self.scale = weight(rngs, (), (), zeros, dtype=building.weight_dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x * self.scale[...].astype(x.dtype)


class Block(nnx.Module):
    """Pre-norm block.

    sequential (Radford et al. 2019): h = x + attn(norm(x)); y = h + mlp(norm(h)).
    parallel (GPT-NeoX-20B, section 2.1.2, with two norms): y = x + attn(norm(x)) + mlp(norm'(x)).
    macaron (Lu et al. 2019): sequential, with half a feed-forward before and half a one after.
    rezero (Bachlechner et al. 2020): each part has a gate in place of its norm.

    A layer without a mixer has its feed-forward alone. With dense connections x is the input
    of the residual stream, and queries, keys and values have inputs and norms of their own.
    """

    def __init__(self, layer: Layer, building: Building, rngs: nnx.Rngs):
        section, dimensions = layer
        building = dataclasses.replace(building, dimensions=dimensions)
        own, dense = section.block, section.dense_connections
        mixer = mixer_of(layer)
        self.arrangement = own.block_arrangement
        self.dropout_rate = section.dropout.rate("residual")
        self.path_rate = section.dropout.rate("path")
        self.path_ramps = section.dropout.drop_path_schedule == "linear"
        self.num_layers = dimensions.num_layers
        self.precision = building.precision
        self.doubles = mixer is None and section.attention.none_doubles_residual

        def norm() -> nnx.Module | None:
            if own.use_rezero:
                return None
            return normalization(own, building, rngs, parametric=own.block_norm_parametric)

        def gate() -> Gate | None:
            return Gate(building, rngs) if own.use_rezero else None

        macaron, normed_first = own.use_macaron, own.use_macaron and own.macaron_prenorm
        self.macaron_mlp = (
            MLP(section.feed_forward, building, rngs, _MACARON_SLOPES) if macaron else None
        )
        self.macaron_layer_norm = norm() if normed_first else None
        self.macaron_gate = gate() if normed_first else None

        self.norm_names = ("_q", "_k", "_v") if dense.mixes_attention_inputs else ("",)
        if mixer is None:
            self.self_attention = self.attention_gate = None
        else:
            for name in self.norm_names:
                setattr(self, f"pre_self_attention_layer_norm{name}", norm())
            self.self_attention = mixer.build(layer, building, rngs)
            self.attention_gate = gate()
        parallel = own.block_arrangement == "parallel"
        self.shares_norm = parallel and own.parallel_residual_shared_norm and mixer is not None
        self.pre_mlp_layer_norm = None if self.shares_norm else norm()
        self.mlp = lookup("feed_forward", section.feed_forward.feed_forward_type).build(
            layer, building, rngs
        )
        self.mlp_gate = gate()

    def __call__(
        self, inputs: Inputs, context: Context, state: Any = None
    ) -> tuple[jax.Array, Scalars, Any]:
        """Returns y_BTD, scalars to be summed over layers, and the mixer's state."""
        share = 1.0
        scalars: Scalars = {}
        if self.macaron_mlp is not None:
            share = 0.5
            half, scalars = self.macaron_mlp(_normed(self.macaron_layer_norm, inputs.r), context)
            half = self._added(share * half, self.macaron_gate, context, _MACARON)
            inputs = Inputs.all(inputs.r + half)
        x_BTD = h_BTD = inputs.r
        normed = None
        if self.self_attention is not None:
            normed = self._normalized(inputs)
            out, attention_scalars, state = self._mixed(normed, context, state)
            h_BTD = x_BTD + self._added(out, self.attention_gate, context, _ATTENTION)
            scalars = _sum(scalars, attention_scalars)
        elif self.doubles:
            h_BTD = x_BTD + x_BTD
        if self.shares_norm:
            assert normed is not None
            mlp_input = normed[0]
        else:
            mlp_input = _normed(
                self.pre_mlp_layer_norm, h_BTD if self.arrangement == "sequential" else x_BTD
            )
        found = self.mlp(mlp_input, context)
        out, mlp_scalars = checked(self.mlp, "__call__", found, mlp_input)
        if share != 1.0:
            out = share * out
        y_BTD = constrain(
            h_BTD + self._added(out, self.mlp_gate, context, _MLP),
            "activation_batch",
            "activation_length",
            "activation_embed",
        )
        return y_BTD, _sum(scalars, mlp_scalars), state

    def _mixed(
        self, normed: tuple[jax.Array, jax.Array, jax.Array], context: Context, state: Any
    ) -> tuple[jax.Array, Scalars, Any]:
        """The mixer's output, its scalars and its decode state."""
        mixer = self.self_attention
        assert mixer is not None
        x_BTD = normed if mixer.has_separate_inputs else normed[0]
        if state is not None:
            found = mixer.decode_step(x_BTD, state, context)
            out, state = checked(mixer, "decode_step", found, normed[0])
            return out, {}, state
        if context.capacity is not None:
            found = mixer.prefill(x_BTD, context)
            out, state = checked(mixer, "prefill", found, normed[0])
            return out, {}, state
        return *checked(mixer, "__call__", mixer(x_BTD, context), normed[0]), None

    @property
    def norms_of_ways(self) -> dict[str, nnx.Module]:
        """Way -> the norm that only its input goes through; none where all go through one."""
        if self.self_attention is None or len(self.norm_names) == 1:
            return {}
        norms = {way: self._norm(f"_{way}") for way in "qkv"}
        return {way: norm for way, norm in norms.items() if norm is not None}

    def _norm(self, name: str) -> Any:
        return getattr(self, f"pre_self_attention_layer_norm{name}")

    def _normalized(self, inputs: Inputs) -> tuple[jax.Array, jax.Array, jax.Array]:
        if len(self.norm_names) == 1:
            # One norm over three inputs happens only where they are the same.
            y_BTD = _normed(self._norm(""), inputs.q)
            return y_BTD, y_BTD, y_BTD
        q_BTD, k_BTD, v_BTD = (
            x.x_BTD if isinstance(x, Normalized) else _normed(self._norm(f"_{way}"), x)
            for way, x in zip("qkv", inputs[:3], strict=True)
        )
        return q_BTD, k_BTD, v_BTD

    def _added(
        self, x_BTD: jax.Array, gate: Gate | None, context: Context, place: int
    ) -> jax.Array:
        """What a part adds to the stream, after its gate, dropout and drop path."""
        if gate is not None:
            x_BTD = gate(x_BTD)
        x_BTD = dropout(x_BTD, self.dropout_rate, context.key_for(place))
        key = context.key_for(place + _PATH)
        if self.path_rate == 0.0 or key is None:
            return x_BTD
        rate = self.path_rate
        if self.path_ramps:
            assert context.layer is not None
            rate = rate * context.layer / max(self.num_layers - 1, 1)
        return drop_path(x_BTD, rate, key)


def _normed(norm: Any, x_BTD: Any) -> jax.Array:
    return x_BTD if norm is None else norm(x_BTD)


def _sum(first: Scalars, second: Scalars) -> Scalars:
    total = dict(first)
    for name, value in second.items():
        total[name] = total[name] + value if name in total else value
    return total
