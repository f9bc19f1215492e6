"""Gated norms, and decays of states.

Legend: B sequences, T tokens, N heads, H width of a head.
"""

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from MaxText.layers.normalization import RMSNorm
from MaxText.layers.params import Init, Initializer, Shape


class GatedRMSNorm(RMSNorm):
    """scale o / sqrt(mean(o^2) + eps) activation(z), of each head.

    The scale is the factor itself, also where other norms of the model store its difference from 1
    (Qwen3-Next).
    """

    def __init__(
        self,
        size: int,
        epsilon: float,
        init: Init,
        rngs: nnx.Rngs,
        *,
        activation: Callable[[jax.Array], jax.Array] = jax.nn.silu,
    ):
        """Declares the scale.

        Args:
          size: H.
          epsilon: eps.
          init: dtype of the scale.
          rngs: RNG streams that weights are drawn from.
          activation: Of the gate z.
        """
        stores_factor = dataclasses.replace(init, zero_centered_norms=False)
        super().__init__(size, epsilon, stores_factor, rngs)
        self.activation = activation

    def gated(self, o_BTNH: jax.Array, z_BTNH: jax.Array) -> jax.Array:
        """Returns the normalized and gated output in the dtype of the gate."""
        normalized = self(o_BTNH.astype(jnp.float32))
        return (normalized * self.activation(z_BTNH.astype(jnp.float32))).astype(z_BTNH.dtype)


def unit_length(x: jax.Array) -> jax.Array:
    """Returns x / |x| over the last dimension."""
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)


def log_decay(rate: jax.Array, A_log: jax.Array, dt_bias: jax.Array) -> jax.Array:
    """Returns -exp(A_log) softplus(rate + dt_bias), float32: the logarithm of a decay.

    Args:
      rate: What the decay depends on, by token.
      A_log: Logarithm of the largest rate of decay; broadcasts to `rate`.
      dt_bias: Broadcasts to `rate`.
    """
    steps = jax.nn.softplus(rate.astype(jnp.float32) + dt_bias.astype(jnp.float32))
    return -jnp.exp(A_log.astype(jnp.float32)) * steps


def log_of_uniform(low: float, high: float) -> Initializer:
    """Returns an initializer of A_log: the logarithm of uniform numbers."""

    def initialize(
        key: jax.Array, shape: Shape, num_input_dims: int, dtype: jnp.dtype
    ) -> jax.Array:
        return jnp.log(jax.random.uniform(key, shape, jnp.float32, low, high)).astype(dtype)

    return initialize


def inverse_softplus_of_log_uniform(low: float, high: float) -> Initializer:
    """Returns an initializer of dt_bias, so that softplus(dt_bias) is log-uniform.

    Its logarithm is uniform between those of `low` and `high` (Gu and Dao 2023, arXiv 2312.00752).
    """

    def initialize(
        key: jax.Array, shape: Shape, num_input_dims: int, dtype: jnp.dtype
    ) -> jax.Array:
        bounds = math.log(low), math.log(high)
        dt = jnp.exp(jax.random.uniform(key, shape, jnp.float32, *bounds))
        return (dt + jnp.log(-jnp.expm1(-dt))).astype(dtype)

    return initialize
