"""The inverse of lower triangular matrices with a diagonal of ones, by matrix products.

The tokens of a chunk depend on each other by a triangular system. Substitution, row by row, leaves
the matrix units of an accelerator idle (XLA's triangular_solve is serial). Instead, inverses of
blocks are put together from those of blocks half as large:

    [[I + A, 0], [B, I + D]]^-1 = [[X, 0], [-Y B X, Y]],  X = (I + A)^-1,  Y = (I + D)^-1

All blocks of a size are one product of whole matrices, with zeros elsewhere: 2 (log2 C - 1)
products of [C, C]. As many as (I + A)^-1 = prod_m (I + (-A)^(2^m)) takes, of which powers of A are
the sums; those can be larger than the inverse by orders of magnitude, and cancel.

Legend: C rows of a matrix.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from MaxText.layers.dense import einsum


def num_levels(size: int) -> int:
    """Returns the number of block sizes for matrices of `size` rows: log2 C, rounded up."""
    return (size - 1).bit_length()


def num_products(size: int) -> int:
    """Returns the products [C, C] times [C, C] of an inverse; its gradient has 2 more."""
    return 2 * max(num_levels(size) - 1, 0)


def unit_lower_inverse(below_CC: jax.Array, precision: str | None) -> jax.Array:
    """Returns (I + A)^-1 of matrices A [..., C, C] that are 0 on the diagonal and above.

    Args:
      below_CC: A, float32.
      precision: Of the products, a name of jax.lax.Precision. At least "high" is used: one bfloat16
        pass is too few where A has elements of 1 or more, as repeated keys make them.
    """
    inverse: Any = _inverse(below_CC, "highest" if precision == "highest" else "high")
    return inverse


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _inverse(below_CC: jax.Array, precision: str | None) -> jax.Array:
    size = below_CC.shape[-1]
    rows, columns = jnp.indices((size, size))
    multiply = functools.partial(einsum, "...ij,...jk->...ik", precision=precision)
    inverse = jnp.broadcast_to(jnp.eye(size, dtype=below_CC.dtype), below_CC.shape)
    for level in range(num_levels(size)):
        # Blocks of 2^level rows are inverted; B is what joins two of them.
        half, whole = 1 << level, 2 << level
        is_joined = (rows // whole == columns // whole) & (rows // half != columns // half)
        joined = jnp.where(is_joined, below_CC, 0)
        # Blocks of one row are ones.
        inverse -= joined if level == 0 else multiply(multiply(inverse, joined), inverse)
    return inverse


def _forward(below_CC: jax.Array, precision: str | None) -> tuple[jax.Array, jax.Array]:
    inverse: Any = _inverse(below_CC, precision)
    return inverse, inverse


def _backward(precision: str | None, inverse: jax.Array, gradient: jax.Array) -> tuple[jax.Array]:
    """Returns -X^T g X^T below the diagonal: two products, and none of the inverse's saved."""
    multiply = functools.partial(einsum, "...ij,...jk->...ik", precision=precision)
    return (-jnp.tril(multiply(multiply(inverse.mT, gradient), inverse.mT), -1),)


_inverse.defvjp(_forward, _backward)
