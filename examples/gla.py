"""Gated linear attention (Yang et al. 2024, arXiv 2312.06635) as a mixer.

    S_t = Diag(a_t) S_(t-1) + k_t v_t^T,   o_t = S_t^T q_t / sqrt(H)

The state S of a head maps keys to values. Each token decays its rows by a_t, a = sigmoid(W_b W_a x
+ b)^(1/16), with a low rank between W_a and W_b, and adds its own value under its key. Outputs are
normalized in each head and gated: W_out (norm(o) SiLU(W_g x)).

In chunks of tokens (section 4.2), products of tokens are decayed by what lies between them
(MaxText/layers/recurrent/decayed_products.py); states pass from chunk to chunk, and from device to
device where sequences are split. gla.yml uses it.

Legend: B sequences, T tokens, D emb_dim, N heads, H head_dim, R rank, C tokens of a chunk, J
chunks, P parts of a sequence (MaxText/layers/recurrent/chunks.py).
"""

import functools
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from MaxText.config.keys import Section, key
from MaxText.config.layer_sections import Dimensions
from MaxText.layers.dense import Dense, einsum
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
from MaxText.layers.recurrent.chunks import Chunks, is_token
from MaxText.layers.recurrent.decayed_products import (
    decayed_products,
    forget_between_documents,
    product_flops,
    with_diagonal,
)
from MaxText.layers.recurrent.gates import GatedRMSNorm
from MaxText.layers.recurrent.state_passing import pass_decayed_states


class Keys(Section):
    """Gated linear attention."""

    gla_chunk: int = key(64, "Tokens of a chunk. No effect on the result.", unit="tokens", ge=1)
    gla_rank: int = key(16, "Rank of the projection to decays.", ge=1)
    gla_temperature: float = key(16.0, "Divisor of the logarithm of decays.", gt=0)


class TokenInputs(NamedTuple):
    """What the tokens do to the state, and read from it; float32 [B, T, N, H]."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    log_a: jax.Array  # -inf forgets all tokens before


@register("mixer", "gla", keys=Keys)
class GatedLinearAttention(Mixer):
    """Linear attention with a decay for each channel of a key.

    The decode state is S after the last token, float32 [B, N, H, H].
    """

    rows: ClassVar = {
        **dict.fromkeys(("query", "key", "value"), "query, key, value"),
        **dict.fromkeys(("decay_down", "decay"), "decays"),
        "gate": "attention gate",
        "out": "attention output",
    }

    def __init__(self, config: Keys, init: Init, rngs: nnx.Rngs):
        """Declares the projections and the norm."""
        D = init.dimensions.emb_dim
        N = init.dimensions.num_query_heads
        H = init.dimensions.head_dim
        R = config.gla_rank
        draw = init.initializers
        self.chunk = config.gla_chunk
        self.temperature = config.gla_temperature
        self.dtype = init.dtype
        self.precision = init.precision
        dense = functools.partial(Dense, init=init, rngs=rngs)
        into_heads = functools.partial(dense, (D,), (N, H), ("embed", "q_heads", "kv"))
        self.query = into_heads(draw.query)
        self.key = into_heads(draw.key_value)
        self.value = into_heads(draw.key_value)
        self.gate = into_heads(draw.kernel)
        self.decay_down = dense((D,), (R,), ("embed", None), draw.kernel)
        decay_axes = ("latent", "q_heads", "kv")
        self.decay = dense((R,), (N, H), decay_axes, draw.kernel, use_bias=True)
        self.norm = GatedRMSNorm(H, 1e-5, init, rngs)
        out_axes = ("q_heads", "kv", "embed")
        self.out = dense((N, H), (D,), out_axes, draw.attention_output)

    def __call__(self, x_BTD: jax.Array, context: ForwardContext) -> tuple[jax.Array, Scalars]:
        """Returns the output [B, T, D], and no losses."""
        y_BTD, _ = self.prefill(x_BTD, context)
        return y_BTD, {}

    def prefill(self, x_BTD: jax.Array, context: ForwardContext) -> tuple[jax.Array, jax.Array]:
        """Returns the output of whole sequences, and the state after them."""
        N, H, _ = self.out.kernel.shape
        return self.decode_step(x_BTD, jnp.zeros((len(x_BTD), N, H, H), jnp.float32), context)

    def decode_step(
        self, x_BTD: jax.Array, state: jax.Array, context: ForwardContext
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the output of further tokens, and the state after them.

        Args:
          x_BTD: Input.
          state: S before the first token, float32 [B, N, H, H].
          context: Facts about the batch.
        """
        T = x_BTD.shape[1]
        q_BTNH = tag(self.query(x_BTD), "query_proj").astype(jnp.float32)
        k_BTNH = tag(self.key(x_BTD), "key_proj").astype(jnp.float32)
        v_BTNH = tag(self.value(x_BTD), "value_proj").astype(jnp.float32)
        rate_BTNH = self.decay(self.decay_down(x_BTD)).astype(jnp.float32)
        log_a_BTNH = jax.nn.log_sigmoid(rate_BTNH) / self.temperature
        record(jnp.exp(log_a_BTNH), "decay")
        is_token_BT = is_token(context, T)
        if is_token_BT is not None:  # padding keeps the state
            k_BTNH = jnp.where(is_token_BT[..., None, None], k_BTNH, 0)
            log_a_BTNH = jnp.where(is_token_BT[..., None, None], log_a_BTNH, 0)
        log_a_BTNH = forget_between_documents(log_a_BTNH, context, T)
        inputs = TokenInputs(q_BTNH * q_BTNH.shape[-1] ** -0.5, k_BTNH, v_BTNH, log_a_BTNH)
        chunks = Chunks.of(x_BTD, self.chunk)
        o_BTNH, state = attend(inputs, state, chunks, self.precision)
        gate_BTNH = tag(self.gate(x_BTD), "attention_gate")
        o_BTNH = self.norm.gated(tag(o_BTNH.astype(self.dtype), "context"), gate_BTNH)
        return tag(self.out(o_BTNH), "out_proj"), state

    @classmethod
    def flops(cls, config: Keys, dimensions: Dimensions, length: int) -> dict[str, Flops]:
        """Returns FLOPs of reads and updates of the state, by row of the FLOPs table."""
        N = dimensions.num_query_heads
        H = dimensions.head_dim
        C = min(config.gla_chunk, length)
        heads = N * -(-length // C) * C / length  # with the tokens that fill the last chunk
        in_chunk = product_flops(C, H) + 2 * C * H
        return {"state": Flops(4.0 * N * H * H, heads * (4 * H * H + in_chunk))}

    @classmethod
    def state_bytes(
        cls, config: Keys, dimensions: Dimensions, length: int, itemsize: int
    ) -> tuple[int, int]:
        """Returns bytes of the decode state per sequence: (per token, fixed)."""
        return 0, 4 * dimensions.num_query_heads * dimensions.head_dim**2


def attend(
    inputs: TokenInputs, state_BNHH: jax.Array, chunks: Chunks, precision: str | None = None
) -> tuple[jax.Array, jax.Array]:
    """Returns the outputs o, float32 [B, T, N, H], and the state after the last token.

    Args:
      inputs: Of all tokens.
      state_BNHH: S before the first token.
      chunks: The division of sequences; no effect on the result besides rounding.
      precision: Of the products.
    """
    product = functools.partial(einsum, precision=precision)
    # [J, P, B, N, C, H]
    q, k, v, log_a = (chunks.split(x) for x in inputs)
    pairs = decayed_products((q,), (k,), log_a, precision)
    since_begin = jnp.exp(pairs.since_begin_CK)
    added = product("jpbnck,jpbncv->jpbnkv", k * jnp.exp(pairs.to_end_CK), v)
    decay = since_begin[..., -1, :, None]
    before, last_BNHH = pass_decayed_states(decay, added, state_BNHH)
    o = product("jpbnck,jpbnkv->jpbncv", q * since_begin, before)
    scores = with_diagonal(pairs.products_CC[0][0], q, k)
    o += product("jpbncd,jpbndv->jpbncv", scores, v)
    return chunks.merge(o), last_BNHH
