"""The short convolution before a recurrence: of each channel, over the newest tokens.

    y_t = sum_(i<W) kernel_i x_(t-W+1+i) + bias

It sees tokens of the same document only. What is earlier than the first token is the decode state,
the last W - 1 inputs. Activations are the mixer's.

Legend: B sequences, T tokens, W width of the convolution, P = W - 1 earlier tokens, X channels, in
any number of dimensions, such as heads N and their width H.
"""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from MaxText.layers.context import ForwardContext
from MaxText.layers.lowering.shift import earlier_tokens
from MaxText.layers.params import Init, Shape, param, zeros


class ShortConvolution(nnx.Module):
    """A causal convolution of each channel by itself."""

    def __init__(
        self,
        shape: Shape,
        axes: Sequence[str | None],
        init: Init,
        rngs: nnx.Rngs,
        *,
        width: int,
        use_bias: bool = False,
    ):
        """Declares the kernel [W, X] and the bias [X].

        Args:
          shape: X, the sizes of the channels' dimensions.
          axes: Their logical axes.
          init: Dtype of the weights.
          rngs: RNG streams that weights are drawn from.
          width: W.
          use_bias: Whether a bias is added; it starts at 0.
        """
        self.width = width
        self.shape = shape
        dtype = init.weight_dtype
        self.kernel = param(rngs, (width, *shape), (None, *axes), _uniform, dtype=dtype)
        self.bias = param(rngs, shape, tuple(axes), zeros, dtype=dtype) if use_bias else None

    def __call__(
        self, x_BTX: jax.Array, context: ForwardContext, state_BPX: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the output [B, T, X], and the state after the last token, both float32.

        Args:
          x_BTX: Inputs.
          context: `segments_BT` bounds what a token sees, `lengths_B` says where padding begins.
          state_BPX: State before the first token, whose document it continues; None is zeros.
        """
        x_BTX = x_BTX.astype(jnp.float32)
        segments_BT = context.segments_BT
        kernel_WX = self.kernel[...].astype(jnp.float32)
        y_BTX = x_BTX * kernel_WX[-1]
        for distance in range(1, self.width):
            earlier_BTX = _earlier(x_BTX, distance, state_BPX)
            if segments_BT is not None:
                is_before_first = jnp.arange(x_BTX.shape[1]) < distance
                of_earlier_BT = jnp.where(
                    is_before_first, segments_BT[:, :1], earlier_tokens(segments_BT, distance)
                )
                is_same_BT = of_earlier_BT == segments_BT
                is_same = is_same_BT.reshape(*is_same_BT.shape, *[1] * len(self.shape))
                earlier_BTX = jnp.where(is_same, earlier_BTX, 0)
            y_BTX += earlier_BTX * kernel_WX[-1 - distance]
        if self.bias is not None:
            y_BTX += self.bias[...].astype(jnp.float32)
        return y_BTX, self._state_after(x_BTX, context.lengths_B, state_BPX)

    def _state_after(
        self, x_BTX: jax.Array, lengths_B: jax.Array | None, state_BPX: jax.Array | None
    ) -> jax.Array:
        """Returns the last P inputs, float32 [B, P, X]; zeros stand for tokens that there are not.

        Args:
          x_BTX: Inputs.
          lengths_B: Tokens of each sequence, without padding; None is all.
          state_BPX: State before the first token.
        """
        num_earlier = self.width - 1
        if state_BPX is None:
            state_BPX = jnp.zeros((len(x_BTX), num_earlier, *self.shape), jnp.float32)
        inputs = jnp.concatenate([state_BPX, x_BTX], axis=1)
        if lengths_B is None:
            return inputs[:, x_BTX.shape[1] :]
        positions_BP = lengths_B[:, None] + jnp.arange(num_earlier)
        positions_BPX = positions_BP.reshape(*positions_BP.shape, *[1] * len(self.shape))
        return jnp.take_along_axis(inputs, positions_BPX, axis=1)


def _earlier(x_BTX: jax.Array, distance: int, state_BPX: jax.Array | None) -> jax.Array:
    """Returns what is `distance` tokens earlier; before the first token, the state or zeros."""
    length = x_BTX.shape[1]
    if state_BPX is None:
        return earlier_tokens(x_BTX, distance)
    start = state_BPX.shape[1] - distance
    return jnp.concatenate([state_BPX, x_BTX], axis=1)[:, start : start + length]


def _uniform(key: jax.Array, shape: Shape, num_input_dims: int, dtype: jnp.dtype) -> jax.Array:
    """Draws a kernel uniformly between -1 / sqrt(W) and 1 / sqrt(W), as torch.nn.Conv1d does."""
    bound = 1 / math.sqrt(shape[0])
    return jax.random.uniform(key, shape, jnp.float32, -bound, bound).astype(dtype)
