"""The attention mixer: projections, position form, core, output projection.

Legend: B sequences, T tokens, D emb_dim, N query heads, K key/value heads, H head_dim.
"""

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from MaxText.configuration.layer_sections import Attention as AttentionSection
from MaxText.configuration.layer_sections import Pattention as PattentionSection
from MaxText.configuration.layer_sections import SlotPlace
from MaxText.layers.attention_core import attend_to_slots, softmax_attention
from MaxText.layers.building import Building
from MaxText.layers.context import Context
from MaxText.layers.dense import Axes, Dense
from MaxText.layers.key_value_cache import KeyValueCache
from MaxText.layers.normalization import RMSNorm
from MaxText.layers.pattention import PattentionProjection
from MaxText.layers.rotary import rotate
from MaxText.layers.weights import Initializer, Shape
from MaxText.parallelism.constraints import constrain

Scalars = dict[str, jax.Array]


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
    ):
        D, N, K, H = building.dimensions[:4]
        init = building.initializers
        self.section = section
        self.dropout_rate = dropout_rate
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
        self.query = projection((D,), (N, H), q_axes, init.kernel, "qkv", bias)
        self.key = projection((D,), (K, H), kv_axes, init.kernel, "qkv", bias)
        self.value = projection((D,), (K, H), kv_axes, init.kernel, "qkv", bias)
        out_axes = ("q_heads", "kv", "embed")
        self.out = projection((N, H), (D,), out_axes, init.output, "proj", section.proj_bias)
        norm = section.use_qk_norm
        self.query_norm = RMSNorm(H, epsilon, building, rngs) if norm else None
        self.key_norm = RMSNorm(H, epsilon, building, rngs) if norm else None

    def __call__(
        self,
        inputs: tuple[jax.Array, jax.Array, jax.Array],
        context: Context,
        state: KeyValueCache | None = None,
    ) -> tuple[jax.Array, Scalars, KeyValueCache | None]:
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
        batch, length = "activation_batch", "activation_length"
        q_BTNH = constrain(q_BTNH, batch, length, "activation_heads", "activation_kv")
        k_BTKH = constrain(k_BTKH, batch, length, "activation_kv_heads", "activation_kv")
        v_BTKH = constrain(v_BTKH, batch, length, "activation_kv_heads", "activation_kv")
        section = self.section
        if state is not None:
            assert context.positions_BT is not None
            state = state.append(k_BTKH, v_BTKH, context.positions_BT)
            o_BTNH = attend_to_slots(
                q_BTNH,
                state.keys,
                state.values,
                context.positions_BT,
                soft_cap=section.attn_logits_soft_cap,
                precision=self.precision,
            )
        else:
            blocked = section.attention != "dot_product"
            o_BTNH = softmax_attention(
                q_BTNH,
                k_BTKH,
                v_BTKH,
                causal=section.causal,
                segments_BT=context.segments_BT,
                block_size=section.attention_block_size if blocked else None,
                soft_cap=section.attn_logits_soft_cap,
                dropout_rate=self.dropout_rate,
                dropout_key=context.key_for(0),
                precision=self.precision,
            )
            if context.capacity is not None:
                state = KeyValueCache.of_prompt(k_BTKH, v_BTKH, context.capacity)
        o_BTNH = constrain(o_BTNH, batch, length, "activation_heads", "activation_kv")
        o_BTNH = checkpoint_name(o_BTNH, "context")
        return checkpoint_name(self.out(o_BTNH), "out_proj"), {}, state
