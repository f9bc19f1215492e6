"""Differential attention (Ye et al. 2024, arXiv 2410.05258) as a mixer.

    o = norm((softmax(q1 k1^T) - lambda softmax(q2 k2^T)) v) (1 - lambda_init)
    lambda = exp(lambda_q1 . lambda_k1) - exp(lambda_q2 . lambda_k2) + lambda_init

The queries and keys of each head are split in two halves; the values are whole. The norm is an
RMSNorm of each head. differential_attention.yml uses it.

The difference of two attentions is the attention of twice as many heads, followed by a difference
of their outputs. So the halves become heads of their own in `project_inputs`, and the outputs are
subtracted in `project_output`. Everything between is inherited: windows, documents, caches, flash
and ring attention.

Legend: B sequences, T tokens, D emb_dim, N query heads, K key/value heads, G query heads of a
key/value head, H head_dim, C the two halves, E half of H.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from MaxText.config.keys import Section, key
from MaxText.config.layer_sections import Dimensions
from MaxText.config.model_sections import LayerConfig, ModelConfig
from MaxText.layers.attention.attention import Attention, LocalAttention, MixerInput
from MaxText.layers.attention.attention_core import AttentionSpec, Heads
from MaxText.layers.normalization import RMSNorm
from MaxText.layers.params import Shape, param
from MaxText.layers.part import ForwardContext, Init, LayerIndex, register
from MaxText.layers.rotary import apply_rotary


class Keys(Section):
    """Differential attention."""

    diff_lambda_init: float | None = key(
        None, "lambda at first; null is 0.8 - 0.6 exp(-0.3 layer), layers counted from 0.", ge=0
    )


@register("mixer", "differential_attention", keys=Keys)
class DifferentialAttention(Attention):
    """The difference of two softmax attentions, with less noise."""

    has_memories = False

    def __init__(self, config: ModelConfig, init: Init, rngs: nnx.Rngs):
        super().__init__(config, init, rngs)
        keys = config.parts.of(type(self))
        assert isinstance(keys, Keys)
        H = init.dimensions.head_dim
        self.lambda_init = keys.diff_lambda_init
        self.num_kv_heads = init.dimensions.num_kv_heads
        self.lambdas = param(
            rngs,
            (2, 2, H // 2),  # q or k, half, E
            (None, None, None),
            _small_normal,
            dtype=init.weight_dtype,
        )
        self.norm = RMSNorm(H, 1e-5, init, rngs)

    @classmethod
    def config_of(cls, layer: LayerConfig) -> ModelConfig:
        """Returns the model's keys, which Attention reads."""
        return layer.config

    @classmethod
    def heads(cls, config: ModelConfig, dimensions: Dimensions) -> Heads:
        """Returns two heads of queries and keys for each head of values."""
        return Heads(
            num_query_heads=2 * dimensions.num_query_heads,
            num_key_heads=2 * dimensions.num_kv_heads,
            num_value_heads=dimensions.num_kv_heads,
            key_width=dimensions.head_dim // 2,
            value_width=dimensions.head_dim,
        )

    def project_inputs(
        self, x: MixerInput, context: ForwardContext
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns queries [B, T, 2N, E], keys [B, T, 2K, E] and values [B, T, K, H].

        A half is rotated as a head of its own: every other frequency of the table for whole heads
        is the table for heads half as wide.
        """
        unrotated = dataclasses.replace(context, rotary=None)
        q_BTNH, k_BTKH, v_BTKH = super().project_inputs(x, unrotated)
        B, T, _, H = q_BTNH.shape
        K = self.num_kv_heads
        # Heads in the order (K, C, G), so that those of a half share keys.
        q_BTKGCE = q_BTNH.reshape(B, T, K, -1, 2, H // 2)
        q_BTNE = q_BTKGCE.swapaxes(3, 4).reshape(B, T, -1, H // 2)
        k_BTKE = k_BTKH.reshape(B, T, 2 * K, H // 2)
        if context.rotary is not None:
            sin, cos = (angles[..., ::2] for angles in context.rotary)
            q_BTNE = apply_rotary(q_BTNE, (sin, cos))
            k_BTKE = apply_rotary(k_BTKE, (sin, cos))
        return q_BTNE, k_BTKE, v_BTKH

    def spec(self, context: ForwardContext) -> AttentionSpec:
        """Returns the scores' computation; both halves of a head have its ALiBi slope."""
        spec = super().spec(context)
        if spec.slopes_N is None:
            return spec
        slopes_KCG = jnp.repeat(spec.slopes_N.reshape(self.num_kv_heads, 1, -1), 2, axis=1)
        return dataclasses.replace(spec, slopes_N=slopes_KCG.reshape(-1))

    def project_output(
        self, o_BTNH: jax.Array, x: MixerInput, context: ForwardContext
    ) -> jax.Array:
        """Returns the output [B, T, D] of both attentions' outputs (equations 1 to 3)."""
        assert context.layer is not None
        lambda_init = self._lambda_init_of(context.layer)
        dots_C = jnp.sum(jnp.prod(self.lambdas[...].astype(jnp.float32), 0), -1)
        weight = jnp.exp(dots_C[0]) - jnp.exp(dots_C[1]) + lambda_init  # lambda
        B, T, _, H = o_BTNH.shape
        o_BTKCGH = o_BTNH.reshape(B, T, self.num_kv_heads, 2, -1, H).astype(jnp.float32)
        difference = o_BTKCGH[:, :, :, 0] - weight * o_BTKCGH[:, :, :, 1]
        normed_BTNH = self.norm(difference.reshape(B, T, -1, H).astype(o_BTNH.dtype))
        scaled_BTNH = normed_BTNH * jnp.asarray(1 - lambda_init, o_BTNH.dtype)
        return super().project_output(scaled_BTNH, x, context)

    def _lambda_init_of(self, layer: LayerIndex) -> jax.Array | float:
        if self.lambda_init is not None:
            return self.lambda_init
        return 0.8 - 0.6 * jnp.exp(-0.3 * layer)

    @classmethod
    def problem(cls, config: ModelConfig, dimensions: Dimensions) -> str | None:
        """Returns why the size of heads is invalid, and on line 2 a remedy."""
        H = dimensions.head_dim
        if H % 4 == 0:
            return None
        return f"head_dim={H} is not a multiple of 4\nhead_dim={-(-H // 4) * 4}"


@register("mixer", "local_differential_attention")
class LocalDifferentialAttention(LocalAttention, DifferentialAttention):
    """Differential attention to the last `sliding_window_size` tokens."""


def _small_normal(rng: jax.Array, shape: Shape, num_input_dims: int, dtype: jnp.dtype) -> jax.Array:
    """Draws from a normal distribution with deviation 0.1; an Initializer."""
    return 0.1 * jax.random.normal(rng, shape, dtype)
