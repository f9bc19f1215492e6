"""Linear layers over any number of dimensions."""

import jax
import jax.numpy as jnp
from flax import nnx

from MaxText.config.model_sections import ModelConfig
from MaxText.config.registry import register
from MaxText.layers.params import Init, Initializer, Shape, param, zeros

Axes = tuple[str | None, ...]


class Dense(nnx.Module):
    """y[..., outputs] = x[..., inputs] kernel (+ bias)."""

    def __init__(
        self,
        inputs: Shape,
        outputs: Shape,
        axes: Axes,  # logical axes of the kernel, inputs first
        initializer: Initializer,
        init: Init,
        rngs: nnx.Rngs,
        *,
        use_bias: bool = False,
        used_in: jnp.dtype | None = None,  # dtype of the product; None is that of activations
    ):
        self.num_input_dims = len(inputs)
        self.dtype = used_in or init.dtype
        self.precision = init.precision
        self.dot_general = jax.lax.dot_general  # replaced in quantized layers
        self.is_quantizable = used_in is None
        dtype = init.weight_dtype
        self.kernel = param(
            rngs, inputs + outputs, axes, initializer,
            dtype=dtype, num_input_dims=len(inputs), used_in=self.dtype,
        )  # fmt: skip
        self.bias = (
            param(rngs, outputs, axes[len(inputs) :], zeros, dtype=dtype) if use_bias else None
        )

    def __call__(self, x: jax.Array, dtype: jnp.dtype | None = None) -> jax.Array:
        dtype, n = dtype or self.dtype, self.num_input_dims
        contracted = (tuple(range(x.ndim - n, x.ndim)), tuple(range(n)))
        y = self.dot_general(
            x.astype(dtype),
            self.kernel[...].astype(dtype),
            (contracted, ((), ())),
            precision=self.precision,
        )
        if self.bias is not None:
            y = y + self.bias[...].astype(dtype)
        return y


def einsum_f32(subscripts: str, a: jax.Array, b: jax.Array, precision: str | None) -> jax.Array:
    return jnp.einsum(subscripts, a, b, precision=precision, preferred_element_type=jnp.float32)


@register("projection", "dense")
def projection(
    model: ModelConfig,
    init: Init,
    rngs: nnx.Rngs,
    place: str,
    inputs: Shape,
    outputs: Shape,
    axes: Axes,
    initializer: Initializer,
    use_bias: bool,
) -> Dense:
    """Builds an attention projection; `place` is "qkv" or "proj"."""
    return Dense(inputs, outputs, axes, initializer, init, rngs, use_bias=use_bias)
