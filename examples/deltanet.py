"""DeltaNet (Yang et al. 2024, arXiv 2406.06484) as a mixer.

    S_t = S_(t-1) + b_t k_t (v_t - S_(t-1)^T k_t)^T,   o_t = S_t^T q_t

The state S of a head is a matrix that maps keys to values: each token corrects its answer for k
toward v by a share b. `delta_rule` computes it by products of matrices in chunks of tokens (section
3.2). deltanet.yml uses it. Gated DeltaNet, in which the state also decays, is built in
(mixer=gated_delta_net), with a faster inverse and for sequences on several devices.

Legend: B sequences, T tokens, D emb_dim, N heads, H head_dim, C tokens of a chunk, P tokens before
the first that the convolution sees.
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
from MaxText.layers.recurrent.short_convolution import ShortConvolution


class Keys(Section):
    """DeltaNet."""

    deltanet_chunk: int = key(
        64, "Tokens of a chunk. No effect on the result.", unit="tokens", ge=1
    )
    deltanet_conv: int = key(
        4, "Tokens that the convolution of q, k and v sees.", unit="tokens", ge=1
    )


class DeltaNetState(NamedTuple):
    """Decode state, float32."""

    newest_BP3NH: jax.Array  # q, k and v of the newest P tokens, before the convolution
    memory_BNHH: jax.Array  # S, keys by values


class DeltaInputs(NamedTuple):
    """Inputs of the delta rule: [B, T, N, ...], or [chunks, B, N, C, ...]."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    beta: jax.Array  # b, without the last dimension
    segments: jax.Array  # document of each token, without heads


@register("mixer", "deltanet", keys=Keys)
class DeltaNet(Mixer):
    """A linear RNN with a state corrected toward each new value."""

    def __init__(self, config: Keys, init: Init, rngs: nnx.Rngs):
        D = init.dimensions.emb_dim
        N = init.dimensions.num_query_heads
        H = init.dimensions.head_dim
        draw = init.initializers
        self.chunk = config.deltanet_chunk
        self.dtype = init.dtype
        axes = ("embed", "q_heads", "kv")
        self.query = Dense((D,), (N, H), axes, draw.kernel, init, rngs)
        self.key = Dense((D,), (N, H), axes, draw.kernel, init, rngs)
        self.value = Dense((D,), (N, H), axes, draw.kernel, init, rngs)
        self.beta = Dense((D,), (N,), axes[:2], draw.kernel, init, rngs)
        self.conv = ShortConvolution(
            (3, N, H), (None, "q_heads", "kv"), init, rngs, width=config.deltanet_conv
        )
        self.norm = RMSNorm(H, 1e-5, init, rngs)
        out_axes = ("q_heads", "kv", "embed")
        self.out = Dense((N, H), (D,), out_axes, draw.attention_output, init, rngs)

    def __call__(self, x_BTD: jax.Array, context: ForwardContext) -> tuple[jax.Array, Scalars]:
        """Returns the output [B, T, D], and no losses."""
        y_BTD, _ = self.prefill(x_BTD, context)
        return y_BTD, {}

    def prefill(self, x_BTD: jax.Array, context: ForwardContext) -> tuple[jax.Array, DeltaNetState]:
        """Returns the output of whole sequences, and the state after them."""
        B, _, _ = x_BTD.shape
        _, N, H = self.conv.shape
        state = DeltaNetState(
            newest_BP3NH=jnp.zeros((B, self.conv.width - 1, 3, N, H), jnp.float32),
            memory_BNHH=jnp.zeros((B, N, H, H), jnp.float32),
        )
        return self.decode_step(x_BTD, state, context)

    def decode_step(
        self, x_BTD: jax.Array, state: DeltaNetState, context: ForwardContext
    ) -> tuple[jax.Array, DeltaNetState]:
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
        qkv_BT3NH = jnp.stack([q_BTNH, k_BTNH, v_BTNH], 2)
        qkv_BT3NH, newest_BP3NH = self.conv(qkv_BT3NH, context, state.newest_BP3NH)
        q, k, v = jnp.moveaxis(jax.nn.silu(qkv_BT3NH), 2, 0)
        beta_BTN = jax.nn.sigmoid(self.beta(x_BTD, jnp.dtype(jnp.float32)))
        record(beta_BTN, "write_strength")
        if context.lengths_B is not None:  # padding keeps the state
            is_token_BT = jnp.arange(T) < context.lengths_B[:, None]
            beta_BTN = jnp.where(is_token_BT[..., None], beta_BTN, 0)
        inputs = DeltaInputs(
            q=_unit_length(q) * q.shape[-1] ** -0.5,
            k=_unit_length(k),
            v=v,
            beta=beta_BTN,
            segments=segments_BT,
        )
        o_BTNH, memory_BNHH = delta_rule(inputs, state.memory_BNHH, self.chunk)
        o_BTNH = self.norm(tag(o_BTNH.astype(self.dtype), "context"))
        y_BTD = tag(self.out(o_BTNH), "out_proj")
        return y_BTD, DeltaNetState(newest_BP3NH, memory_BNHH)

    @classmethod
    def flops(cls, config: Keys, dimensions: Dimensions, length: int) -> dict[str, Flops]:
        """Returns FLOPs of the delta rule, by row of the FLOPs table."""
        N = dimensions.num_query_heads
        H = dimensions.head_dim
        C = min(config.deltanet_chunk, length)
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
        return 0, 4 * N * H * (H + 3 * (config.deltanet_conv - 1))


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

    The corrections u of all tokens solve a triangular system, (I + tril(b (k k^T), -1)) u =
    b (v - k S) (section 3.2).

    Args:
      carry: The state S before the chunk, and the document of its last token [B].
      inputs: [B, N, C, ...].
    """
    S, last_segment_B = carry
    q, k, v, beta, segments = inputs
    seen = jnp.tril(segments[:, :, None] == segments[:, None])[:, None]
    continues = (segments == last_segment_B[:, None])[:, None, :, None]
    remains = (segments == segments[:, -1:])[:, None, :, None]
    system = jnp.tril(beta[..., None] * (k @ k.mT) * seen, -1) + jnp.eye(k.shape[-2])
    right = beta[..., None] * jnp.concatenate([v, continues * k], -1)
    solution = solve_triangular(system, right, lower=True, unit_diagonal=True)
    u, w = jnp.split(solution, 2, -1)
    u -= w @ S
    o = continues * (q @ S) + (q @ k.mT * seen) @ u
    S = continues[..., -1:, :] * S + (k * remains).mT @ u
    return (S, segments[:, -1]), o
