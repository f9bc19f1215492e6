"""A layer: how a mixer and a feed-forward are arranged around the residual stream.

Legend: B sequences, T tokens, D emb_dim.
"""

import dataclasses
from typing import Any

import jax
from flax import nnx

from MaxText.configuration.model_sections import Model as ModelSection
from MaxText.layers.attention import Attention, Scalars
from MaxText.layers.building import Building
from MaxText.layers.connections import Inputs, Normalized
from MaxText.layers.context import Context
from MaxText.layers.dropout import drop_path, dropout
from MaxText.layers.feed_forward import MLP
from MaxText.layers.normalization import normalization
from MaxText.layers.pattention import PattentionFeedForward
from MaxText.parallelism.constraints import constrain


def feed_forward(
    section: ModelSection, building: Building, rngs: nnx.Rngs
) -> MLP | PattentionFeedForward:
    """The feed-forward that the configuration chooses."""
    own = section.feed_forward
    if own.feed_forward_type == "pattention":
        return PattentionFeedForward(section.pattention, own.ffn_bias, building, rngs)
    return MLP(own, building, rngs)


class Block(nnx.Module):
    """Pre-norm block.

    sequential (Radford et al. 2019): h = x + attn(norm(x)); y = h + mlp(norm(h)).
    parallel (GPT-NeoX-20B, section 2.1.2, with two norms): y = x + attn(norm(x)) + mlp(norm'(x)).

    With dense connections x is the input of the residual stream, and queries, keys and values have
    inputs and norms of their own.
    """

    def __init__(self, section: ModelSection, index: int, building: Building, rngs: nnx.Rngs):
        """`index` counts layers from 0."""
        dimensions = building.dimensions
        mlp_dim = section.feed_forward.mlp_dims(dimensions)[index]
        building = dataclasses.replace(building, dimensions=dimensions._replace(mlp_dim=mlp_dim))
        epsilon = section.block.normalization_layer_epsilon
        self.arrangement = section.block.block_arrangement
        self.dropout_rate = section.dropout.rate("residual")
        self.path_rate = section.dropout.rate("path")
        self.path_ramps = section.dropout.drop_path_schedule == "linear"
        self.num_layers = building.dimensions.num_layers
        attention_dropout = section.dropout.rate("attention")
        parametric = section.block.block_norm_parametric
        dense = section.dense_connections
        one = not dense.mixes_attention_inputs or (index == 0 and dense.dense_first_norms == "one")
        self.norm_names = ("",) if one else ("_q", "_k", "_v")
        for name in self.norm_names:
            norm = normalization(section.block, building, rngs, parametric=parametric)
            setattr(self, f"pre_self_attention_layer_norm{name}", norm)
        self.self_attention = Attention(
            section.attention, section.pattention, epsilon, attention_dropout, building, rngs
        )
        self.pre_mlp_layer_norm = normalization(
            section.block, building, rngs, parametric=parametric
        )
        self.mlp = feed_forward(section, building, rngs)

    def __call__(
        self, inputs: Inputs, context: Context, state: Any = None
    ) -> tuple[jax.Array, Scalars, Any]:
        """Returns y_BTD, scalars to be summed over layers, and the mixer's state."""
        x_BTD = inputs.r
        attention_out, scalars, state = self.self_attention(
            self._normalized(inputs), context, state
        )
        attention_out = self._dropped(attention_out, context, 1)
        h_BTD = x_BTD + attention_out
        mlp_input = h_BTD if self.arrangement == "sequential" else x_BTD
        mlp_out, mlp_scalars = self.mlp(self.pre_mlp_layer_norm(mlp_input))
        mlp_out = self._dropped(mlp_out, context, 2)
        y_BTD = constrain(
            h_BTD + mlp_out, "activation_batch", "activation_length", "activation_embed"
        )
        return y_BTD, scalars | mlp_scalars, state

    @property
    def norms_of_ways(self) -> dict[str, nnx.Module]:
        """Way -> the norm that only its input goes through; none where all go through one."""
        if len(self.norm_names) == 1:
            return {}
        return {
            name.removeprefix("_"): getattr(self, f"pre_self_attention_layer_norm{name}")
            for name in self.norm_names
        }

    def _normalized(self, inputs: Inputs) -> tuple[jax.Array, jax.Array, jax.Array]:
        norms = self.norms_of_ways
        if not norms:
            # One norm over three inputs happens only where they are the same.
            norm = getattr(self, f"pre_self_attention_layer_norm{self.norm_names[0]}")
            y_BTD = norm(inputs.q)
            return y_BTD, y_BTD, y_BTD
        q_BTD, k_BTD, v_BTD = (
            x.x_BTD if isinstance(x, Normalized) else norms[way](x)
            for way, x in zip("qkv", inputs[:3], strict=True)
        )
        return q_BTD, k_BTD, v_BTD

    def _dropped(self, x_BTD: jax.Array, context: Context, branch: int) -> jax.Array:
        """What branch 1 or 2 adds to the stream, after dropout and drop path."""
        x_BTD = dropout(x_BTD, self.dropout_rate, context.key_for(branch))
        key = context.key_for(branch + 2)
        if self.path_rate == 0.0 or key is None:
            return x_BTD
        rate = self.path_rate
        if self.path_ramps:
            assert context.layer is not None
            rate = rate * context.layer / max(self.num_layers - 1, 1)
        return drop_path(x_BTD, rate, key)
