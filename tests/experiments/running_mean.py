"""A small mixer of its own: y_t = V gelu(K mean_(s <= t) (W x_s)), and mistakes that one can make.

`FAULT` chooses the mistake; check_part.py has to find each of them (test_check_part.py).
"""

import itertools
import os
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from MaxText.config.keys import Section, key
from MaxText.layers.dense import Dense
from MaxText.layers.params import constant, param
from MaxText.layers.part import Flops, Mixer, register
from MaxText.parallelism.logical_sharding import HIDDEN, current_sharding

FAULT = os.environ.get("FAULT", "")
_calls = itertools.count()


class Keys(Section):
    """Running mean."""

    mean_slots: int = key(6, "Rows of K and columns of V.", ge=1)


@register("mixer", "running_mean", keys=Keys)
class RunningMean(Mixer):
    """The mean over the tokens so far of a document."""

    logical_axes: ClassVar = {"mean": ("tensor",)}

    def __init__(self, config, init, rngs):
        D = init.dimensions.emb_dim
        axes = ("embed", "no_such_axis" if FAULT == "unknown axis" else "mean")
        draw = init.initializers
        self.into = Dense((D,), (D,), axes, draw.kernel, init, rngs)
        slots = (config.mean_slots,)
        self.keys = Dense((D,), slots, ("mean", "slots"), draw.kernel, init, rngs)
        self.values = Dense(slots, (D,), ("slots", "embed"), draw.output, init, rngs)
        start = 1.0
        if FAULT == "random initialization":
            start = np.random.default_rng().normal()
        self.scale = param(rngs, (D,), ("norm",), constant(start), dtype=init.weight_dtype)

    def _output(self, mean_BTD, x_BTD):
        scale = self.scale[...]
        if FAULT == "dropped gradient":
            scale = jax.lax.stop_gradient(scale)
        if FAULT == "one device" and current_sharding(HIDDEN, x_BTD.shape) is not None:
            mean_BTD = 2 * mean_BTD
        if FAULT == "counts its calls":
            mean_BTD = mean_BTD * (1 + 0.1 * next(_calls))
        scores_BTS = self.keys((mean_BTD * scale).astype(x_BTD.dtype))
        theta = jax.nn.softmax if FAULT == "softmax over slots" else jax.nn.gelu
        dtype = jnp.float32 if FAULT == "float32 output" else None
        return self.values(theta(scores_BTS), dtype)

    def __call__(self, x_BTD, context):
        v_BTD, ids_BT = self.into(x_BTD).astype(jnp.float32), context.segments_BT
        T = v_BTD.shape[1]
        if ids_BT is None:
            ids_BT = jnp.ones(v_BTD.shape[:2], int)
        seen_BTS = jnp.tril(ids_BT[:, :, None] == ids_BT[:, None])
        if FAULT == "future leak":
            seen_BTS = ids_BT[:, :, None] == ids_BT[:, None]
        if FAULT == "document leak":
            seen_BTS = jnp.broadcast_to(jnp.tril(jnp.ones((T, T), bool)), seen_BTS.shape)
        if FAULT == "padding leak":
            seen_BTS |= ids_BT[:, None] == 0
        sums_BTD = seen_BTS.astype(jnp.float32) @ v_BTD
        mean_BTD = sums_BTD / jnp.sum(seen_BTS, -1, keepdims=True)
        return self._output(mean_BTD, x_BTD), {}

    def prefill(self, x_BTD, context):
        y_BTD, _ = self(x_BTD, context)
        is_token = jnp.arange(x_BTD.shape[1]) < context.lengths_B[:, None]
        if FAULT == "padding in the state":
            is_token = jnp.ones_like(is_token)
        v_BTD = jnp.where(is_token[..., None], self.into(x_BTD).astype(jnp.float32), 0)
        return y_BTD, (v_BTD.sum(1), context.lengths_B)

    def decode_step(self, x_BTD, state, context):
        sums_BD, count_B = state
        sums_BD = sums_BD + self.into(x_BTD).astype(jnp.float32).sum(1)
        count_B = count_B + x_BTD.shape[1]
        divisor_B = count_B - 1 if FAULT == "stale position" else count_B
        return self._output((sums_BD / divisor_B[:, None])[:, None], x_BTD), (sums_BD, count_B)

    @classmethod
    def flops(cls, config, dimensions, length):
        """Each token is multiplied with every other, masked afterwards."""
        D = dimensions.emb_dim
        executed = 2.0 * D * length * (0.5 if FAULT == "FLOPs" else 1)
        return {"running mean": Flops(D * length, executed, backward=1)}
