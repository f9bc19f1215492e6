"""The attention mixer: projections, positions, attention, output.

`Attention.__call__` reads in the order of execution: `project_inputs`, `attend`, `project_output`.
`attend` chooses among three implementations of the same attention: `ring_attention` and
`flash_attention` where the configuration, the devices and the part allow them, else
`dot_product_attention`. `prefill` does the same and keeps the keys and values, `decode_step`
attends to those kept. All of them apply the hooks `score`, `mask` and `weights` of the part.

Legend: B sequences, T tokens, D emb_dim, N query heads, K key/value heads, H head_dim, M memories.
"""

import functools
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from MaxText.config.layer_sections import AttentionConfig, Dimensions
from MaxText.config.model_sections import ModelConfig
from MaxText.config.registry import lookup, register
from MaxText.layers.attention.attention_core import (
    MAX_BLOCKS,
    AttentionSharding,
    AttentionSpec,
    Heads,
    PersistentKV,
    WeightsScope,
    dot_product_attention,
    window_blocks,
)
from MaxText.layers.attention.attention_metrics import attention_metrics
from MaxText.layers.attention.flash_attention import TILE, flash_attention, supports_shape
from MaxText.layers.attention.flash_attention import average_keys_computed as flash_keys_computed
from MaxText.layers.attention.ring_attention import ring_attention, ring_unsupported_reason
from MaxText.layers.capture import tag
from MaxText.layers.context import ForwardContext
from MaxText.layers.dropout import Dropout
from MaxText.layers.kv_cache import KeyValueCache, SlidingWindowCache
from MaxText.layers.normalization import HeadNorm
from MaxText.layers.params import Init, param, zeros
from MaxText.layers.part import DecodeState, Flops, Mixer, MixerInput, Scalars
from MaxText.layers.rotary import apply_rotary
from MaxText.parallelism.logical_sharding import current_sharding, with_logical_constraint

QUERY_AXES = ("activation_batch", "activation_length", "activation_heads", "activation_kv")
KEY_AXES = ("activation_batch", "activation_length", "activation_kv_heads", "activation_kv")
_WHOLE_KEY_AXES = (KEY_AXES[0], "activation_kv_length", *KEY_AXES[2:])  # all tokens on each device

_DROPOUT_STREAM = 0  # RNG stream id within a layer; block.py has the others

AttentionState = KeyValueCache | SlidingWindowCache


@register("mixer", "attention")
class Attention(Mixer):
    """Multi-head or grouped-query attention (Vaswani et al. 2017; Ainslie et al. 2023).

    A variant is a subclass that overrides only what differs. All implementations of attention
    apply it, caches included; fused kernels do not apply the first three:

    - `score` changes scores, `mask` hides keys, `weights` replaces the softmax;
    - `sliding_window` and `is_causal` say how far a query sees, which decides the blocks that are
      computed and the size of the cache;
    - `project_inputs`, `values` and `project_output` compute other queries, keys and values, and
      another output. Keys may have more heads than values (`dot_product_attention`), values another
      width than keys.

    What is not weights times values replaces `attend`, and with it `decode_step` and `flops`, and
    `prefill` and `state_bytes` if its decode state is no cache of keys and values. It sets
    `has_softmax` to False, and `has_memories` unless it reads them.

    A registered subclass is built from the model's keys, as this class is. One with keys of its own
    has a `config_of` that returns `layer.config`, and reads its keys by `config.parts.of`.

    Attributes:
      weights_scope: What a weight of `weights` depends on. "score": its own score alone, as in
        sigmoid attention, so that parts of a sequence add up (ring attention). "query": all scores
        of its query, as in a softmax. "sequence": scores of other queries too; they are then
        computed in one block, and generation needs a `decode_step` of the part.
      has_memories: Whether it reads num_mem_kv learned keys and values.
    """

    rows: ClassVar = {
        **dict.fromkeys(("query", "key", "value"), "query, key, value"),
        **dict.fromkeys(("memory_key", "memory_value"), "memories"),
        "gate": "attention gate",
        "out": "attention output",
    }
    not_recomputed = ("out",)
    has_separate_inputs = True
    has_softmax = True
    has_memories = True
    weights_scope: ClassVar[WeightsScope] = "query"

    def __init__(self, config: ModelConfig, init: Init, rngs: nnx.Rngs):
        """Declares the projections, and where configured memories, norms, sinks and a gate.

        Args:
          config: Keys of the model; `attention_projections` names the class of the projections.
          init: Sizes, initializers and dtypes.
          rngs: RNG streams that weights are drawn from.
        """
        attention = config.attention
        D, N, K, H = init.dimensions[:4]
        draw = init.initializers
        self.config = attention
        self.has_adjacent_pairs = config.position.rope_pairs == "adjacent"
        self.dropout_rate = config.dropout.rate("attention")
        self.max_length = init.dimensions.max_target_length
        self.precision = init.precision
        projection = functools.partial(
            lookup("projection", attention.attention_projections), config, init, rngs
        )
        from_stream = functools.partial(projection, "qkv", (D,), use_bias=attention.qkv_bias)
        to_query_heads = functools.partial(from_stream, (N, H), axes=("embed", "q_heads", "kv"))
        key_or_value = functools.partial(
            from_stream, (K, H), axes=("embed", "kv_heads", "kv"), initializer=draw.key_value
        )
        self.query = to_query_heads(initializer=draw.query)
        self.key = key_or_value()
        self.value = None if attention.share_kv_projections else key_or_value()
        self.out = projection(
            "proj",
            (N, H),
            (D,),
            axes=("q_heads", "kv", "embed"),
            initializer=draw.attention_output,
            use_bias=attention.proj_bias,
        )
        has_gate = attention.attention_output_gate
        self.gate = to_query_heads(initializer=draw.kernel) if has_gate else None
        sinks = functools.partial(
            param,
            rngs,
            (self.heads(config, init.dimensions).num_query_heads,),
            ("q_heads",),
            zeros,
            dtype=init.weight_dtype,
        )
        self.sinks = sinks() if attention.attention_sinks else None
        memory = functools.partial(
            param,
            rngs,
            (attention.num_mem_kv, K, H),
            (None, "kv_heads", "kv"),
            draw.persistent_kv,
            dtype=init.weight_dtype,
        )
        has_memories = self.has_memories and attention.num_mem_kv > 0
        self.memory_key = memory() if has_memories else None
        self.memory_value = memory() if has_memories else None
        epsilon = config.block.normalization_layer_epsilon
        norm = functools.partial(HeadNorm, init=init, rngs=rngs, epsilon=epsilon)
        qk_norm = functools.partial(
            norm,
            parametric=attention.qk_norm_with_scale,
            scope=attention.qk_norm_scope,
            kind=attention.qk_norm_type,
        )
        has_qk_norm = attention.use_qk_norm
        self.query_norm = qk_norm((N, H), "q_heads") if has_qk_norm else None
        self.key_norm = qk_norm((K, H), "kv_heads") if has_qk_norm else None
        has_v_norm = attention.use_v_norm
        self.value_norm = norm((K, H), "kv_heads", parametric=False) if has_v_norm else None

    @classmethod
    def problem(cls, config: ModelConfig, dimensions: Dimensions) -> str | None:
        """Returns why a subclass cannot have the keys; see `Part.problem`."""
        computes_values = cls.values is not Attention.values
        if not computes_values or not config.attention.share_kv_projections:
            return None
        return (
            "it computes values of its own, and share_kv_projections=true takes the keys\n"
            "share_kv_projections=false"
        )

    @classmethod
    def sliding_window(cls, config: AttentionConfig) -> int | None:
        """Returns the window, a query's own token included, or None."""
        return None

    @classmethod
    def is_causal(cls, config: AttentionConfig) -> bool:
        """Returns whether a query sees only keys up to its own position, whatever `mask` says.

        A part whose `mask` opens later keys, such as those of a prefix, returns False.
        """
        return config.causal

    @classmethod
    def heads(cls, config: ModelConfig, dimensions: Dimensions) -> Heads:
        """Returns the heads that `project_inputs` makes, for `flops`, `state_bytes` and kernels."""
        return Heads(
            num_query_heads=dimensions.num_query_heads,
            num_key_heads=dimensions.num_kv_heads,
            num_value_heads=dimensions.num_kv_heads,
            key_width=dimensions.head_dim,
            value_width=dimensions.head_dim,
        )

    @classmethod
    def hooks(cls) -> tuple[str, ...]:
        """Returns which of `score`, `mask` and `weights` a subclass overrides."""
        names = ("score", "mask", "weights")
        return tuple(name for name in names if getattr(cls, name) is not getattr(Attention, name))

    @classmethod
    def decodes(cls) -> bool:
        """Returns whether it can generate text: a step has no scores of earlier queries."""
        has_step = cls.decode_step is not Attention.decode_step
        return cls.weights_scope != "sequence" or has_step

    def score(
        self, scores_BNTS: jax.Array, q_pos: jax.Array, k_pos: jax.Array, head: jax.Array
    ) -> jax.Array:
        """Hook: returns the scores that weights are computed from, float32 [B, N, T, S].

        Each depends only on its own score and the other arguments, so that any part of the square
        may be computed alone. They may read parameters of the part, such as
        `self.bias[...][head, q_pos - k_pos]`. A score of -inf hides a key from one head. Memories
        (num_mem_kv) have no positions, and are not passed.

        Args:
          scores_BNTS: Products q k, scaled, soft-capped, and lowered by ALiBi.
          q_pos: Positions of the queries in their documents, int32 [B, 1, T, 1]; B may be 1.
          k_pos: Positions of the keys, [B, 1, 1, S].
          head: Indices of the query heads, [N, 1, 1]; on several devices maybe a part of them.
        """
        return scores_BNTS

    def mask(self, q_pos: jax.Array, k_pos: jax.Array) -> jax.Array:
        """Hook: returns whether queries see keys, bool [B, T, S].

        It is asked about keys that `is_causal`, `sliding_window` and the document allow. Every
        query has to see one.

        Args:
          q_pos: Positions of the queries in their documents, int32 [B, T, 1]; B may be 1.
          k_pos: Positions of the keys, [B, 1, S].
        """
        return jnp.ones(jnp.broadcast_shapes(q_pos.shape, k_pos.shape), bool)

    def weights(self, scores_BNTS: jax.Array, mask_B1TS: jax.Array) -> jax.Array:
        """Hook: returns the weights of the values, float32 [B, N, T, S], in place of a softmax.

        `weights_scope` says what a weight depends on. Weights of masked keys are set to 0
        afterward. Memories (num_mem_kv) come first.

        Args:
          scores_BNTS: Scores, -inf where a key is masked.
          mask_B1TS: Whether a query sees a key; B may be 1.
        """
        return jax.nn.softmax(scores_BNTS, axis=-1)

    @classmethod
    def flops(cls, config: ModelConfig, dimensions: Dimensions, length: int) -> dict[str, Flops]:
        """Returns FLOPs of the products q k and p v; see `Part.flops`."""
        attention = config.attention
        heads = cls.heads(config, dimensions)
        memories = attention.num_mem_kv if cls.has_memories else 0
        visible = average_keys_visible(
            length, causal=cls.is_causal(attention), window=cls.sliding_window(attention)
        )
        computed = average_keys_computed(cls, attention, length)
        is_flash = attention.attention == "flash" and not cls.hooks() and length % TILE == 0

        def product(width: int) -> Flops:
            """Returns the FLOPs of a product of tokens with tokens in heads of this width."""
            per_key = 2 * heads.num_query_heads * width
            return Flops(per_key * (visible + memories), per_key * (computed + memories))

        scores = product(heads.key_width)
        values = product(heads.value_width)
        # Both backward kernels recompute scores and the gradient of probabilities.
        recomputed = 0.0
        if is_flash:
            key_and_value = 2 * heads.key_width + heads.value_width
            recomputed = 2 * heads.num_query_heads * key_and_value * computed
        return {
            "attention scores": scores._replace(recomputed=recomputed),
            "attention values": values,
        }

    @classmethod
    def state_bytes(
        cls, config: ModelConfig, dimensions: Dimensions, length: int, itemsize: int
    ) -> tuple[int, int]:
        """Returns bytes of keys and values; see `Part.state_bytes`."""
        heads = cls.heads(config, dimensions)
        key_size = heads.num_key_heads * heads.key_width
        value_size = heads.num_value_heads * heads.value_width
        bytes_per_token = (key_size + value_size) * itemsize
        window = cls.sliding_window(config.attention)
        if window is not None:
            return 0, min(window, length) * bytes_per_token
        return bytes_per_token, config.attention.num_mem_kv * bytes_per_token

    def __call__(self, x: MixerInput, context: ForwardContext) -> tuple[jax.Array, Scalars]:
        """Returns the output [B, T, D], and metrics if `context.log_layer_metrics`.

        Args:
          x: Normalized inputs of queries, keys and values, [B, T, D] each.
          context: Facts about the batch.
        """
        q_BTNH, k_BTKH, v_BTKH = self.project_inputs(x, context)
        o_BTNH = self.attend(q_BTNH, k_BTKH, v_BTKH, context)
        metrics = {}
        if context.log_layer_metrics and self.has_softmax:
            metrics = attention_metrics(
                q_BTNH,
                k_BTKH,
                self.spec(context),
                segments_BT=context.segments_BT,
                persistent_kv=self.memories(k_BTKH.dtype),
            )
        return self.project_output(o_BTNH, x, context), metrics

    def prefill(self, x: MixerInput, context: ForwardContext) -> tuple[jax.Array, DecodeState]:
        """Returns the output for prompts, and a cache of their keys and values."""
        q_BTNH, k_BTKH, v_BTKH = self.project_inputs(x, context)
        o_BTNH = self.attend(q_BTNH, k_BTKH, v_BTKH, context)
        y_BTD = self.project_output(o_BTNH, x, context)
        return y_BTD, self._fill_cache(k_BTKH, v_BTKH, context)

    def decode_step(
        self, x: MixerInput, state: DecodeState, context: ForwardContext
    ) -> tuple[jax.Array, DecodeState]:
        """Returns the output for new tokens, and the cache with their keys and values."""
        q_BTNH, k_BTKH, v_BTKH = self.project_inputs(x, context)
        spec = self.spec(context)
        positions_BT = context.positions_BT
        assert positions_BT is not None
        if isinstance(state, SlidingWindowCache):
            o_BTNH, state = state.step(q_BTNH, k_BTKH, v_BTKH, positions_BT, spec)
        else:
            assert isinstance(state, KeyValueCache)
            state = state.append(k_BTKH, v_BTKH, positions_BT)
            o_BTNH = state.attend(q_BTNH, positions_BT, spec)
        return self.project_output(o_BTNH, x, context), state

    def project_inputs(
        self, x: MixerInput, context: ForwardContext
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns queries [B, T, N, H], keys and values [B, T, K, H].

        Queries and keys are normalized (use_qk_norm) and rotated (rotary positions), or with
        qk_norm_after_rotary rotated and normalized. With share_kv_projections values are the keys
        before both.
        """
        query_input_BTD, key_input_BTD, value_input_BTD = x
        q_BTNH = tag(self.query(query_input_BTD), "query_proj")
        k_BTKH = tag(self.key(key_input_BTD), "key_proj")
        v_BTKH = k_BTKH if self.value is None else self.values(value_input_BTD, context)
        if self.value_norm is not None:
            v_BTKH = self.value_norm(v_BTKH)
        if not self.config.qk_norm_after_rotary:
            q_BTNH, k_BTKH = self._normalized(q_BTNH, k_BTKH)
        if context.rotary is not None:
            q_BTNH = apply_rotary(q_BTNH, context.rotary, adjacent=self.has_adjacent_pairs)
            k_BTKH = apply_rotary(k_BTKH, context.rotary, adjacent=self.has_adjacent_pairs)
        if self.config.qk_norm_after_rotary:
            q_BTNH, k_BTKH = self._normalized(q_BTNH, k_BTKH)
        if context.query_scale is not None:
            q_BTNH = (q_BTNH.astype(jnp.float32) * context.query_scale).astype(q_BTNH.dtype)
        q_BTNH = with_logical_constraint(q_BTNH, *QUERY_AXES)
        k_BTKH = with_logical_constraint(k_BTKH, *KEY_AXES)
        v_BTKH = with_logical_constraint(v_BTKH, *KEY_AXES)
        return q_BTNH, k_BTKH, v_BTKH

    def _normalized(self, q_BTNH: jax.Array, k_BTKH: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns queries and keys after their norms, if there are any."""
        if self.query_norm is None or self.key_norm is None:
            return q_BTNH, k_BTKH
        return self.query_norm(q_BTNH), self.key_norm(k_BTKH)

    def values(self, v_BTD: jax.Array, context: ForwardContext) -> jax.Array:
        """Returns the values [B, T, K, H] of their inputs."""
        assert self.value is not None, "with share_kv_projections values are the keys"
        return tag(self.value(v_BTD), "value_proj")

    def project_output(
        self, o_BTNH: jax.Array, x: MixerInput, context: ForwardContext
    ) -> jax.Array:
        """Returns the output [B, T, D] of the heads' outputs.

        With attention_output_gate they are first multiplied by sigmoid(W x), x the input of the
        queries (Qiu et al. 2025, arXiv 2505.06708, section 2.2: after the weighted values).
        """
        if self.gate is not None:
            g_BTNH = tag(self.gate(x[0]), "attention_gate")
            o_BTNH = o_BTNH * jax.nn.sigmoid(g_BTNH.astype(jnp.float32)).astype(o_BTNH.dtype)
        o_BTNH = with_logical_constraint(o_BTNH, *QUERY_AXES)
        return tag(self.out(o_BTNH), "out_proj")

    def spec(self, context: ForwardContext) -> AttentionSpec:
        """Returns how this layer computes and masks its scores, with its hooks."""
        hooks = self.hooks()
        return AttentionSpec(
            causal=self.is_causal(self.config),
            window=self.sliding_window(self.config),
            scale=self.config.attention_scale,
            soft_cap=self.config.attn_logits_soft_cap,
            slopes_N=context.slopes_N,
            sinks_N=None if self.sinks is None else self.sinks[...],
            precision=self.precision,
            score_hook=self.score if "score" in hooks else None,
            mask_hook=self.mask if "mask" in hooks else None,
            weights_hook=self.weights if "weights" in hooks else None,
            weights_scope=self.weights_scope,
        )

    def memories(self, dtype: DTypeLike) -> PersistentKV | None:
        """Returns the learned keys and values [M, K, H] that every query sees, or None."""
        if self.memory_key is None or self.memory_value is None:
            return None
        return self.memory_key[...].astype(dtype), self.memory_value[...].astype(dtype)

    def attend(
        self, q_BTNH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array, context: ForwardContext
    ) -> jax.Array:
        """Returns attention within whole sequences, [B, T, N, H], tagged "context".

        Tokens of a sequence may be divided over devices. Then keys and values travel around a ring
        (context_parallel_strategy=ring), or the kernel or a sharding constraint gathers them.

        A method in its place applies the mask (`spec.mask`, `context.segments_BT`) and the scale
        (`spec.scale_for`) itself. Keys of attention that it does not read have no effect; a warning
        names them if `has_softmax` is False.
        """
        config = self.config
        spec = self.spec(context)
        segments_BT = context.segments_BT
        if not spec.causal and context.lengths_B is not None:  # padding follows the prompts
            segments_BT = (jnp.arange(q_BTNH.shape[1]) < context.lengths_B[:, None]).astype(int)
        memories = self.memories(k_BTKH.dtype)
        dropout = Dropout(self.dropout_rate, context.key_for(_DROPOUT_STREAM))
        has_blocks = config.attention != "dot_product"
        block_size = config.attention_block_size if has_blocks else None
        sharding = _attention_sharding(q_BTNH, k_BTKH)
        if sharding is not None and self._uses_ring(spec, sharding, dropout):
            o_BTNH = ring_attention(
                q_BTNH,
                k_BTKH,
                v_BTKH,
                spec,
                sharding,
                segments_BT=segments_BT,
                persistent_kv=memories,
                block_size=block_size,
                balanced=config.context_parallel_load_balance,
            )
            return tag(o_BTNH, "context")
        if self._uses_flash(q_BTNH, spec, sharding):
            assert memories is None, config
            assert not dropout.is_active, config
            return flash_attention(  # tags its output itself, with what its backward pass reads
                q_BTNH,
                k_BTKH,
                v_BTKH,
                spec,
                sharding,
                segments_BT=segments_BT,
            )
        num_parts = 1
        if sharding is not None and sharding.length_axes:
            k_BTKH = with_logical_constraint(k_BTKH, *_WHOLE_KEY_AXES)
            v_BTKH = with_logical_constraint(v_BTKH, *_WHOLE_KEY_AXES)
            num_parts = q_BTNH.shape[1] // sharding.query.shard_shape(q_BTNH.shape)[1]
        o_BTNH = dot_product_attention(
            q_BTNH,
            k_BTKH,
            v_BTKH,
            spec,
            segments_BT=segments_BT,
            persistent_kv=memories,
            block_size=block_size,
            num_parts=num_parts,
            dropout=dropout,
        )
        return tag(o_BTNH, "context")

    def _uses_ring(
        self, spec: AttentionSpec, sharding: AttentionSharding, dropout: Dropout
    ) -> bool:
        is_ring = self.config.context_parallel_strategy == "ring" and bool(sharding.length_axes)
        return is_ring and not dropout.is_active and ring_unsupported_reason(spec) is None

    def _uses_flash(
        self, q_BTNH: jax.Array, spec: AttentionSpec, sharding: AttentionSharding | None
    ) -> bool:
        # A registered position embedding may have added a bias, which no kernel has.
        if self.config.attention != "flash" or spec.slopes_N is not None or spec.has_hooks:
            return False
        return supports_shape(q_BTNH, sharding)

    def _fill_cache(
        self, k_BTKH: jax.Array, v_BTKH: jax.Array, context: ForwardContext
    ) -> AttentionState:
        """Returns a cache of the keys and values of prompts."""
        window = self.sliding_window(self.config)
        if window is not None:
            assert context.lengths_B is not None
            # The window may be longer than any sequence.
            slots = min(window, self.max_length)
            return SlidingWindowCache.from_prefill(k_BTKH, v_BTKH, context.lengths_B, slots)
        assert context.capacity is not None
        memories = self.memories(k_BTKH.dtype)
        return KeyValueCache.from_prefill(k_BTKH, v_BTKH, context.capacity, memories)


def _attention_sharding(q_BTNH: jax.Array, k_BTKH: jax.Array) -> AttentionSharding | None:
    """Returns how the current mesh divides queries and keys; None on one device."""
    query = current_sharding(QUERY_AXES, q_BTNH.shape)
    key = current_sharding(KEY_AXES, k_BTKH.shape)
    return None if query is None or key is None else AttentionSharding(query, key)


@register("mixer", "local_attention")
class LocalAttention(Attention):
    """Attention to the last `sliding_window_size` tokens (Longformer, Beltagy et al. 2020)."""

    has_memories = False

    @classmethod
    def sliding_window(cls, config: AttentionConfig) -> int | None:
        """Returns sliding_window_size."""
        return config.sliding_window_size


def average_keys_visible(length: int, *, causal: bool, window: int | None = None) -> float:
    """Returns the average number of visible keys per query, for the MFU."""
    visible = min(window or length, length)
    return visible - visible**2 / (2 * length) if causal else float(visible)


def average_keys_computed(mixer: type[Attention], config: AttentionConfig, length: int) -> float:
    """Returns the average number of keys multiplied per query, masked ones included.

    Args:
      mixer: The layer's mixer: its window, and whether a kernel serves it.
      config: Chooses the implementation, and with it the blocks of queries.
      length: Tokens of a sequence.
    """
    causal = mixer.is_causal(config)
    window = mixer.sliding_window(config)
    if config.attention == "flash" and not mixer.hooks() and length % TILE == 0:
        return flash_keys_computed(length, causal=causal, window=window)
    if mixer.weights_scope == "sequence":
        return float(length)
    if window is not None:
        rows = window_blocks(window, length, causal=causal)
        if rows is None:
            return float(length)
        return -(-length // rows) * rows * rows * (2 if causal else 3) / length
    block = length
    if config.attention != "dot_product" and causal:
        block = min(max(config.attention_block_size, -(-length // MAX_BLOCKS)), length)
    ends = ((start, min(start + block, length)) for start in range(0, length, block))
    return sum((end - start) * end for start, end in ends) / length
