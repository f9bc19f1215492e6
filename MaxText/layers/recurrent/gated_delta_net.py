"""Gated DeltaNet: a linear RNN whose state is corrected toward each new value.

    S_t = a_t S_(t-1) + b_t k_t (v_t - a_t S_(t-1)^T k_t)^T,   o_t = S_t^T q_t

The state S of a head is a matrix that maps keys to values: each token decays it by a and corrects
its answer for k toward v by a share b (Yang et al. 2024, arXiv 2412.06464). Queries, keys and
values go through a short convolution and SiLU; queries and keys have length 1, and queries are
divided by sqrt(K). b = sigmoid(W_b x), log a = -exp(A_log) softplus(W_a x + dt_bias). Outputs are
normalized in each head and gated: norm(o) SiLU(z), z = W_z x.

In chunks of tokens (section 3.3), with G the sums of log a from the chunk's beginning on and
D_ij = exp(G_i - G_j) for j <= i of the same document:

    X = (I + A)^-1,   A_ij = b_i k_i k_j D_ij below the diagonal
    V = X (b v) - X (b e^G k) S,   o = e^G q S + (q k^T D) V,   S <- e^(G_C) S + (k D_C)^T V

All but the products with S is computed for all chunks at once.

Legend: B sequences, T tokens, D emb_dim, M heads of queries and keys, N = M R heads of values, K
width of keys, V width of values, C tokens of a chunk, J chunks, P parts of a sequence (chunks.py),
E tokens that the convolution keeps.
"""

import functools
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from MaxText.config.layer_sections import Dimensions, RecurrentConfig
from MaxText.config.model_sections import LayerConfig, ModelConfig
from MaxText.config.registry import register
from MaxText.layers.capture import record, tag
from MaxText.layers.context import ForwardContext
from MaxText.layers.dense import Dense, einsum
from MaxText.layers.lowering.repeated_heads import repeat_heads
from MaxText.layers.params import Init, param
from MaxText.layers.part import Flops
from MaxText.layers.recurrent.chunks import Chunks, DocumentMasks, is_token
from MaxText.layers.recurrent.gates import (
    GatedRMSNorm,
    inverse_softplus_of_log_uniform,
    log_decay,
    log_of_uniform,
    unit_length,
)
from MaxText.layers.recurrent.recurrent_mixer import RecurrentMixer
from MaxText.layers.recurrent.short_convolution import ShortConvolution
from MaxText.layers.recurrent.state_passing import DeltaUpdates, pass_corrected_states
from MaxText.layers.recurrent.triangular_inverse import num_products, unit_lower_inverse
from MaxText.parallelism.logical_sharding import with_logical_constraint

_FLOAT32 = jnp.dtype(jnp.float32)
_KEY_AXES = ("embed", "kv_heads", "kv")
_VALUE_AXES = ("embed", "q_heads", "kv")
_KEYS = ("activation_batch", "activation_length", "activation_kv_heads", "activation_kv")
_VALUES = ("activation_batch", "activation_length", "activation_heads", "activation_kv")


class GatedDeltaNetState(NamedTuple):
    """Decode state, float32."""

    queries_BEMK: jax.Array  # the newest E queries, keys and values, before the convolution
    keys_BEMK: jax.Array
    values_BENV: jax.Array
    memory_BNKV: jax.Array  # S


class DeltaInputs(NamedTuple):
    """Inputs of the delta rule, float32."""

    q_BTMK: jax.Array
    k_BTMK: jax.Array
    v_BTNV: jax.Array
    beta_BTN: jax.Array  # b
    log_a: jax.Array  # [B, T, N], or [B, T, N, K]: one for each row of S


@register("mixer", "gated_delta_net")
class GatedDeltaNet(RecurrentMixer):
    """Gated DeltaNet (formulas above)."""

    rows: ClassVar = {
        **dict.fromkeys(("query", "key", "value", "beta", "decay"), "query, key, value"),
        "gate": "attention gate",
        "out": "attention output",
    }
    not_recomputed: ClassVar = ("out",)

    def __init__(self, config: ModelConfig, init: Init, rngs: nnx.Rngs):
        """Declares projections, convolutions, decays and the norm.

        Args:
          config: Keys of the model.
          init: Sizes, initializers and dtypes.
          rngs: RNG streams that weights are drawn from.
        """
        keys = config.recurrent
        D = init.dimensions.emb_dim
        M = keys.linear_num_key_heads
        N = keys.linear_num_value_heads
        K = keys.linear_key_head_dim
        V = keys.linear_value_head_dim
        draw = init.initializers
        self.chunk_size = keys.linear_chunk_size
        self.largest_beta = 2.0 if keys.linear_allow_neg_eigval else 1.0
        self.precision = init.precision
        dense = functools.partial(Dense, (D,), init=init, rngs=rngs)
        self.query = dense((M, K), _KEY_AXES, draw.query)
        self.key = dense((M, K), _KEY_AXES, draw.key_value)
        self.value = dense((N, V), _VALUE_AXES, draw.key_value)
        self.gate = dense((N, V), _VALUE_AXES, draw.kernel)
        of_heads = functools.partial(dense, (N,), ("embed", "q_heads"), used_in=_FLOAT32)
        self.beta = of_heads(initializer=draw.kernel)
        self.decay = of_heads(initializer=draw.kernel)
        convolution = functools.partial(
            ShortConvolution, width=keys.linear_conv_kernel_dim, init=init, rngs=rngs
        )
        self.query_conv = convolution((M, K), _KEY_AXES[1:])
        self.key_conv = convolution((M, K), _KEY_AXES[1:])
        self.value_conv = convolution((N, V), _VALUE_AXES[1:])
        # As in the authors' program.
        declare = functools.partial(param, rngs, (N,), ("q_heads",), dtype=init.weight_dtype)
        self.A_log = declare(log_of_uniform(0.01, 16.0))
        self.dt_bias = declare(inverse_softplus_of_log_uniform(1e-3, 0.1))
        self.norm = GatedRMSNorm(V, norm_epsilon(config), init, rngs)
        out_axes = ("q_heads", "kv", "embed")
        self.out = Dense((N, V), (D,), out_axes, draw.attention_output, init, rngs)

    def advance(
        self, x_BTD: jax.Array, state: GatedDeltaNetState | None, context: ForwardContext
    ) -> tuple[jax.Array, GatedDeltaNetState]:
        """Returns the output, and the state after the last token.

        Args:
          x_BTD: Input.
          state: State before the first token; None is that of an empty sequence.
          context: Facts about the batch.
        """
        B, T, _ = x_BTD.shape
        q_BTMK = with_logical_constraint(tag(self.query(x_BTD), "query_proj"), *_KEYS)
        k_BTMK = with_logical_constraint(tag(self.key(x_BTD), "key_proj"), *_KEYS)
        v_BTNV = with_logical_constraint(tag(self.value(x_BTD), "value_proj"), *_VALUES)
        has_state = state is not None
        q_BTMK, queries_BEMK = self.query_conv(
            q_BTMK, context, state.queries_BEMK if has_state else None
        )
        k_BTMK, keys_BEMK = self.key_conv(k_BTMK, context, state.keys_BEMK if has_state else None)
        v_BTNV, values_BENV = self.value_conv(
            v_BTNV, context, state.values_BENV if has_state else None
        )
        N, V = v_BTNV.shape[2:]
        memory_BNKV = jnp.zeros((B, N, q_BTMK.shape[-1], V), jnp.float32)
        if has_state:
            memory_BNKV = state.memory_BNKV
        beta_BTN, log_a = self.rates(x_BTD)
        is_token_BT = is_token(context, T)
        if is_token_BT is not None:  # padding keeps the state
            beta_BTN = jnp.where(is_token_BT[..., None], beta_BTN, 0)
            log_a = jnp.where(is_token_BT.reshape(B, T, *[1] * (log_a.ndim - 2)), log_a, 0)
        inputs = DeltaInputs(
            q_BTMK=unit_length(jax.nn.silu(q_BTMK)) * q_BTMK.shape[-1] ** -0.5,
            k_BTMK=unit_length(jax.nn.silu(k_BTMK)),
            v_BTNV=jax.nn.silu(v_BTNV),
            beta_BTN=beta_BTN,
            log_a=log_a,
        )
        chunks = Chunks.of(x_BTD, self.chunk_size)
        o_BTNV, memory_BNKV = self.recur(inputs, memory_BNKV, context, chunks)
        gate_BTNV = tag(self.output_gate(x_BTD), "attention_gate")
        o_BTNV = self.norm.gated(tag(o_BTNV.astype(gate_BTNV.dtype), "context"), gate_BTNV)
        y_BTD = tag(self.out(o_BTNV), "out_proj")
        return y_BTD, GatedDeltaNetState(queries_BEMK, keys_BEMK, values_BENV, memory_BNKV)

    def recur(
        self, inputs: DeltaInputs, memory_BNKV: jax.Array, context: ForwardContext, chunks: Chunks
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the outputs o, float32 [B, T, N, V], and the last state; see `delta_rule`."""
        return delta_rule(inputs, memory_BNKV, context, chunks, self.precision)

    def output_gate(self, x_BTD: jax.Array) -> jax.Array:
        """Returns z of the gated norm, [B, T, N, V]."""
        return self.gate(x_BTD)

    def rates(self, x_BTD: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns b and log a, float32 [B, T, N] each."""
        beta_BTN = self.largest_beta * jax.nn.sigmoid(self.beta(x_BTD))
        log_a_BTN = log_decay(self.decay(x_BTD), self.A_log[...], self.dt_bias[...])
        record(beta_BTN, "write_strength")
        record(jnp.exp(log_a_BTN), "state_decay")
        return beta_BTN, log_a_BTN

    @classmethod
    def flops(cls, config: ModelConfig, dimensions: Dimensions, length: int) -> dict[str, Flops]:
        """Returns FLOPs of the delta rule, by row of the FLOPs table."""
        keys = config.recurrent
        N = keys.linear_num_value_heads
        K = keys.linear_key_head_dim
        V = keys.linear_value_head_dim
        C = min(keys.linear_chunk_size, length)
        filled = -(-length // C) * C / length  # with the tokens that fill the last chunk
        of_state = 6.0 * K * V  # V and o from S, and S
        in_chunk = 2 * C * (K + 2 * V)  # V before S, what is subtracted from it, o from V
        pairs = cls.pair_flops(keys, C)
        inverse = filled * N * 2 * C * C
        return {
            "delta rule": Flops(N * of_state, filled * (N * (of_state + in_chunk) + pairs)),
            # The backward pass has two products of its own, and none of those of the inverse.
            "inverses of chunks": Flops(
                by_rule=0.0,
                hardware_flops=num_products(C) * inverse,
                recomputed=2 * inverse,
                backward=0,
            ),
        }

    @classmethod
    def num_key_heads(cls, keys: RecurrentConfig) -> int:
        """Returns M."""
        return keys.linear_num_key_heads

    @classmethod
    def pair_flops(cls, keys: RecurrentConfig, chunk: int) -> float:
        """Returns FLOPs per token of the products of keys with keys, and of queries with keys.

        Args:
          keys: Sizes of the mixer.
          chunk: C.
        """
        return cls.num_key_heads(keys) * 4 * chunk * keys.linear_key_head_dim

    @classmethod
    def state_bytes(
        cls, config: ModelConfig, dimensions: Dimensions, length: int, itemsize: int
    ) -> tuple[int, int]:
        """Returns bytes of a GatedDeltaNetState per sequence: (per token, fixed)."""
        keys = config.recurrent
        queries_and_keys = 2 * cls.num_key_heads(keys) * keys.linear_key_head_dim
        values = keys.linear_num_value_heads * keys.linear_value_head_dim
        memory = values * keys.linear_key_head_dim
        num_kept = keys.linear_conv_kernel_dim - 1
        return 0, 4 * (memory + num_kept * (queries_and_keys + values))

    @classmethod
    def sharded_sizes(cls, layer: LayerConfig) -> dict[str, tuple[str, int]]:
        """Returns the numbers of heads; see `Part.sharded_sizes`."""
        keys: RecurrentConfig = layer.config.recurrent
        return {
            "linear_num_key_heads": ("kv_heads", keys.linear_num_key_heads),
            "linear_num_value_heads": ("heads", keys.linear_num_value_heads),
        }


def norm_epsilon(config: ModelConfig) -> float:
    """Returns the epsilon of the gated norm: linear_norm_epsilon, or that of the model's norms."""
    epsilon = config.recurrent.linear_norm_epsilon
    return config.block.normalization_layer_epsilon if epsilon is None else epsilon


def delta_rule(
    inputs: DeltaInputs,
    memory_BNKV: jax.Array,
    context: ForwardContext,
    chunks: Chunks,
    precision: str | None,
) -> tuple[jax.Array, jax.Array]:
    """Returns the outputs o, float32 [B, T, N, V], and the last state.

    Args:
      inputs: Of all tokens. Those with b = 0 and log a = 0 leave the state as it is.
      memory_BNKV: The state before the first token, whose document that token continues.
      context: `segments_BT` has the documents: tokens see only their own.
      chunks: The division of sequences; no effect on the result besides rounding.
      precision: Of the products.
    """
    product = functools.partial(einsum, precision=precision)
    q, k, v, beta, log_a = (chunks.split(x) for x in inputs)  # [J, P, B, M or N, C, ...]
    num_groups, num_heads = k.shape[3], v.shape[3]

    def grouped(x: jax.Array) -> jax.Array:
        """Returns x [J, P, B, N, ...] as [J, P, B, M, R, ...]."""
        return x.reshape(*x.shape[:3], num_groups, num_heads // num_groups, *x.shape[4:])

    def of_heads(x: jax.Array) -> jax.Array:
        """Returns x [J, P, B, M, R, ...] as [J, P, B, N, ...]."""
        return x.reshape(*x.shape[:3], num_heads, *x.shape[5:])

    repeated = functools.partial(repeat_heads, num_heads=num_heads)
    masks = DocumentMasks.of(context, chunks)
    visible, continues, remains = (
        mask[:, :, :, None]
        for mask in (masks.visible_JPBCC, masks.continues_JPBC, masks.remains_JPBC)
    )
    sums = jnp.cumsum(log_a, axis=-1)  # G
    decay = _masked_exp(sums[..., :, None] - sums[..., None, :], visible)  # D
    since_begin = _masked_exp(sums, continues)
    to_end = _masked_exp(sums[..., -1:] - sums, remains)
    pairs = repeated(product("jpbmck,jpbmdk->jpbmcd", k, k))
    below = beta[..., None] * pairs * decay
    solution = unit_lower_inverse(jnp.tril(below, -1), precision) * beta[..., None, :]
    weights = grouped(solution * since_begin[..., None, :])
    states = pass_corrected_states(
        DeltaUpdates(
            decay=since_begin[..., -1:, None],
            keys_JPBNCK=repeated(k) * to_end[..., None],
            values_JPBNCV=product("jpbncd,jpbndv->jpbncv", solution, v),
            corrections_JPBNCK=of_heads(product("jpbmrcd,jpbmdk->jpbmrck", weights, k)),
        ),
        memory_BNKV,
        precision,
    )
    read = product("jpbmck,jpbmrkv->jpbmrcv", q, grouped(states.before_JPBNKV))
    scores = repeated(product("jpbmck,jpbmdk->jpbmcd", q, k))
    o = of_heads(read) * since_begin[..., None]
    o += product("jpbncd,jpbndv->jpbncv", scores * decay, states.values_JPBNCV)
    return chunks.merge(o), states.last_BNKV


def _masked_exp(x: jax.Array, mask: jax.Array) -> jax.Array:
    """Returns exp(x) where the mask is true, else 0; what is masked may be beyond float32."""
    return jnp.exp(jnp.where(mask, x, -jnp.inf))
