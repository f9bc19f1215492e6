"""The protocol of the parts of a model, built-in ones and those that a user brings.

A part is a class registered under a kind and a name (config/registry.py):

    @register("mixer", "my_mixer", keys=MyKeys)
    class MyMixer(Mixer):
        def __init__(self, keys, init, rngs): ...      # declares weights: layers/weights.py, Dense
        def __call__(self, x_BTD, context): ...        # (y_BTD, scalars)

What the rest of the program has to know of a part, it declares here; nothing else is edited.

Legend: B sequences, T tokens, D emb_dim, V vocab_size.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple, Self

import jax
from flax import nnx

from MaxText.config.layer_sections import Dimensions
from MaxText.config.model_sections import Layer
from MaxText.config.registry import register, registrations
from MaxText.errors import UserError
from MaxText.layers.capture import tag
from MaxText.layers.context import Context
from MaxText.layers.weights import Init

__all__ = [
    "Connection", "FeedForward", "Flops", "Head", "Init", "Inputs", "Mixer", "Nothing", "Part",
    "Position", "Scalars", "register", "tag",
]  # fmt: skip

Scalars = dict[str, jax.Array]  # to be summed over layers


class Flops(NamedTuple):
    """Forward operations per token in one layer, besides those of weights (2 per weight).

    Attributes:
      by_rule: Counted for the MFU: products of tokens with tokens or with a state.
      executed: By the backend, masked products included; None for the same.
      recomputed: Executed again by the backward pass under every remat policy.
      backward: Operations of the backward pass for each forward one.
      kept: Executed ones that the backward pass never repeats; nan if unknown.
    """

    by_rule: float
    executed: float | None = None
    recomputed: float = 0.0
    backward: int = 2
    kept: float = 0.0


class Part(nnx.Module):
    """A part of a model.

    Remat policies keep intermediate values that `tag` names query_proj, key_proj, value_proj,
    context and out_proj (of a mixer), mlpwi and mlpwo (of a feed-forward).

    Attributes:
      logical_axes: Logical axis -> mesh axes, for axes that logical_axis_rules does not name.
      rows: Row of the FLOPs table for all weights, or own attribute -> row; by default the name of
        the weight's module. The outermost module decides.
      not_recomputed: Own attributes whose product the backward pass does not read: those that make
        the output. With remat_policy=full they are computed once if the layer only adds the output
        to the residual stream.
      hugging_face_names: Of a mixer or feed-forward: own weight -> its name in a layer of a Hugging
        Face checkpoint, such as {"into/kernel": "mixer.in_proj.weight"}. Matrices are stored there
        like those of torch.nn.Linear, [outputs, inputs].
    """

    logical_axes: ClassVar[dict[str, tuple[str, ...]]] = {}
    hugging_face_names: ClassVar[dict[str, str]] = {}
    rows: ClassVar[str | dict[str, str]] = {}
    not_recomputed: ClassVar[tuple[str, ...]] = ()

    def __init__(self, keys: Any, init: Init, rngs: nnx.Rngs):
        """Declares weights; `keys` are those of `keys_of`."""

    @classmethod
    def build(cls, layer: Layer, init: Init, rngs: nnx.Rngs) -> Self:
        """Builds the part of a layer; parts of the whole model get its keys and sizes."""
        return cls(cls.keys_of(layer), init, rngs)

    @classmethod
    def keys_of(cls, layer: Layer) -> Any:
        """Returns the part's own keys in a layer, or the model's keys if it has none."""
        keys = layer.section.parts.of(cls)
        return layer.section if keys is None else keys

    @classmethod
    def problem(cls, keys: Any, dimensions: Dimensions) -> str | None:
        """Returns why these keys or sizes are impossible; a second line says what to set."""
        return None

    @classmethod
    def flops(cls, keys: Any, dimensions: Dimensions, length: int) -> dict[str, Flops]:
        """Returns row of the FLOPs table -> operations, for sequences of `length` tokens."""
        return {}

    @classmethod
    def state_bytes(
        cls, keys: Any, dimensions: Dimensions, length: int, itemsize: int
    ) -> tuple[int, int]:
        """Returns the bytes of a sequence's decode state: per token, and independent of the length.

        Args:
          length: Maximum number of tokens.
          itemsize: Bytes of a number in the activations' format.
        """
        return 0, 0


class Mixer(Part):
    """A token mixer.

    Attributes:
      has_separate_inputs: Whether queries, keys and values may come from different hidden states
        (dense connections); x is then a tuple of three.
      has_softmax: Whether it is softmax attention in the form that the key `attention` chooses.
    """

    has_separate_inputs = False
    has_softmax: ClassVar[bool] = False

    def __call__(self, x_BTD: Any, context: Context) -> tuple[jax.Array, Scalars]:
        """Returns the output [B, T, D], and scalars to be summed over layers.

        Tokens may depend only on earlier tokens of the same segment (`context.segments_BT`).
        """
        raise NotImplementedError

    def prefill(self, x_BTD: Any, context: Context) -> tuple[jax.Array, Any]:
        """Returns the output of prompts and the state after each, a tree of arrays.

        `context.lengths_B` are the tokens of each prompt, followed by padding. State that grows
        with tokens has room for `context.capacity` and can be enlarged: a KeyValueCache, or another
        registered dataclass with `capacity` and `with_capacity`.
        """
        raise NotImplementedError(f"{type(self).__name__} has no decode state")

    def decode_step(self, x_BTD: Any, state: Any, context: Context) -> tuple[jax.Array, Any]:
        """Returns the output of tokens at `context.positions_BT`, and the state after them."""
        raise NotImplementedError(f"{type(self).__name__} has no decode state")

    @classmethod
    def notes(cls, keys: Any, length: int) -> tuple[str, str]:
        """Returns footnotes of the FLOPs table about `by_rule` and `executed`; "" for none."""
        return "", ""

    @classmethod
    def decodes(cls) -> bool:
        """Returns whether text can be generated with it."""
        return cls.prefill is not Mixer.prefill


@register("mixer", "none")
class Nothing(Mixer):
    """No mixer: the layer has a feed-forward alone."""

    @classmethod
    def decodes(cls) -> bool:
        return True


class FeedForward(Part):
    """Changes each token independently."""

    rows = "feed-forward"

    def __call__(self, x_BTD: jax.Array, context: Context) -> tuple[jax.Array, Scalars]:
        """Returns the output [B, T, D], and scalars to be summed over layers."""
        raise NotImplementedError


@register("position", "none")
class Position(Part):
    """A positional encoding; this one encodes nothing."""

    rows = "position embedding"

    def embed(self, positions_BT: jax.Array) -> jax.Array | None:
        """Returns what is added to the embedding, [B or 1, T, D]."""
        return None

    def for_mixers(self, positions_BT: jax.Array) -> dict[str, Any]:
        """Returns fields of Context that mixers read: `rotary` or `slopes_N`."""
        return {}


class Normalized(NamedTuple):
    """An input that the layer's own norm has been applied to."""

    x_BTD: jax.Array


class Inputs(NamedTuple):
    """Inputs x_BTD of a layer's queries, keys, values and residual stream; often the same."""

    q: jax.Array | Normalized
    k: jax.Array | Normalized
    v: jax.Array | Normalized
    r: jax.Array

    @classmethod
    def all(cls, x_BTD: jax.Array) -> "Inputs":
        return cls(x_BTD, x_BTD, x_BTD, x_BTD)


class Connection(Part):
    """State carried from layer to layer, and what each layer reads of it.

    The state is a tree of arrays [B, T, ...] that passes through the scan over layers, pipeline
    stages and each step of decoding.

    Attributes:
      keeps_shapes: Whether the tree has the same shapes after every layer. Otherwise layers are
        unrolled, on one stage.
    """

    keeps_shapes: ClassVar[bool] = True

    def begin(self, x_BTD: jax.Array) -> Any:
        """Returns the state that the first layer gets, from the embedding."""
        return x_BTD

    def read(self, index: Any, carried: Any, norms: Mapping[str, nnx.Module]) -> tuple[Inputs, Any]:
        """Returns the inputs of a layer, and the state to carry on.

        Args:
          index: Of the layer, from 0; an array inside a scan.
          norms: The layer's norms of inputs that it normalizes alone.
        """
        raise NotImplementedError

    def shared(self, carried: Any) -> dict[str, jax.Array]:
        """Returns what mixers read, and may replace, in `context.shared`."""
        return {}

    def write(self, index: Any, carried: Any, y_BTD: jax.Array, shared: dict[str, Any]) -> Any:
        """Returns the state for the next layer from a layer's output and `shared`."""
        raise NotImplementedError

    def end(self, carried: Any) -> jax.Array:
        """Returns the hidden state for the final norm."""
        raise NotImplementedError

    def checked(self, before: Any, after: Any) -> Any:
        """Returns `after`; raises a UserError if it should have the shapes of `before`."""
        if self.keeps_shapes and _shapes(before) != _shapes(after):
            raise UserError(
                f"{described(self)}: write returned {_shapes(after)}, and has to keep what "
                f"begin made, {_shapes(before)}; or set keeps_shapes = False"
            )
        return after


@register("connection", "residual")
class ResidualStream(Connection):
    """Each layer reads the output of the one before it (He et al. 2016)."""

    def read(self, index: Any, carried: Any, norms: Mapping[str, nnx.Module]) -> tuple[Inputs, Any]:
        return Inputs.all(carried), carried

    def write(self, index: Any, carried: Any, y_BTD: jax.Array, shared: dict[str, Any]) -> Any:
        return y_BTD

    def end(self, carried: Any) -> jax.Array:
        return carried


class Head(Part):
    """Logits from normalized hidden states of the last layer.

    With num_vocab_tiling the backward pass recomputes `__call__`, but not `state`: its weights
    belong in `not_recomputed`.
    """

    rows = "head"

    def __call__(self, h_BTD: jax.Array, table: Any, state: Any, places_BT: jax.Array) -> jax.Array:
        """Returns float32 logits [B, T, V]; T may be any part of the sequence.

        Args:
          table: Token embeddings, for a tied head.
          state: Of the whole sequence, from `state`.
          places_BT: Positions of the hidden states in the sequence; B may be 1.
        """
        raise NotImplementedError

    def state(
        self, h_BTD: jax.Array, tokens_BT: jax.Array, context: Context, earlier: Any = None
    ) -> Any:
        """Returns what logits read besides their own hidden state; None for nothing.

        Args:
          h_BTD: Hidden states: of whole sequences (`context.segments_BT`), of prompts
            (`context.lengths_B`), or of the next tokens (`context.positions_BT`).
          tokens_BT: Their tokens.
          earlier: The state before the next tokens.

        Returns:
          A tree of arrays. During generation, what grows with tokens has room for
            `context.capacity` and
          can be enlarged, as for Mixer.prefill.
        """
        return None

    @classmethod
    def reads_table(cls, keys: Any) -> bool:
        """Returns whether its product with the token table counts as its own."""
        return False


def checked(part: Part, method: str, found: Any, x_BTD: jax.Array) -> Any:
    """Returns the result of a part's method: a pair whose first has the input's shape.

    Raises:
      UserError: It is not.
    """
    if isinstance(found, tuple) and len(found) == 2 and _words(found[0]) == _words(x_BTD):
        return found
    given = f"({', '.join(map(_words, found))})" if isinstance(found, tuple) else _words(found)
    second = "scalars" if method == "__call__" else "state"
    raise UserError(
        f"{described(part)}: {method} returned {given}, and has to return "
        f"({_words(x_BTD)}, {second})"
    )


def described(part: Part) -> str:
    """Returns kind, name and place of a part, for messages."""
    names = (f"{one.kind} {one.name} ({one.place})" for one in registrations()
             if one.target is type(part))  # fmt: skip
    return next(names, type(part).__name__)


def _words(x: Any) -> str:
    return f"[{', '.join(map(str, x.shape))}]" if hasattr(x, "shape") else type(x).__name__


def _shapes(carried: Any) -> str:
    return str(jax.tree.map(lambda x: f"{x.dtype.name}{list(x.shape)}", carried))
