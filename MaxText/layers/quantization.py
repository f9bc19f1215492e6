"""Quantized training with int8 or fp8 matmuls, forward and backward.

Parameters, activations and optimizer state keep their dtypes: operands are quantized at each
matmul, with scales from their largest absolute values.
"""

import dataclasses
import functools
import re
from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from MaxText.config.model_sections import NumericsConfig, Quantization
from MaxText.errors import UserError

Dims = jax.lax.DotDimensionNumbers
Layer = TypeVar("Layer", bound=nnx.Module)


@dataclasses.dataclass(frozen=True)
class QuantizedDot:
    """A drop-in for jax.lax.dot_general with quantized operands.

    int8: one scale per row of each operand and of the gradient; products accumulate in int32.
    fp8: one scale per tensor, which cuBLAS needs; e4m3, and e5m2 for gradients (Micikevicius et
    al. 2022). Backends without fp8 matmuls convert the operands.

    A scale maps the largest absolute value of a row or tensor to the largest number of the format.
    It is computed at each matmul: there is no history of scales in the train state.
    """

    kind: Quantization

    def __call__(self, a: jax.Array, b: jax.Array, dims: Dims, **unused: Any) -> jax.Array:
        """Returns the product in the operands' dtype; `precision` does not apply."""
        return _dot(self.kind, dims, a, b)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _dot(kind: Quantization, dims: Dims, a: jax.Array, b: jax.Array) -> jax.Array:
    """Returns the quantized product; its gradient has two quantized products."""
    return _product(kind, dims, a, b, jnp.float8_e4m3fn)


def _dot_backward(
    kind: Quantization, dims: Dims, operands: tuple[jax.Array, jax.Array], g: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the gradients of a and b: each is a product of g with the other operand."""
    a, b = operands
    (a_contracted, b_contracted), (a_batch, b_batch) = dims
    swapped = (b_contracted, a_contracted), (b_batch, a_batch)
    num_batch = len(b_batch)
    num_b_free = b.ndim - len(b_contracted) - len(b_batch)
    a_free = range(num_batch, g.ndim - num_b_free)
    b_free = range(g.ndim - num_b_free, g.ndim)
    return _grad(kind, dims, a.ndim, b, g, b_free), _grad(kind, swapped, b.ndim, a, g, a_free)


_dot.defvjp(lambda *arguments: (_dot(*arguments), arguments[2:]), _dot_backward)


def _grad(  # noqa: PLR0917
    kind: Quantization, dims: Dims, ndim: int, other: jax.Array, g: jax.Array, other_free: range
) -> jax.Array:
    """Returns the gradient of an operand.

    `other_free` are the free dimensions of the other operand in `g`.
    """
    (contracted, other_contracted), (batch, other_batch) = dims
    g_dims = (
        (tuple(other_free), _rest(other.ndim, (*other_contracted, *other_batch))),
        (tuple(range(len(batch))), other_batch),
    )
    product = _product(kind, g_dims, g.astype(other.dtype), other, jnp.float8_e5m2)
    in_order_of_other = [axis for _, axis in sorted(zip(other_contracted, contracted, strict=True))]
    axes = [*batch, *_rest(ndim, (*contracted, *batch)), *in_order_of_other]
    return jax.lax.transpose(product, [axes.index(axis) for axis in range(ndim)])


def _product(
    kind: Quantization, dims: Dims, a: jax.Array, b: jax.Array, float8_a: jax.typing.DTypeLike
) -> jax.Array:
    """Returns the product of quantized operands, in the dtype of a.

    Args:
      kind: "int8" or "fp8".
      dims: As for jax.lax.dot_general.
      a: First operand.
      b: Second operand.
      float8_a: Format of a for fp8: e4m3, or e5m2 for a gradient. That of b is e4m3.
    """
    import qwix

    if kind == "int8":
        a_rows, b_rows = (_rest(x.ndim, axes) for x, axes in zip((a, b), dims[0], strict=True))
        quantized_a = qwix.quantize(a, jnp.int8, channelwise_axes=a_rows)
        quantized_b = qwix.quantize(b, jnp.int8, channelwise_axes=b_rows)
        return qwix.dot_general(quantized_a, quantized_b, dims)
    quantized_a = qwix.quantize(a, float8_a)
    quantized_b = qwix.quantize(b, jnp.float8_e4m3fn)
    product = jax.lax.dot_general(
        quantized_a.qvalue, quantized_b.qvalue, dims, preferred_element_type=a.dtype
    )
    return product * (quantized_a.scale * quantized_b.scale).reshape(())


def _rest(ndim: int, axes: Sequence[int]) -> tuple[int, ...]:
    """Returns the dimensions that are not in `axes`, in order."""
    return tuple(axis for axis in range(ndim) if axis not in axes)


class Quantizer:
    """Quantizes matmuls of layers by `quantization` and `quantization_rules`."""

    def __init__(self, numerics: NumericsConfig):
        """Holds the rules; `check` says at the end whether each has matched.

        Args:
          numerics: `quantization`, and `quantization_rules` for modules by their path in a layer.
        """
        self._numerics = numerics
        self._paths: set[str] = set()  # of modules that rules can choose

    def quantize(self, layer: Layer) -> Layer:
        """Quantizes a layer in place, except its float32-only weights."""
        for steps, module in nnx.iter_modules(layer):
            if getattr(module, "is_quantizable", False):
                path = "/".join(map(str, steps))
                self._paths.add(path)
                if kind := self._numerics.quantization_of(path):
                    setattr(module, "dot_general", QuantizedDot(kind))  # noqa: B010
        return layer

    def check(self) -> None:
        """Raises UserError for a rule without a matching module."""
        for pattern, _ in self._numerics.quantization_rules:
            if not any(re.fullmatch(pattern, path) for path in self._paths):
                raise UserError(
                    f"quantization_rules: {pattern!r} matches no module of a layer\n"
                    f"  What to do: match one of {', '.join(sorted(self._paths))}"
                )
