"""Dropout (Srivastava et al. 2014) and drop path, scaled in training."""

import jax
import jax.numpy as jnp


def dropout(x: jax.Array, rate: float, key: jax.Array | None) -> jax.Array:
    """Zeroes elements with probability `rate`; no-op without `key`."""
    if key is None or rate == 0.0:
        return x
    keep = jax.random.bernoulli(key, 1.0 - rate, x.shape)
    return jnp.where(keep, x / (1.0 - rate), 0).astype(x.dtype)


def drop_path(x_BTD: jax.Array, rate: float | jax.Array, key: jax.Array) -> jax.Array:
    """Zeroes sequences with probability `rate` (Huang et al. 2016)."""
    keep_B11 = jax.random.bernoulli(key, 1.0 - rate, (x_BTD.shape[0], 1, 1))
    return jnp.where(keep_B11, x_BTD / (1.0 - rate), 0).astype(x_BTD.dtype)
