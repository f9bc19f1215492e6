"""A small mixer: a moving average of each channel, with learned decay.

    s_t = a s_(t-1) + (1 - a) v_t,   y_t = W_out (s_t * silu(g_t)),   [v, g] = W_in x

Legend: B sequences, T tokens, D emb_dim.
"""

from typing import ClassVar

import jax
import jax.numpy as jnp

from MaxText.config.keys import Section, key
from MaxText.layers.dense import Dense
from MaxText.layers.params import constant, param
from MaxText.layers.part import Mixer, record, register, tag


class Keys(Section):
    """Moving average."""

    average_tokens: float = key(8.0, "Tokens that it spans at first.", unit="tokens", gt=1)


@register("mixer", "moving_average", keys=Keys)
class MovingAverage(Mixer):
    """A gated moving average over the tokens so far."""

    def __init__(self, config, init, rngs):
        D = init.dimensions.emb_dim
        draw = init.initializers
        dtype = init.weight_dtype
        self.into = Dense((D,), (2, D), ("embed", None, "mlp"), draw.kernel, init, rngs)
        self.out = Dense((D,), (D,), ("mlp", "embed"), draw.output, init, rngs)
        logit = jnp.log(config.average_tokens - 1)  # a = 1 - 1 / average_tokens
        self.decay = param(rngs, (D,), ("mlp",), constant(logit), dtype=dtype)

    hugging_face_names: ClassVar = {
        "into/kernel": "mixer.in_proj.weight",
        "out/kernel": "mixer.out_proj.weight",
        "decay": "mixer.decay",
    }

    def __call__(self, x_BTD, context):
        return self.prefill(x_BTD, context)[0], {}

    def prefill(self, x_BTD, context):
        B, _, D = x_BTD.shape
        return self.decode_step(x_BTD, jnp.zeros((B, D), jnp.float32), context)

    def decode_step(self, x_BTD, state_BD, context):
        v_BTD, g_BTD = jnp.moveaxis(tag(self.into(x_BTD), "value_proj"), 2, 0)
        a = jax.nn.sigmoid(self.decay[...].astype(jnp.float32))
        added_BTD = (1 - a) * v_BTD
        kept_BTD = jnp.broadcast_to(a, v_BTD.shape)
        if (ids_BT := context.segments_BT) is not None:  # a document starts from nothing
            is_first = jnp.diff(ids_BT, axis=1, prepend=ids_BT[:, :1]) != 0
            kept_BTD = jnp.where(is_first[..., None], 0, kept_BTD)
        if context.lengths_B is not None:  # the padding behind a prompt leaves the state as it is
            is_token = (jnp.arange(x_BTD.shape[1]) < context.lengths_B[:, None])[..., None]
            added_BTD = jnp.where(is_token, added_BTD, 0)
            kept_BTD = jnp.where(is_token, kept_BTD, 1)

        def after(first, second):
            return first[0] * second[0], first[1] * second[0] + second[1]

        kept_BTD, s_BTD = jax.lax.associative_scan(after, (kept_BTD, added_BTD), axis=1)
        s_BTD += kept_BTD * state_BD[:, None]
        record(s_BTD, "average")
        y_BTD = self.out(s_BTD.astype(x_BTD.dtype) * jax.nn.silu(g_BTD))
        return tag(y_BTD, "out_proj"), s_BTD[:, -1]

    @classmethod
    def state_bytes(cls, config, dimensions, length, itemsize):
        return 0, 4 * dimensions.emb_dim
