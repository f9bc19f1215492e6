"""Gathers of rows whose gradients are gathers, too.

Legend: N rows, D columns, M reads, R reads of one row.
"""

import jax
import jax.numpy as jnp


def rows_or_zeros(x_ND: jax.Array, index_M: jax.Array) -> jax.Array:
    """Returns x[index], [M, D], with zeros where the index is N."""
    return x_ND.at[index_M].get(mode="fill", fill_value=0)


def inverse_index(index_M: jax.Array, size: int) -> jax.Array:
    """Returns which read takes each row, the inverse of an index without duplicates.

    Args:
      index_M: Row of each read; reads of rows beyond `size` are ignored.
      size: Number of rows, N.

    Returns:
      int32 [N], from 0 to M - 1, or M for a row that no read takes.
    """
    num_reads = index_M.shape[0]
    reads_N = jnp.full((size,), num_reads, jnp.int32)
    return reads_N.at[index_M].set(jnp.arange(num_reads, dtype=jnp.int32), mode="drop")


@jax.custom_vjp
def take_rows(x_ND: jax.Array, index_M: jax.Array, reads_NR: jax.Array) -> jax.Array:
    """Returns `rows_or_zeros(x, index)`, with a gradient that gathers.

    Works around: the gradient of a gather is a scatter, and XLA for TPU expands the indices of a
    scatter to the size of the rows. The caller knows which reads take each row, so that the
    gradient of a row is the sum of the gradients of its reads, each gathered.

    Args:
      x_ND: The rows.
      index_M: Row of each read, or N for a read of zeros.
      reads_NR: The inverse of `index_M`: numbers of the reads that take each row, or M for none.
    """
    return rows_or_zeros(x_ND, index_M)


def _take_rows_forward(
    x_ND: jax.Array, index_M: jax.Array, reads_NR: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the rows; the only residual is which reads take each row."""
    return rows_or_zeros(x_ND, index_M), reads_NR


def _take_rows_backward(
    reads_NR: jax.Array, grad_MD: jax.Array
) -> tuple[jax.Array | int, None, None]:
    """Returns the gradient of each row, the sum of those of its R reads."""
    return sum(rows_or_zeros(grad_MD, reads_N) for reads_N in reads_NR.T), None, None


take_rows.defvjp(_take_rows_forward, _take_rows_backward)
