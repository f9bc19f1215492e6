"""Linear attention: a state of fixed size instead of a KV cache.

    o_t = phi(q_t) S_t / (phi(q_t) z_t + eps),  S_t = sum_{s<=t} exp(k_s) v_s^T,  z_t = sum exp(k_s)

phi is softmax over a head's dimensions (Shen et al. 2021, arXiv 1812.01243, made causal by
GPT-Neo). Scores are unscaled; everything is float32 inside. exp(k) overflows beyond 88, so the sums
and eps are divided by exp(m), m the running maximum of k in the head: every factor between two
tokens is then at most 1.

Legend: C tokens of a chunk, K key/value heads, G query heads for each, N = K G, H head_dim.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from MaxText.config.layer_sections import Dimensions
from MaxText.config.model_sections import ModelConfig
from MaxText.config.registry import register
from MaxText.layers.attention.attention import Attention
from MaxText.layers.capture import tag
from MaxText.layers.context import ForwardContext
from MaxText.layers.dense import einsum
from MaxText.layers.part import Flops

_NOTHING = -1e30  # maximum over no tokens; finite, so that differences are
_TINY = 1e-37


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LinearAttentionState:
    """Decode state of causal linear attention."""

    sums_BKHH: jax.Array  # S / exp(m)
    counts_BKH: jax.Array  # z / exp(m)
    largest_BK: jax.Array  # m
    segment_B: jax.Array  # segment of the newest token; the sums cover only this one


def causal_linear_attention(
    q_BTNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    *,
    chunk: int,  # C, tokens that are multiplied with each other
    epsilon: float,
    state: LinearAttentionState | None = None,  # before the first token
    segments_BT: jax.Array | None = None,  # contiguous; tokens see only their own segment
    lengths_B: jax.Array | None = None,  # later tokens (padding) do not enter the state
    precision: str | None = None,
) -> tuple[jax.Array, LinearAttentionState]:
    """Returns causal linear attention in O(T), and the last state."""
    batch, length, num_heads, head_dim = q_BTNH.shape
    num_kv_heads = k_BTKH.shape[2]
    chunk = min(chunk, length)
    num_chunks = -(-length // chunk)
    if segments_BT is None:
        segments_BT = jnp.zeros((batch, length), jnp.int32)
    real_BT = jnp.ones((batch, length), bool)
    if lengths_B is not None:
        real_BT = jnp.arange(length)[None] < lengths_B[:, None]

    def chunks(x: jax.Array, value: float = 0) -> jax.Array:
        widths = ((0, 0), (0, num_chunks * chunk - length), *((0, 0),) * (x.ndim - 2))
        x = jnp.pad(x, widths, constant_values=value)
        return jnp.moveaxis(x.reshape(batch, num_chunks, chunk, *x.shape[2:]), 1, 0)

    phi = jax.nn.softmax(q_BTNH.astype(jnp.float32), axis=-1)
    phi = phi.reshape(batch, length, num_kv_heads, num_heads // num_kv_heads, head_dim)
    product = functools.partial(einsum, precision=precision)

    def one_chunk(state: LinearAttentionState, xs):
        phi_BCKGH, k_BCKH, v_BCKH, segments_BC, real_BC = xs
        # Padding keys do not count: exp(k - m) is 0.
        k_BCKH = jnp.where(real_BC[..., None, None], k_BCKH, _NOTHING)
        carries_BC1 = (segments_BC == state.segment_B[:, None])[..., None]
        largest_BCK = _running_max(k_BCKH.max(-1), segments_BC)
        largest_BCK = jnp.where(
            carries_BC1, jnp.maximum(largest_BCK, state.largest_BK[:, None]), largest_BCK
        )
        largest_BCK = jax.lax.stop_gradient(largest_BCK)  # m cancels out of the result
        psi_BCKH = jnp.where(
            real_BC[..., None, None], jnp.exp(k_BCKH - largest_BCK[..., None]), 0.0
        )
        # exp(m_s - m_t) from token s (columns) to token t (rows).
        positions = jnp.arange(segments_BC.shape[1])
        sees_BCC = (positions[:, None] >= positions)[None] & (
            segments_BC[:, :, None] == segments_BC[:, None, :]
        )
        fading_BCCK = jnp.where(
            sees_BCC[..., None], largest_BCK[:, None] - largest_BCK[:, :, None], -jnp.inf
        )
        scores = product("btkgh,bskh->btskg", phi_BCKGH, psi_BCKH)
        scores = scores * jnp.exp(fading_BCCK)[..., None]
        carried_BCK = jnp.exp(
            jnp.where(carries_BC1, state.largest_BK[:, None] - largest_BCK, -jnp.inf)
        )
        above = product("btskg,bskh->btkgh", scores, v_BCKH)
        above += (
            product("btkgh,bkhi->btkgi", phi_BCKGH, state.sums_BKHH) * carried_BCK[..., None, None]
        )
        below = (
            scores.sum(2)
            + product("btkgh,bkh->btkg", phi_BCKGH, state.counts_BKH) * carried_BCK[..., None]
        )
        if epsilon:
            # Clamped to stay finite; beyond 80 the result is 0 in any case.
            below = below + epsilon * jnp.exp(jnp.minimum(-largest_BCK, 80.0))[..., None]
        # 0 for 0 / 0, with a stable gradient.
        below = below[..., None]
        size = jax.lax.stop_gradient(jnp.maximum(below, _TINY))
        o_BCKGH = (above / size) / jnp.maximum(below / size, _TINY)

        # The new state is that of the last real token's segment.
        last_B = jnp.maximum(real_BC.sum(1) - 1, 0)
        any_B = real_BC.any(1)
        segment_B = jnp.where(
            any_B, jnp.take_along_axis(segments_BC, last_B[:, None], 1)[:, 0], state.segment_B
        )
        last_BCK = jnp.take_along_axis(largest_BCK, last_B[:, None, None], axis=1)
        end_BK = jnp.where(any_B[:, None], last_BCK[:, 0], state.largest_BK)
        same_segment_BC1 = ((segments_BC == segment_B[:, None]) & real_BC)[..., None]
        since_BCK = jnp.where(same_segment_BC1, largest_BCK - end_BK[:, None], -jnp.inf)
        weights_BCKH = psi_BCKH * jnp.exp(since_BCK)[..., None]
        goes_on_B1 = (segment_B == state.segment_B)[:, None]
        kept_BK = jnp.exp(jnp.where(goes_on_B1, state.largest_BK - end_BK, -jnp.inf))
        new = LinearAttentionState(
            state.sums_BKHH * kept_BK[..., None, None]
            + product("bskh,bski->bkhi", weights_BCKH, v_BCKH),
            state.counts_BKH * kept_BK[..., None] + weights_BCKH.sum(1),
            end_BK,
            segment_B,
        )
        return new, o_BCKGH

    if state is None:
        heads = (batch, num_kv_heads)
        state = LinearAttentionState(
            jnp.zeros((*heads, head_dim, head_dim), jnp.float32),
            jnp.zeros((*heads, head_dim), jnp.float32),
            jnp.full(heads, _NOTHING, jnp.float32),
            segments_BT[:, 0],
        )
    xs = (
        chunks(phi),
        chunks(k_BTKH.astype(jnp.float32)),
        chunks(v_BTKH.astype(jnp.float32)),
        chunks(segments_BT, -1),
        chunks(real_BT),
    )
    if num_chunks == 1:
        state, o = one_chunk(state, jax.tree.map(lambda x: x[0], xs))
        o = o[None]
    else:
        # Scores [B, T, C] are recomputed in the backward pass instead of being saved.
        state, o = jax.lax.scan(jax.checkpoint(one_chunk, prevent_cse=False), state, xs)
    o = jnp.moveaxis(o, 0, 1).reshape(batch, num_chunks * chunk, num_heads, head_dim)
    return o[:, :length].astype(q_BTNH.dtype), state


def bidirectional_linear_attention(
    q_BTNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    *,
    segments_BT: jax.Array | None = None,
    precision: str | None = None,
) -> jax.Array:
    """Returns softmax_H(q) (softmax_T(k)^T v); O(T^2) with segments."""
    batch, length, num_heads, head_dim = q_BTNH.shape
    num_kv_heads = k_BTKH.shape[2]
    phi = jax.nn.softmax(q_BTNH.astype(jnp.float32), axis=-1)
    phi = phi.reshape(batch, length, num_kv_heads, num_heads // num_kv_heads, head_dim)
    k = k_BTKH.astype(jnp.float32)
    v = v_BTKH.astype(jnp.float32)
    if segments_BT is None:
        sums = einsum("bskh,bski->bkhi", jax.nn.softmax(k, axis=1), v, precision)
        o = einsum("btkgh,bkhi->btkgi", phi, sums, precision)
    else:
        same_BTS = segments_BT[:, :, None] == segments_BT[:, None, :]
        # Sums over each token's segment, stabilized by the largest k of the segment.
        largest = jnp.maximum(
            _running_max(k, segments_BT), _running_max(k, segments_BT, reverse=True)
        )
        weights = jnp.exp(k - jax.lax.stop_gradient(largest))
        below = einsum("bts,bskh->btkh", same_BTS.astype(jnp.float32), weights, precision)
        # Every divisor is at least 1, the term of the largest k.
        scores = einsum("btkgh,bskh->btskg", phi / below[:, :, :, None], weights, precision)
        scores = jnp.where(same_BTS[..., None, None], scores, 0.0)
        o = einsum("btskg,bskh->btkgh", scores, v, precision)
    return o.reshape(batch, length, num_heads, head_dim).astype(q_BTNH.dtype)


def _running_max(k: jax.Array, segments_BT: jax.Array, *, reverse: bool = False) -> jax.Array:
    changes_BT = segments_BT[:, 1:] != segments_BT[:, :-1]
    edge_B1 = jnp.ones_like(changes_BT, shape=(len(segments_BT), 1))
    begins = jnp.concatenate([changes_BT, edge_B1] if reverse else [edge_B1, changes_BT], axis=1)
    begins = jnp.broadcast_to(begins.reshape(*begins.shape, *(1,) * (k.ndim - 2)), k.shape)

    def join(earlier, later):
        (a, a_begins) = earlier
        (b, b_begins) = later
        return jnp.where(b_begins, b, jnp.maximum(a, b)), a_begins | b_begins

    return jax.lax.associative_scan(join, (k, begins), reverse=reverse, axis=1)[0]


@register("mixer", "linear_attention")
class LinearAttention(Attention):
    """Linear attention, with a decode state of fixed size."""

    has_softmax = False
    has_memories = False

    @classmethod
    def flops(cls, config: ModelConfig, dimensions: Dimensions, length: int) -> dict[str, Flops]:
        N = dimensions.num_query_heads
        K = dimensions.num_kv_heads
        H = dimensions.head_dim
        adds = 2.0 * K * H * H
        reads = 2.0 * N * H * H
        if not config.attention.causal:
            return {"attention scores": Flops(adds), "attention values": Flops(reads)}
        chunk = min(config.attention.linear_attention.chunk, length)
        filled = -(-length // chunk) * chunk / length
        square = 2.0 * N * H * chunk
        counts = 2.0 * N * H
        scores = filled * (square + counts + adds)
        values = filled * (square + reads)
        # The scan saves the state after each chunk, so its update is not recomputed.
        again = length > config.attention.linear_attention.chunk
        return {
            "attention scores": Flops(adds, scores, (scores - filled * adds) if again else 0.0),
            "attention values": Flops(reads, values, values if again else 0.0),
        }

    @classmethod
    def state_bytes(
        cls, config: ModelConfig, dimensions: Dimensions, length: int, itemsize: int
    ) -> tuple[int, int]:
        K = dimensions.num_kv_heads
        H = dimensions.head_dim
        return 0, 4 * (K * (H * H + H + 1) + 1)

    def _core(
        self,
        q_BTNH: jax.Array,
        k_BTKH: jax.Array,
        v_BTKH: jax.Array,
        context: ForwardContext,
        state: Any,
    ) -> tuple[jax.Array, LinearAttentionState | None]:
        config = self.config
        if not config.causal:
            o_BTNH = bidirectional_linear_attention(
                q_BTNH, k_BTKH, v_BTKH, segments_BT=context.segments_BT, precision=self.precision
            )
            return tag(o_BTNH, "context"), None
        assert state is None or isinstance(state, LinearAttentionState)
        o_BTNH, new_state = causal_linear_attention(
            q_BTNH,
            k_BTKH,
            v_BTKH,
            chunk=config.linear_attention.chunk,
            epsilon=config.linear_attention.epsilon,
            state=state,
            segments_BT=context.segments_BT,
            lengths_B=context.lengths_B,
            precision=self.precision,
        )
        keeps = state is not None or context.capacity is not None
        return tag(o_BTNH, "context"), new_state if keeps else None
