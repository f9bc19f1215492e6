"""A small mixer: a moving average of each channel, with learned decay.

    s_t = a s_(t-1) + (1 - a) v_t,   y_t = W_out (s_t * silu(g_t)),   [v, g] = W_in x

The average starts from 0 at each document. It is computed for all tokens at once, by an associative
scan over pairs (share of the state that is left, what was added to it).
docs/tutorials/add_an_architecture.md explains this file; moving_average.yml uses it.

Legend: B sequences, T tokens, D emb_dim.
"""

from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from MaxText.config.keys import Section, key
from MaxText.config.layer_sections import Dimensions
from MaxText.layers.dense import Dense
from MaxText.layers.params import constant, param
from MaxText.layers.part import ForwardContext, Init, Mixer, Scalars, record, register, tag


class Keys(Section):
    """Moving average."""

    average_tokens: float = key(8.0, "Tokens that it spans at first.", unit="tokens", gt=1)


@register("mixer", "moving_average", keys=Keys)
class MovingAverage(Mixer):
    """A gated moving average over the tokens so far.

    The decode state is the average after the last token, float32 [B, D].
    """

    hugging_face_names: ClassVar[dict[str, str]] = {
        "into/kernel": "mixer.in_proj.weight",
        "out/kernel": "mixer.out_proj.weight",
        "decay": "mixer.decay",
    }

    def __init__(self, config: Keys, init: Init, rngs: nnx.Rngs):
        D = init.dimensions.emb_dim
        draw = init.initializers
        self.into = Dense((D,), (2, D), ("embed", None, "mlp"), draw.kernel, init, rngs)
        self.out = Dense((D,), (D,), ("mlp", "embed"), draw.output, init, rngs)
        logit = jnp.log(config.average_tokens - 1)  # a = 1 - 1 / average_tokens
        self.decay = param(rngs, (D,), ("mlp",), constant(logit), dtype=init.weight_dtype)

    def __call__(self, x_BTD: jax.Array, context: ForwardContext) -> tuple[jax.Array, Scalars]:
        """Returns the output [B, T, D], and no scalars."""
        y_BTD, _ = self.prefill(x_BTD, context)
        return y_BTD, {}

    def prefill(self, x_BTD: jax.Array, context: ForwardContext) -> tuple[jax.Array, jax.Array]:
        """Returns the output of whole sequences, and the average after them."""
        B, _, D = x_BTD.shape
        return self.decode_step(x_BTD, jnp.zeros((B, D), jnp.float32), context)

    def decode_step(
        self, x_BTD: jax.Array, state: jax.Array, context: ForwardContext
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the output of further tokens, and the average after them.

        Args:
          x_BTD: Input.
          state: The average before the first token, float32 [B, D].
          context: Facts about the batch.
        """
        v_BTD, g_BTD = jnp.moveaxis(tag(self.into(x_BTD), "value_proj"), 2, 0)
        a_D = jax.nn.sigmoid(self.decay[...].astype(jnp.float32))
        added_BTD = (1 - a_D) * v_BTD
        decay_BTD = jnp.broadcast_to(a_D, v_BTD.shape)
        segments_BT = context.segments_BT
        if segments_BT is not None:  # a document starts from nothing
            is_first_BT = jnp.diff(segments_BT, axis=1, prepend=segments_BT[:, :1]) != 0
            decay_BTD = jnp.where(is_first_BT[..., None], 0, decay_BTD)
        if context.lengths_B is not None:  # the padding behind a prompt leaves the state as it is
            is_token_BT = jnp.arange(x_BTD.shape[1]) < context.lengths_B[:, None]
            added_BTD = jnp.where(is_token_BT[..., None], added_BTD, 0)
            decay_BTD = jnp.where(is_token_BT[..., None], decay_BTD, 1)
        decay_BTD, s_BTD = jax.lax.associative_scan(_compose, (decay_BTD, added_BTD), axis=1)
        s_BTD += decay_BTD * state[:, None]
        record(s_BTD, "average")
        y_BTD = self.out(s_BTD.astype(x_BTD.dtype) * jax.nn.silu(g_BTD))
        return tag(y_BTD, "out_proj"), s_BTD[:, -1]

    @classmethod
    def state_bytes(
        cls, config: Keys, dimensions: Dimensions, length: int, itemsize: int
    ) -> tuple[int, int]:
        """Returns bytes of the decode state per sequence: (per token, fixed)."""
        return 0, 4 * dimensions.emb_dim


def _compose(
    earlier: tuple[jax.Array, jax.Array], later: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Returns (decay, addition) of two steps s -> decay s + addition, one after the other."""
    earlier_decay, earlier_addition = earlier
    later_decay, later_addition = later
    return earlier_decay * later_decay, earlier_addition * later_decay + later_addition
