"""The protocol of model parts, built-in and user-defined.

A part is a class registered under a kind and a name (config/registry.py)::

    @register("mixer", "my_mixer", keys=MyKeys)
    class MyMixer(Mixer):
        def __init__(self, config, init, rngs): ...    # declares weights: layers/params.py, Dense
        def __call__(self, x_BTD, context): ...        # (y_BTD, scalars)

It declares here all that the rest of the program needs to know; nothing else is edited. Only
`__init__` and the methods of its kind are needed; docs/tutorials/add_an_architecture.md shows both.

Legend: B sequences, T tokens, D emb_dim, V vocab_size.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple, Self

import jax
from flax import nnx

from MaxText.config.layer_sections import Dimensions
from MaxText.config.model_sections import LayerConfig
from MaxText.config.registry import register
from MaxText.layers.capture import record, tag
from MaxText.layers.context import ForwardContext, MixerPositions
from MaxText.layers.dense import Embedding
from MaxText.layers.params import Init
from MaxText.layers.part_scalars import Metric, Scalars, Statistic
from MaxText.value_types import PyTree

__all__ = [
    "Carry",
    "Connection",
    "DecodeState",
    "FeedForward",
    "Flops",
    "ForwardContext",
    "Head",
    "Init",
    "LayerIndex",
    "LayerInputs",
    "Metric",
    "Mixer",
    "MixerInput",
    "MixerPositions",
    "Nothing",
    "Part",
    "Position",
    "Scalars",
    "Statistic",
    "record",
    "register",
    "tag",
]

# Keys of a part: its own section, or else the model's configuration. Any, so that a part can name
# the class of its own.
PartConfig = Any
LayerIndex = jax.Array | int
# Input x_BTD of a mixer, or the inputs of its queries, keys and values.
MixerInput = jax.Array | tuple[jax.Array, jax.Array, jax.Array]
Carry = PyTree  # a tree of arrays that a connection carries from layer to layer
DecodeState = PyTree  # a tree of arrays that a mixer or head keeps while it generates


class Flops(NamedTuple):
    """Forward FLOPs per token in one layer, besides 2 per weight.

    Attributes:
      by_rule: As the MFU counts (Chowdhery et al. 2022, appendix B): products of tokens with tokens
        or with a state, without masked ones.
      hardware_flops: What is executed, masked products included; None is `by_rule`.
      recomputed: What the backward pass executes again under every remat policy.
      backward: Backward FLOPs per forward FLOP.
      kept: What is executed, and never recomputed by the backward pass; nan if unknown.
    """

    by_rule: float
    hardware_flops: float | None = None
    recomputed: float = 0.0
    backward: int = 2
    kept: float = 0.0


class Part(nnx.Module):
    """A part of a model: a mixer, feed-forward, position encoding, connection or head.

    A part declares its weights in `__init__` and computes in the methods of its kind. The class
    methods are facts about it, for rules, plans and conversion; all are optional.

    The scalars that mixers and feed-forwards return beside their output are of three kinds. An
    array is a loss: a sum over tokens, whose mean over tokens is added to the loss. `Metric(total,
    weight)` is reported as total / weight, in training and in evaluation, and not minimized.
    `Statistic.of(weight, x)` is for weights that the optimizer does not train: the `update_rule` of
    their declaration makes an update of it, once a step. Scalars of one name are added up over
    layers.

    `tag(x, name)` names an intermediate value, for `Run.forward(capture=...)` and for remat
    policies, which save values named query_proj, key_proj, value_proj, attention_gate, context and
    out_proj (in a mixer), mlpwi and mlpwo (in a feed-forward). `record(x, name)` names one for
    captures alone.
    Inputs and outputs of parts are recorded without it.

    Attributes:
      logical_axes: Logical axis -> mesh axes, for axes that logical_axis_rules does not name.
      rows: Row of the FLOPs table for all weights, or own attribute -> row; by default the name of
        the weight's module. The outermost module decides.
      not_recomputed: Own attributes whose output no backward pass reads: those that make the part's
        output. With remat_policy=full they run once if it is only added to the residual stream.
      hugging_face_names: For mixers and feed-forwards, own weight -> its name in a layer of a
        Hugging Face checkpoint, such as {"into/kernel": "mixer.in_proj.weight"}. Matrices are
        stored there as [outputs, inputs], like those of torch.nn.Linear.
    """

    logical_axes: ClassVar[dict[str, tuple[str, ...]]] = {}
    hugging_face_names: ClassVar[dict[str, str]] = {}
    rows: ClassVar[str | dict[str, str]] = {}
    not_recomputed: ClassVar[tuple[str, ...]] = ()

    def __init__(self, config: PartConfig, init: Init, rngs: nnx.Rngs):
        """Declares weights.

        Args:
          config: The part's own keys, or the model's (`config_of`).
          init: Sizes, initializers and dtypes.
          rngs: RNG streams that weights are drawn from.
        """

    @classmethod
    def build(cls, layer: LayerConfig, init: Init, rngs: nnx.Rngs) -> Self:
        """Builds the part of a layer, or of the model from its keys and sizes.

        Args:
          layer: Keys and sizes of the layer.
          init: Sizes, initializers and dtypes.
          rngs: RNG streams that weights are drawn from.
        """
        return cls(cls.config_of(layer), init, rngs)

    @classmethod
    def config_of(cls, layer: LayerConfig) -> PartConfig:
        """Returns the part's own keys in a layer, or else the model's.

        The keys of a part come without the model's. A part that needs both, such as a subclass of
        Attention, returns `layer.config` here and finds its own in `config.parts.of(cls)`.
        """
        config = layer.config.parts.of(cls)
        return layer.config if config is None else config

    @classmethod
    def problem(cls, config: PartConfig, dimensions: Dimensions) -> str | None:
        """Returns why keys or sizes are invalid, or None.

        Args:
          config: The part's own keys, or the model's.
          dimensions: Sizes of the layer.

        Returns:
          The reason, and on a second line a remedy: what to set instead.
        """
        return None

    @classmethod
    def flops(cls, config: PartConfig, dimensions: Dimensions, length: int) -> dict[str, Flops]:
        """Returns FLOPs besides those of the weights, by row of the FLOPs table.

        Args:
          config: The part's own keys, or the model's.
          dimensions: Sizes of the layer.
          length: Tokens of a sequence.
        """
        return {}

    @classmethod
    def sharded_sizes(cls, layer: LayerConfig) -> dict[str, tuple[str, int]]:
        """Returns sizes of its own that a mesh has to divide: key -> (logical axis, size)."""
        return {}

    @classmethod
    def slots_problem(cls, layer: LayerConfig) -> str | None:
        """Returns why growth by slots with keys of 0 changes its output, or None."""
        return None

    @classmethod
    def state_bytes(
        cls, config: PartConfig, dimensions: Dimensions, length: int, itemsize: int
    ) -> tuple[int, int]:
        """Returns bytes of decode state per sequence: (per token, fixed).

        Args:
          config: The part's own keys, or the model's.
          dimensions: Sizes of the layer.
          length: Most tokens of a sequence, for states that stop growing.
          itemsize: Bytes of an element of activations.
        """
        return 0, 0


class Mixer(Part):
    """A token mixer.

    Attributes:
      has_separate_inputs: Whether x is a tuple of the inputs of queries, keys and values, which
        dense connections tell apart.
      has_softmax: Whether it is softmax attention, computed as the key `attention` says. Choices of
        `attention` and estimates of time and memory count on it. Attention has True, so a subclass
        without softmax sets False.
    """

    has_separate_inputs = False
    has_softmax: ClassVar[bool] = False

    def __call__(self, x_BTD: MixerInput, context: ForwardContext) -> tuple[jax.Array, Scalars]:
        """Returns the output [B, T, D], and scalars by name: losses, metrics, statistics.

        Tokens may depend only on earlier tokens of the same segment.

        Args:
          x_BTD: Normalized input; a tuple of three if `has_separate_inputs`.
          context: Facts about the batch, such as `segments_BT`.
        """
        raise NotImplementedError

    def prefill(self, x_BTD: MixerInput, context: ForwardContext) -> tuple[jax.Array, DecodeState]:
        """Returns the output of right-padded prompts and the states after them.

        State that grows with tokens has room for `context.capacity` and can be enlarged: a
        KeyValueCache, or another registered dataclass with `capacity` and `resize`.

        Args:
          x_BTD: Normalized input; a tuple of three if `has_separate_inputs`.
          context: Facts about the batch, such as `lengths_B`.
        """
        raise NotImplementedError(f"{type(self).__name__} has no decode state")

    def decode_step(
        self, x_BTD: MixerInput, state: DecodeState, context: ForwardContext
    ) -> tuple[jax.Array, DecodeState]:
        """Returns the output of new tokens, and the new state.

        Args:
          x_BTD: Normalized input; a tuple of three if `has_separate_inputs`.
          state: State after the tokens before.
          context: Facts about the batch, such as `positions_BT` of the new tokens.
        """
        raise NotImplementedError(f"{type(self).__name__} has no decode state")

    @classmethod
    def decodes(cls) -> bool:
        """Returns whether it can generate text."""
        return cls.prefill is not Mixer.prefill

    @classmethod
    def rotary_width(cls, layer: LayerConfig) -> int:
        """Returns the width of what `context.rotary` rotates: a head, or a slice of it."""
        return layer.dimensions.head_dim


@register("mixer", "none")
class Nothing(Mixer):
    """No mixer: the layer is only a feed-forward."""

    @classmethod
    def decodes(cls) -> bool:
        """Returns True: it has no state to keep."""
        return True


class FeedForward(Part):
    """A part applied to each token independently."""

    rows = "feed-forward"

    def __call__(self, x_BTD: jax.Array, context: ForwardContext) -> tuple[jax.Array, Scalars]:
        """Returns the output [B, T, D], and scalars by name: losses, metrics, statistics.

        Args:
          x_BTD: Normalized input.
          context: Facts about the batch.
        """
        raise NotImplementedError


@register("feed_forward", "none")
class NoFeedForward(FeedForward):
    """No feed-forward: the layer is only a mixer."""


@register("position", "none")
class Position(Part):
    """A position encoding; the base class encodes nothing."""

    rows = "position embedding"

    def embed(self, positions_BT: jax.Array) -> jax.Array | None:
        """Returns what is added to the embedding, [B or 1, T, D], or None.

        Args:
          positions_BT: Positions of the tokens within their documents; B may be 1.
        """
        return None

    def for_mixers(self, positions_BT: jax.Array) -> MixerPositions:
        """Returns fields of ForwardContext for mixers: `rotary`, `slopes_N` or `query_scale`.

        Args:
          positions_BT: Positions of the tokens within their documents; B may be 1.
        """
        return {}


class PreNormalized(NamedTuple):
    """An input, normalized by the layer's own norm."""

    x_BTD: jax.Array


class LayerInputs(NamedTuple):
    """Inputs x_BTD of queries, keys, values and residual stream of a layer."""

    q: jax.Array | PreNormalized
    k: jax.Array | PreNormalized
    v: jax.Array | PreNormalized
    r: jax.Array

    @classmethod
    def all(cls, x_BTD: jax.Array) -> "LayerInputs":
        """Returns the same input for all four."""
        return cls(x_BTD, x_BTD, x_BTD, x_BTD)


class Connection(Part):
    """The state carried from layer to layer, the source of their inputs.

    It is a tree of arrays [B, T, ...], carried through scan, pipeline stages and decoding steps.
    """

    keeps_shapes: ClassVar[bool] = True  # if False, layers are unrolled, on one stage

    def begin(self, x_BTD: jax.Array) -> Carry:
        """Returns the state for the first layer, from the embedding."""
        return x_BTD

    def read(
        self, index: LayerIndex, carry: Carry, norms: Mapping[str, nnx.Module]
    ) -> tuple[LayerInputs, Carry]:
        """Returns the inputs of a layer, and the state to carry on.

        Args:
          index: Index of the layer, from 0; an array inside a scan.
          carry: The state from the layers before.
          norms: The layer's norms of single inputs, for results of type PreNormalized.
        """
        raise NotImplementedError

    def shared(self, carry: Carry) -> dict[str, jax.Array]:
        """Returns the arrays [B, T, ...] that mixers find, and may replace, in `context.shared`."""
        return {}

    def write(
        self, index: LayerIndex, carry: Carry, y_BTD: jax.Array, shared: dict[str, jax.Array]
    ) -> Carry:
        """Returns the state for the next layer.

        Args:
          index: Index of the layer, from 0; an array inside a scan.
          carry: The state that `read` returned.
          y_BTD: Output of the layer, its residual stream included.
          shared: Arrays of `context.shared` after the layer.
        """
        raise NotImplementedError

    def end(self, carry: Carry) -> jax.Array:
        """Returns the hidden state for the final norm."""
        raise NotImplementedError


@register("connection", "residual")
class ResidualStream(Connection):
    """Residual stream: a layer reads the previous output (He et al. 2016)."""

    def read(
        self, index: LayerIndex, carry: Carry, norms: Mapping[str, nnx.Module]
    ) -> tuple[LayerInputs, Carry]:
        """Returns the stream as each input."""
        return LayerInputs.all(carry), carry

    def write(
        self, index: LayerIndex, carry: Carry, y_BTD: jax.Array, shared: dict[str, jax.Array]
    ) -> Carry:
        """Returns the output, which is the new stream."""
        return y_BTD

    def end(self, carry: Carry) -> jax.Array:
        """Returns the stream."""
        return carry


class Head(Part):
    """Logits from normalized hidden states of the last layer.

    With num_vocab_tiling the backward pass recomputes `__call__`, but not `state`: its weights
    belong in `not_recomputed`.
    """

    rows = "head"

    def __call__(
        self, h_BTD: jax.Array, table: Embedding, state: DecodeState, positions_BT: jax.Array
    ) -> jax.Array:
        """Returns float32 logits [B, T, V]; T may be any part of the sequence.

        Args:
          h_BTD: Normalized hidden states.
          table: Token embeddings, for a tied head.
          state: From `state`, of the whole sequence.
          positions_BT: Positions of the hidden states in the sequence; B may be 1.
        """
        raise NotImplementedError

    def state(
        self,
        h_BTD: jax.Array,
        tokens_BT: jax.Array,
        context: ForwardContext,
        earlier: DecodeState = None,
    ) -> DecodeState:
        """Returns a tree of arrays for logits besides hidden states, or None.

        Args:
          h_BTD: Hidden states: of whole sequences (`context.segments_BT`), of prompts
            (`context.lengths_B`), or of the next tokens (`context.positions_BT`).
          tokens_BT: Their tokens.
          context: Facts about the batch.
          earlier: The state before the next tokens.

        State that grows with tokens is as in Mixer.prefill.
        """
        return None

    @classmethod
    def reads_table(cls, config: PartConfig) -> bool:
        """Returns whether its product with the token table counts as its own."""
        return False
