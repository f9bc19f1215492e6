"""Embedding tables."""

import jax
import jax.numpy as jnp
from flax import nnx

from MaxText.layers.dense import pad_vocab
from MaxText.layers.params import Init, param


class Embedding(nnx.Module):
    """A table of vectors, read by id; for tokens also the tied output head."""

    def __init__(
        self,
        num_rows: int,
        row_axis: str,
        init: Init,
        rngs: nnx.Rngs,
        scale: float | None = None,  # of the embeddings, not of the tied head
        used_in: jnp.dtype | None = None,  # widest dtype it is read in; None is that of activations
    ):
        D = init.dimensions.emb_dim
        self.dtype = init.dtype
        self.precision = init.precision
        self.scale = scale
        draw = init.initializers
        initial = draw.position if row_axis == "position" else draw.embedding
        self.embedding = param(
            rngs, (num_rows, D), (row_axis, "embed"), initial,
            dtype=init.weight_dtype, used_in=used_in or init.dtype,
        )  # fmt: skip

    def __call__(self, ids_BT: jax.Array) -> jax.Array:
        rows_BTD = jnp.take(self.embedding[...].astype(self.dtype), ids_BT, axis=0)
        if self.scale is None:
            return rows_BTD
        # The scale is rounded first, as Gemma was trained: sqrt(3072) is 55.5 in bfloat16.
        return rows_BTD * jnp.asarray(self.scale, self.dtype)

    def attend(
        self, x_BTD: jax.Array, dtype: jnp.dtype, rounded: jnp.dtype | None = None
    ) -> jax.Array:
        """Returns logits [B, T, V] in `dtype`; rounds the table first."""
        table = self.embedding[...]
        if rounded is not None:
            table = table.astype(rounded)
        table = pad_vocab(table.astype(dtype), ("vocab", "embed"))
        logits = jnp.einsum("btd,vd->btv", x_BTD.astype(dtype), table, precision=self.precision)
        return logits[..., : self.embedding.shape[0]]
