"""Norms over the last dimension, with float32 statistics whatever the activation format."""

import jax
import jax.numpy as jnp
from flax import nnx

from MaxText.configuration.model_sections import Block
from MaxText.layers.building import Building
from MaxText.layers.weights import ones, weight, zeros


class RMSNorm(nnx.Module):
    """x / sqrt(mean(x^2) + eps) * scale (Zhang and Sennrich 2019)."""

    def __init__(
        self,
        size: int,
        epsilon: float,
        building: Building,
        rngs: nnx.Rngs,
        logical_axis: str = "norm",
    ):
        self.epsilon = epsilon
        self.scale = weight(rngs, (size,), (logical_axis,), ones, dtype=building.weight_dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        x_float = x.astype(jnp.float32)
        mean_square = jnp.mean(jnp.square(x_float), axis=-1, keepdims=True)
        y = x_float * jax.lax.rsqrt(mean_square + self.epsilon)
        return (y * self.scale[...].astype(jnp.float32)).astype(x.dtype)


class LayerNorm(nnx.Module):
    """(x - mean) / sqrt(variance + eps) * scale + bias (Ba et al. 2016)."""

    def __init__(
        self, size: int, epsilon: float, use_bias: bool, building: Building, rngs: nnx.Rngs
    ):
        self.epsilon = epsilon
        dtype = building.weight_dtype
        self.scale = weight(rngs, (size,), ("norm",), ones, dtype=dtype)
        self.bias = weight(rngs, (size,), ("norm",), zeros, dtype=dtype) if use_bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        x_float = x.astype(jnp.float32)
        mean = jnp.mean(x_float, axis=-1, keepdims=True)
        centred = x_float - mean
        variance = jnp.mean(jnp.square(centred), axis=-1, keepdims=True)
        y = centred * jax.lax.rsqrt(variance + self.epsilon) * self.scale[...].astype(jnp.float32)
        if self.bias is not None:
            y = y + self.bias[...].astype(jnp.float32)
        return y.astype(x.dtype)


def normalization(section: Block, building: Building, rngs: nnx.Rngs) -> nnx.Module:
    """The norm that the configuration chooses, over the residual stream."""
    size, epsilon = building.dimensions.emb_dim, section.normalization_layer_epsilon
    if section.normalization_type == "rms_norm":
        return RMSNorm(size, epsilon, building, rngs)
    return LayerNorm(size, epsilon, section.normalization_bias, building, rngs)
