"""Differential attention (Ye et al. 2024, arXiv 2410.05258) as a mixer.

    o = norm((softmax(q1 k1^T) - lambda softmax(q2 k2^T)) v) (1 - lambda_init)
    lambda = exp(lambda_q1 . lambda_k1) - exp(lambda_q2 . lambda_k2) + lambda_init

The queries and keys of each head are split in two halves; the values are whole. The norm is an
RMSNorm of each head. differential_attention.yml uses it.

Legend: B sequences, T query tokens, S key tokens, D emb_dim, N query heads, K key/value heads,
G query heads of a key/value head, H head_dim, C the two halves, E half of H.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from MaxText.config.keys import Section, key
from MaxText.config.layer_sections import Dimensions
from MaxText.layers.dense import Dense
from MaxText.layers.kv_cache import KeyValueCache
from MaxText.layers.normalization import RMSNorm
from MaxText.layers.params import Shape, param
from MaxText.layers.part import (
    Flops,
    ForwardContext,
    Init,
    LayerIndex,
    Mixer,
    Scalars,
    record,
    register,
    tag,
)
from MaxText.layers.rotary import apply_rotary


class Keys(Section):
    """Differential attention."""

    diff_lambda_init: float | None = key(
        None, "lambda at first; null is 0.8 - 0.6 exp(-0.3 layer), layers counted from 0.", ge=0
    )


class Projections(NamedTuple):
    """Queries, keys and values of some tokens."""

    q_BTNH: jax.Array
    k_BTKH: jax.Array
    v_BTKH: jax.Array


@register("mixer", "differential_attention", keys=Keys)
class DifferentialAttention(Mixer):
    """The difference of two softmax attentions, with less noise.

    The decode state is a KeyValueCache, as that of ordinary attention.
    """

    def __init__(self, config: Keys, init: Init, rngs: nnx.Rngs):
        D, N, K, H = init.dimensions[:4]
        draw = init.initializers
        self.lambda_init = config.diff_lambda_init
        key_axes = ("embed", "kv_heads", "kv")
        self.query = Dense((D,), (N, H), ("embed", "q_heads", "kv"), draw.query, init, rngs)
        self.key = Dense((D,), (K, H), key_axes, draw.key_value, init, rngs)
        self.value = Dense((D,), (K, H), key_axes, draw.key_value, init, rngs)
        out_axes = ("q_heads", "kv", "embed")
        self.out = Dense((N, H), (D,), out_axes, draw.attention_output, init, rngs)
        self.lambdas = param(
            rngs,
            (2, 2, H // 2),  # q or k, half, E
            (None, None, None),
            _small_normal,
            dtype=init.weight_dtype,
        )
        self.norm = RMSNorm(H, 1e-5, init, rngs)

    def __call__(self, x_BTD: jax.Array, context: ForwardContext) -> tuple[jax.Array, Scalars]:
        """Returns the output [B, T, D], and no losses."""
        projections = self._project(x_BTD, context)
        return self._attend_to_sequence(projections, context), {}

    def prefill(self, x_BTD: jax.Array, context: ForwardContext) -> tuple[jax.Array, KeyValueCache]:
        """Returns the output of prompts, and a cache of their keys and values."""
        projections = self._project(x_BTD, context)
        y_BTD = self._attend_to_sequence(projections, context)
        assert context.capacity is not None
        cache = KeyValueCache.from_prefill(projections.k_BTKH, projections.v_BTKH, context.capacity)
        return y_BTD, cache

    def decode_step(
        self, x_BTD: jax.Array, state: KeyValueCache, context: ForwardContext
    ) -> tuple[jax.Array, KeyValueCache]:
        """Returns the output of new tokens, and the cache with their keys and values."""
        q_BTNH, k_BTKH, v_BTKH = self._project(x_BTD, context)
        positions_BT = context.positions_BT
        assert positions_BT is not None
        state = state.append(k_BTKH, v_BTKH, positions_BT)
        B, _, K, H = k_BTKH.shape
        S = state.capacity
        # The cache of a single sequence has no dimension B.
        k_BKSH = state.keys.reshape(B, K, S, H)
        v_BKSH = state.values.reshape(B, K, S, H)
        seen_BTS = jnp.arange(S) <= positions_BT[:, :, None]
        return self._attend(q_BTNH, k_BKSH, v_BKSH, seen_BTS, context), state

    def _project(self, x_BTD: jax.Array, context: ForwardContext) -> Projections:
        q_BTNH = tag(self.query(x_BTD), "query_proj")
        k_BTKH = tag(self.key(x_BTD), "key_proj")
        v_BTKH = tag(self.value(x_BTD), "value_proj")
        if context.rotary is not None:
            q_BTNH = _rotate_halves(q_BTNH, context.rotary)
            k_BTKH = _rotate_halves(k_BTKH, context.rotary)
        return Projections(q_BTNH, k_BTKH, v_BTKH)

    def _attend_to_sequence(self, projections: Projections, context: ForwardContext) -> jax.Array:
        """Returns the output [B, T, D] of whole sequences, causal and within documents."""
        T = projections.q_BTNH.shape[1]
        segments_BT = context.segments_BT
        seen_BTS = jnp.tril(jnp.ones((1, T, T), bool))
        if segments_BT is not None:
            seen_BTS &= segments_BT[:, :, None] == segments_BT[:, None]
        k_BKSH = projections.k_BTKH.swapaxes(1, 2)
        v_BKSH = projections.v_BTKH.swapaxes(1, 2)
        return self._attend(projections.q_BTNH, k_BKSH, v_BKSH, seen_BTS, context)

    def _attend(
        self,
        q_BTNH: jax.Array,
        k_BKSH: jax.Array,
        v_BKSH: jax.Array,
        seen_BTS: jax.Array,
        context: ForwardContext,
    ) -> jax.Array:
        """Returns the output [B, T, D] (equations 1 to 3 of the paper).

        Args:
          q_BTNH: Queries.
          k_BKSH: Keys.
          v_BKSH: Values.
          seen_BTS: Whether a query sees a key; B may be 1.
          context: Facts about the batch, such as the index of the layer.
        """
        B, T, N, H = q_BTNH.shape
        K, S = k_BKSH.shape[1:3]
        E = H // 2
        assert context.layer is not None
        lambda_init = self._lambda_init_of(context.layer)
        dots_C = jnp.sum(jnp.prod(self.lambdas[...].astype(jnp.float32), 0), -1)
        weight = jnp.exp(dots_C[0]) - jnp.exp(dots_C[1]) + lambda_init  # lambda
        q_BTKGCE = q_BTNH.reshape(B, T, K, N // K, 2, E) * E**-0.5
        k_BKSCE = k_BKSH.reshape(B, K, S, 2, E)
        scores_BCKGTS = jnp.einsum(
            "btkgce,bksce->bckgts", q_BTKGCE, k_BKSCE, preferred_element_type=jnp.float32
        )
        scores_BCKGTS = jnp.where(seen_BTS[:, None, None, None], scores_BCKGTS, -jnp.inf)
        p_BCKGTS = jax.nn.softmax(scores_BCKGTS, axis=-1)
        p_BKGTS = p_BCKGTS[:, 0] - weight * p_BCKGTS[:, 1]
        record(p_BKGTS.reshape(B, N, T, S), "probabilities")
        p_BKGTS = p_BKGTS.astype(v_BKSH.dtype)
        o_BTKGH = tag(jnp.einsum("bkgts,bksh->btkgh", p_BKGTS, v_BKSH), "context")
        o_BTNH = self.norm(o_BTKGH.reshape(B, T, N, H))
        o_BTNH = o_BTNH * jnp.asarray(1 - lambda_init, o_BTNH.dtype)
        return tag(self.out(o_BTNH), "out_proj")

    def _lambda_init_of(self, layer: LayerIndex) -> jax.Array | float:
        if self.lambda_init is not None:
            return self.lambda_init
        return 0.8 - 0.6 * jnp.exp(-0.3 * layer)

    @classmethod
    def problem(cls, config: Keys, dimensions: Dimensions) -> str | None:
        """Returns why the size of heads is invalid, and on line 2 a remedy."""
        H = dimensions.head_dim
        if H % 4 == 0:
            return None
        return f"head_dim={H} is not a multiple of 4\nhead_dim={-(-H // 4) * 4}"

    @classmethod
    def flops(cls, config: Keys, dimensions: Dimensions, length: int) -> dict[str, Flops]:
        """Returns FLOPs of the products of tokens with tokens, by row of the FLOPs table."""
        per_key = 2.0 * dimensions.num_query_heads * dimensions.head_dim
        product = Flops(per_key * length / 2, per_key * length)  # masked ones are executed, too
        return {"attention scores": product, "attention values": product}

    @classmethod
    def state_bytes(
        cls, config: Keys, dimensions: Dimensions, length: int, itemsize: int
    ) -> tuple[int, int]:
        """Returns bytes of the decode state per sequence: (per token, fixed)."""
        return 2 * dimensions.num_kv_heads * dimensions.head_dim * itemsize, 0


def _rotate_halves(x_BTNH: jax.Array, table: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotates each half of a head as a head of its own.

    Every other frequency of the table for whole heads is the table for heads half as wide.
    """
    sin, cos = (angles[..., ::2] for angles in table)
    B, T, N, H = x_BTNH.shape
    return apply_rotary(x_BTNH.reshape(B, T, 2 * N, H // 2), (sin, cos)).reshape(B, T, N, H)


def _small_normal(rng: jax.Array, shape: Shape, num_input_dims: int, dtype: jnp.dtype) -> jax.Array:
    """Draws from a normal distribution with deviation 0.1; an Initializer."""
    return 0.1 * jax.random.normal(rng, shape, dtype)
