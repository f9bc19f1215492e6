"""The protocol of the parts of a model, built-in ones and those that a user brings.

A part is a class registered under a kind and a name (configuration/registry.py):

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

from MaxText.configuration.layer_sections import Dimensions
from MaxText.configuration.model_sections import Layer
from MaxText.configuration.registry import register, registrations
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
    """Forward operations on a token in one layer, besides those of weights (2 per weight).

    Attributes:
      by_rule: what counts for the MFU: products of tokens with tokens or with a state.
      executed: as the backend computes them, masked products included; None is the same.
      recomputed: those that the backward pass executes again under every remat policy.
      backward: operations of the backward pass for each forward one.
      kept: executed ones that the backward pass never executes again; nan where that is not known.
    """

    by_rule: float
    executed: float | None = None
    recomputed: float = 0.0
    backward: int = 2
    kept: float = 0.0


class Part(nnx.Module):
    """A part of a model.

    Remat policies keep intermediate values that `tag` gives one of their names: query_proj,
    key_proj, value_proj, context and out_proj of a mixer, mlpwi and mlpwo of a feed-forward.

    Attributes:
      logical_axes: logical axis -> mesh axes, for axes of weights or activations that
        logical_axis_rules does not name.
      rows: row of the FLOPs table that all weights are counted in, or own attribute -> row; by
        default the row has the name of the folder of the weight. The outermost module decides.
      not_recomputed: own attributes whose product nothing in the backward pass reads: those that
        make the output. With remat_policy=full they are computed once, if the layer as well only
        adds the output to the residual stream.
      hugging_face_names: of a mixer or feed-forward: own weight -> its name in a layer of a Hugging
        Face checkpoint, such as {"into/kernel": "mixer.in_proj.weight"}. Matrices are stored there
        as torch.nn.Linear has them, [outputs, inputs] without other dimensions.
    """

    logical_axes: ClassVar[dict[str, tuple[str, ...]]] = {}
    hugging_face_names: ClassVar[dict[str, str]] = {}
    rows: ClassVar[str | dict[str, str]] = {}
    not_recomputed: ClassVar[tuple[str, ...]] = ()

    def __init__(self, keys: Any, init: Init, rngs: nnx.Rngs):
        """Declares weights; `keys` are those of `keys_of`."""

    @classmethod
    def build(cls, layer: Layer, init: Init, rngs: nnx.Rngs) -> Self:
        """Makes the part of a layer; those of the whole model get its keys and sizes."""
        return cls(cls.keys_of(layer), init, rngs)

    @classmethod
    def keys_of(cls, layer: Layer) -> Any:
        """The part's own keys in a layer; the model's for a part without keys of its own."""
        keys = layer.section.parts.of(cls)
        return layer.section if keys is None else keys

    @classmethod
    def problem(cls, keys: Any, dimensions: Dimensions) -> str | None:
        """Why these keys or sizes are impossible, in words; a second line says what to set."""
        return None

    @classmethod
    def flops(cls, keys: Any, dimensions: Dimensions, length: int) -> dict[str, Flops]:
        """Name of a row of the FLOPs table -> its operations, for sequences of `length` tokens."""
        return {}

    @classmethod
    def state_bytes(
        cls, keys: Any, dimensions: Dimensions, length: int, itemsize: int
    ) -> tuple[int, int]:
        """Bytes that generation keeps of a sequence: for each token, and however long it is.

        Args:
          length: the most tokens that a sequence has.
          itemsize: bytes of a number in the activations' format.
        """
        return 0, 0


class Mixer(Part):
    """Mixes the tokens of a sequence.

    Attributes:
      has_separate_inputs: whether queries, keys and values may be made of different hidden states
        (dense connections); x is then a tuple of three.
      has_softmax: whether it is softmax attention in the form that the key `attention` chooses,
        which kernels and plans ask.
    """

    has_separate_inputs = False
    has_softmax: ClassVar[bool] = False

    def __call__(self, x_BTD: Any, context: Context) -> tuple[jax.Array, Scalars]:
        """The output [B, T, D] of whole sequences, and scalars to be summed over layers.

        Tokens may depend on earlier tokens of the same segment (`context.segments_BT`) alone.
        """
        raise NotImplementedError

    def prefill(self, x_BTD: Any, context: Context) -> tuple[jax.Array, Any]:
        """The output of prompts and the state after each, a tree of arrays.

        `context.lengths_B` are the tokens of each prompt; padding stands behind them. What grows
        with the tokens has room for `context.capacity` and can be enlarged: a KeyValueCache, or
        another registered dataclass with `capacity` and `with_capacity`.
        """
        raise NotImplementedError(f"{type(self).__name__} has no decode state")

    def decode_step(self, x_BTD: Any, state: Any, context: Context) -> tuple[jax.Array, Any]:
        """The output of the next tokens, at `context.positions_BT`, and the state after them."""
        raise NotImplementedError(f"{type(self).__name__} has no decode state")

    @classmethod
    def notes(cls, keys: Any, length: int) -> tuple[str, str]:
        """What is said below the FLOPs table: of `by_rule` and of `executed`; "" for nothing."""
        return "", ""

    @classmethod
    def decodes(cls) -> bool:
        """Whether text can be generated with it."""
        return cls.prefill is not Mixer.prefill


@register("mixer", "none")
class Nothing(Mixer):
    """No mixer: the layer has a feed-forward alone."""

    @classmethod
    def decodes(cls) -> bool:
        """Whether text can be generated with it."""
        return True


class FeedForward(Part):
    """Changes each token by itself."""

    rows = "feed-forward"

    def __call__(self, x_BTD: jax.Array, context: Context) -> tuple[jax.Array, Scalars]:
        """The output [B, T, D], and scalars to be summed over layers."""
        raise NotImplementedError


@register("position", "none")
class Position(Part):
    """How the model knows where a token stands; this one adds and tells nothing."""

    rows = "position embedding"

    def embed(self, positions_BT: jax.Array) -> jax.Array | None:
        """What is added to the embedding, [B or 1, T, D]."""
        return None

    def for_mixers(self, positions_BT: jax.Array) -> dict[str, Any]:
        """Fields of Context that mixers read: `rotary` or `slopes_N`."""
        return {}


class Normalized(NamedTuple):
    """An input that the layer's own norm has been applied to."""

    x_BTD: jax.Array


class Inputs(NamedTuple):
    """x_BTD of a layer's queries, keys, values and residual stream; often one and the same."""

    q: jax.Array | Normalized
    k: jax.Array | Normalized
    v: jax.Array | Normalized
    r: jax.Array

    @classmethod
    def all(cls, x_BTD: jax.Array) -> "Inputs":
        """One hidden state as every input."""
        return cls(x_BTD, x_BTD, x_BTD, x_BTD)


class Connection(Part):
    """What is carried from layer to layer, and what each layer reads of it.

    That is a tree of arrays [B, T, ...]. It goes through the scan over layers, the stages of a
    pipeline, and each step of decoding.

    Attributes:
      keeps_shapes: whether the tree is the same after every layer, but for its numbers. Otherwise
        layers are unrolled, on one stage.
    """

    keeps_shapes: ClassVar[bool] = True

    def begin(self, x_BTD: jax.Array) -> Any:
        """What the first layer gets, made of the embedding."""
        return x_BTD

    def read(self, index: Any, carried: Any, norms: Mapping[str, nnx.Module]) -> tuple[Inputs, Any]:
        """Inputs of a layer, and what is carried on.

        Args:
          index: number of the layer, from 0; an array inside a scan.
          norms: the layer's own, of inputs that it normalizes alone.
        """
        raise NotImplementedError

    def shared(self, carried: Any) -> dict[str, jax.Array]:
        """What mixers find, and may replace, in `context.shared`."""
        return {}

    def write(self, index: Any, carried: Any, y_BTD: jax.Array, shared: dict[str, Any]) -> Any:
        """What the next layer gets, with a layer's output and what it left in `shared`."""
        raise NotImplementedError

    def end(self, carried: Any) -> jax.Array:
        """The hidden state that the final norm reads."""
        raise NotImplementedError

    def checked(self, before: Any, after: Any) -> Any:
        """`after`, where it keeps the shapes of `before` or need not.

        Raises:
          UserError: it does not.
        """
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
    """Turns normalized hidden states of the last layer into logits.

    With num_vocab_tiling the backward pass computes `__call__` again, but not `state`: its weights
    are among those in `not_recomputed`.
    """

    rows = "head"

    def __call__(self, h_BTD: jax.Array, table: Any, state: Any, places_BT: jax.Array) -> jax.Array:
        """Float32 logits [B, T, V]; T may be any part of the sequence.

        Args:
          h_BTD: hidden states.
          table: of the tokens, for a tied head.
          state: of the whole sequence; what `state` returned.
          places_BT: where in the sequence the hidden states stand; B may be 1.
        """
        raise NotImplementedError

    def state(
        self, h_BTD: jax.Array, tokens_BT: jax.Array, context: Context, earlier: Any = None
    ) -> Any:
        """What logits read of the sequence besides their own hidden state; None for nothing.

        Args:
          h_BTD: hidden states: of whole sequences (`context.segments_BT`), of prompts
            (`context.lengths_B`), or of the next tokens (`context.positions_BT`).
          tokens_BT: the tokens that they are of.
          earlier: the state before the next tokens.

        Returns:
          A tree of arrays. While text is generated, what grows with the tokens has room for
          `context.capacity` and can be enlarged: a registered dataclass with `capacity` and
          `with_capacity`.
        """
        return None

    @classmethod
    def reads_table(cls, keys: Any) -> bool:
        """Whether it multiplies with the token table, whose product then counts as the head's."""
        return False


def checked(part: Part, method: str, found: Any, x_BTD: jax.Array) -> Any:
    """What a method of a part returned: a pair, whose first has the shape of the input.

    Raises:
      UserError: it returned something else.
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
    """Kind, name and place of a part, for messages."""
    names = (f"{one.kind} {one.name} ({one.place})" for one in registrations()
             if one.target is type(part))  # fmt: skip
    return next(names, type(part).__name__)


def _words(x: Any) -> str:
    """The shape of an array, or what else it is."""
    return f"[{', '.join(map(str, x.shape))}]" if hasattr(x, "shape") else type(x).__name__


def _shapes(carried: Any) -> str:
    return str(jax.tree.map(lambda x: f"{x.dtype.name}{list(x.shape)}", carried))
