"""The attention mixer: projections, position form, core, output projection.

Legend: B sequences, T tokens, D emb_dim, N query heads, K key/value heads, H head_dim.
"""

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from MaxText.configuration.layer_sections import Attention as AttentionSection
from MaxText.configuration.layer_sections import AttentionKind, SlotPlace
from MaxText.configuration.layer_sections import Pattention as PattentionSection
from MaxText.layers.attention_core import Memory, Scoring, softmax_attention
from MaxText.layers.building import Building
from MaxText.layers.context import Context
from MaxText.layers.dense import Axes, Dense
from MaxText.layers.flash_attention import flash_attention, serves
from MaxText.layers.key_value_cache import KeyValueCache, WindowCache
from MaxText.layers.linear_attention import (
    LinearState,
    bidirectional_linear_attention,
    causal_linear_attention,
)
from MaxText.layers.normalization import RMSNorm
from MaxText.layers.pattention import PattentionProjection
from MaxText.layers.ring_attention import ring_attention
from MaxText.layers.rotary import rotate
from MaxText.layers.weights import Initializer, Shape, weight
from MaxText.parallelism.constraints import constrain, sharding_in_force, split_axes

Scalars = dict[str, jax.Array]
# Names of the dimensions of queries and of keys and values.
_OF_QUERIES = ("activation_batch", "activation_length", "activation_heads", "activation_kv")
_OF_KEYS = ("activation_batch", "activation_length", "activation_kv_heads", "activation_kv")

State = KeyValueCache | WindowCache | LinearState


class Attention(nnx.Module):
    """Multi-head or grouped-query attention (Vaswani et al. 2017; Ainslie et al. 2023)."""

    def __init__(
        self,
        section: AttentionSection,
        slots: PattentionSection,
        epsilon: float,
        dropout_rate: float,
        building: Building,
        rngs: nnx.Rngs,
        *,
        kind: AttentionKind = "global",
        width: int | None = None,
    ):
        """`width` is D where it is not that of the model; memories are for layers of one kind."""
        D, N, K, H = building.dimensions[:4]
        D = width or D
        init = building.initializers
        self.section = section
        self.dropout_rate = dropout_rate
        self.max_length = building.dimensions.max_target_length
        self.precision = building.precision
        bias = section.qkv_bias

        def projection(
            inputs: Shape, outputs: Shape, axes: Axes, init: Initializer, place: SlotPlace,
            use_bias: bool,
        ) -> Dense | PattentionProjection:  # fmt: skip
            if section.attention_projections == "dense":
                return Dense(inputs, outputs, axes, init, building, rngs, use_bias=use_bias)
            return PattentionProjection(
                slots, place, inputs, outputs, building, rngs, use_bias=use_bias
            )

        q_axes, kv_axes = ("embed", "q_heads", "kv"), ("embed", "kv_heads", "kv")
        self.query = projection((D,), (N, H), q_axes, init.query, "qkv", bias)
        self.key = projection((D,), (K, H), kv_axes, init.key_value, "qkv", bias)
        self.value = projection((D,), (K, H), kv_axes, init.key_value, "qkv", bias)
        out_axes = ("q_heads", "kv", "embed")
        self.out = projection(
            (N, H), (D,), out_axes, init.attention_output, "proj", section.proj_bias
        )
        memories = section.num_mem_kv if kind == "global" else 0
        self.memory_key, self.memory_value = (
            weight(
                rngs, (memories, K, H), (None, "kv_heads", "kv"), init.memory,
                dtype=building.weight_dtype,
            )
            if memories
            else None
            for _ in range(2)
        )  # fmt: skip
        norm = section.use_qk_norm
        self.query_norm = RMSNorm(H, epsilon, building, rngs) if norm else None
        self.key_norm = RMSNorm(H, epsilon, building, rngs) if norm else None

    def __call__(
        self,
        inputs: tuple[jax.Array, jax.Array, jax.Array],
        context: Context,
        state: State | None = None,
    ) -> tuple[jax.Array, Scalars, State | None]:
        """The mixer.

        Args:
          inputs: x_BTD of queries, of keys and of values, most often one and the same.
          state: of the tokens before these; None where there are none.

        Returns:
          y_BTD; scalars to be summed over layers (none here); and the state after these tokens,
          None unless there was one before or the context asks for one.
        """
        q_BTD, k_BTD, v_BTD = inputs
        q_BTNH = checkpoint_name(self.query(q_BTD), "query_proj")
        k_BTKH = checkpoint_name(self.key(k_BTD), "key_proj")
        v_BTKH = checkpoint_name(self.value(v_BTD), "value_proj")
        if self.query_norm is not None and self.key_norm is not None:
            q_BTNH, k_BTKH = self.query_norm(q_BTNH), self.key_norm(k_BTKH)
        if context.rotary is not None:
            q_BTNH, k_BTKH = rotate(q_BTNH, context.rotary), rotate(k_BTKH, context.rotary)
        q_BTNH = constrain(q_BTNH, *_OF_QUERIES)
        k_BTKH, v_BTKH = constrain(k_BTKH, *_OF_KEYS), constrain(v_BTKH, *_OF_KEYS)
        o_BTNH, state = self._core(q_BTNH, k_BTKH, v_BTKH, context, state)
        o_BTNH = constrain(o_BTNH, *_OF_QUERIES)
        return checkpoint_name(self.out(o_BTNH), "out_proj"), {}, state

    def _core(
        self,
        q_BTNH: jax.Array,
        k_BTKH: jax.Array,
        v_BTKH: jax.Array,
        context: Context,
        state: State | None,
    ) -> tuple[jax.Array, State | None]:
        """Who sees what: the part that the kind of attention chooses."""
        section = self.section
        if context.attention_kind == "linear":
            return self._linear(q_BTNH, k_BTKH, v_BTKH, context, state)
        local = context.attention_kind == "local"
        window = section.sliding_window_size if local else None
        scoring = Scoring(
            causal=section.causal,
            window=window,
            scale=section.attention_scale,
            soft_cap=section.attn_logits_soft_cap,
            slopes_N=context.slopes_N,
            precision=self.precision,
        )
        if state is not None:
            assert context.positions_BT is not None
            if isinstance(state, WindowCache):
                return state.step(q_BTNH, k_BTKH, v_BTKH, context.positions_BT, scoring)
            assert isinstance(state, KeyValueCache)
            state = state.append(k_BTKH, v_BTKH, context.positions_BT)
            return state.attend(q_BTNH, context.positions_BT, scoring), state
        memory = None
        if self.memory_key is not None and self.memory_value is not None:
            memory = (self.memory_key[...], self.memory_value[...])
            memory = jax.tree.map(lambda kept: kept.astype(k_BTKH.dtype), memory)
        o_BTNH = self._softmax(q_BTNH, k_BTKH, v_BTKH, scoring, memory, context)
        if context.capacity is None:
            return o_BTNH, None
        if window is not None:
            assert context.lengths_B is not None
            # A text may be shorter than the window, for all its length.
            slots = min(window, self.max_length)
            return o_BTNH, WindowCache.of_prompt(k_BTKH, v_BTKH, context.lengths_B, slots)
        return o_BTNH, KeyValueCache.of_prompt(k_BTKH, v_BTKH, context.capacity, memory)

    def _softmax(
        self,
        q_BTNH: jax.Array,
        k_BTKH: jax.Array,
        v_BTKH: jax.Array,
        scoring: Scoring,
        memory: Memory | None,
        context: Context,
    ) -> jax.Array:
        """Tokens of a batch among themselves, in the form that suits where they lie."""
        section = self.section
        segments_BT, key = context.segments_BT, context.key_for(0)
        drops = self.dropout_rate > 0 and key is not None
        blocked = section.attention != "dot_product"
        block_size = section.attention_block_size if blocked else None
        of_queries = sharding_in_force(_OF_QUERIES, q_BTNH.shape)
        of_keys = sharding_in_force(_OF_KEYS, k_BTKH.shape)
        parts = 1
        if of_queries is not None and of_keys is not None and split_axes(of_queries, 1):
            if section.context_parallel_strategy == "ring" and not drops:
                balanced = section.context_parallel_load_balance
                o_BTNH = ring_attention(
                    q_BTNH, k_BTKH, v_BTKH, scoring, of_queries, of_keys,
                    segments_BT=segments_BT, memory=memory, block_size=block_size,
                    balanced=balanced,
                )  # fmt: skip
                return _named(o_BTNH)
            whole = (_OF_KEYS[0], "activation_kv_length", *_OF_KEYS[2:])
            k_BTKH, v_BTKH = constrain(k_BTKH, *whole), constrain(v_BTKH, *whole)
            parts = q_BTNH.shape[1] // of_queries.shard_shape(q_BTNH.shape)[1]
        if section.attention == "flash" and serves(q_BTNH, of_queries):
            assert memory is None, section
            assert not drops, section
            return flash_attention(
                q_BTNH, k_BTKH, v_BTKH, scoring, of_queries, of_keys, segments_BT=segments_BT
            )
        o_BTNH = softmax_attention(
            q_BTNH, k_BTKH, v_BTKH, scoring,
            segments_BT=segments_BT, memory=memory, block_size=block_size, parts=parts,
            dropout_rate=self.dropout_rate, dropout_key=key,
        )  # fmt: skip
        return _named(o_BTNH)

    def _linear(
        self,
        q_BTNH: jax.Array,
        k_BTKH: jax.Array,
        v_BTKH: jax.Array,
        context: Context,
        state: State | None,
    ) -> tuple[jax.Array, LinearState | None]:
        section = self.section
        if not section.causal:
            o_BTNH = bidirectional_linear_attention(
                q_BTNH, k_BTKH, v_BTKH, segments_BT=context.segments_BT, precision=self.precision
            )
            return _named(o_BTNH), None
        assert state is None or isinstance(state, LinearState)
        o_BTNH, new_state = causal_linear_attention(
            q_BTNH,
            k_BTKH,
            v_BTKH,
            chunk=section.linear_attention_chunk,
            epsilon=section.linear_attention_epsilon,
            state=state,
            segments_BT=context.segments_BT,
            lengths_B=context.lengths_B,
            precision=self.precision,
        )
        keeps = state is not None or context.capacity is not None
        return _named(o_BTNH), new_state if keeps else None


def _named(o_BTNH: jax.Array) -> jax.Array:
    """With the name that policies of rematerialisation know; kernels name what they keep."""
    return checkpoint_name(o_BTNH, "context")
