"""Norms over the last dimension, with float32 statistics whatever the activation format.

The parameter `scale` holds the factor itself, or its difference from 1 where norms are
zero-centred (normalization_zero_centered). Both start at a factor of 1. Weight decay pulls the
parameter to 0, so the factor of a zero-centred norm to 1: a pattern of adamw_mask that exempts
`scale`, which keeps factors from 0 otherwise, has nothing to prevent there. A norm without
parameters has factor 1 and no bias.
"""

import functools
import math

import jax
import jax.numpy as jnp
from flax import nnx

from MaxText.configuration.layer_sections import Block
from MaxText.configuration.registry import lookup
from MaxText.layers.weights import Init, constant, ones, weight, zeros


class RMSNorm(nnx.Module):
    """x / sqrt(mean(x^2) + eps) * scale (Zhang and Sennrich 2019)."""

    rows = "norms"

    def __init__(
        self,
        size: int,
        epsilon: float,
        building: Init,
        rngs: nnx.Rngs,
        logical_axis: str = "norm",
        *,
        parametric: bool = True,
        initial: float = 1.0,
    ):
        """`initial` is the factor that the scale begins with."""
        self.epsilon = epsilon
        self.zero_centered = building.zero_centered_norms
        stored = constant(initial - 1.0 if self.zero_centered else initial)
        self.size = size
        self.scale = (
            weight(rngs, (size,), (logical_axis,), stored, dtype=building.weight_dtype)
            if parametric
            else None
        )

    def factors(self) -> jax.Array:
        """Float32 [size], 1 without a scale."""
        if self.scale is None:
            return jnp.ones(self.size, jnp.float32)
        return factor(self.scale, self.zero_centered)

    def __call__(self, x: jax.Array) -> jax.Array:
        return normalized(x, None if self.scale is None else self.factors(), self.epsilon)


class LayerNorm(nnx.Module):
    """(x - mean) / sqrt(variance + eps) * scale + bias (Ba et al. 2016)."""

    rows = "norms"

    def __init__(
        self,
        size: int,
        epsilon: float,
        use_bias: bool,
        building: Init,
        rngs: nnx.Rngs,
        *,
        parametric: bool = True,
    ):
        self.epsilon = epsilon
        self.zero_centered = building.zero_centered_norms
        dtype, initial = building.weight_dtype, zeros if self.zero_centered else ones
        self.scale = weight(rngs, (size,), ("norm",), initial, dtype=dtype) if parametric else None
        has_bias = use_bias and parametric
        self.bias = weight(rngs, (size,), ("norm",), zeros, dtype=dtype) if has_bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        x_float = x.astype(jnp.float32)
        mean = jnp.mean(x_float, axis=-1, keepdims=True)
        centred = x_float - mean
        variance = jnp.mean(jnp.square(centred), axis=-1, keepdims=True)
        y = centred * jax.lax.rsqrt(variance + self.epsilon)
        if self.scale is not None:
            y = y * factor(self.scale, self.zero_centered)
        if self.bias is not None:
            y = y + self.bias[...].astype(jnp.float32)
        return y.astype(x.dtype)


class ScaleNorm(nnx.Module):
    """g x / |x|, one g for all dimensions, sqrt(D) at first (Nguyen and Salazar 2019)."""

    rows = "norms"

    def __init__(
        self,
        size: int,
        epsilon: float,
        building: Init,
        rngs: nnx.Rngs,
        *,
        centered: bool = False,
        parametric: bool = True,
    ):
        """`centered`: LayerNorm with one scale and no bias, GPT-Neo's scalenorm; 1 at first."""
        self.epsilon, self.centered, self.size = epsilon, centered, size
        self.zero_centered = building.zero_centered_norms
        initial = 1.0 if centered else math.sqrt(size)
        stored = constant(initial - 1.0 if self.zero_centered else initial)
        dtype = building.weight_dtype
        self.scale = weight(rngs, (1,), ("norm",), stored, dtype=dtype) if parametric else None

    def __call__(self, x: jax.Array) -> jax.Array:
        x_float = x.astype(jnp.float32)
        if self.centered:
            x_float = x_float - jnp.mean(x_float, axis=-1, keepdims=True)
        square = jnp.mean(jnp.square(x_float), axis=-1, keepdims=True)
        y = x_float * jax.lax.rsqrt(square + self.epsilon)
        if not self.centered:
            y = y / math.sqrt(self.size)  # from a mean of squares to a sum
        if self.scale is not None:
            y = y * factor(self.scale, self.zero_centered)
        return y.astype(x.dtype)


def normalized(x: jax.Array, factors: jax.Array | None, epsilon: float) -> jax.Array:
    """x / sqrt(mean(x^2) + epsilon) * factors, in the format of x; None is a factor of 1."""
    x_float = x.astype(jnp.float32)
    mean_square = jnp.mean(jnp.square(x_float), axis=-1, keepdims=True)
    y = x_float * jax.lax.rsqrt(mean_square + epsilon)
    return (y if factors is None else y * factors).astype(x.dtype)


def factor(scale: nnx.Param, zero_centered: bool) -> jax.Array:
    """What a norm multiplies by, in float32: bfloat16 could not hold 1 and a small difference."""
    stored = scale[...].astype(jnp.float32)
    return 1.0 + stored if zero_centered else stored


def normalization(
    section: Block,
    building: Init,
    rngs: nnx.Rngs,
    *,
    parametric: bool = True,
    kind: str | None = None,
) -> nnx.Module:
    """The norm that the configuration chooses, over the residual stream.

    Args:
      parametric: whether it has weights.
      kind: another normalization_type than that of the section.
    """
    make = lookup("norm", kind or section.normalization_type)
    return make(section, building, rngs, parametric=parametric)


def rms_norm(section: Block, init: Init, rngs: nnx.Rngs, *, parametric: bool) -> nnx.Module:
    """RMSNorm over the residual stream."""
    epsilon = section.normalization_layer_epsilon
    return RMSNorm(init.dimensions.emb_dim, epsilon, init, rngs, parametric=parametric)


def layer_norm(section: Block, init: Init, rngs: nnx.Rngs, *, parametric: bool) -> nnx.Module:
    """LayerNorm over the residual stream."""
    size, epsilon = init.dimensions.emb_dim, section.normalization_layer_epsilon
    has_bias = section.normalization_bias
    return LayerNorm(size, epsilon, has_bias, init, rngs, parametric=parametric)


def scale_norm(
    section: Block, init: Init, rngs: nnx.Rngs, *, parametric: bool, centered: bool = False
) -> nnx.Module:
    """ScaleNorm over the residual stream."""
    size, epsilon = init.dimensions.emb_dim, section.normalization_layer_epsilon
    return ScaleNorm(size, epsilon, init, rngs, centered=centered, parametric=parametric)


scale_norm_centered = functools.partial(scale_norm, centered=True)
