"""Kimi Delta Attention (KDA): gated DeltaNet with a decay for each channel of a key.

    S_t = Diag(a_t) S_(t-1) + b_t k_t (v_t - (Diag(a_t) S_(t-1))^T k_t)^T,   o_t = S_t^T q_t

The state S of a head maps keys to values, as in gated_delta_net.py, and a_t decays its rows (Kimi
Team 2025, arXiv 2510.26692). Two forms of log a, of r_t = W_fb W_fa x_t + dt_bias:

    -exp(A_log) softplus(r_t)               Kimi Linear
    bound sigmoid(exp(A_log) r_t)           with kda_lower_bound, such as -5 (Ling 3)

Outputs are normalized in each head and gated: norm(o) sigmoid(W_gb W_ga x).

Chunks are those of gated_delta_net.py. Their products of tokens have a decay for each channel
(decayed_products.py), in place of D.

Legend: B sequences, T tokens, D emb_dim, N heads, K width of keys, V width of values, R rank, C
tokens of a chunk, J chunks, P parts of a sequence (chunks.py).
"""

import functools
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from MaxText.config.layer_sections import RecurrentConfig
from MaxText.config.model_sections import LayerConfig, ModelConfig
from MaxText.config.registry import register
from MaxText.layers.capture import record
from MaxText.layers.context import ForwardContext
from MaxText.layers.dense import Dense, einsum
from MaxText.layers.params import Init, param
from MaxText.layers.recurrent.chunks import Chunks
from MaxText.layers.recurrent.decayed_products import (
    decayed_products,
    forget_between_documents,
    product_flops,
    with_diagonal,
)
from MaxText.layers.recurrent.gated_delta_net import DeltaInputs, GatedDeltaNet, norm_epsilon
from MaxText.layers.recurrent.gates import (
    GatedRMSNorm,
    inverse_softplus_of_log_uniform,
    log_decay,
    log_of_uniform,
)
from MaxText.layers.recurrent.short_convolution import ShortConvolution
from MaxText.layers.recurrent.state_passing import DeltaUpdates, pass_corrected_states
from MaxText.layers.recurrent.triangular_inverse import unit_lower_inverse

_FLOAT32 = jnp.dtype(jnp.float32)
_HEAD_AXES = ("q_heads", "kv")


@register("mixer", "kda")
class KimiDeltaAttention(GatedDeltaNet):
    """Kimi Delta Attention (formulas above)."""

    rows: ClassVar = {
        **dict.fromkeys(("query", "key", "value", "beta", "decay"), "query, key, value"),
        "decay_down": "query, key, value",
        **dict.fromkeys(("gate_down", "gate"), "attention gate"),
        "out": "attention output",
    }

    def __init__(self, config: ModelConfig, init: Init, rngs: nnx.Rngs):
        """Declares projections, convolutions, decays and the norm.

        Args:
          config: Keys of the model.
          init: Sizes, initializers and dtypes.
          rngs: RNG streams that weights are drawn from.
        """
        keys = config.recurrent
        D = init.dimensions.emb_dim
        N = keys.linear_num_value_heads
        K = keys.linear_key_head_dim
        V = keys.linear_value_head_dim
        R = rank(keys)
        draw = init.initializers
        self.chunk_size = keys.linear_chunk_size
        self.largest_beta = 2.0 if keys.linear_allow_neg_eigval else 1.0
        self.lower_bound = keys.kda.kda_lower_bound
        self.precision = init.precision
        dense = functools.partial(Dense, init=init, rngs=rngs)
        into_heads = functools.partial(dense, (D,), axes=("embed", *_HEAD_AXES))
        self.query = into_heads((N, K), initializer=draw.query)
        self.key = into_heads((N, K), initializer=draw.key_value)
        self.value = into_heads((N, V), initializer=draw.key_value)
        axes = ("embed", "q_heads")
        self.beta = dense((D,), (N,), axes, draw.kernel, used_in=_FLOAT32)
        if R:
            down = functools.partial(dense, (D,), (R,), ("embed", None), draw.kernel)
            self.decay_down = down(used_in=init.dtype)
            self.gate_down = down()
            into_heads = functools.partial(dense, (R,), axes=("latent", *_HEAD_AXES))
        else:
            self.decay_down = None
            self.gate_down = None
        # Decays multiply up over all later tokens, so that they are never quantized.
        self.decay = into_heads((N, K), initializer=draw.kernel, used_in=init.dtype)
        self.gate = into_heads((N, V), initializer=draw.kernel)
        convolution = functools.partial(
            ShortConvolution,
            axes=_HEAD_AXES,
            width=keys.linear_conv_kernel_dim,
            init=init,
            rngs=rngs,
        )
        self.query_conv = convolution((N, K))
        self.key_conv = convolution((N, K))
        self.value_conv = convolution((N, V))
        # As in the authors' program.
        declare = functools.partial(param, rngs, dtype=init.weight_dtype)
        self.A_log = declare((N,), ("q_heads",), log_of_uniform(1.0, 16.0))
        self.dt_bias = declare((N, K), _HEAD_AXES, inverse_softplus_of_log_uniform(1e-3, 0.1))
        self.norm = GatedRMSNorm(V, norm_epsilon(config), init, rngs, activation=jax.nn.sigmoid)
        out_axes = (*_HEAD_AXES, "embed")
        self.out = dense((N, V), (D,), out_axes, draw.attention_output)

    def output_gate(self, x_BTD: jax.Array) -> jax.Array:
        """Returns what the gate of outputs is the sigmoid of, [B, T, N, V]."""
        return self.gate(x_BTD if self.gate_down is None else self.gate_down(x_BTD))

    def rates(self, x_BTD: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns b [B, T, N] and log a [B, T, N, K], float32."""
        beta_BTN = self.largest_beta * jax.nn.sigmoid(self.beta(x_BTD))
        rate_BTNK = self.decay(x_BTD if self.decay_down is None else self.decay_down(x_BTD))
        A_log_N1 = self.A_log[...].astype(jnp.float32)[:, None]
        dt_bias_NK = self.dt_bias[...].astype(jnp.float32)
        if self.lower_bound is None:
            log_a_BTNK = log_decay(rate_BTNK, A_log_N1, dt_bias_NK)
        else:
            steps_BTNK = jnp.exp(A_log_N1) * (rate_BTNK.astype(jnp.float32) + dt_bias_NK)
            log_a_BTNK = self.lower_bound * jax.nn.sigmoid(steps_BTNK)
        record(beta_BTN, "write_strength")
        record(jnp.exp(log_a_BTNK), "state_decay")
        return beta_BTN, log_a_BTNK

    def recur(
        self, inputs: DeltaInputs, memory_BNKV: jax.Array, context: ForwardContext, chunks: Chunks
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the outputs o, float32 [B, T, N, V], and the last state."""
        return channelwise_delta_rule(inputs, memory_BNKV, context, chunks, self.precision)

    @classmethod
    def num_key_heads(cls, keys: RecurrentConfig) -> int:
        """Returns N: every head has keys of its own."""
        return keys.linear_num_value_heads

    @classmethod
    def pair_flops(cls, keys: RecurrentConfig, chunk: int) -> float:
        """Returns FLOPs per token of the decayed products; see `GatedDeltaNet.pair_flops`."""
        products = 2 * product_flops(chunk, keys.linear_key_head_dim)
        return cls.num_key_heads(keys) * products

    @classmethod
    def sharded_sizes(cls, layer: LayerConfig) -> dict[str, tuple[str, int]]:
        """Returns the number of heads; see `Part.sharded_sizes`."""
        num_heads = layer.config.recurrent.linear_num_value_heads
        return {"linear_num_value_heads": ("heads", num_heads)}


def rank(keys: RecurrentConfig) -> int:
    """Returns R, the rank of the projections to decays and gates; 0 if they have full rank."""
    chosen = keys.kda.kda_lora_rank
    return keys.linear_key_head_dim if chosen is None else chosen


def channelwise_delta_rule(
    inputs: DeltaInputs,
    memory_BNKV: jax.Array,
    context: ForwardContext,
    chunks: Chunks,
    precision: str | None,
) -> tuple[jax.Array, jax.Array]:
    """Returns the outputs o, float32 [B, T, N, V], and the last state.

    Args:
      inputs: Of all tokens, with as many heads of keys as of values, and a decay for each channel
        of a key. Those with b = 0 and log a = 0 leave the state as it is.
      memory_BNKV: The state before the first token, whose document that token continues.
      context: `segments_BT` has the documents: tokens see only their own.
      chunks: The division of sequences; no effect on the result besides rounding.
      precision: Of the products.
    """
    product = functools.partial(einsum, precision=precision)
    log_a_BTNK = forget_between_documents(inputs.log_a, context, chunks.length)
    # [J, P, B, N, C, ...]
    q, k, v, beta, log_a = (chunks.split(x) for x in inputs._replace(log_a=log_a_BTNK))
    pairs = decayed_products((k, q), (k,), log_a, precision)
    [[key_pairs], [query_pairs]] = pairs.products_CC
    inverse = unit_lower_inverse(beta[..., None] * key_pairs, precision)
    solution = inverse * beta[..., None, :]
    since_begin = jnp.exp(pairs.since_begin_CK)
    states = pass_corrected_states(
        DeltaUpdates(
            decay=since_begin[..., -1, :, None],
            keys_JPBNCK=k * jnp.exp(pairs.to_end_CK),
            values_JPBNCV=product("jpbncd,jpbndv->jpbncv", solution, v),
            corrections_JPBNCK=product("jpbncd,jpbndk->jpbnck", solution, k * since_begin),
        ),
        memory_BNKV,
        precision,
    )
    o = product("jpbnck,jpbnkv->jpbncv", q * since_begin, states.before_JPBNKV)
    o += product("jpbncd,jpbndv->jpbncv", with_diagonal(query_pairs, q, k), states.values_JPBNCV)
    return chunks.merge(o), states.last_BNKV
