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
from typing import NamedTuple

import jax
import jax.numpy as jnp

from MaxText.config.layer_sections import Dimensions
from MaxText.config.model_sections import ModelConfig
from MaxText.config.registry import register
from MaxText.layers.attention.attention import Attention, MixerInput
from MaxText.layers.capture import tag
from MaxText.layers.context import ForwardContext
from MaxText.layers.dense import einsum
from MaxText.layers.part import DecodeState, Flops

_NO_MAXIMUM = -1e30  # maximum over no tokens; finite, so that differences are
_TINY = 1e-37


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LinearAttentionState:
    """Decode state of causal linear attention."""

    sums_BKHH: jax.Array  # S / exp(m)
    counts_BKH: jax.Array  # z / exp(m)
    largest_BK: jax.Array  # m
    segment_B: jax.Array  # segment of the newest token; the sums cover only this one


def causal_linear_attention(  # noqa: PLR0913
    q_BTNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    *,
    chunk: int,
    epsilon: float,
    state: LinearAttentionState | None = None,
    segments_BT: jax.Array | None = None,
    lengths_B: jax.Array | None = None,
    precision: str | None = None,
) -> tuple[jax.Array, LinearAttentionState]:
    """Returns causal linear attention in O(T), and the last state.

    Tokens are multiplied with each other within a chunk; a scan carries the state from one chunk to
    the next. Formulas in the docstring of the module.

    Args:
      q_BTNH: Queries.
      k_BTKH: Keys.
      v_BTKH: Values.
      chunk: C, the tokens of a chunk; no effect on the result besides rounding.
      epsilon: eps, added to the divisor.
      state: State before the first token; None is that of an empty sequence.
      segments_BT: Document of each token, contiguous: tokens see only their own document.
      lengths_B: Tokens of each sequence; later ones are padding and do not enter the state.
      precision: Precision of the products.

    Returns:
      Outputs [B, T, N, H] in the dtype of the queries, and the state of the last real token.
    """
    batch, length, num_heads, head_dim = q_BTNH.shape
    num_kv_heads = k_BTKH.shape[2]
    chunk = min(chunk, length)
    num_chunks = -(-length // chunk)
    if segments_BT is None:
        segments_BT = jnp.zeros((batch, length), jnp.int32)
    real_BT = jnp.ones((batch, length), bool)
    if lengths_B is not None:
        real_BT = jnp.arange(length)[None] < lengths_B[:, None]

    def chunks(x: jax.Array, padding: float = 0) -> jax.Array:
        """Returns [chunks, B, C, ...]."""
        widths = ((0, 0), (0, num_chunks * chunk - length), *((0, 0),) * (x.ndim - 2))
        x = jnp.pad(x, widths, constant_values=padding)
        return jnp.moveaxis(x.reshape(batch, num_chunks, chunk, *x.shape[2:]), 1, 0)

    phi = jax.nn.softmax(q_BTNH.astype(jnp.float32), axis=-1)
    phi = phi.reshape(batch, length, num_kv_heads, num_heads // num_kv_heads, head_dim)
    if state is None:
        state = _empty_state(batch, num_kv_heads, head_dim, segments_BT[:, 0])
    xs = _Chunk(
        phi_BCKGH=chunks(phi),
        k_BCKH=chunks(k_BTKH.astype(jnp.float32)),
        v_BCKH=chunks(v_BTKH.astype(jnp.float32)),
        segments_BC=chunks(segments_BT, -1),
        real_BC=chunks(real_BT),
    )
    attend_chunk = functools.partial(_attend_chunk, epsilon=epsilon, precision=precision)
    if num_chunks == 1:
        state, o = attend_chunk(state, jax.tree.map(lambda x: x[0], xs))
        o = o[None]
    else:
        # Scores [B, T, C] are recomputed in the backward pass instead of being saved.
        state, o = jax.lax.scan(jax.checkpoint(attend_chunk, prevent_cse=False), state, xs)
    o = jnp.moveaxis(o, 0, 1).reshape(batch, num_chunks * chunk, num_heads, head_dim)
    return o[:, :length].astype(q_BTNH.dtype), state


class _Chunk(NamedTuple):
    """Inputs of a chunk of tokens, or of all chunks with a leading dimension."""

    phi_BCKGH: jax.Array  # phi(q)
    k_BCKH: jax.Array
    v_BCKH: jax.Array
    segments_BC: jax.Array
    real_BC: jax.Array  # whether a token is not padding


def _empty_state(
    batch: int, num_kv_heads: int, head_dim: int, segment_B: jax.Array
) -> LinearAttentionState:
    heads = (batch, num_kv_heads)
    return LinearAttentionState(
        sums_BKHH=jnp.zeros((*heads, head_dim, head_dim), jnp.float32),
        counts_BKH=jnp.zeros((*heads, head_dim), jnp.float32),
        largest_BK=jnp.full(heads, _NO_MAXIMUM, jnp.float32),
        segment_B=segment_B,
    )


def _attend_chunk(
    state: LinearAttentionState, chunk: _Chunk, *, epsilon: float, precision: str | None
) -> tuple[LinearAttentionState, jax.Array]:
    """Returns the state after a chunk, and its outputs [B, C, K, G, H].

    Everything between two tokens s <= t is multiplied by exp(m_s - m_t), so that sums are relative
    to the running maximum of the token that reads them.
    """
    phi_BCKGH, k_BCKH, v_BCKH, segments_BC, real_BC = chunk
    product = functools.partial(einsum, precision=precision)
    # Padding keys do not count: exp(k - m) is 0.
    k_BCKH = jnp.where(real_BC[..., None, None], k_BCKH, _NO_MAXIMUM)
    carries_BC1 = (segments_BC == state.segment_B[:, None])[..., None]
    largest_BCK = _running_max(k_BCKH.max(-1), segments_BC)
    largest_BCK = jnp.where(
        carries_BC1, jnp.maximum(largest_BCK, state.largest_BK[:, None]), largest_BCK
    )
    largest_BCK = jax.lax.stop_gradient(largest_BCK)  # m cancels out of the result
    psi_BCKH = jnp.where(real_BC[..., None, None], jnp.exp(k_BCKH - largest_BCK[..., None]), 0.0)
    # exp(m_s - m_t) from token s (columns) to token t (rows).
    positions = jnp.arange(segments_BC.shape[1])
    sees_BCC = (positions[:, None] >= positions)[None] & (
        segments_BC[:, :, None] == segments_BC[:, None, :]
    )
    log_decay_BCCK = jnp.where(
        sees_BCC[..., None], largest_BCK[:, None] - largest_BCK[:, :, None], -jnp.inf
    )
    scores = product("btkgh,bskh->btskg", phi_BCKGH, psi_BCKH)
    scores = scores * jnp.exp(log_decay_BCCK)[..., None]
    carried_BCK = jnp.exp(jnp.where(carries_BC1, state.largest_BK[:, None] - largest_BCK, -jnp.inf))
    numerator = product("btskg,bskh->btkgh", scores, v_BCKH)
    numerator += (
        product("btkgh,bkhi->btkgi", phi_BCKGH, state.sums_BKHH) * carried_BCK[..., None, None]
    )
    divisor = (
        scores.sum(2)
        + product("btkgh,bkh->btkg", phi_BCKGH, state.counts_BKH) * carried_BCK[..., None]
    )
    if epsilon:
        # Clamped to stay finite; beyond 80 the result is 0 in any case.
        divisor = divisor + epsilon * jnp.exp(jnp.minimum(-largest_BCK, 80.0))[..., None]
    # 0 for 0 / 0, with a stable gradient.
    divisor = divisor[..., None]
    size = jax.lax.stop_gradient(jnp.maximum(divisor, _TINY))
    o_BCKGH = (numerator / size) / jnp.maximum(divisor / size, _TINY)
    return _state_after(state, psi_BCKH, largest_BCK, chunk, precision), o_BCKGH


def _state_after(
    state: LinearAttentionState,
    psi_BCKH: jax.Array,
    largest_BCK: jax.Array,
    chunk: _Chunk,
    precision: str | None,
) -> LinearAttentionState:
    """Returns the state of the last real token's segment.

    Args:
      state: State before the chunk.
      psi_BCKH: exp(k - m) of its tokens, 0 for padding.
      largest_BCK: m, the running maximum.
      chunk: The chunk.
      precision: Precision of the products.
    """
    segments_BC = chunk.segments_BC
    real_BC = chunk.real_BC
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
    decay_BK = jnp.exp(jnp.where(goes_on_B1, state.largest_BK - end_BK, -jnp.inf))
    added_BKHH = einsum("bskh,bski->bkhi", weights_BCKH, chunk.v_BCKH, precision=precision)
    return LinearAttentionState(
        sums_BKHH=state.sums_BKHH * decay_BK[..., None, None] + added_BKHH,
        counts_BKH=state.counts_BKH * decay_BK[..., None] + weights_BCKH.sum(1),
        largest_BK=end_BK,
        segment_B=segment_B,
    )


def bidirectional_linear_attention(
    q_BTNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    *,
    segments_BT: jax.Array | None = None,
    precision: str | None = None,
) -> jax.Array:
    """Returns softmax_H(q) (softmax_T(k)^T v) (Shen et al. 2021).

    Takes O(T) without segments. With them it takes O(T^2), as each token has its own sum.

    Args:
      q_BTNH: Queries.
      k_BTKH: Keys.
      v_BTKH: Values.
      segments_BT: Document of each token: tokens see only their own document.
      precision: Precision of the products.

    Returns:
      [B, T, N, H] in the dtype of the queries.
    """
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
        divisor = einsum("bts,bskh->btkh", same_BTS.astype(jnp.float32), weights, precision)
        # Every divisor is at least 1, the term of the largest k.
        scores = einsum("btkgh,bskh->btskg", phi / divisor[:, :, :, None], weights, precision)
        scores = jnp.where(same_BTS[..., None, None], scores, 0.0)
        o = einsum("btskg,bskh->btkgh", scores, v, precision)
    return o.reshape(batch, length, num_heads, head_dim).astype(q_BTNH.dtype)


def _running_max(k: jax.Array, segments_BT: jax.Array, *, reverse: bool = False) -> jax.Array:
    """Returns the maximum of k [B, T, ...] over the tokens so far of each segment.

    Args:
      k: Keys, or their maximum over a head.
      segments_BT: Segment of each token.
      reverse: Whether to go from the last token to the first.
    """
    changes_BT = segments_BT[:, 1:] != segments_BT[:, :-1]
    edge_B1 = jnp.ones_like(changes_BT, shape=(len(segments_BT), 1))
    begins = jnp.concatenate([changes_BT, edge_B1] if reverse else [edge_B1, changes_BT], axis=1)
    begins = jnp.broadcast_to(begins.reshape(*begins.shape, *(1,) * (k.ndim - 2)), k.shape)

    def join(
        earlier: tuple[jax.Array, jax.Array], later: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        earlier_max, earlier_begins = earlier
        later_max, later_begins = later
        joined_max = jnp.where(later_begins, later_max, jnp.maximum(earlier_max, later_max))
        return joined_max, earlier_begins | later_begins

    return jax.lax.associative_scan(join, (k, begins), reverse=reverse, axis=1)[0]


@register("mixer", "linear_attention")
class LinearAttention(Attention):
    """Linear attention, with a decode state of fixed size (formulas above)."""

    has_softmax = False
    has_memories = False

    @classmethod
    def flops(cls, config: ModelConfig, dimensions: Dimensions, length: int) -> dict[str, Flops]:
        """Returns FLOPs of the state's updates and reads, and of products within chunks."""
        N = dimensions.num_query_heads
        K = dimensions.num_kv_heads
        H = dimensions.head_dim
        updates = 2.0 * K * H * H
        reads = 2.0 * N * H * H
        if not config.attention.causal:
            return {"attention scores": Flops(updates), "attention values": Flops(reads)}
        chunk = min(config.attention.linear_attention.chunk, length)
        filled = -(-length // chunk) * chunk / length
        square = 2.0 * N * H * chunk
        counts = 2.0 * N * H
        scores = filled * (square + counts + updates)
        values = filled * (square + reads)
        if length <= config.attention.linear_attention.chunk:
            return {
                "attention scores": Flops(updates, scores),
                "attention values": Flops(reads, values),
            }
        # The scan saves the state after each chunk, so its update is not recomputed.
        return {
            "attention scores": Flops(updates, scores, scores - filled * updates),
            "attention values": Flops(reads, values, values),
        }

    @classmethod
    def state_bytes(
        cls, config: ModelConfig, dimensions: Dimensions, length: int, itemsize: int
    ) -> tuple[int, int]:
        """Returns bytes of a LinearAttentionState, which is float32 and int32."""
        K = dimensions.num_kv_heads
        H = dimensions.head_dim
        return 0, 4 * (K * (H * H + H + 1) + 1)

    def prefill(self, x: MixerInput, context: ForwardContext) -> tuple[jax.Array, DecodeState]:
        """Returns the output for prompts, and the state after them."""
        return self._continue(x, None, context)

    def decode_step(
        self, x: MixerInput, state: DecodeState, context: ForwardContext
    ) -> tuple[jax.Array, DecodeState]:
        """Returns the output for new tokens, and the state after them."""
        assert isinstance(state, LinearAttentionState)
        return self._continue(x, state, context)

    def _continue(
        self, x: MixerInput, state: LinearAttentionState | None, context: ForwardContext
    ) -> tuple[jax.Array, LinearAttentionState]:
        assert self.config.causal, "a bidirectional model cannot generate"
        q_BTNH, k_BTKH, v_BTKH = self.project_inputs(x, context)
        o_BTNH, state = self._causal(q_BTNH, k_BTKH, v_BTKH, context, state)
        return self.project_output(tag(o_BTNH, "context"), x, context), state

    def attend(
        self, q_BTNH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array, context: ForwardContext
    ) -> jax.Array:
        """Returns linear attention of whole sequences, [B, T, N, H], tagged "context"."""
        if self.config.causal:
            o_BTNH, _ = self._causal(q_BTNH, k_BTKH, v_BTKH, context, None)
        else:
            o_BTNH = bidirectional_linear_attention(
                q_BTNH, k_BTKH, v_BTKH, segments_BT=context.segments_BT, precision=self.precision
            )
        return tag(o_BTNH, "context")

    def _causal(
        self,
        q_BTNH: jax.Array,
        k_BTKH: jax.Array,
        v_BTKH: jax.Array,
        context: ForwardContext,
        state: LinearAttentionState | None,
    ) -> tuple[jax.Array, LinearAttentionState]:
        return causal_linear_attention(
            q_BTNH,
            k_BTKH,
            v_BTKH,
            chunk=self.config.linear_attention.chunk,
            epsilon=self.config.linear_attention.epsilon,
            state=state,
            segments_BT=context.segments_BT,
            lengths_B=context.lengths_B,
            precision=self.precision,
        )
