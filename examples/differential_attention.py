"""Differential attention (Ye et al. 2024, arXiv 2410.05258) as a mixer.

    o = norm((softmax(q1 k1^T) - lambda softmax(q2 k2^T)) v) (1 - lambda_init)

The queries and keys of each head are split in two halves. differential_attention.yml uses it.

Legend: B sequences, T query tokens, S key tokens, D emb_dim, N query heads, K key/value heads,
G query heads of a key/value head, H head_dim, C the two halves, E half of H.
"""

import jax
import jax.numpy as jnp

from MaxText.config.keys import Section, key
from MaxText.layers.dense import Dense
from MaxText.layers.kv_cache import KeyValueCache
from MaxText.layers.normalization import RMSNorm
from MaxText.layers.params import param
from MaxText.layers.part import Flops, Mixer, record, register, tag
from MaxText.layers.rotary import apply_rotary


class Keys(Section):
    """Differential attention."""

    diff_lambda_init: float | None = key(
        None, "lambda at first; null is 0.8 - 0.6 exp(-0.3 layer), layers counted from 0.", ge=0
    )


@register("mixer", "differential_attention", keys=Keys)
class DifferentialAttention(Mixer):
    """The difference of two softmax attentions, with less noise."""

    def __init__(self, config, init, rngs):
        (D, N, K, H) = init.dimensions[:4]
        draw = init.initializers
        self.first = config.diff_lambda_init
        self.query = Dense((D,), (N, H), ("embed", "q_heads", "kv"), draw.query, init, rngs)
        self.key, self.value = (
            Dense((D,), (K, H), ("embed", "kv_heads", "kv"), draw.key_value, init, rngs)
            for _ in range(2)
        )
        axes = ("q_heads", "kv", "embed")
        self.out = Dense((N, H), (D,), axes, draw.attention_output, init, rngs)
        axes = (None, None, None)  # q or k, half, E
        self.lambdas = param(rngs, (2, 2, H // 2), axes, small_normal, dtype=init.weight_dtype)
        self.norm = RMSNorm(H, 1e-5, init, rngs)

    def __call__(self, x_BTD, context):
        return self._sequences(x_BTD, context)[0], {}

    def prefill(self, x_BTD, context):
        y_BTD, k_BSKH, v_BSKH = self._sequences(x_BTD, context)
        return y_BTD, KeyValueCache.from_prefill(k_BSKH, v_BSKH, context.capacity)

    def decode_step(self, x_BTD, state, context):
        q_BTNH, k_BTKH, v_BTKH = self._projections(x_BTD, context)
        state = state.append(k_BTKH, v_BTKH, context.positions_BT)
        (B, _, K, H) = k_BTKH.shape
        S = state.capacity
        k_BKSH, v_BKSH = (x.reshape(B, K, S, H) for x in (state.keys, state.values))
        seen_BTS = jnp.arange(S) <= context.positions_BT[:, :, None]
        return self._attend(q_BTNH, k_BKSH, v_BKSH, seen_BTS, context.layer), state

    def _sequences(self, x_BTD, context):
        """The output of whole sequences, and their keys and values."""
        q_BTNH, k_BSKH, v_BSKH = self._projections(x_BTD, context)
        T = x_BTD.shape[1]
        ids_BT = context.segments_BT
        seen_BTS = jnp.tril(jnp.ones((1, T, T), bool))
        if ids_BT is not None:
            seen_BTS &= ids_BT[:, :, None] == ids_BT[:, None]
        k_BKSH = k_BSKH.swapaxes(1, 2)
        v_BKSH = v_BSKH.swapaxes(1, 2)
        return self._attend(q_BTNH, k_BKSH, v_BKSH, seen_BTS, context.layer), k_BSKH, v_BSKH

    def _projections(self, x_BTD, context):
        q_BTNH = tag(self.query(x_BTD), "query_proj")
        k_BTKH = tag(self.key(x_BTD), "key_proj")
        v_BTKH = tag(self.value(x_BTD), "value_proj")
        if context.rotary is not None:  # every other frequency: the table of heads half as wide
            table = tuple(x[..., ::2] for x in context.rotary)
            q_BTNH, k_BTKH = (
                apply_rotary(x.reshape(*x.shape[:2], -1, x.shape[-1] // 2), table).reshape(x.shape)
                for x in (q_BTNH, k_BTKH)
            )
        return q_BTNH, k_BTKH, v_BTKH

    def _attend(self, q_BTNH, k_BKSH, v_BKSH, seen_BTS, layer):
        (B, T, N, H) = q_BTNH.shape
        (K, S) = k_BKSH.shape[1:3]
        E = q_BTNH.shape[-1] // 2
        first = 0.8 - 0.6 * jnp.exp(-0.3 * layer) if self.first is None else self.first
        dots_C = jnp.sum(jnp.prod(self.lambdas[...].astype(jnp.float32), 0), -1)
        difference = jnp.exp(dots_C[0]) - jnp.exp(dots_C[1]) + first
        q_BTKGCE = q_BTNH.reshape(B, T, K, N // K, 2, E) * E**-0.5
        k_BKSCE = k_BKSH.reshape(B, K, S, 2, E)
        scores = jnp.einsum(
            "btkgce,bksce->bckgts", q_BTKGCE, k_BKSCE, preferred_element_type=jnp.float32
        )
        p_BCKGTS = jax.nn.softmax(jnp.where(seen_BTS[:, None, None, None], scores, -jnp.inf), -1)
        p_BKGTS = p_BCKGTS[:, 0] - difference * p_BCKGTS[:, 1]
        record(p_BKGTS.reshape(B, N, T, S), "probabilities")
        p_BKGTS = p_BKGTS.astype(v_BKSH.dtype)
        o = tag(jnp.einsum("bkgts,bksh->btkgh", p_BKGTS, v_BKSH), "context")
        o = self.norm(o.reshape(B, T, N, H)) * jnp.asarray(1 - first, o.dtype)
        return tag(self.out(o), "out_proj")

    @classmethod
    def problem(cls, config, dimensions):
        H = dimensions.head_dim
        return f"head_dim={H} is not a multiple of 4\nhead_dim={-(-H // 4) * 4}" if H % 4 else None

    @classmethod
    def flops(cls, config, dimensions, length):
        product = 2.0 * dimensions.num_query_heads * dimensions.head_dim  # of a query with a key
        found = Flops(product * length / 2, product * length)  # masked ones are executed, too
        return {"attention scores": found, "attention values": found}

    @classmethod
    def state_bytes(cls, config, dimensions, length, itemsize):
        return 2 * dimensions.num_kv_heads * dimensions.head_dim * itemsize, 0


def small_normal(rng, shape, num_input_dims, dtype):
    return 0.1 * jax.random.normal(rng, shape, dtype)
