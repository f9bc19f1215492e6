"""Head-QK: pointer scores for tokens of the context.

    c_tj = (h_t Wq) . (h_j Wk) / E for j <= t of the same segment;  logits_t[token_j] += c_tj

Legend: B sequences, T tokens, S context tokens, D emb_dim, E head_qk_dim, V vocab_size.
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from MaxText.config.layer_sections import Dimensions
from MaxText.config.model_sections import ModelConfig
from MaxText.config.registry import register
from MaxText.layers.attention.attention import average_keys_visible
from MaxText.layers.capture import record
from MaxText.layers.context import ForwardContext
from MaxText.layers.dense import Dense, Embedding, einsum_f32
from MaxText.layers.head import LinearHead
from MaxText.layers.params import orthogonal, zeros
from MaxText.layers.part import Flops, Init


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class HeadQKCache:
    """The tokens of the context.

    Attributes:
      keys_BSE: h_j Wk of each token.
      tokens_BS: Their ids.
      segments_BS: Their documents; None is a single one.
    """

    keys_BSE: jax.Array
    tokens_BS: jax.Array
    segments_BS: jax.Array | None = None

    @property
    def capacity(self) -> int:
        """S, the tokens that it has room for."""
        return self.tokens_BS.shape[1]

    def resize(self, capacity: int) -> "HeadQKCache":
        """Returns the cache of a single document with room for `capacity` tokens."""
        spare = (0, capacity - self.capacity)
        return HeadQKCache(
            keys_BSE=jnp.pad(self.keys_BSE, ((0, 0), spare, (0, 0))),
            tokens_BS=jnp.pad(self.tokens_BS, ((0, 0), spare)),
        )

    def append(self, tokens: "HeadQKCache", positions_BT: jax.Array) -> "HeadQKCache":
        """Returns the cache of a single document with new tokens at their positions."""
        rows = jnp.arange(len(positions_BT))[:, None]
        return HeadQKCache(
            keys_BSE=self.keys_BSE.at[rows, positions_BT].set(tokens.keys_BSE),
            tokens_BS=self.tokens_BS.at[rows, positions_BT].set(tokens.tokens_BS),
        )


@register("head", "head_qk")
class HeadQK(LinearHead):
    """The linear head plus Head-QK."""

    rows: ClassVar = {"logits_dense": "head", "head_qk": "Head-QK"}
    not_recomputed = ("head_qk",)

    def __init__(self, config: ModelConfig, init: Init, rngs: nnx.Rngs):
        super().__init__(config, init, rngs)
        self.head_qk = HeadQKScores(config.head.head_qk_dim, init, rngs)

    def __call__(
        self, h_BTD: jax.Array, table: Embedding, state: HeadQKCache, positions_BT: jax.Array
    ) -> jax.Array:
        """Returns float32 logits [B, T, V]; see `Head.__call__`."""
        logits_BTV = super().__call__(h_BTD, table, None, positions_BT)
        return self.head_qk(logits_BTV, h_BTD, state, positions_BT)

    def state(
        self,
        h_BTD: jax.Array,
        tokens_BT: jax.Array,
        context: ForwardContext,
        earlier: HeadQKCache | None = None,
    ) -> HeadQKCache:
        """Returns the context tokens up to the given ones; see `Head.state`."""
        tokens = HeadQKCache(self.head_qk.key(h_BTD), tokens_BT, context.segments_BT)
        if earlier is not None:
            assert context.positions_BT is not None
            return earlier.append(tokens, context.positions_BT)
        return tokens if context.capacity is None else tokens.resize(context.capacity)

    @classmethod
    def flops(cls, config: ModelConfig, dimensions: Dimensions, length: int) -> dict[str, Flops]:
        """Returns FLOPs of the scores; see `Part.flops`."""
        width = 2 * config.head.head_qk_dim
        by_rule = width * average_keys_visible(length, causal=True)
        return {"Head-QK scores": Flops(by_rule, float(width * length))}

    @classmethod
    def state_bytes(
        cls, config: ModelConfig, dimensions: Dimensions, length: int, itemsize: int
    ) -> tuple[int, int]:
        """Returns bytes of a key and an id per token; see `Part.state_bytes`."""
        return config.head.head_qk_dim * itemsize + 4, 0


class HeadQKScores(nnx.Module):
    """Adds Head-QK scores to logits; 0 initially, as Wq starts at 0."""

    not_recomputed = ("key",)  # computed once for the whole sequence

    def __init__(self, width: int, init: Init, rngs: nnx.Rngs):
        D = init.dimensions.emb_dim
        axes = ("embed", None)
        self.precision = init.precision
        self.query = Dense((D,), (width,), axes, zeros, init, rngs)
        self.key = Dense((D,), (width,), axes, orthogonal(0.1), init, rngs)

    def __call__(
        self, logits_BTV: jax.Array, h_BTD: jax.Array, cache: HeadQKCache, positions_BT: jax.Array
    ) -> jax.Array:
        """Returns logits plus the scores of context tokens, [B, T, V].

        Args:
          logits_BTV: Logits of the linear head.
          h_BTD: Hidden states.
          cache: Context tokens of whole sequences.
          positions_BT: Positions of the hidden states in the sequence, up to which they see tokens;
            B may be 1.
        """
        query_BTE = self.query(h_BTD)
        scores_BTS = einsum_f32("bte,bse->bts", query_BTE, cache.keys_BSE, self.precision)
        sees_BTS = positions_BT[:, :, None] >= jnp.arange(cache.capacity)
        if cache.segments_BS is not None:
            shape = (len(h_BTD), positions_BT.shape[1])
            segments_BT = jnp.take_along_axis(
                cache.segments_BS, jnp.broadcast_to(positions_BT, shape), axis=1
            )
            sees_BTS = sees_BTS & (segments_BT[:, :, None] == cache.segments_BS[:, None])
        scores_BTS = jnp.where(sees_BTS, scores_BTS, 0.0) / query_BTE.shape[-1]
        record(scores_BTS, "head_qk_scores")

        def add(logits_TV: jax.Array, scores_TS: jax.Array, tokens_S: jax.Array) -> jax.Array:
            return logits_TV.at[:, tokens_S].add(scores_TS)

        return jax.vmap(add)(logits_BTV, scores_BTS, cache.tokens_BS)
