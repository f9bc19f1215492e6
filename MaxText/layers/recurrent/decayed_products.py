"""Products of the tokens of a chunk, with a decay between two tokens for each channel.

    sum_c x_ic y_jc exp(G_ic - G_jc),   G the sums of log a over tokens,   j < i

is not a product of x with y times one decay, and exp(G_i) exp(-G_j) overflows. Instead, a block of
tokens is computed from its halves. For a token i of the right half and j of the left one, with the
boundary between them as the anchor,

    G_i - G_j = (sum from the boundary to i) + (sum from j + 1 to the boundary)

Neither sum is positive, so each side has a factor of at most 1, and the pairs of both halves are
one product of matrices. Sums are over the tokens of a half alone, not differences of sums over the
chunk: a strong decay costs no digits of other tokens' decays, and log a = -inf forgets all tokens
before, as where a document begins.

Blocks of up to 16 tokens are products of the whole block with zeros elsewhere, larger ones
products of the halves.

Legend: C tokens of a chunk, K channels.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from MaxText.layers.context import ForwardContext
from MaxText.layers.dense import einsum
from MaxText.layers.recurrent.chunks import begins_document
from MaxText.layers.recurrent.triangular_inverse import num_levels

_WHOLE_BLOCK = 16


class DecayedProducts(NamedTuple):
    """Products of tokens, and sums of log a; leading dimensions are those of the inputs."""

    products_CC: list[list[jax.Array]]  # of each rows, a list of each columns; 0 unless j < i
    since_begin_CK: jax.Array  # sums from the first token to i
    to_end_CK: jax.Array  # sums from i + 1 to the last token


@functools.partial(jax.checkpoint, static_argnums=(3,))
def decayed_products(
    rows: Sequence[jax.Array],
    columns: Sequence[jax.Array],
    log_a: jax.Array,
    precision: str | None,
) -> DecayedProducts:
    """Returns the products of all rows x with all columns y (formulas above).

    The backward pass computes decayed rows and columns again, instead of saving them for each size
    of blocks.

    Args:
      rows: Arrays x [..., C, K], float32, as the others.
      columns: Arrays y [..., C, K].
      log_a: [..., C, K], not positive.
      precision: Of the products.
    """
    *_, size, width = log_a.shape
    num_padding = 2 ** num_levels(size) - size
    if num_padding:
        padding = [(0, 0)] * (log_a.ndim - 2) + [(0, num_padding), (0, 0)]
        rows, columns = ([jnp.pad(x, padding) for x in arrays] for arrays in (rows, columns))
        log_a = jnp.pad(log_a, padding)
    *lead, padded, _ = shape = log_a.shape
    product = functools.partial(einsum, "...ck,...dk->...cd", precision=precision)
    block = min(_WHOLE_BLOCK, padded)
    zeros = jnp.zeros((*lead, padded // block, block, block), log_a.dtype)
    products = [[zeros for _ in columns] for _ in rows]
    # Sums within blocks of 2^level tokens.
    since_begin = log_a
    to_end = jnp.zeros_like(log_a)
    for level in range(num_levels(padded)):
        half = 2**level
        halves = (*lead, padded // (2 * half), 2, half, width)
        left_since, right_since = _split(since_begin, halves)
        left_to_end, right_to_end = _split(to_end, halves)
        factors = jnp.exp(_join(left_to_end, right_since, shape))
        is_whole = 2 * half <= block
        blocks = (*lead, padded // block, block, width) if is_whole else halves
        decayed_rows = [(x * factors).reshape(blocks) for x in rows]
        decayed_columns = [(y * factors).reshape(blocks) for y in columns]
        for x, of_row in zip(decayed_rows, products, strict=True):
            for index, y in enumerate(decayed_columns):
                if is_whole:
                    of_row[index] = jnp.where(_is_pair(block, half), product(x, y), of_row[index])
                else:
                    below = product(x[..., 1, :, :], y[..., 0, :, :])
                    of_row[index] = _grown(of_row[index], below)
        left_total = left_since[..., -1:, :]
        right_total = right_since[..., -1:, :]
        since_begin = _join(left_since, right_since + left_total, shape)
        to_end = _join(left_to_end + right_total, right_to_end, shape)
    return DecayedProducts(
        products_CC=[[x[..., 0, :size, :size] for x in of_row] for of_row in products],
        since_begin_CK=since_begin[..., :size, :],
        to_end_CK=to_end[..., :size, :],
    )


def product_flops(size: int, width: int) -> float:
    """Returns the FLOPs per token of the products of one of rows with one of columns.

    Args:
      size: C.
      width: K.
    """
    levels = num_levels(size)
    padded = 2**levels
    block = min(_WHOLE_BLOCK, padded)
    num_whole = num_levels(block)
    # Half of the tokens meet the other half of their block.
    num_columns = num_whole * block + sum(2**level / 2 for level in range(num_whole, levels))
    return 2 * width * num_columns * padded / size


def with_diagonal(products_CC: jax.Array, x_CK: jax.Array, y_CK: jax.Array) -> jax.Array:
    """Returns products with those of x and y of the same token, i = j, which no decay separates."""
    same = jnp.sum(x_CK * y_CK, axis=-1)
    return products_CC + same[..., None] * jnp.eye(same.shape[-1], dtype=same.dtype)


def forget_between_documents(
    log_a_BTNK: jax.Array, context: ForwardContext, length: int
) -> jax.Array:
    """Returns log a with -inf at the first token of each later document."""
    begins_BT = begins_document(context, length)
    if begins_BT is None:
        return log_a_BTNK
    return jnp.where(begins_BT[..., None, None], -jnp.inf, log_a_BTNK)


def _is_pair(size: int, half: int) -> np.ndarray:
    """Returns which tokens (row, column) are in the right and the left half of the same block.

    Args:
      size: Tokens.
      half: Tokens of a half.
    """
    number = np.arange(size) // half
    is_same_block = number[:, None] // 2 == number // 2
    return is_same_block & (number[:, None] > number)


def _split(x: jax.Array, halves: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """Returns the left and the right halves of blocks, [..., blocks, 1, half, K] each.

    Args:
      x: [..., C, K].
      halves: The shape [..., blocks, 2, half, K].
    """
    x = x.reshape(halves)
    return x[..., :1, :, :], x[..., 1:, :, :]


def _join(left: jax.Array, right: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Returns the halves of blocks as [..., C, K]; the inverse of `_split`."""
    return jnp.concatenate([left, right], axis=-3).reshape(shape)


def _grown(diagonal: jax.Array, below: jax.Array) -> jax.Array:
    """Returns blocks [[X, 0], [Z, Y]] of twice the size.

    Without a dimension for the halves of columns: jax 0.10 crashes on CPU in the gradient of that.

    Args:
      diagonal: X and Y in turn, [..., blocks, half, half].
      below: Z, [..., blocks / 2, half, half].
    """
    *lead, half, _ = below.shape
    sides = jnp.tile(diagonal.reshape(*lead, 2 * half, half), 2)  # X X over Y Y
    number = np.arange(2 * half) // half
    below = jnp.pad(below, [(0, 0)] * len(lead) + [(half, 0), (0, half)])
    return jnp.where(number[:, None] == number, sides, below)
