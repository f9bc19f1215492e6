"""The attention mixer: projections, positions, attention, output."""

import functools
from typing import Any, ClassVar

import jax
from flax import nnx

from MaxText.config.layer_sections import AttentionConfig, Dimensions
from MaxText.config.model_sections import ModelConfig
from MaxText.config.registry import lookup, register
from MaxText.layers.attention.attention_core import (
    MAX_BLOCKS,
    AttentionSpec,
    PersistentKV,
    dot_product_attention,
    window_blocks,
)
from MaxText.layers.attention.flash_attention import TILE, flash_attention, supports_shape
from MaxText.layers.attention.flash_attention import average_keys_computed as flash_keys_computed
from MaxText.layers.attention.ring_attention import ring_attention
from MaxText.layers.capture import tag
from MaxText.layers.context import ForwardContext
from MaxText.layers.kv_cache import KeyValueCache, SlidingWindowCache
from MaxText.layers.normalization import RMSNorm
from MaxText.layers.params import Init, param
from MaxText.layers.part import Flops, Mixer, Scalars
from MaxText.layers.rotary import apply_rotary
from MaxText.parallelism.logical_sharding import (
    current_sharding,
    split_axes,
    with_logical_constraint,
)

QUERY_AXES = ("activation_batch", "activation_length", "activation_heads", "activation_kv")
KEY_AXES = ("activation_batch", "activation_length", "activation_kv_heads", "activation_kv")

State = KeyValueCache | SlidingWindowCache


@register("mixer", "attention")
class Attention(Mixer):
    """Multi-head or grouped-query attention (Vaswani 2017; Ainslie 2023)."""

    rows: ClassVar = {
        **dict.fromkeys(("query", "key", "value"), "query, key, value"),
        **dict.fromkeys(("memory_key", "memory_value"), "memories"),
        "out": "attention output",
    }
    not_recomputed = ("out",)
    has_separate_inputs = True
    has_softmax = True
    has_memories = True  # whether it reads num_mem_kv learned keys and values

    def __init__(self, config: ModelConfig, init: Init, rngs: nnx.Rngs):
        attention = config.attention
        D, N, K, H = init.dimensions[:4]
        draw = init.initializers
        self.config = attention
        self.dropout_rate = config.dropout.rate("attention")
        self.max_length = init.dimensions.max_target_length
        self.precision = init.precision
        bias = attention.qkv_bias
        projection = functools.partial(
            lookup("projection", attention.attention_projections), config, init, rngs
        )
        q_axes = ("embed", "q_heads", "kv")
        kv_axes = ("embed", "kv_heads", "kv")
        self.query = projection("qkv", (D,), (N, H), q_axes, draw.query, bias)
        self.key = projection("qkv", (D,), (K, H), kv_axes, draw.key_value, bias)
        self.value = projection("qkv", (D,), (K, H), kv_axes, draw.key_value, bias)
        out_axes = ("q_heads", "kv", "embed")
        bias = attention.proj_bias
        self.out = projection("proj", (N, H), (D,), out_axes, draw.attention_output, bias)
        memories = attention.num_mem_kv if self.has_memories else 0
        axes = (None, "kv_heads", "kv")
        dtype = init.weight_dtype
        self.memory_key, self.memory_value = (
            param(rngs, (memories, K, H), axes, draw.persistent_kv, dtype=dtype)
            if memories
            else None
            for _ in range(2)
        )
        norm = attention.use_qk_norm
        epsilon = config.block.normalization_layer_epsilon
        self.query_norm = RMSNorm(H, epsilon, init, rngs) if norm else None
        self.key_norm = RMSNorm(H, epsilon, init, rngs) if norm else None

    @classmethod
    def sliding_window(cls, config: AttentionConfig) -> int | None:
        """Returns the window, a query's own token included, or None."""
        return None

    @classmethod
    def flops(cls, config: ModelConfig, dimensions: Dimensions, length: int) -> dict[str, Flops]:
        attention = config.attention
        per_key = 2 * dimensions.num_query_heads * dimensions.head_dim
        window = cls.sliding_window(attention)
        memories = attention.num_mem_kv if cls.has_memories else 0
        counted = average_keys_visible(length, causal=attention.causal, window=window) + memories
        multiplied = average_keys_computed(attention, length, window)
        found = Flops(per_key * counted, per_key * (multiplied + memories))
        is_flash = attention.attention == "flash" and length % TILE == 0
        # Both backward kernels recompute scores and the gradient of probabilities.
        again = 3 * per_key * multiplied if is_flash else 0.0
        return {"attention scores": found._replace(recomputed=again), "attention values": found}

    @classmethod
    def state_bytes(
        cls, config: ModelConfig, dimensions: Dimensions, length: int, itemsize: int
    ) -> tuple[int, int]:
        bytes_per_token = 2 * dimensions.num_kv_heads * dimensions.head_dim * itemsize
        if (window := cls.sliding_window(config.attention)) is not None:
            return 0, min(window, length) * bytes_per_token
        return bytes_per_token, config.attention.num_mem_kv * bytes_per_token

    def __call__(self, x_BTD: Any, context: ForwardContext) -> tuple[jax.Array, Scalars]:
        return self._run(x_BTD, context, None)[0], {}

    def prefill(self, x_BTD: Any, context: ForwardContext) -> tuple[jax.Array, State]:
        return self._run(x_BTD, context, None)

    def decode_step(self, x_BTD: Any, state: Any, context: ForwardContext) -> tuple[jax.Array, Any]:
        return self._run(x_BTD, context, state)

    def _run(self, x: Any, context: ForwardContext, state: State | None) -> tuple[jax.Array, Any]:
        q_BTD, k_BTD, v_BTD = x
        q_BTNH = tag(self.query(q_BTD), "query_proj")
        k_BTKH = tag(self.key(k_BTD), "key_proj")
        v_BTKH = self.values(v_BTD, context)
        if self.query_norm is not None and self.key_norm is not None:
            q_BTNH = self.query_norm(q_BTNH)
            k_BTKH = self.key_norm(k_BTKH)
        if context.rotary is not None:
            q_BTNH, k_BTKH = (apply_rotary(x, context.rotary) for x in (q_BTNH, k_BTKH))
        q_BTNH = with_logical_constraint(q_BTNH, *QUERY_AXES)
        k_BTKH, v_BTKH = (with_logical_constraint(x, *KEY_AXES) for x in (k_BTKH, v_BTKH))
        o_BTNH, state = self._core(q_BTNH, k_BTKH, v_BTKH, context, state)
        o_BTNH = with_logical_constraint(o_BTNH, *QUERY_AXES)
        return tag(self.out(o_BTNH), "out_proj"), state

    def values(self, v_BTD: jax.Array, context: ForwardContext) -> jax.Array:
        return tag(self.value(v_BTD), "value_proj")

    def _core(
        self,
        q_BTNH: jax.Array,
        k_BTKH: jax.Array,
        v_BTKH: jax.Array,
        context: ForwardContext,
        state: State | None,
    ) -> tuple[jax.Array, State | None]:
        config = self.config
        window = self.sliding_window(config)
        spec = AttentionSpec(
            causal=config.causal,
            window=window,
            scale=config.attention_scale,
            soft_cap=config.attn_logits_soft_cap,
            slopes_N=context.slopes_N,
            precision=self.precision,
        )
        if state is not None:
            assert context.positions_BT is not None
            if isinstance(state, SlidingWindowCache):
                return state.step(q_BTNH, k_BTKH, v_BTKH, context.positions_BT, spec)
            assert isinstance(state, KeyValueCache)
            state = state.append(k_BTKH, v_BTKH, context.positions_BT)
            return state.attend(q_BTNH, context.positions_BT, spec), state
        persistent_kv = None
        if self.memory_key is not None and self.memory_value is not None:
            persistent_kv = (self.memory_key[...], self.memory_value[...])
            persistent_kv = jax.tree.map(lambda x: x.astype(k_BTKH.dtype), persistent_kv)
        o_BTNH = self._softmax(q_BTNH, k_BTKH, v_BTKH, spec, persistent_kv, context)
        if context.capacity is None:
            return o_BTNH, None
        if window is not None:
            assert context.lengths_B is not None
            # The window may be longer than any sequence.
            slots = min(window, self.max_length)
            return o_BTNH, SlidingWindowCache.from_prefill(k_BTKH, v_BTKH, context.lengths_B, slots)
        return o_BTNH, KeyValueCache.from_prefill(k_BTKH, v_BTKH, context.capacity, persistent_kv)

    def _softmax(
        self,
        q_BTNH: jax.Array,
        k_BTKH: jax.Array,
        v_BTKH: jax.Array,
        spec: AttentionSpec,
        persistent_kv: PersistentKV | None,
        context: ForwardContext,
    ) -> jax.Array:
        config = self.config
        segments_BT = context.segments_BT
        key = context.key_for(0)
        drops = self.dropout_rate > 0 and key is not None
        blocked = config.attention != "dot_product"
        block_size = config.attention_block_size if blocked else None
        query_sharding = current_sharding(QUERY_AXES, q_BTNH.shape)
        key_sharding = current_sharding(KEY_AXES, k_BTKH.shape)
        # A registered position embedding may have added a bias.
        flash = config.attention == "flash" and spec.slopes_N is None
        flash = flash and supports_shape(q_BTNH, query_sharding)
        parts = 1
        if query_sharding and key_sharding and split_axes(query_sharding, 1):
            if config.context_parallel_strategy == "ring" and not drops:
                balanced = config.context_parallel_load_balance
                o_BTNH = ring_attention(
                    q_BTNH,
                    k_BTKH,
                    v_BTKH,
                    spec,
                    query_sharding,
                    key_sharding,
                    segments_BT=segments_BT,
                    persistent_kv=persistent_kv,
                    block_size=block_size,
                    balanced=balanced,
                )
                return tag(o_BTNH, "context")
            if not flash:
                whole = (KEY_AXES[0], "activation_kv_length", *KEY_AXES[2:])
                k_BTKH, v_BTKH = (with_logical_constraint(x, *whole) for x in (k_BTKH, v_BTKH))
            parts = q_BTNH.shape[1] // query_sharding.shard_shape(q_BTNH.shape)[1]
        if flash:
            assert persistent_kv is None, config
            assert not drops, config
            return flash_attention(
                q_BTNH,
                k_BTKH,
                v_BTKH,
                spec,
                query_sharding,
                key_sharding,
                segments_BT=segments_BT,
            )
        o_BTNH = dot_product_attention(
            q_BTNH,
            k_BTKH,
            v_BTKH,
            spec,
            segments_BT=segments_BT,
            persistent_kv=persistent_kv,
            block_size=block_size,
            parts=parts,
            dropout_rate=self.dropout_rate,
            dropout_key=key,
        )
        return tag(o_BTNH, "context")


@register("mixer", "local_attention")
class LocalAttention(Attention):
    """Attention to the last `sliding_window_size` tokens."""

    has_memories = False

    @classmethod
    def sliding_window(cls, config: AttentionConfig) -> int | None:
        return config.sliding_window_size


def average_keys_visible(length: int, *, causal: bool, window: int | None = None) -> float:
    """Returns the average number of visible keys per query, for the MFU."""
    visible = min(window or length, length)
    return visible - visible**2 / (2 * length) if causal else float(visible)


def average_keys_computed(config: AttentionConfig, length: int, window: int | None = None) -> float:
    """Returns the average keys multiplied per query, masked ones included."""
    if config.attention == "flash" and length % TILE == 0:
        return flash_keys_computed(length, causal=config.causal, window=window)
    if window is not None:
        rows = window_blocks(window, length, causal=config.causal)
        if rows is None:
            return float(length)
        return -(-length // rows) * rows * rows * (2 if config.causal else 3) / length
    block = length
    if config.attention != "dot_product" and config.causal:
        block = min(max(config.attention_block_size, -(-length // MAX_BLOCKS)), length)
    ends = ((start, min(start + block, length)) for start in range(0, length, block))
    return sum((end - start) * end for start, end in ends) / length
