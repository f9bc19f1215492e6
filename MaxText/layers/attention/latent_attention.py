"""Multi-head latent attention: keys and values from one narrow vector per token.

    q_t = [q^C_t; q^R_t]    of each head, projected from norm(W_DQ x_t), or from x_t itself
    k_t = [k^C_t; k^R_t]    k^C_t = W_UK c_t of each head, k^R_t = W_KR x_t of all heads
    v_t = W_UV c_t          of each head, with the latent vector c_t = norm(W_DKV x_t)

q^R and k^R are rotated, and o = softmax(q k / sqrt(C + R)) v (DeepSeek-AI 2024, arXiv 2405.04434,
section 2.1 and appendix C). Whole sequences are computed so, by any implementation of attention:
C + R + V multiplications for a query and a key in a head. A new token is decoded with the matrices
of c absorbed into queries and outputs, which is the same function:

    q^C W_UK c = (W_UK^T q^C) c,    sum_s p_s W_UV c_s = W_UV (sum_s p_s c_s)

Attention then has one key [c; k^R] for all heads, whose first numbers are also its value. The cache
holds these L + R numbers of a token, and no keys and values of heads.

Legend: B sequences, T tokens, D emb_dim, N heads, L kv_lora_rank, Q q_lora_rank, C
qk_nope_head_dim, R qk_rope_head_dim, H = C + R, V v_head_dim, J = L + R.
"""

import dataclasses
import functools
import math
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from MaxText.config.layer_sections import Dimensions
from MaxText.config.model_sections import LayerConfig, ModelConfig
from MaxText.config.registry import register
from MaxText.layers.attention.attention import (
    KEY_AXES,
    QUERY_AXES,
    Attention,
    AttentionState,
    MixerInput,
)
from MaxText.layers.attention.attention_core import AttentionSpec, Heads
from MaxText.layers.capture import tag
from MaxText.layers.context import ForwardContext
from MaxText.layers.dense import Dense, einsum
from MaxText.layers.kv_cache import KeyValueCache
from MaxText.layers.normalization import RMSNorm
from MaxText.layers.params import Init, param, zeros
from MaxText.layers.part import DecodeState
from MaxText.layers.rotary import apply_rotary
from MaxText.parallelism.logical_sharding import with_logical_constraint

# Of the norms of latent vectors, whatever normalization_layer_epsilon is: DeepSeek's programs pass
# theirs only to the other norms.
_EPSILON = 1e-6


@register("mixer", "latent_attention")
class LatentAttention(Attention):
    """Multi-head latent attention (formulas above)."""

    rows: ClassVar = {
        **dict.fromkeys(("query_down", "query", "latent", "key_value"), "query, key, value"),
        "gate": "attention gate",
        "out": "attention output",
    }
    has_separate_inputs = False
    has_memories = False

    def __init__(self, config: ModelConfig, init: Init, rngs: nnx.Rngs):
        """Declares the projections, the norms of latent vectors, and maybe sinks and a gate.

        Args:
          config: Keys of the model.
          init: Sizes, initializers and dtypes.
          rngs: RNG streams that weights are drawn from.
        """
        attention = config.attention
        latent = attention.latent_attention
        D = init.dimensions.emb_dim
        N = init.dimensions.num_query_heads
        L = latent.kv_lora_rank
        C = latent.qk_nope_head_dim
        R = latent.qk_rope_head_dim
        V = latent.v_head_dim
        draw = init.initializers
        self.config = attention
        self.has_adjacent_pairs = config.position.rope_pairs == "adjacent"
        self.dropout_rate = config.dropout.rate("attention")
        self.max_length = init.dimensions.max_target_length
        self.precision = init.precision
        self.scale = score_scale(config)
        dense = functools.partial(Dense, init=init, rngs=rngs)
        down = functools.partial(dense, (D,), axes=("embed", None), use_bias=attention.qkv_bias)
        of_width = functools.partial(dense, (D,), axes=("embed", "q_heads", "kv"))
        of_rank = functools.partial(dense, axes=("latent", "q_heads", "kv"))
        if Q := latent.q_lora_rank:
            self.query_down = down((Q,), initializer=draw.query)
            self.query_down_norm = RMSNorm(Q, _EPSILON, init, rngs)
            self.query = of_rank((Q,), (N, C + R), initializer=draw.query)
        else:
            self.query_down = None
            self.query_down_norm = None
            self.query = of_width((N, C + R), initializer=draw.query)
        self.latent = down((L + R,), initializer=draw.key_value)
        self.latent_norm = RMSNorm(L, _EPSILON, init, rngs)
        self.key_value = of_rank((L,), (N, C + V), initializer=draw.key_value)
        self.out = dense(
            (N, V),
            (D,),
            axes=("q_heads", "kv", "embed"),
            initializer=draw.attention_output,
            use_bias=attention.proj_bias,
        )
        has_gate = attention.attention_output_gate
        self.gate = of_width((N, V), initializer=draw.kernel) if has_gate else None
        sinks = functools.partial(param, rngs, (N,), ("q_heads",), zeros, dtype=init.weight_dtype)
        self.sinks = sinks() if attention.attention_sinks else None
        self.memory_key = None
        self.memory_value = None

    @classmethod
    def heads(cls, config: ModelConfig, dimensions: Dimensions) -> Heads:
        """Returns the heads of whole sequences, whose keys and values have widths of their own."""
        latent = config.attention.latent_attention
        return Heads(
            num_query_heads=dimensions.num_query_heads,
            num_key_heads=dimensions.num_query_heads,
            num_value_heads=dimensions.num_query_heads,
            key_width=latent.qk_nope_head_dim + latent.qk_rope_head_dim,
            value_width=latent.v_head_dim,
        )

    @classmethod
    def rotary_width(cls, layer: LayerConfig) -> int:
        """Returns R, the width of the rotary slice."""
        return layer.config.attention.latent_attention.qk_rope_head_dim

    @classmethod
    def state_bytes(
        cls, config: ModelConfig, dimensions: Dimensions, length: int, itemsize: int
    ) -> tuple[int, int]:
        """Returns bytes of latent vectors and rotated slices; see `Part.state_bytes`."""
        latent = config.attention.latent_attention
        return (latent.kv_lora_rank + latent.qk_rope_head_dim) * itemsize, 0

    def spec(self, context: ForwardContext) -> AttentionSpec:
        """Returns how scores are computed; the scale is that of unabsorbed heads."""
        return dataclasses.replace(super().spec(context), scale=self.scale)

    def project_inputs(
        self, x: MixerInput, context: ForwardContext
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns queries and keys [B, T, N, H], and values [B, T, N, V]."""
        k_BTNH, v_BTNV = self._keys_and_values(self._latents(x, context))
        return self._queries(x, context), k_BTNH, v_BTNV

    def _queries(self, x_BTD: MixerInput, context: ForwardContext) -> jax.Array:
        """Returns the queries [B, T, N, H], their last R numbers rotated."""
        assert isinstance(x_BTD, jax.Array)
        if self.query_down is not None:
            assert self.query_down_norm is not None
            x_BTD = self.query_down_norm(self.query_down(x_BTD))
        q_BTNH = tag(self.query(x_BTD), "query_proj")
        q_BTNH = self._rotated(q_BTNH, self.config.latent_attention.qk_nope_head_dim, context)
        if context.query_scale is not None:
            q_BTNH = (q_BTNH.astype(jnp.float32) * context.query_scale).astype(q_BTNH.dtype)
        return with_logical_constraint(q_BTNH, *QUERY_AXES)

    def _latents(self, x_BTD: MixerInput, context: ForwardContext) -> jax.Array:
        """Returns [c; k^R] of the tokens, [B, T, 1, J], after norm and rotation."""
        assert isinstance(x_BTD, jax.Array)
        rank = self.config.latent_attention.kv_lora_rank
        latent_BTJ = tag(self.latent(x_BTD), "key_proj")
        c_BTL = self.latent_norm(latent_BTJ[..., :rank])
        latent_BTJ = jnp.concatenate([c_BTL, latent_BTJ[..., rank:]], axis=-1)
        return self._rotated(latent_BTJ[:, :, None], rank, context)

    def _rotated(self, x_BTNH: jax.Array, start: int, context: ForwardContext) -> jax.Array:
        """Returns heads whose dimensions from `start` on are rotated, if positions are."""
        if context.rotary is None:
            return x_BTNH
        rotated = apply_rotary(
            x_BTNH[..., start:], context.rotary, adjacent=self.has_adjacent_pairs
        )
        return jnp.concatenate([x_BTNH[..., :start], rotated], axis=-1)

    def _keys_and_values(self, latents_BT1J: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the keys [B, T, N, H] and values [B, T, N, V] of the heads."""
        latent = self.config.latent_attention
        c_BTL = latents_BT1J[:, :, 0, : latent.kv_lora_rank]
        key_value_BTNH = tag(self.key_value(c_BTL), "value_proj")
        k_BTNC, v_BTNV = jnp.split(key_value_BTNH, [latent.qk_nope_head_dim], axis=-1)
        rotary_BT1R = latents_BT1J[..., latent.kv_lora_rank :]
        rotary_BTNR = jnp.broadcast_to(rotary_BT1R, (*k_BTNC.shape[:-1], latent.qk_rope_head_dim))
        k_BTNH = jnp.concatenate([k_BTNC, rotary_BTNR], axis=-1)
        k_BTNH = with_logical_constraint(k_BTNH, *KEY_AXES)
        return k_BTNH, with_logical_constraint(v_BTNV, *KEY_AXES)

    def project_output(
        self, o_BTNH: jax.Array, x: MixerInput, context: ForwardContext
    ) -> jax.Array:
        """Returns the output [B, T, D] of the heads' outputs [B, T, N, V]."""
        assert isinstance(x, jax.Array)
        return super().project_output(o_BTNH, (x, x, x), context)

    def prefill(self, x: MixerInput, context: ForwardContext) -> tuple[jax.Array, AttentionState]:
        """Returns the output for prompts, and a cache of their latent vectors."""
        latents_BT1J = self._latents(x, context)
        k_BTNH, v_BTNV = self._keys_and_values(latents_BT1J)
        o_BTNV = self.attend(self._queries(x, context), k_BTNH, v_BTNV, context)
        assert context.capacity is not None
        rank = self.config.latent_attention.kv_lora_rank
        cache = KeyValueCache.of_keys(latents_BT1J, context.capacity, value_width=rank)
        return self.project_output(o_BTNV, x, context), cache

    def decode_step(
        self, x: MixerInput, state: DecodeState, context: ForwardContext
    ) -> tuple[jax.Array, AttentionState]:
        """Returns the output for new tokens, and the cache with their latent vectors.

        Attention reads the cache alone: the matrices of keys and values are absorbed, and their
        products not quantized.
        """
        assert isinstance(state, KeyValueCache)
        positions_BT = context.positions_BT
        assert positions_BT is not None
        width = self.config.latent_attention.qk_nope_head_dim
        q_BTNH = self._queries(x, context)
        into_heads_LNH = self.key_value.kernel[...].astype(q_BTNH.dtype)
        into_keys_LNC, into_values_LNV = jnp.split(into_heads_LNH, [width], axis=-1)
        absorbed_BTNL = einsum("btnc,lnc->btnl", q_BTNH[..., :width], into_keys_LNC, self.precision)
        q_BTNJ = jnp.concatenate([absorbed_BTNL, q_BTNH[..., width:]], axis=-1)
        state = state.append(self._latents(x, context), None, positions_BT)
        o_BTNL = state.attend(q_BTNJ, positions_BT, self.spec(context))
        o_BTNV = einsum("btnl,lnv->btnv", o_BTNL, into_values_LNV, self.precision)
        return self.project_output(tag(o_BTNV, "context"), x, context), state


def score_scale(config: ModelConfig) -> float:
    """Returns the factor of scores: attention_scale, or 1 / sqrt(C + R), and that of YaRN.

    With rope_type=yarn it is multiplied by (0.1 mscale ln(rope_factor) + 1)^2, as DeepSeek's
    programs do instead of scaling sines and cosines (Peng et al. 2023, section 3.4).
    """
    latent = config.attention.latent_attention
    scale = config.attention.attention_scale
    if scale is None:
        scale = (latent.qk_nope_head_dim + latent.qk_rope_head_dim) ** -0.5
    position = config.position
    if position.position_embedding == "rotary" and position.rope_type == "yarn":
        scale *= (0.1 * latent.mscale * math.log(position.rope_factor) + 1.0) ** 2
    return scale
