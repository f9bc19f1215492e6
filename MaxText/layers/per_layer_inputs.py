"""Per-layer embeddings: an input of its own for each layer (Gemma 3n and 4, E2B and E4B).

Legend: B sequences, T tokens, D emb_dim, V rows of the table, L layers, P width of an input.
"""

import math

import jax
import jax.numpy as jnp
from flax import nnx

from MaxText.config.model_sections import ModelConfig
from MaxText.layers.context import ForwardContext
from MaxText.layers.dense import Dense, scaled
from MaxText.layers.normalization import RMSNorm
from MaxText.layers.params import Init, param
from MaxText.parallelism.logical_sharding import HIDDEN, with_logical_constraint


class PerLayerInputs(nnx.Module):
    """The inputs of all layers, (sqrt(P) E[token] + rms(W x / sqrt(D)) w) / sqrt(2).

    x is the embedding, as the first layer reads it. Each layer adds its input to the residual
    stream by a gate of its own (block_variants.WithPerLayerInput). The table E is read as rarely as
    the token table, so that it costs memory and no FLOPs.
    """

    rows = "per-layer inputs"

    def __init__(self, config: ModelConfig, init: Init, rngs: nnx.Rngs):
        """Declares the table [V, L, P], the projection and its norm.

        Args:
          config: Keys of the model.
          init: Sizes, initializers and dtypes.
          rngs: RNG streams that weights are drawn from.
        """
        D = init.dimensions.emb_dim
        L = init.dimensions.num_layers
        P = config.embedding.hidden_size_per_layer_input
        num_rows = config.embedding.vocab_size_per_layer_input
        draw = init.initializers
        self.dtype = init.dtype
        self.embedding = param(
            rngs,
            (init.dimensions.vocab_size if num_rows == -1 else num_rows, L, P),
            ("vocab", None, "embed"),
            draw.embedding,
            dtype=init.weight_dtype,
            used_in=init.dtype,
        )
        self.projection = Dense((D,), (L, P), ("embed", None, None), draw.kernel, init, rngs)
        self.norm = RMSNorm(P, config.block.normalization_layer_epsilon, init, rngs)

    def __call__(self, ids_BT: jax.Array, x_BTD: jax.Array) -> jax.Array:
        """Returns the inputs [B, T, L, P] of tokens and their embedding."""
        P = self.embedding.shape[-1]
        rows_BTLP = jnp.take(self.embedding[...].astype(self.dtype), ids_BT, axis=0)
        rows_BTLP = rows_BTLP * jnp.asarray(math.sqrt(P), self.dtype)  # rounded, as in Gemma
        projected_BTLP = self.norm(scaled(self.projection(x_BTD), x_BTD.shape[-1] ** -0.5))
        inputs_BTLP = scaled(rows_BTLP + projected_BTLP, 2**-0.5)
        return with_logical_constraint(inputs_BTLP, *HIDDEN[:2], None, None)


def layer_input(context: ForwardContext) -> jax.Array:
    """Returns the input [B, T, P] of the context's layer."""
    assert context.per_layer_inputs_BTLP is not None
    assert context.layer is not None
    return jax.lax.dynamic_index_in_dim(
        context.per_layer_inputs_BTLP, context.layer, axis=2, keepdims=False
    )
