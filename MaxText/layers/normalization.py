"""Norms over the last dimension with float32 statistics.

The parameter `scale` is the factor, or with normalization_zero_centered its difference from 1, so
that weight decay pulls the factor to 1 instead of 0.
"""

import functools
import math
from typing import Literal, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from MaxText.config.layer_sections import BlockConfig
from MaxText.config.registry import register, registration
from MaxText.layers.params import AbstractRngs, Init, constant, param, zeros
from MaxText.layers.part_outputs import check_norm


class Norm(Protocol):
    """A module that normalizes the last dimension of an array."""

    def __call__(self, x: jax.Array, /) -> jax.Array:
        """Returns x normalized, in its dtype."""
        ...


class RMSNorm(nnx.Module):
    """x / sqrt(mean(x^2) + eps) * scale (Zhang and Sennrich 2019)."""

    rows = "norms"

    def __init__(
        self,
        size: int,
        epsilon: float,
        init: Init,
        rngs: nnx.Rngs,
        *,
        parametric: bool = True,
        initial: float = 1.0,
    ):
        """Declares the scale.

        Args:
          size: Number of scales: the size of the last dimension, or 1 for all.
          epsilon: eps.
          init: dtype of the scale, and whether it is stored as its difference from 1.
          rngs: RNG streams that weights are drawn from.
          parametric: Whether there is a scale at all.
          initial: The factor at the start.
        """
        self.size = size
        self.epsilon = epsilon
        self.zero_centered = init.zero_centered_norms
        stored = constant(initial - 1.0 if self.zero_centered else initial)
        dtype = init.weight_dtype
        self.scale = param(rngs, (size,), ("norm",), stored, dtype=dtype) if parametric else None

    def factors(self) -> jax.Array:
        """Returns the factors in float32, [size]; ones without a scale."""
        if self.scale is None:
            return jnp.ones(self.size, jnp.float32)
        return effective_scale(self.scale, self.zero_centered)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns x normalized over its last dimension, in its dtype."""
        return rms_normalize(x, None if self.scale is None else self.factors(), self.epsilon)


class LayerNorm(RMSNorm):
    """(x - mean) / sqrt(variance + eps) * scale + bias (Ba et al. 2016)."""

    bias: nnx.Param | None = None

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns x normalized over its last dimension, in its dtype."""
        x_float = x.astype(jnp.float32)
        y = super().__call__(x_float - jnp.mean(x_float, axis=-1, keepdims=True))
        if self.bias is not None:
            y = y + self.bias[...].astype(jnp.float32)
        return y.astype(x.dtype)


class ScaleNorm(RMSNorm):
    """g x / |x| with a scalar g, initially sqrt(D) (Nguyen and Salazar 2019)."""

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns x normalized over its last dimension, in its dtype."""
        y = rms_normalize(x.astype(jnp.float32), None, self.epsilon)
        y = y / math.sqrt(x.shape[-1])  # from a mean of squares to a sum
        return (y if self.scale is None else y * self.factors()).astype(x.dtype)


class HeadNorm(nnx.Module):
    """Norm of queries, keys or values: RMSNorm, or LayerNorm without bias.

    scope says what the statistics are over, and what share a scale:

        head      each head; one scale [H] for all heads (Qwen 3, Gemma 3)
        separate  each head; a scale for each, [N, H] (StableLM 2, Cohere)
        joint     all heads of a token together; scale [N, H] (OLMo 2)

    Where tensor parallelism divides the heads, joint statistics are summed over its devices.

    Legend: B sequences, T tokens, N heads, H head_dim.
    """

    rows = "norms"

    def __init__(
        self,
        shape: tuple[int, int],
        heads_axis: str,
        init: Init,
        rngs: nnx.Rngs,
        *,
        epsilon: float,
        parametric: bool = True,
        scope: Literal["head", "separate", "joint"] = "head",
        kind: Literal["rms_norm", "layer_norm"] = "rms_norm",
    ):
        """Declares the scale.

        Args:
          shape: N and H.
          heads_axis: Logical axis of the heads.
          init: dtype of the scale, and whether it is stored as its difference from 1.
          rngs: RNG streams that weights are drawn from.
          epsilon: Added to the mean square.
          parametric: Whether there is a scale.
          scope: As above.
          kind: layer_norm subtracts the mean.
        """
        self.epsilon = epsilon
        self.zero_centered = init.zero_centered_norms
        self.statistics_axes = (-2, -1) if scope == "joint" else -1
        self.subtracts_mean = kind == "layer_norm"
        has_one_scale = scope == "head"
        declare = functools.partial(
            param,
            rngs,
            shape[1:] if has_one_scale else shape,
            ("norm",) if has_one_scale else (heads_axis, "kv"),
            constant(0.0 if self.zero_centered else 1.0),
            dtype=init.weight_dtype,
        )
        self.scale = declare() if parametric else None

    def __call__(self, x_BTNH: jax.Array) -> jax.Array:
        """Returns the normalized heads, in their dtype."""
        factors = None if self.scale is None else effective_scale(self.scale, self.zero_centered)
        axes = self.statistics_axes
        if not self.subtracts_mean:
            return rms_normalize(x_BTNH, factors, self.epsilon, axes)
        x_float = x_BTNH.astype(jnp.float32)
        x_float = x_float - jnp.mean(x_float, axis=axes, keepdims=True)
        return rms_normalize(x_float, factors, self.epsilon, axes).astype(x_BTNH.dtype)


def rms_normalize(
    x: jax.Array, factors: jax.Array | None, epsilon: float, axis: int | tuple[int, ...] = -1
) -> jax.Array:
    """Returns x / sqrt(mean(x^2) + epsilon) * factors, in the dtype of x.

    Args:
      x: Any array.
      factors: Float32 factors that broadcast to x; None is 1.
      epsilon: Epsilon inside of the root.
      axis: Dimensions that the mean is over.
    """
    x_float = x.astype(jnp.float32)
    y = x_float * inverse_rms(x_float, epsilon, axis)
    return (y if factors is None else y * factors).astype(x.dtype)


def inverse_rms(x: jax.Array, epsilon: float, axis: int | tuple[int, ...] = -1) -> jax.Array:
    """Returns 1 / sqrt(mean(x^2) + epsilon), float32, with `axis` of size 1."""
    mean_square = jnp.mean(jnp.square(x.astype(jnp.float32)), axis=axis, keepdims=True)
    return jax.lax.rsqrt(mean_square + epsilon)


def effective_scale(scale: nnx.Param, zero_centered: bool) -> jax.Array:
    """Returns a norm's factor in float32, for precision near 1."""
    stored = scale[...].astype(jnp.float32)
    return 1.0 + stored if zero_centered else stored


def make_norm(
    config: BlockConfig,
    init: Init,
    rngs: nnx.Rngs,
    *,
    parametric: bool = True,
    kind: str | None = None,
) -> Norm:
    """Builds a norm of the residual stream; a custom one is checked abstractly.

    Args:
      config: normalization_type and its constants.
      init: Sizes and dtypes.
      rngs: RNG streams that weights are drawn from.
      parametric: Whether it has a scale and, if its type has one, a bias.
      kind: Registered name of its type, in place of normalization_type.
    """
    registered = registration("norm", kind or config.normalization_type)
    make = registered.load()
    norm = make(config, init, rngs, parametric=parametric)
    if not registered.is_built_in and isinstance(rngs, AbstractRngs):
        check_norm(make, norm, init.dimensions.emb_dim, init.dtype)
    return norm


@register("norm", "rms_norm")
def rms_norm(config: BlockConfig, init: Init, rngs: nnx.Rngs, *, parametric: bool) -> nnx.Module:
    """Builds an RMSNorm."""
    epsilon = config.normalization_layer_epsilon
    return RMSNorm(init.dimensions.emb_dim, epsilon, init, rngs, parametric=parametric)


@register("norm", "layer_norm")
def layer_norm(config: BlockConfig, init: Init, rngs: nnx.Rngs, *, parametric: bool) -> nnx.Module:
    """Builds a LayerNorm, with a bias if normalization_bias is set."""
    size = init.dimensions.emb_dim
    epsilon = config.normalization_layer_epsilon
    norm = LayerNorm(size, epsilon, init, rngs, parametric=parametric)
    if config.normalization_bias and parametric:
        norm.bias = param(rngs, (size,), ("norm",), zeros, dtype=init.weight_dtype)
    return norm


@register("norm", "scale_norm")
def scale_norm(config: BlockConfig, init: Init, rngs: nnx.Rngs, *, parametric: bool) -> nnx.Module:
    """Builds a ScaleNorm with g = sqrt(D)."""
    epsilon = config.normalization_layer_epsilon
    initial = math.sqrt(init.dimensions.emb_dim)
    return ScaleNorm(1, epsilon, init, rngs, parametric=parametric, initial=initial)


@register("norm", "scale_norm_centered")
def scale_norm_centered(
    config: BlockConfig, init: Init, rngs: nnx.Rngs, *, parametric: bool
) -> nnx.Module:
    """Builds GPT-Neo's scalenorm, a LayerNorm with one scale and no bias."""
    return LayerNorm(1, config.normalization_layer_epsilon, init, rngs, parametric=parametric)
