"""Rounding to a narrower dtype that XLA does not optimize away."""

import jax
import jax.numpy as jnp


def round_to(arrays: tuple[jax.Array, ...], dtype: str | jnp.dtype) -> tuple[jax.Array, ...]:
    """Returns float32 arrays rounded to the numbers of a narrower dtype.

    Works around: XLA may drop the rounding, as the cast back undoes it at once. The barrier between
    both casts keeps it.

    Args:
      arrays: Float32 arrays.
      dtype: The narrower dtype, such as bfloat16.
    """
    rounded = jax.lax.optimization_barrier(tuple(x.astype(dtype) for x in arrays))
    return tuple(x.astype(jnp.float32) for x in rounded)
