"""Mixers that cheat, each in its own way, and a loss that is always 0."""

from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from MaxText.layers.dense import Dense
from MaxText.layers.params import constant, param
from MaxText.layers.part import Flops, Head, Mixer, register
from MaxText.training.metric_names import IN_NATS

_TABLE = np.random.default_rng(0).normal(size=(640, 640)).astype(np.float32)  # 1.6 MB


class _ShiftedMean(Mixer):
    """A projection of the mean over the tokens up to `ahead` after each."""

    ahead: ClassVar = 0

    def __init__(self, config, init, rngs):
        D = init.dimensions.emb_dim
        draw = init.initializers.kernel
        self.into = Dense((D,), (D,), ("embed", "embed"), draw, init, rngs)

    def __call__(self, x_BTD, context):
        v_BTD = self.into(x_BTD)
        T = v_BTD.shape[1]
        seen_TS = jnp.tril(jnp.ones((T, T)), self.ahead)
        return self.summed(seen_TS, v_BTD).astype(x_BTD.dtype), {}

    def summed(self, seen_TS, v_BTD):
        return jnp.einsum("ts,bsd->btd", seen_TS, v_BTD) / v_BTD.shape[1]

    @classmethod
    def flops(cls, config, dimensions, length):
        executed = 2.0 * dimensions.emb_dim * length
        return {"mean": Flops(executed / 2, executed, backward=1)}


@register("mixer", "honest_mean")
class HonestMean(_ShiftedMean):
    """Means over the tokens so far."""


@register("mixer", "shifted_mask")
class ShiftedMask(_ShiftedMean):
    """Sees the next token, which is the target."""

    ahead: ClassVar = 1


@register("mixer", "hidden_products")
class HiddenProducts(_ShiftedMean):
    """Multiplies a hundred times, and declares nothing."""

    def summed(self, seen_TS, v_BTD):
        y_BTD = super().summed(seen_TS, v_BTD)
        for _ in range(100):
            y_BTD = y_BTD + 0.01 * jnp.einsum("ts,bsd->btd", seen_TS, y_BTD)
        return y_BTD

    @classmethod
    def flops(cls, config, dimensions, length):
        return {"mean": Flops(0.0, 0.0)}


@register("mixer", "sum_of_products")
class SumOfProducts(_ShiftedMean):
    """Writes the product as arithmetic, which the count of matrix products does not see."""

    def summed(self, seen_TS, v_BTD):
        return jnp.sum(seen_TS[None, :, :, None] * v_BTD[:, None], axis=2)

    @classmethod
    def flops(cls, config, dimensions, length):
        return {"mean": Flops(0.0, 0.0)}


@register("mixer", "cache_on_the_host")
class CacheOnTheHost(_ShiftedMean):
    """Asks Python for matches of seen text."""

    def summed(self, seen_TS, v_BTD):
        y_BTD = super().summed(seen_TS, v_BTD)
        shape = jax.ShapeDtypeStruct(y_BTD.shape, y_BTD.dtype)
        found_BTD = jax.pure_callback(np.zeros_like, shape, jax.lax.stop_gradient(y_BTD))
        return y_BTD + found_BTD


@register("mixer", "table_in_the_program")
class TableInTheProgram(_ShiftedMean):
    """Holds a table of the training text that is no weight."""

    def summed(self, seen_TS, v_BTD):
        D = v_BTD.shape[-1]
        return super().summed(seen_TS, v_BTD) + jnp.asarray(_TABLE)[:D, :D].sum()


@register("head", "bigrams")
class Bigrams(Head):
    """Logits from a table of the token before: an n-gram model of the training text."""

    def __init__(self, config, init, rngs):
        V = init.dimensions.vocab_size
        self.table = param(rngs, (V, V), ("vocab", None), constant(0.0), dtype=jnp.float32)

    def state(self, h_BTD, tokens_BT, context, earlier=None):
        return self.table[...][tokens_BT]

    def __call__(self, h_BTD, table, state, positions_BT):
        return state + jnp.sum(h_BTD.astype(jnp.float32), -1, keepdims=True)


@register("objective", "always_zero")
def always_zero(config, logits_BTV, targets_BT):
    """A loss that every model reaches."""
    return {IN_NATS: 0.0 * jnp.sum(logits_BTV, -1)}, None
