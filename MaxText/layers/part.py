"""The protocol of model parts, built-in and user-defined.

A part is a class registered under a kind and a name (config/registry.py)::

    @register("mixer", "my_mixer", keys=MyKeys)
    class MyMixer(Mixer):
        def __init__(self, config, init, rngs): ...    # declares weights: layers/params.py, Dense
        def __call__(self, x_BTD, context): ...        # (y_BTD, scalars)

It declares here all that the rest of the program needs to know; nothing else is edited.

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
from MaxText.layers.context import ForwardContext
from MaxText.layers.params import Init

__all__ = [
    "Connection",
    "FeedForward",
    "Flops",
    "Head",
    "Init",
    "LayerInputs",
    "Mixer",
    "Nothing",
    "Part",
    "Position",
    "Scalars",
    "record",
    "register",
    "tag",
]

Scalars = dict[str, jax.Array]  # added to the loss


class Flops(NamedTuple):
    """Forward FLOPs per token in one layer, besides 2 per weight."""

    by_rule: float  # as the MFU counts: products of tokens with tokens or with a state
    hardware_flops: float | None = None  # masked products included; None is `by_rule`
    recomputed: float = 0.0  # executed again by the backward pass under every remat policy
    backward: int = 2  # backward FLOPs per forward FLOP
    kept: float = 0.0  # executed, and never recomputed by the backward pass; nan if unknown


class Part(nnx.Module):
    """A part of a model.

    `tag(x, name)` names an intermediate value, for `Run.forward(capture=...)` and for remat
    policies, which save values named query_proj, key_proj, value_proj, context and out_proj (in a
    mixer), mlpwi and mlpwo (in a feed-forward). `record(x, name)` names one for captures alone.
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

    def __init__(self, config: Any, init: Init, rngs: nnx.Rngs):
        """Declares weights; `config` comes from `config_of`."""

    @classmethod
    def build(cls, layer: LayerConfig, init: Init, rngs: nnx.Rngs) -> Self:
        """Builds the part of a layer, or of the model from its keys and sizes."""
        return cls(cls.config_of(layer), init, rngs)

    @classmethod
    def config_of(cls, layer: LayerConfig) -> Any:
        """Returns the part's own keys in a layer, or else the model's."""
        config = layer.config.parts.of(cls)
        return layer.config if config is None else config

    @classmethod
    def problem(cls, config: Any, dimensions: Dimensions) -> str | None:
        """Returns why keys or sizes are invalid, and on line 2 a remedy."""
        return None

    @classmethod
    def flops(cls, config: Any, dimensions: Dimensions, length: int) -> dict[str, Flops]:
        """Returns FLOPs table row -> FLOPs, for sequences of `length` tokens."""
        return {}

    @classmethod
    def sharded_sizes(cls, layer: LayerConfig) -> dict[str, tuple[str, int]]:
        """Returns key of a size of its own -> (logical axis, size)."""
        return {}

    @classmethod
    def slots_problem(cls, layer: LayerConfig) -> str | None:
        """Returns why new slots with keys of 0 change its output, or None."""
        return None

    @classmethod
    def state_bytes(
        cls, config: Any, dimensions: Dimensions, length: int, itemsize: int
    ) -> tuple[int, int]:
        """Returns bytes of decode state per sequence: (per token, fixed)."""
        return 0, 0


class Mixer(Part):
    """A token mixer."""

    has_separate_inputs = False  # whether x is a tuple (q, k, v), for dense connections
    has_softmax: ClassVar[bool] = False  # whether it is softmax attention, by the key `attention`

    def __call__(self, x_BTD: Any, context: ForwardContext) -> tuple[jax.Array, Scalars]:
        """Returns the output [B, T, D], and scalars to sum over layers.

        Tokens may depend only on earlier tokens of the same segment (`context.segments_BT`).
        """
        raise NotImplementedError

    def prefill(self, x_BTD: Any, context: ForwardContext) -> tuple[jax.Array, Any]:
        """Returns the output of right-padded prompts and the states after them.

        State that grows with tokens has room for `context.capacity` and can be enlarged: a
        KeyValueCache, or another registered dataclass with `capacity` and `resize`.
        """
        raise NotImplementedError(f"{type(self).__name__} has no decode state")

    def decode_step(self, x_BTD: Any, state: Any, context: ForwardContext) -> tuple[jax.Array, Any]:
        """Returns the output at `context.positions_BT`, and the new state."""
        raise NotImplementedError(f"{type(self).__name__} has no decode state")

    @classmethod
    def decodes(cls) -> bool:
        """Returns whether it can generate text."""
        return cls.prefill is not Mixer.prefill


@register("mixer", "none")
class Nothing(Mixer):
    """No mixer: the layer is only a feed-forward."""

    @classmethod
    def decodes(cls) -> bool:
        return True


class FeedForward(Part):
    """A part applied to each token independently."""

    rows = "feed-forward"

    def __call__(self, x_BTD: jax.Array, context: ForwardContext) -> tuple[jax.Array, Scalars]:
        """Returns the output [B, T, D], and scalars to sum over layers."""
        raise NotImplementedError


@register("position", "none")
class Position(Part):
    """A position encoding; the base class encodes nothing."""

    rows = "position embedding"

    def embed(self, positions_BT: jax.Array) -> jax.Array | None:
        """Returns the addend to the embedding, [B or 1, T, D]."""
        return None

    def for_mixers(self, positions_BT: jax.Array) -> dict[str, Any]:
        """Returns fields of ForwardContext for mixers: `rotary` or `slopes_N`."""
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
        return cls(x_BTD, x_BTD, x_BTD, x_BTD)


class Connection(Part):
    """The state carried from layer to layer, the source of their inputs.

    It is a tree of arrays [B, T, ...], carried through scan, pipeline stages and decoding steps.
    """

    keeps_shapes: ClassVar[bool] = True  # if False, layers are unrolled, on one stage

    def begin(self, x_BTD: jax.Array) -> Any:
        """Returns the state for the first layer, from the embedding."""
        return x_BTD

    def read(
        self, index: Any, carry: Any, norms: Mapping[str, nnx.Module]
    ) -> tuple[LayerInputs, Any]:
        """Returns the inputs of a layer, and the state to carry on.

        Args:
          index: Index of the layer; an array inside a scan.
          norms: The layer's norms of single inputs, for results of type PreNormalized.
        """
        raise NotImplementedError

    def shared(self, carry: Any) -> dict[str, jax.Array]:
        """Returns the replaceable input of mixers in `context.shared`."""
        return {}

    def write(self, index: Any, carry: Any, y_BTD: jax.Array, shared: dict[str, Any]) -> Any:
        """Returns the state for the next layer from a layer's output and `shared`."""
        raise NotImplementedError

    def end(self, carry: Any) -> jax.Array:
        """Returns the hidden state for the final norm."""
        raise NotImplementedError


@register("connection", "residual")
class ResidualStream(Connection):
    """Residual stream: a layer reads the previous output (He et al. 2016)."""

    def read(
        self, index: Any, carry: Any, norms: Mapping[str, nnx.Module]
    ) -> tuple[LayerInputs, Any]:
        return LayerInputs.all(carry), carry

    def write(self, index: Any, carry: Any, y_BTD: jax.Array, shared: dict[str, Any]) -> Any:
        return y_BTD

    def end(self, carry: Any) -> jax.Array:
        return carry


class Head(Part):
    """Logits from normalized hidden states of the last layer.

    With num_vocab_tiling the backward pass recomputes `__call__`, but not `state`: its weights
    belong in `not_recomputed`.
    """

    rows = "head"

    def __call__(
        self, h_BTD: jax.Array, table: Any, state: Any, positions_BT: jax.Array
    ) -> jax.Array:
        """Returns float32 logits [B, T, V]; T may be any part of the sequence.

        Args:
          table: Token embeddings, for a tied head.
          state: From `state`, of the whole sequence.
          positions_BT: Positions of the hidden states in the sequence; B may be 1.
        """
        raise NotImplementedError

    def state(
        self, h_BTD: jax.Array, tokens_BT: jax.Array, context: ForwardContext, earlier: Any = None
    ) -> Any:
        """Returns a tree of arrays for logits besides hidden states, or None.

        Args:
          h_BTD: Hidden states: of whole sequences (`context.segments_BT`), of prompts
            (`context.lengths_B`), or of the next tokens (`context.positions_BT`).
          tokens_BT: Their tokens.
          earlier: The state before the next tokens.

        State that grows with tokens is as in Mixer.prefill.
        """
        return None

    @classmethod
    def reads_table(cls, config: Any) -> bool:
        """Returns whether its product with the token table counts as its own."""
        return False
