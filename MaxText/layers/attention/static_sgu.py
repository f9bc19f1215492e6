"""Static SGU: a sum over earlier tokens with fixed weights.

    y_t = sum_d x_(t-d) / (d+2), for distances d from 0 to `kernel`

fattorib/transformer's form of the spatial gating unit (Liu et al. 2021). It has no parameters, and
no gradient flows through its input. The mixer that it accompanies has the other half of the
channels.

Legend: B sequences, T tokens, D emb_dim, E = D/2 channels, P the `kernel` positions before the
tokens, S = P + T input tokens.
"""

import dataclasses
from typing import Self

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
from MaxText.layers.part import DecodeState, Flops, Init, Mixer, MixerInput, Scalars


class BesideStaticSGU(Mixer):
    """Static SGU on half of the channels, to `combine` with a mixer.

    The decode state is that of the mixer, and the newest `kernel` inputs of the SGU, x_BPE.
    """

    sgu_kernel: int
    sgu_precision: str | None

    @classmethod
    def build(cls, layer: LayerConfig, init: Init, rngs: nnx.Rngs) -> Self:
        """Builds the mixer for the second half of the channels; see `Part.build`."""
        width = init.dimensions.emb_dim // 2
        half_dimensions = init.dimensions._replace(emb_dim=width)
        part = super().build(layer, dataclasses.replace(init, dimensions=half_dimensions), rngs)
        part.sgu_kernel = layer.config.attention.static_sgu_kernel
        part.sgu_precision = init.precision
        return part

    @classmethod
    def flops(cls, config: ModelConfig, dimensions: Dimensions, length: int) -> dict[str, Flops]:
        """Returns the FLOPs of the mixer and of the sums; see `Part.flops`."""
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
        """Returns bytes of the mixer's state and of the newest inputs; see `Part.state_bytes`."""
        bytes_per_token, fixed = super().state_bytes(config, dimensions, length, itemsize)
        num_inputs = config.attention.static_sgu_kernel * dimensions.emb_dim // 2
        return bytes_per_token, fixed + num_inputs * itemsize

    def _halves(self, x_BTD: MixerInput) -> tuple[jax.Array, MixerInput]:
        """Returns the input of the SGU, x_BTE, and that of the mixer."""
        x_BTD = x_BTD[0] if isinstance(x_BTD, tuple) else x_BTD
        sgu_BTE, mixer_BTE = jnp.split(x_BTD, 2, axis=-1)
        sgu_BTE = jax.lax.stop_gradient(sgu_BTE)
        if self.has_separate_inputs:
            return sgu_BTE, (mixer_BTE, mixer_BTE, mixer_BTE)
        return sgu_BTE, mixer_BTE

    def _sums(self, sgu_BTE: jax.Array, context: ForwardContext) -> jax.Array:
        y_BTE = static_sgu(sgu_BTE, self.sgu_kernel, context.segments_BT, self.sgu_precision)
        record(y_BTE, "static_sgu")
        return y_BTE

    def __call__(self, x_BTD: MixerInput, context: ForwardContext) -> tuple[jax.Array, Scalars]:
        """Returns the sums and the mixer's output, [B, T, D], and the mixer's losses."""
        sgu_BTE, mixer_input = self._halves(x_BTD)
        out_BTE, scalars = super().__call__(mixer_input, context)
        return jnp.concatenate([self._sums(sgu_BTE, context), out_BTE], axis=-1), scalars

    def prefill(self, x_BTD: MixerInput, context: ForwardContext) -> tuple[jax.Array, DecodeState]:
        """Returns the output of prompts, and (the mixer's state, their newest inputs x_BPE)."""
        sgu_BTE, mixer_input = self._halves(x_BTD)
        out_BTE, state = super().prefill(mixer_input, context)
        lengths_B = context.lengths_B
        kernel = self.sgu_kernel
        assert lengths_B is not None
        positions_BP = lengths_B[:, None] - kernel + jnp.arange(kernel)[None]
        inputs_BPE = jnp.take_along_axis(sgu_BTE, jnp.maximum(positions_BP, 0)[..., None], axis=1)
        newest_BPE = jnp.where((positions_BP >= 0)[..., None], inputs_BPE, 0)
        y_BTD = jnp.concatenate([self._sums(sgu_BTE, context), out_BTE], axis=-1)
        return y_BTD, (state, newest_BPE)

    def decode_step(
        self, x_BTD: MixerInput, state: DecodeState, context: ForwardContext
    ) -> tuple[jax.Array, DecodeState]:
        """Returns the output of new tokens, and the state of `prefill` after them."""
        sgu_BTE, mixer_input = self._halves(x_BTD)
        mixer_state, newest_BPE = state
        out_BTE, mixer_state = super().decode_step(mixer_input, mixer_state, context)
        x_BSE = jnp.concatenate([newest_BPE, sgu_BTE], axis=1)
        weights = jnp.asarray(_banded_weights(sgu_BTE.shape[1], self.sgu_kernel))
        sums_BTE = _product(weights, x_BSE, self.sgu_precision).astype(sgu_BTE.dtype)
        newest_BPE = x_BSE[:, x_BSE.shape[1] - self.sgu_kernel :]
        return jnp.concatenate([sums_BTE, out_BTE], axis=-1), (mixer_state, newest_BPE)


def static_sgu(
    x_BTE: jax.Array,
    kernel: int,
    segments_BT: jax.Array | None = None,
    precision: str | None = None,
) -> jax.Array:
    """Returns sums [B, T, E] within segments, in O(T kernel).

    Args:
      x_BTE: Inputs.
      kernel: Largest distance of a token that is summed.
      segments_BT: Document of each token: sums stay within one.
      precision: Precision of the products.
    """
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
    """Returns the rows of a block, and the number of blocks that cover `length` tokens."""
    rows = min(max(kernel, 16), length)
    return rows, -(-length // rows)


def _product(weights: jax.Array, x: jax.Array, precision: str | None) -> jax.Array:
    return einsum_f32("...ts,...se->...te", weights.astype(x.dtype), x, precision)


def _banded_weights(rows: int, kernel: int) -> np.ndarray:
    """Returns float32 [rows, kernel + rows]; row t sums t to t + kernel."""
    distance = np.arange(rows)[:, None] + kernel - np.arange(kernel + rows)[None]
    inside = (distance >= 0) & (distance <= kernel)
    return np.where(inside, 1.0 / (np.maximum(distance, 0) + 2.0), 0.0).astype(np.float32)
