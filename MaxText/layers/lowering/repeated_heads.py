"""Heads that serve several others, repeated with few dimensions."""

import jax
import jax.numpy as jnp


def repeat_heads(x_JPBMCX: jax.Array, num_heads: int) -> jax.Array:
    """Returns x with each of its M heads repeated num_heads / M times, [J, P, B, N, C, X].

    In place of a product with a broadcast [J, P, B, M, 1, C, X]: XLA's program for the CPU (jaxlib
    0.10.2) crashes in the gradient of products of 7 dimensions, a sum over the fifth. With C and X
    as one there are 6.

    Args:
      x_JPBMCX: [J, P, B, M, C, X], such as keys, or products of tokens.
      num_heads: N, a multiple of M.
    """
    *lead, num_groups, C, X = x_JPBMCX.shape
    if num_groups == num_heads:
        return x_JPBMCX
    repeats = num_heads // num_groups
    x = x_JPBMCX.reshape(*lead, num_groups, 1, C * X)
    x = jnp.broadcast_to(x, (*lead, num_groups, repeats, C * X))
    return x.reshape(*lead, num_heads, C, X)
