"""Gated DeltaNet (Yang et al. 2024, arXiv 2412.06464) as a mixer.

    S_t = a_t S_(t-1) + b_t k_t (v_t - a_t S_(t-1)^T k_t)^T,   o_t = S_t^T q_t

The state S of a head is a matrix that maps keys to values: each token decays it by a and corrects
its answer for k toward v by a share b. `delta_rule` computes it by products of matrices in chunks
of tokens (section 3.3). gated_deltanet.yml uses it.

Legend: B sequences, T tokens, D emb_dim, N heads, H head_dim, C tokens of a chunk, W tokens that
the convolution sees, P = W - 1 tokens before the first, S = P + T.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.scipy.linalg import solve_triangular

from MaxText.config.keys import Section, key
from MaxText.config.layer_sections import Dimensions
from MaxText.layers.dense import Dense
from MaxText.layers.normalization import RMSNorm
from MaxText.layers.params import constant, param
from MaxText.layers.part import (
    Flops,
    ForwardContext,
    Init,
    Mixer,
    Scalars,
    record,
    register,
    tag,
)


class Keys(Section):
    """Gated DeltaNet."""

    gdn_chunk: int = key(64, "Tokens of a chunk. No effect on the result.", unit="tokens", ge=1)
    gdn_conv: int = key(4, "Tokens that the convolution of q, k and v sees.", unit="tokens", ge=1)


class GatedDeltaNetState(NamedTuple):
    """Decode state, float32."""

    newest_BP3NH: jax.Array  # q, k and v of the newest P tokens, before the convolution
    memory_BNHH: jax.Array  # S, keys by values


class DeltaInputs(NamedTuple):
    """Inputs of the delta rule: [B, T, N, ...], or [chunks, B, N, C, ...]."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    beta: jax.Array  # b, without the last dimension
    log_a: jax.Array
    segments: jax.Array  # document of each token, without heads


@register("mixer", "gated_deltanet", keys=Keys)
class GatedDeltaNet(Mixer):
    """A linear RNN with a state corrected toward each new value."""

    def __init__(self, config: Keys, init: Init, rngs: nnx.Rngs):
        D = init.dimensions.emb_dim
        N = init.dimensions.num_query_heads
        H = init.dimensions.head_dim
        draw = init.initializers
        dtype = init.weight_dtype
        self.chunk = config.gdn_chunk
        self.taps = config.gdn_conv  # W
        self.dtype = init.dtype
        axes = ("embed", "q_heads", "kv")
        self.query = Dense((D,), (N, H), axes, draw.kernel, init, rngs)
        self.key = Dense((D,), (N, H), axes, draw.kernel, init, rngs)
        self.value = Dense((D,), (N, H), axes, draw.kernel, init, rngs)
        self.gate = Dense((D,), (N, H), axes, draw.kernel, init, rngs)
        self.rates = Dense((D,), (N, 2), ("embed", "q_heads", None), draw.kernel, init, rngs)
        mean = constant(1 / self.taps)
        conv_axes = (None, None, "q_heads", "kv")
        self.conv = param(rngs, (self.taps, 3, N, H), conv_axes, mean, dtype=dtype)
        self.log_decay = param(rngs, (N,), ("q_heads",), constant(-2.0), dtype=dtype)
        self.norm = RMSNorm(H, 1e-5, init, rngs)
        out_axes = ("q_heads", "kv", "embed")
        self.out = Dense((N, H), (D,), out_axes, draw.attention_output, init, rngs)

    def __call__(self, x_BTD: jax.Array, context: ForwardContext) -> tuple[jax.Array, Scalars]:
        """Returns the output [B, T, D], and no losses."""
        y_BTD, _ = self.prefill(x_BTD, context)
        return y_BTD, {}

    def prefill(
        self, x_BTD: jax.Array, context: ForwardContext
    ) -> tuple[jax.Array, GatedDeltaNetState]:
        """Returns the output of whole sequences, and the state after them."""
        B, _, _ = x_BTD.shape
        N, H = self.conv.shape[2:]
        state = GatedDeltaNetState(
            newest_BP3NH=jnp.zeros((B, self.taps - 1, 3, N, H), jnp.float32),
            memory_BNHH=jnp.zeros((B, N, H, H), jnp.float32),
        )
        return self.decode_step(x_BTD, state, context)

    def decode_step(
        self, x_BTD: jax.Array, state: GatedDeltaNetState, context: ForwardContext
    ) -> tuple[jax.Array, GatedDeltaNetState]:
        """Returns the output of further tokens, and the state after them.

        Args:
          x_BTD: Input.
          state: The state before the first token.
          context: Facts about the batch.
        """
        B, T, _ = x_BTD.shape
        segments_BT = context.segments_BT
        if segments_BT is None:
            segments_BT = jnp.ones((B, T), int)
        q_BTNH = tag(self.query(x_BTD), "query_proj")
        k_BTNH = tag(self.key(x_BTD), "key_proj")
        v_BTNH = tag(self.value(x_BTD), "value_proj")
        qkv_BT3NH = jnp.stack([q_BTNH, k_BTNH, v_BTNH], 2).astype(jnp.float32)
        qkv_BS3NH = jnp.concatenate([state.newest_BP3NH, qkv_BT3NH], 1)
        q, k, v = jnp.moveaxis(jax.nn.silu(self._convolve(qkv_BS3NH, segments_BT)), 2, 0)
        beta_BTN, log_a_BTN = self._rates(x_BTD)
        lengths_B = jnp.full((B,), T) if context.lengths_B is None else context.lengths_B
        is_token = (jnp.arange(T) < lengths_B[:, None])[..., None]  # padding keeps the state
        inputs = DeltaInputs(
            q=_unit_length(q) * q.shape[-1] ** -0.5,
            k=_unit_length(k),
            v=v,
            beta=jnp.where(is_token, beta_BTN, 0),
            log_a=jnp.where(is_token, log_a_BTN, 0),
            segments=segments_BT,
        )
        o_BTNH, memory_BNHH = delta_rule(inputs, state.memory_BNHH, self.chunk)
        newest_BP = lengths_B[:, None] + jnp.arange(self.taps - 1)
        newest_BP3NH = jnp.take_along_axis(qkv_BS3NH, newest_BP[:, :, None, None, None], 1)
        o_BTNH = self.norm(tag(o_BTNH.astype(self.dtype), "context"))
        y_BTD = tag(self.out(o_BTNH * jax.nn.silu(self.gate(x_BTD))), "out_proj")
        return y_BTD, GatedDeltaNetState(newest_BP3NH, memory_BNHH)

    def _convolve(self, qkv_BS3NH: jax.Array, segments_BT: jax.Array) -> jax.Array:
        """Returns a convolution of each channel over the newest W tokens of the same document.

        Args:
          qkv_BS3NH: q, k and v of P + T tokens.
          segments_BT: Documents of the last T of them.

        Returns:
          [B, T, 3, N, H].
        """
        T = segments_BT.shape[1]
        segments_BS = jnp.pad(segments_BT, ((0, 0), (self.taps - 1, 0)), "edge")
        conv_W3NH = self.conv[...].astype(jnp.float32)
        y_BT3NH = jnp.zeros_like(qkv_BS3NH[:, :T])
        for tap in range(self.taps):
            is_same_BT = segments_BS[:, tap : tap + T] == segments_BT
            inputs = jnp.where(is_same_BT[:, :, None, None, None], qkv_BS3NH[:, tap : tap + T], 0)
            y_BT3NH += inputs * conv_W3NH[tap]
        return y_BT3NH

    def _rates(self, x_BTD: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns b and log a, float32 [B, T, N] each."""
        rates = self.rates(x_BTD, jnp.dtype(jnp.float32))
        beta_BTN = jax.nn.sigmoid(rates[..., 0])
        decay_N = -jnp.exp(self.log_decay[...].astype(jnp.float32))
        log_a_BTN = jax.nn.softplus(rates[..., 1]) * decay_N
        record(beta_BTN, "write_strength")
        record(jnp.exp(log_a_BTN), "decay")
        return beta_BTN, log_a_BTN

    @classmethod
    def flops(cls, config: Keys, dimensions: Dimensions, length: int) -> dict[str, Flops]:
        """Returns FLOPs of the delta rule, by row of the FLOPs table."""
        N = dimensions.num_query_heads
        H = dimensions.head_dim
        C = min(config.gdn_chunk, length)
        # In each head, with the tokens that fill the last chunk.
        heads = N * -(-length // C) * C / length
        return {
            "delta rule": Flops(
                by_rule=6.0 * N * H * H,
                hardware_flops=heads * (6 * H * H + 6 * C * H),
                recomputed=heads * 4 * C * H,  # of the solve
            )
        }

    @classmethod
    def state_bytes(
        cls, config: Keys, dimensions: Dimensions, length: int, itemsize: int
    ) -> tuple[int, int]:
        """Returns bytes of the decode state per sequence: (per token, fixed)."""
        N = dimensions.num_query_heads
        H = dimensions.head_dim
        return 0, 4 * N * H * (H + 3 * (config.gdn_conv - 1))


def _unit_length(x: jax.Array) -> jax.Array:
    """Returns x / |x| over the last dimension."""
    return x * jax.lax.rsqrt(jnp.sum(x * x, -1, keepdims=True) + 1e-6)


def delta_rule(
    inputs: DeltaInputs, memory_BNHH: jax.Array, chunk: int
) -> tuple[jax.Array, jax.Array]:
    """Returns the outputs o, float32 [B, T, N, H], and the last state.

    Args:
      inputs: [B, T, N, ...]. Tokens see only their own document; the first continues the one of
        the state.
      memory_BNHH: The state before the first token.
      chunk: Tokens of a chunk; no effect on the result besides rounding.
    """
    B, T = inputs.segments.shape
    C = min(chunk, T)
    num_padding = -T % C  # fills the last chunk

    def chunks(x: jax.Array, mode: str = "constant") -> jax.Array:
        """Returns x [B, T, ...] as [chunks, B, ..., C] or [chunks, B, N, C, H]."""
        x = jnp.pad(x, [(0, 0), (0, num_padding), *[(0, 0)] * (x.ndim - 2)], mode)
        x = jnp.moveaxis(x.reshape(B, -1, C, *x.shape[2:]), 1, 0)
        return jnp.swapaxes(x, 2, 3) if x.ndim > 3 else x

    chunked = DeltaInputs(
        q=chunks(inputs.q),
        k=chunks(inputs.k),
        v=chunks(inputs.v),
        beta=chunks(inputs.beta),
        log_a=chunks(inputs.log_a),
        segments=chunks(inputs.segments, "edge"),
    )
    carry = (memory_BNHH, inputs.segments[:, 0])
    (memory_BNHH, _), o = jax.lax.scan(_delta_rule_of_chunk, carry, chunked)
    o_BTNH = o.transpose(1, 0, 3, 2, 4).reshape(B, -1, *inputs.v.shape[2:])
    return o_BTNH[:, :T], memory_BNHH


def _delta_rule_of_chunk(
    carry: tuple[jax.Array, jax.Array], inputs: DeltaInputs
) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
    """Returns the carry after a chunk, and its outputs [B, N, C, H].

    With the products g of decays from the chunk's start, the corrections u of all tokens solve a
    triangular system, (I + tril(b (k k^T) g_t / g_s, -1)) u = b (v - g k S) (section 3.3).

    Args:
      carry: The state S before the chunk, and the document of its last token [B].
      inputs: [B, N, C, ...].
    """
    S, last_segment_B = carry
    q, k, v, beta, log_a, segments = inputs
    log_decay = jnp.cumsum(log_a, -1)
    seen = jnp.tril(segments[:, :, None] == segments[:, None])[:, None]
    log_ratio = log_decay[..., :, None] - log_decay[..., None, :]
    decay = jnp.exp(jnp.where(seen, log_ratio, -jnp.inf))
    continues = (segments == last_segment_B[:, None])[:, None]
    carried = (jnp.exp(log_decay) * continues)[..., None]
    system = jnp.tril(beta[..., None] * (k @ k.mT) * decay, -1) + jnp.eye(k.shape[-2])
    right = beta[..., None] * jnp.concatenate([v, carried * k], -1)
    solution = solve_triangular(system, right, lower=True, unit_diagonal=True)
    u, w = jnp.split(solution, 2, -1)
    u -= w @ S
    o = carried * (q @ S) + (q @ k.mT * decay) @ u
    S = carried[..., -1:, :] * S + (k * decay[..., -1, :, None]).mT @ u
    return (S, segments[:, -1]), o
