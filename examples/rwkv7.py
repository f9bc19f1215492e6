"""RWKV-7 "Goose" (Peng et al. 2025, arXiv 2503.14456): time mix and channel mix.

    S_t = Diag(w_t) S_(t-1) - (a_t * n_t) (S_(t-1)^T n_t)^T + k_t v_t^T,   o_t = S_t^T r_t

The state S of a head maps keys to values. Each token decays its rows by w, removes a share a of
what S answers to the key n, of length 1, and adds a value under k. All of r, w, k, v, a and the
gate g read the token shifted toward the one before: x_t + (x_(t-1) - x_t) mu. With low ranks
between A and B,

    log w = -e^(-1/2) sigmoid(w_0 + tanh(x A_w) B_w),   a = sigmoid(a_0 + x A_a B_a)
    n = unit(k k_k),   k <- k (1 + (a - 1) k_a),   v <- v + (v_first - v) sigmoid(v_0 + x A_v B_v)
    y = W_o ((norm(o) + (sum_c r_c k_c u_c) v) * sigmoid(x A_g) B_g)

v_first are the values of the first layer, which the connection lends in `context.shared`. Channel
mix is W_v relu(W_k x')^2 of the shifted token x'. It has a decode state, the token before, so it is
a mixer in a layer of its own: rwkv7.yml alternates the two.

In chunks of tokens, with p_t = -S_(t-1)^T n_t and sums G of log w,

    p_t = -(e^(G_(t-1)) n_t)^T S - sum_(j<t) ((n_t b_j) p_j + (n_t k_j) v_j),   b = a n

where products of two tokens are decayed by what lies between them. This is a triangular system,
as that of the delta rule (MaxText/layers/recurrent/gated_delta_net.py), with further values.

Legend: B sequences, T tokens, D emb_dim, F mlp_dim, N heads, H head_dim, C tokens of a chunk, J
chunks, P parts of a sequence (MaxText/layers/recurrent/chunks.py).
"""

import functools
import math
from collections.abc import Mapping
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from MaxText.config.keys import Section, key
from MaxText.config.layer_sections import Dimensions
from MaxText.config.model_sections import ModelConfig
from MaxText.layers.dense import Dense, einsum
from MaxText.layers.lowering.shift import earlier_tokens
from MaxText.layers.normalization import inverse_rms
from MaxText.layers.params import Initializer, constant, param, zeros
from MaxText.layers.part import (
    Connection,
    Flops,
    ForwardContext,
    Init,
    LayerIndex,
    LayerInputs,
    Mixer,
    Scalars,
    record,
    register,
    tag,
)
from MaxText.layers.recurrent.chunks import Chunks, begins_document, is_token
from MaxText.layers.recurrent.decayed_products import (
    decayed_products,
    forget_between_documents,
    product_flops,
    with_diagonal,
)
from MaxText.layers.recurrent.gates import unit_length
from MaxText.layers.recurrent.state_passing import DeltaUpdates, pass_corrected_states
from MaxText.layers.recurrent.triangular_inverse import num_products, unit_lower_inverse

_LARGEST_DECAY = math.exp(-0.5)  # of -log w
_SHIFTED = ("r", "w", "k", "v", "a", "g")  # what reads a shifted token, each with a mu of its own
_HEAD_AXES = ("q_heads", "kv")


class ConnectionState(NamedTuple):
    """What the connection carries."""

    x_BTD: jax.Array  # the residual stream
    first_values_BTNH: jax.Array  # v_first; zeros before the first layer


@register("connection", "first_values")
class FirstValues(Connection):
    """Carries the residual stream, and the values of the first layer."""

    def __init__(self, config: ModelConfig, init: Init, rngs: nnx.Rngs):
        """Declares nothing but sizes."""
        self.values_shape = (init.dimensions.num_query_heads, init.dimensions.head_dim)
        self.dtype = init.dtype

    def begin(self, x_BTD: jax.Array) -> ConnectionState:
        """Returns the state for the first layer, from the embedding."""
        values = jnp.zeros((*x_BTD.shape[:2], *self.values_shape), self.dtype)
        return ConnectionState(x_BTD, values)

    def read(
        self, index: LayerIndex, carry: ConnectionState, norms: Mapping[str, nnx.Module]
    ) -> tuple[LayerInputs, ConnectionState]:
        """Returns the stream as each input of a layer, and the state as it is."""
        return LayerInputs.all(carry.x_BTD), carry

    def shared(self, carry: ConnectionState) -> dict[str, jax.Array]:
        """Returns what mixers find in `context.shared`."""
        return {"first_values": carry.first_values_BTNH}

    def write(
        self,
        index: LayerIndex,
        carry: ConnectionState,
        y_BTD: jax.Array,
        shared: dict[str, jax.Array],
    ) -> ConnectionState:
        """Returns the state for the next layer from a layer's output."""
        return ConnectionState(y_BTD, shared["first_values"])

    def end(self, carry: ConnectionState) -> jax.Array:
        """Returns the hidden state for the final norm."""
        return carry.x_BTD


class Keys(Section):
    """RWKV-7."""

    rwkv_chunk: int = key(64, "Tokens of a chunk. No effect on the result.", unit="tokens", ge=1)
    rwkv_decay_rank: int = key(64, "Rank of the projection to decays w.", ge=1)
    rwkv_rate_rank: int = key(64, "Rank of the projection to removal rates a.", ge=1)
    rwkv_value_rank: int = key(32, "Rank of the projection to shares of the first values.", ge=1)
    rwkv_gate_rank: int = key(128, "Rank of the projection to gates of the output.", ge=1)


class TimeMixState(NamedTuple):
    """Decode state of time mix, float32."""

    newest_BD: jax.Array  # the newest input
    memory_BNHH: jax.Array  # S, keys by values


class TokenInputs(NamedTuple):
    """What the tokens do to the state, and read from it; float32 [B, T, N, H]."""

    r: jax.Array
    log_w: jax.Array
    k: jax.Array
    v: jax.Array
    n: jax.Array  # the key whose value is removed
    b: jax.Array  # a n


@register("mixer", "rwkv7", keys=Keys)
class TimeMix(Mixer):
    """Time mix (formulas above)."""

    rows: ClassVar = {
        **dict.fromkeys(("receptance", "key", "value"), "query, key, value"),
        **dict.fromkeys(("decay_down", "decay", "rate_down", "rate"), "decays and rates"),
        **dict.fromkeys(("value_down", "value_share"), "shares of first values"),
        **dict.fromkeys(("gate_down", "gate"), "attention gate"),
        "out": "attention output",
    }

    def __init__(self, config: Keys, init: Init, rngs: nnx.Rngs):
        """Declares projections, shifts, and the scales of keys and outputs."""
        D = init.dimensions.emb_dim
        N = init.dimensions.num_query_heads
        H = init.dimensions.head_dim
        draw = init.initializers
        self.chunk = config.rwkv_chunk
        self.dtype = init.dtype
        self.precision = init.precision
        dense = functools.partial(Dense, init=init, rngs=rngs)
        declare = functools.partial(param, rngs, dtype=init.weight_dtype)
        self.shifts = declare((len(_SHIFTED), D), (None, "norm"), constant(_ramp(D) ** 0.5))
        into_heads = functools.partial(dense, (D,), (N, H), ("embed", *_HEAD_AXES))
        self.receptance = into_heads(draw.query)
        self.key = into_heads(draw.key_value)
        self.value = into_heads(draw.key_value)

        def low_rank(rank: int) -> tuple[Dense, Dense]:
            down = dense((D,), (rank,), ("embed", None), draw.kernel)
            return down, dense((rank,), (N, H), ("latent", *_HEAD_AXES), draw.kernel)

        self.decay_down, self.decay = low_rank(config.rwkv_decay_rank)
        self.rate_down, self.rate = low_rank(config.rwkv_rate_rank)
        self.value_down, self.value_share = low_rank(config.rwkv_value_rank)
        self.gate_down, self.gate = low_rank(config.rwkv_gate_rank)

        def of_channels(initializer: Initializer) -> nnx.Param:
            return declare((N, H), _HEAD_AXES, initializer)

        # Half of the channels forget within tens of tokens, others within thousands.
        self.decay_bias = of_channels(constant(5 * _ramp(N * H).reshape(N, H) - 6.5))  # w_0
        self.rate_bias = of_channels(zeros)  # a_0
        self.value_bias = of_channels(constant(1.0))  # v_0
        self.removed_key = of_channels(constant(0.85))  # k_k
        self.added_key = of_channels(constant(1.0))  # k_a
        self.bonus = of_channels(zeros)  # u
        self.norm_scale = of_channels(constant(1.0))
        self.norm_bias = of_channels(zeros)
        self.out = dense((N, H), (D,), (*_HEAD_AXES, "embed"), draw.attention_output)

    def __call__(self, x_BTD: jax.Array, context: ForwardContext) -> tuple[jax.Array, Scalars]:
        """Returns the output [B, T, D], and no losses."""
        y_BTD, _ = self.prefill(x_BTD, context)
        return y_BTD, {}

    def prefill(self, x_BTD: jax.Array, context: ForwardContext) -> tuple[jax.Array, TimeMixState]:
        """Returns the output of whole sequences, and the state after them."""
        B, _, D = x_BTD.shape
        N, H = self.bonus.shape
        state = TimeMixState(
            newest_BD=jnp.zeros((B, D), jnp.float32),
            memory_BNHH=jnp.zeros((B, N, H, H), jnp.float32),
        )
        return self.decode_step(x_BTD, state, context)

    def decode_step(
        self, x_BTD: jax.Array, state: TimeMixState, context: ForwardContext
    ) -> tuple[jax.Array, TimeMixState]:
        """Returns the output of further tokens, and the state after them.

        Args:
          x_BTD: Input.
          state: The state before the first token.
          context: Facts about the batch.
        """
        inputs, gate_BTNH = self._inputs(x_BTD, state.newest_BD, context)
        chunks = Chunks.of(x_BTD, self.chunk)
        o_BTNH, memory_BNHH = mix(inputs, state.memory_BNHH, chunks, self.precision)
        o_BTNH = self._normalized(tag(o_BTNH, "context"))
        bonus_BTN1 = jnp.sum(inputs.r * inputs.k * _float32(self.bonus), axis=-1, keepdims=True)
        o_BTNH += bonus_BTN1 * inputs.v
        y_BTD = tag(self.out(o_BTNH.astype(self.dtype) * gate_BTNH), "out_proj")
        return y_BTD, TimeMixState(newest(x_BTD, state.newest_BD, context), memory_BNHH)

    def _inputs(
        self, x_BTD: jax.Array, newest_BD: jax.Array, context: ForwardContext
    ) -> tuple[TokenInputs, jax.Array]:
        """Returns the inputs of the recurrence, and the gate of its output [B, T, N, H]."""
        before_BTD = previous(x_BTD, newest_BD, context)
        mu = dict(zip(_SHIFTED, self.shifts[...].astype(x_BTD.dtype), strict=True))
        x = {name: x_BTD + (before_BTD - x_BTD) * mu[name] for name in _SHIFTED}
        r_BTNH = tag(self.receptance(x["r"]), "query_proj").astype(jnp.float32)
        k_BTNH = tag(self.key(x["k"]), "key_proj").astype(jnp.float32)
        v_BTNH = self._values(x["v"], context).astype(jnp.float32)
        decay_BTNH = self.decay(jnp.tanh(self.decay_down(x["w"])))
        log_w_BTNH = -_LARGEST_DECAY * jax.nn.sigmoid(_float32(decay_BTNH, self.decay_bias))
        a_BTNH = jax.nn.sigmoid(_float32(self.rate(self.rate_down(x["a"])), self.rate_bias))
        record(jnp.exp(log_w_BTNH), "decay")
        record(a_BTNH, "removal_rate")
        n_BTNH = unit_length(k_BTNH * _float32(self.removed_key))
        k_BTNH *= 1 + (a_BTNH - 1) * _float32(self.added_key)
        b_BTNH = a_BTNH * n_BTNH
        is_token_BT = is_token(context, x_BTD.shape[1])
        if is_token_BT is not None:  # padding keeps the state
            k_BTNH, b_BTNH, log_w_BTNH = (
                jnp.where(is_token_BT[..., None, None], y, 0) for y in (k_BTNH, b_BTNH, log_w_BTNH)
            )
        # The token before is read without the decay of this one, which is at most e^0.61.
        n_BTNH *= jnp.exp(-log_w_BTNH)
        log_w_BTNH = forget_between_documents(log_w_BTNH, context, x_BTD.shape[1])
        gate_BTNH = tag(self.gate(jax.nn.sigmoid(self.gate_down(x["g"]))), "attention_gate")
        inputs = TokenInputs(r_BTNH, log_w_BTNH, k_BTNH, v_BTNH, n_BTNH, b_BTNH)
        return inputs, gate_BTNH

    def _values(self, x_BTD: jax.Array, context: ForwardContext) -> jax.Array:
        """Returns the values, moved toward those of the first layer; that layer stores its own."""
        v_BTNH = tag(self.value(x_BTD), "value_proj")
        first_BTNH = jnp.where(context.layer == 0, v_BTNH, context.shared["first_values"])
        context.shared["first_values"] = first_BTNH
        share_BTNH = self.value_share(self.value_down(x_BTD))
        share_BTNH = jax.nn.sigmoid(_float32(share_BTNH, self.value_bias)).astype(v_BTNH.dtype)
        return v_BTNH + (first_BTNH - v_BTNH) * share_BTNH

    def _normalized(self, o_BTNH: jax.Array) -> jax.Array:
        """Returns the outputs with mean 0 and variance 1 in each head, scaled, plus a bias."""
        o_BTNH -= jnp.mean(o_BTNH, axis=-1, keepdims=True)
        o_BTNH *= inverse_rms(o_BTNH, 1e-5 * o_BTNH.shape[-1])
        return o_BTNH * _float32(self.norm_scale) + _float32(self.norm_bias)

    @classmethod
    def flops(cls, config: Keys, dimensions: Dimensions, length: int) -> dict[str, Flops]:
        """Returns FLOPs of the recurrence, by row of the FLOPs table."""
        N = dimensions.num_query_heads
        H = dimensions.head_dim
        C = min(config.rwkv_chunk, length)
        heads = N * -(-length // C) * C / length  # with the tokens that fill the last chunk
        # The state is read for p of all values, though those of k have none.
        executed = 10 * H * H + 4 * product_flops(C, H) + 10 * C * H
        inverse = heads * 2 * C * C
        return {
            "recurrence": Flops(by_rule=8.0 * N * H * H, hardware_flops=heads * executed),
            "inverses of chunks": Flops(
                by_rule=0.0,
                hardware_flops=num_products(C) * inverse,
                recomputed=2 * inverse,
                backward=0,
            ),
        }

    @classmethod
    def state_bytes(
        cls, config: Keys, dimensions: Dimensions, length: int, itemsize: int
    ) -> tuple[int, int]:
        """Returns bytes of the decode state per sequence: (per token, fixed)."""
        memory = dimensions.num_query_heads * dimensions.head_dim**2
        return 0, 4 * (dimensions.emb_dim + memory)


@register("mixer", "rwkv7_channel_mix")
class ChannelMix(Mixer):
    """Channel mix (formula above), for layers without another feed-forward.

    The decode state is the newest input, float32 [B, D].
    """

    rows = "feed-forward"

    def __init__(self, config: ModelConfig, init: Init, rngs: nnx.Rngs):
        """Declares the projections and the shift."""
        D = init.dimensions.emb_dim
        F = init.dimensions.mlp_dim
        draw = init.initializers
        dtype = init.weight_dtype
        self.shift = param(rngs, (D,), ("norm",), constant(_ramp(D) ** 0.5), dtype=dtype)
        self.into = Dense((D,), (F,), ("embed", "mlp"), draw.kernel, init, rngs)
        self.out = Dense((F,), (D,), ("mlp", "embed"), draw.output, init, rngs)

    def __call__(self, x_BTD: jax.Array, context: ForwardContext) -> tuple[jax.Array, Scalars]:
        """Returns the output [B, T, D], and no losses."""
        y_BTD, _ = self.prefill(x_BTD, context)
        return y_BTD, {}

    def prefill(self, x_BTD: jax.Array, context: ForwardContext) -> tuple[jax.Array, jax.Array]:
        """Returns the output of whole sequences, and the state after them."""
        B, _, D = x_BTD.shape
        return self.decode_step(x_BTD, jnp.zeros((B, D), jnp.float32), context)

    def decode_step(
        self, x_BTD: jax.Array, state: jax.Array, context: ForwardContext
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the output of further tokens, and the state after them."""
        before_BTD = previous(x_BTD, state, context)
        shifted_BTD = x_BTD + (before_BTD - x_BTD) * self.shift[...].astype(x_BTD.dtype)
        h_BTF = tag(self.into(shifted_BTD), "mlpwi")
        y_BTD = tag(self.out(jnp.square(jax.nn.relu(h_BTF))), "mlpwo")
        return y_BTD, newest(x_BTD, state, context)

    @classmethod
    def state_bytes(
        cls, config: ModelConfig, dimensions: Dimensions, length: int, itemsize: int
    ) -> tuple[int, int]:
        """Returns bytes of the decode state per sequence: (per token, fixed)."""
        return 0, 4 * dimensions.emb_dim


def mix(
    inputs: TokenInputs, memory_BNHH: jax.Array, chunks: Chunks, precision: str | None
) -> tuple[jax.Array, jax.Array]:
    """Returns the outputs o, float32 [B, T, N, H], and the state after the last token.

    Args:
      inputs: Of all tokens; n is already divided by w. Those with k = b = 0 and log w = 0 leave the
        state as it is, and log w = -inf forgets all tokens before.
      memory_BNHH: S before the first token.
      chunks: The division of sequences; no effect on the result besides rounding.
      precision: Of the products.
    """
    product = functools.partial(einsum, precision=precision)
    # [J, P, B, N, C, H]
    r, log_w, k, v, n, b = (chunks.split(x) for x in inputs)
    pairs = decayed_products((n, r), (b, k), log_w, precision)
    [[n_b, n_k], [r_b, r_k]] = pairs.products_CC
    inverse_precision = "highest" if precision == "highest" else "high"
    inverse = unit_lower_inverse(n_b, inverse_precision)
    since_begin = jnp.exp(pairs.since_begin_CK)
    to_end = jnp.exp(pairs.to_end_CK)
    read_earlier = product("jpbncd,jpbndv->jpbncv", n_k, v)
    p = -product("jpbncd,jpbndv->jpbncv", inverse, read_earlier)
    corrections = product("jpbncd,jpbndk->jpbnck", inverse, n * since_begin)
    # Two values of each token: p under b, and v under k, which nothing corrects.
    states = pass_corrected_states(
        DeltaUpdates(
            decay=since_begin[..., -1, :, None],
            keys_JPBNCK=jnp.concatenate([b * to_end, k * to_end], axis=-2),
            values_JPBNCV=jnp.concatenate([p, v], axis=-2),
            corrections_JPBNCK=jnp.concatenate([corrections, jnp.zeros_like(k)], axis=-2),
        ),
        memory_BNHH,
        precision,
    )
    scores = jnp.concatenate([with_diagonal(r_b, r, b), with_diagonal(r_k, r, k)], axis=-1)
    o = product("jpbnck,jpbnkv->jpbncv", r * since_begin, states.before_JPBNKV)
    o += product("jpbncd,jpbndv->jpbncv", scores, states.values_JPBNCV)
    return chunks.merge(o), states.last_BNKV


def previous(x_BTD: jax.Array, newest_BD: jax.Array, context: ForwardContext) -> jax.Array:
    """Returns the token before each, of the same document; zeros if there is none.

    Args:
      x_BTD: Tokens.
      newest_BD: The token before the first.
      context: Facts about the batch.
    """
    length = x_BTD.shape[1]
    is_first_T1 = jnp.arange(length)[:, None] == 0
    before_BTD = earlier_tokens(x_BTD, 1)
    before_BTD = jnp.where(is_first_T1, newest_BD[:, None].astype(x_BTD.dtype), before_BTD)
    begins_BT = begins_document(context, length)
    return before_BTD if begins_BT is None else jnp.where(begins_BT[..., None], 0, before_BTD)


def newest(x_BTD: jax.Array, newest_BD: jax.Array, context: ForwardContext) -> jax.Array:
    """Returns the newest token, float32 [B, D].

    Args:
      x_BTD: Tokens.
      newest_BD: The token before the first.
      context: `lengths_B` has the number of those that are not padding.
    """
    tokens = jnp.concatenate([newest_BD[:, None], x_BTD.astype(jnp.float32)], axis=1)
    if context.lengths_B is None:
        return tokens[:, -1]
    return jnp.take_along_axis(tokens, context.lengths_B[:, None, None], axis=1)[:, 0]


def _float32(*terms: nnx.Param | jax.Array) -> jax.Array:
    """Returns the sum of weights or arrays in float32."""
    return sum((jnp.asarray(term[...], jnp.float32) for term in terms), jnp.zeros(()))


def _ramp(size: int) -> np.ndarray:
    """Returns numbers from 0 to 1."""
    return np.arange(size) / max(size - 1, 1)
