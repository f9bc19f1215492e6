"""Head-QK: the head points back at tokens of the text (fattorib/transformer, after B. Peng).

    c_tj = (h_t Wq) . (h_j Wk) / E for j <= t of the same segment;  logits_t[token_j] += c_tj

Legend: B sequences, T tokens, S tokens pointed at, D emb_dim, E head_qk_dim, V vocab_size.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from MaxText.layers.building import Building
from MaxText.layers.dense import Dense
from MaxText.layers.weights import orthogonal, zeros


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pointers:
    """Tokens that the head may point at.

    Attributes:
      keys_BSE: h Wk.
      tokens_BS: their ids.
      segments_BS: None is one segment.
    """

    keys_BSE: jax.Array
    tokens_BS: jax.Array
    segments_BS: jax.Array | None = None

    @property
    def capacity(self) -> int:
        """Tokens of a row."""
        return self.tokens_BS.shape[1]

    def with_capacity(self, capacity: int) -> "Pointers":
        """With room for more tokens, while text is generated."""
        spare = (0, capacity - self.capacity)
        return Pointers(
            jnp.pad(self.keys_BSE, ((0, 0), spare, (0, 0))),
            jnp.pad(self.tokens_BS, ((0, 0), spare)),
        )

    def append(self, new: "Pointers", positions_BT: jax.Array) -> "Pointers":
        """With T more tokens at these places."""
        rows = jnp.arange(len(positions_BT))[:, None]
        return Pointers(
            self.keys_BSE.at[rows, positions_BT].set(new.keys_BSE),
            self.tokens_BS.at[rows, positions_BT].set(new.tokens_BS),
        )


class HeadQK(nnx.Module):
    """Adds to the logits of ids that the text has had; at first nothing, since Wq starts at 0."""

    def __init__(self, width: int, building: Building, rngs: nnx.Rngs):
        D = building.dimensions.emb_dim
        axes = ("embed", None)
        self.precision = building.precision
        self.query = Dense((D,), (width,), axes, zeros, building, rngs)
        self.key = Dense((D,), (width,), axes, orthogonal(0.1), building, rngs)

    def pointers(
        self, h_BTD: jax.Array, tokens_BT: jax.Array, segments_BT: jax.Array | None = None
    ) -> Pointers:
        """What these tokens are found by."""
        return Pointers(self.key(h_BTD), tokens_BT, segments_BT)

    def __call__(
        self, logits_BTV: jax.Array, h_BTD: jax.Array, pointers: Pointers, places_BT: jax.Array
    ) -> jax.Array:
        """Logits with what tokens up to their places add.

        Args:
          h_BTD: the hidden states that the logits are of.
          places_BT: where they stand among the tokens of `pointers`; B may be 1.
        """
        query_BTE = self.query(h_BTD)
        scores_BTS = jnp.einsum(
            "bte,bse->bts", query_BTE, pointers.keys_BSE,
            preferred_element_type=jnp.float32, precision=self.precision,
        )  # fmt: skip
        sees_BTS = places_BT[:, :, None] >= jnp.arange(pointers.capacity)
        if pointers.segments_BS is not None:
            shape = (len(h_BTD), places_BT.shape[1])
            own_BT = jnp.take_along_axis(
                pointers.segments_BS, jnp.broadcast_to(places_BT, shape), axis=1
            )
            sees_BTS = sees_BTS & (own_BT[:, :, None] == pointers.segments_BS[:, None])
        scores_BTS = jnp.where(sees_BTS, scores_BTS, 0.0) / query_BTE.shape[-1]

        def add(logits_TV, scores_TS, tokens_S):
            return logits_TV.at[:, tokens_S].add(scores_TS)

        return jax.vmap(add)(logits_BTV, scores_BTS, pointers.tokens_BS)
