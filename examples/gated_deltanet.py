"""Gated DeltaNet (Yang et al. 2024, arXiv 2412.06464) as a mixer.

    S_t = a_t S_(t-1) + b_t k_t (v_t - a_t S_(t-1)^T k_t)^T,   o_t = S_t^T q_t

by products of matrices in chunks of tokens (section 3.3). gated_deltanet.yml uses it.

Legend: B sequences, T tokens, D emb_dim, N heads, H head_dim, C tokens of a chunk.
"""

import jax
import jax.numpy as jnp
from jax.scipy.linalg import solve_triangular

from MaxText.config.keys import Section, key
from MaxText.layers.dense import Dense
from MaxText.layers.normalization import RMSNorm
from MaxText.layers.params import constant, param
from MaxText.layers.part import Flops, Mixer, record, register, tag


class Keys(Section):
    """Gated DeltaNet."""

    gdn_chunk: int = key(64, "Tokens of a chunk. No effect on the result.", unit="tokens", ge=1)
    gdn_conv: int = key(4, "Tokens that the convolution of q, k and v sees.", unit="tokens", ge=1)


@register("mixer", "gated_deltanet", keys=Keys)
class GatedDeltaNet(Mixer):
    """A linear RNN with a state corrected toward each new value."""

    def __init__(self, config, init, rngs):
        D = init.dimensions.emb_dim
        N = init.dimensions.num_query_heads
        H = init.dimensions.head_dim
        draw = init.initializers
        dtype = init.weight_dtype
        axes = ("embed", "q_heads", "kv")
        self.chunk = config.gdn_chunk
        self.taps = config.gdn_conv
        self.dtype = init.dtype
        for name in ("query", "key", "value", "gate"):
            setattr(self, name, Dense((D,), (N, H), axes, draw.kernel, init, rngs))
        self.rates = Dense((D,), (N, 2), ("embed", "q_heads", None), draw.kernel, init, rngs)
        shape = (self.taps, 3, N, H)
        mean = constant(1 / self.taps)
        self.conv = param(rngs, shape, (None, None, *axes[1:]), mean, dtype=dtype)
        self.log_decay = param(rngs, (N,), axes[1:2], constant(-2.0), dtype=dtype)
        self.norm = RMSNorm(H, 1e-5, init, rngs)
        self.out = Dense((N, H), (D,), (*axes[1:], "embed"), draw.attention_output, init, rngs)

    def __call__(self, x_BTD, context):
        return self.prefill(x_BTD, context)[0], {}

    def prefill(self, x_BTD, context):
        (B, _, _) = x_BTD.shape
        (N, H) = self.conv.shape[2:]
        newest = jnp.zeros((B, self.taps - 1, 3, N, H), jnp.float32)
        return self.decode_step(x_BTD, (newest, jnp.zeros((B, N, H, H), jnp.float32)), context)

    def decode_step(self, x_BTD, state, context):
        (newest, memory) = state
        (B, T, _) = x_BTD.shape
        ids_BT = jnp.ones((B, T), int) if context.segments_BT is None else context.segments_BT
        qkv = (self.query(x_BTD), self.key(x_BTD), self.value(x_BTD))
        qkv = [*map(tag, qkv, ("query_proj", "key_proj", "value_proj"))]
        x_BS3NH = jnp.concatenate([newest, jnp.stack(qkv, 2).astype(jnp.float32)], 1)
        # A convolution over the newest tokens of the same segment, then q and k of length 1.
        ids_BS = jnp.pad(ids_BT, ((0, 0), (self.taps - 1, 0)), "edge")
        y = 0.0
        conv = self.conv[...].astype(jnp.float32)
        for tap in range(self.taps):
            same_BT = (ids_BS[:, tap : tap + T] == ids_BT)[:, :, None, None, None]
            y += jnp.where(same_BT, x_BS3NH[:, tap : tap + T], 0) * conv[tap]
        q, k, v = jnp.moveaxis(jax.nn.silu(y), 2, 0)
        q, k = (x * jax.lax.rsqrt(jnp.sum(x * x, -1, keepdims=True) + 1e-6) for x in (q, k))
        rates = self.rates(x_BTD, jnp.float32)
        beta = jax.nn.sigmoid(rates[..., 0])
        log_a = jax.nn.softplus(rates[..., 1])
        log_a *= -jnp.exp(self.log_decay[...].astype(jnp.float32))
        record(beta, "write_strength")  # [B, T, N]
        record(jnp.exp(log_a), "decay")
        lengths_B = jnp.full((B,), T) if context.lengths_B is None else context.lengths_B
        is_token = (jnp.arange(T) < lengths_B[:, None])[..., None]  # padding keeps the state
        beta = jnp.where(is_token, beta, 0)
        log_a = jnp.where(is_token, log_a, 0)
        q *= memory.shape[-1] ** -0.5
        o, memory = delta_rule(q, k, v, beta, log_a, ids_BT, memory, self.chunk)
        places = (lengths_B[:, None] + jnp.arange(self.taps - 1))[:, :, None, None, None]
        state = jnp.take_along_axis(x_BS3NH, places, 1), memory
        o = self.norm(tag(o.astype(self.dtype), "context"))
        return tag(self.out(o * jax.nn.silu(self.gate(x_BTD))), "out_proj"), state

    @classmethod
    def flops(cls, config, dimensions, length):
        N = dimensions.num_query_heads
        H = dimensions.head_dim
        C = min(config.gdn_chunk, length)
        done = N * -(-length // C) * C / length  # in each head, with the tokens that fill a chunk
        # of the solve
        executed = done * (6 * H * H + 6 * C * H)
        again = done * 4 * C * H
        return {"delta rule": Flops(6.0 * N * H * H, executed, again)}

    @classmethod
    def state_bytes(cls, config, dimensions, length, itemsize):
        N = dimensions.num_query_heads
        H = dimensions.head_dim
        return 0, 4 * N * H * (H + 3 * (config.gdn_conv - 1))


def delta_rule(q, k, v, beta, log_a, ids_BT, memory, chunk):
    """Returns o [B, T, N, H] and the last state [B, N, H, H] in float32."""
    (B, T) = ids_BT.shape
    C = min(chunk, ids_BT.shape[1])
    spare = -T % C  # fills the last chunk

    def chunks(x, mode="constant"):  # [B, T, ...] -> [chunks, B, ..., C or C, H]
        x = jnp.pad(x, [(0, 0), (0, spare), *[(0, 0)] * (x.ndim - 2)], mode)
        x = jnp.moveaxis(x.reshape(B, -1, C, *x.shape[2:]), 1, 0)
        return jnp.swapaxes(x, 2, 3) if x.ndim > 3 else x

    def one(carry, given):
        (S, last_B) = carry
        (q, k, v, beta, log_a, ids) = given
        sums = jnp.cumsum(log_a, -1)
        seen = jnp.tril(ids[:, :, None] == ids[:, None])[:, None]
        decay = jnp.exp(jnp.where(seen, sums[..., :, None] - sums[..., None, :], -jnp.inf))
        carried = (jnp.exp(sums) * (ids == last_B[:, None])[:, None])[..., None]
        system = jnp.tril(beta[..., None] * (k @ k.mT) * decay, -1) + jnp.eye(C)
        right = beta[..., None] * jnp.concatenate([v, carried * k], -1)
        u, w = jnp.split(solve_triangular(system, right, lower=True, unit_diagonal=True), 2, -1)
        u -= w @ S
        o = carried * (q @ S) + (q @ k.mT * decay) @ u
        S = carried[..., -1:, :] * S + (k * decay[..., -1, :, None]).mT @ u
        return (S, ids[:, -1]), o

    given = (*map(chunks, (q, k, v, beta, log_a)), chunks(ids_BT, "edge"))
    (memory, _), o = jax.lax.scan(one, (memory, ids_BT[:, 0]), given)
    return o.transpose(1, 0, 3, 2, 4).reshape(B, -1, *v.shape[2:])[:, :T], memory
