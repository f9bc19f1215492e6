"""What a layer reads of the layers before it: the residual stream, and the protocol of others.

Legend: B sequences, T tokens, D emb_dim.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import jax
from flax import nnx

from MaxText.errors import UserError
from MaxText.layers.part import Part, described


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


class ResidualStream(Connection):
    """Each layer reads the output of the one before it (He et al. 2016)."""

    def read(self, index: Any, carried: Any, norms: Mapping[str, nnx.Module]) -> tuple[Inputs, Any]:
        return Inputs.all(carried), carried

    def write(self, index: Any, carried: Any, y_BTD: jax.Array, shared: dict[str, Any]) -> Any:
        return y_BTD

    def end(self, carried: Any) -> jax.Array:
        return carried


def _shapes(carried: Any) -> str:
    return str(jax.tree.map(lambda x: f"{x.dtype.name}{list(x.shape)}", carried))
