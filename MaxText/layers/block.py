"""A layer: how a mixer and a feed-forward are arranged around the residual stream.

Legend: B sequences, T tokens, D emb_dim.
"""

from typing import Any

import jax
from flax import nnx

from MaxText.configuration.model_sections import Model as ModelSection
from MaxText.layers.attention import Attention, Scalars
from MaxText.layers.building import Building
from MaxText.layers.context import Context
from MaxText.layers.dropout import dropout
from MaxText.layers.feed_forward import MLP
from MaxText.layers.normalization import normalization
from MaxText.parallelism.constraints import constrain


class Block(nnx.Module):
    """Pre-norm block.

    sequential (Radford et al. 2019): h = x + attn(norm(x)); y = h + mlp(norm(h)).
    parallel (GPT-NeoX-20B, section 2.1.2, with two norms): y = x + attn(norm(x)) + mlp(norm'(x)).
    """

    def __init__(self, section: ModelSection, building: Building, rngs: nnx.Rngs):
        epsilon = section.block.normalization_layer_epsilon
        self.arrangement = section.block.block_arrangement
        self.dropout_rate = section.dropout.rate("residual")
        attention_dropout = section.dropout.rate("attention")
        self.pre_self_attention_layer_norm = normalization(section.block, building, rngs)
        self.self_attention = Attention(
            section.attention, epsilon, attention_dropout, building, rngs
        )
        self.pre_mlp_layer_norm = normalization(section.block, building, rngs)
        self.mlp = MLP(section.feed_forward, building, rngs)

    def __call__(
        self, x_BTD: jax.Array, context: Context, state: Any = None
    ) -> tuple[jax.Array, Scalars, Any]:
        """Returns y_BTD, scalars to be summed over layers, and the mixer's state."""
        attention_out, scalars, state = self.self_attention(
            self.pre_self_attention_layer_norm(x_BTD), context, state
        )
        attention_out = dropout(attention_out, self.dropout_rate, context.key_for(1))
        h_BTD = x_BTD + attention_out
        mlp_input = h_BTD if self.arrangement == "sequential" else x_BTD
        mlp_out, mlp_scalars = self.mlp(self.pre_mlp_layer_norm(mlp_input))
        mlp_out = dropout(mlp_out, self.dropout_rate, context.key_for(2))
        y_BTD = constrain(
            h_BTD + mlp_out, "activation_batch", "activation_length", "activation_embed"
        )
        return y_BTD, scalars | mlp_scalars, state
