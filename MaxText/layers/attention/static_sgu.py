"""Static SGU: a sum over earlier tokens with fixed weights.

    y_t = sum_d x_(t-d) / (d+2), for distances d from 0 to `kernel`

fattorib/transformer's form of the spatial gating unit (Liu et al. 2021). It has no parameters, and
no gradient flows through its input. Legend: E channels, P positions before the tokens.
"""

import dataclasses
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from MaxText.config.layer_sections import Dimensions
from MaxText.config.model_sections import LayerConfig, ModelConfig
from MaxText.layers.attention.attention import average_keys_visible
from MaxText.layers.capture import record
from MaxText.layers.context import ForwardContext
from MaxText.layers.dense import einsum_f32
from MaxText.layers.part import Flops, Init, Mixer, Scalars


class BesideStaticSGU(Mixer):
    """Static SGU on half of the channels, to `combine` with a mixer.

    The decode state is that of the mixer, and the newest `kernel` inputs of the SGU, x_BPE.
    """

    sgu_kernel: int
    sgu_precision: str | None

    @classmethod
    def build(cls, layer: LayerConfig, init: Init, rngs: nnx.Rngs) -> Self:
        width = init.dimensions.emb_dim // 2
        half = init.dimensions._replace(emb_dim=width)
        made = super().build(layer, dataclasses.replace(init, dimensions=half), rngs)
        made.sgu_kernel = layer.config.attention.static_sgu_kernel
        made.sgu_precision = init.precision
        return made

    @classmethod
    def flops(cls, config: ModelConfig, dimensions: Dimensions, length: int) -> dict[str, Flops]:
        kernel = config.attention.static_sgu_kernel
        width = dimensions.emb_dim
        rows, num_blocks = sgu_blocks(kernel, length)
        sums = Flops(
            width * average_keys_visible(length, causal=True, window=kernel + 1),
            width * num_blocks * rows * (kernel + rows) / length,
            backward=0,
        )
        return {**super().flops(config, dimensions, length), "static SGU": sums}

    @classmethod
    def state_bytes(
        cls, config: ModelConfig, dimensions: Dimensions, length: int, itemsize: int
    ) -> tuple[int, int]:
        bytes_per_token, fixed = super().state_bytes(config, dimensions, length, itemsize)
        kept = config.attention.static_sgu_kernel * dimensions.emb_dim // 2
        return bytes_per_token, fixed + kept * itemsize

    def _halves(self, x_BTD: Any) -> tuple[jax.Array, Any]:
        x_BTD = x_BTD[0] if self.has_separate_inputs else x_BTD
        first, rest = jnp.split(x_BTD, 2, axis=-1)
        first = jax.lax.stop_gradient(first)
        return first, (rest, rest, rest) if self.has_separate_inputs else rest

    def _sums(self, first: jax.Array, context: ForwardContext) -> jax.Array:
        y_BTE = static_sgu(first, self.sgu_kernel, context.segments_BT, self.sgu_precision)
        record(y_BTE, "static_sgu")
        return y_BTE

    def __call__(self, x_BTD: Any, context: ForwardContext) -> tuple[jax.Array, Scalars]:
        first, rest = self._halves(x_BTD)
        out, scalars = super().__call__(rest, context)
        return jnp.concatenate([self._sums(first, context), out], axis=-1), scalars

    def prefill(self, x_BTD: Any, context: ForwardContext) -> tuple[jax.Array, Any]:
        first, rest = self._halves(x_BTD)
        out, state = super().prefill(rest, context)
        lengths_B = context.lengths_B
        kernel = self.sgu_kernel
        assert lengths_B is not None
        positions_BP = lengths_B[:, None] - kernel + jnp.arange(kernel)[None]
        found = jnp.take_along_axis(first, jnp.maximum(positions_BP, 0)[..., None], axis=1)
        newest = jnp.where((positions_BP >= 0)[..., None], found, 0)
        return jnp.concatenate([self._sums(first, context), out], axis=-1), (state, newest)

    def decode_step(self, x_BTD: Any, state: Any, context: ForwardContext) -> tuple[jax.Array, Any]:
        first, rest = self._halves(x_BTD)
        own, newest = state
        out, own = super().decode_step(rest, own, context)
        x_BSE = jnp.concatenate([newest, first], axis=1)
        weights = jnp.asarray(_banded_weights(first.shape[1], self.sgu_kernel))
        sums = _product(weights, x_BSE, self.sgu_precision).astype(first.dtype)
        newest = x_BSE[:, x_BSE.shape[1] - self.sgu_kernel :]
        return jnp.concatenate([sums, out], axis=-1), (own, newest)


def static_sgu(
    x_BTE: jax.Array,
    kernel: int,
    segments_BT: jax.Array | None = None,
    precision: str | None = None,
) -> jax.Array:
    """Returns sums [B, T, E] within segments, in O(T kernel)."""
    batch, length, channels = x_BTE.shape
    rows, num_blocks = sgu_blocks(kernel, length)
    spare = num_blocks * rows - length

    def with_earlier_positions(x: jax.Array) -> jax.Array:
        """Returns [B, blocks, kernel + rows, ...]."""
        x = jnp.pad(x, ((0, 0), (kernel, spare), *((0, 0),) * (x.ndim - 2)))
        starts = np.arange(num_blocks)[:, None] * rows + np.arange(kernel + rows)[None]
        return x[:, starts]

    weights = jnp.asarray(_banded_weights(rows, kernel))
    if segments_BT is not None:
        input_segments = with_earlier_positions(segments_BT)
        same = input_segments[:, :, kernel:, None] == input_segments[:, :, None, :]
        weights = jnp.where(same, weights, 0.0)
    y = _product(weights, with_earlier_positions(x_BTE), precision)
    return y.reshape(batch, num_blocks * rows, channels)[:, :length].astype(x_BTE.dtype)


def sgu_blocks(kernel: int, length: int) -> tuple[int, int]:
    rows = min(max(kernel, 16), length)
    return rows, -(-length // rows)


def _product(weights: jax.Array, x: jax.Array, precision: str | None) -> jax.Array:
    return einsum_f32("...ts,...se->...te", weights.astype(x.dtype), x, precision)


def _banded_weights(rows: int, kernel: int) -> np.ndarray:
    """Returns float32 [rows, kernel + rows]; row t sums t to t + kernel."""
    distance = np.arange(rows)[:, None] + kernel - np.arange(kernel + rows)[None]
    inside = (distance >= 0) & (distance <= kernel)
    return np.where(inside, 1.0 / (np.maximum(distance, 0) + 2.0), 0.0).astype(np.float32)
