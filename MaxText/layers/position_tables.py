"""Learned position tables, added to the embedding."""

import jax
from flax import nnx

from MaxText.config.model_sections import Model as ModelSection
from MaxText.config.registry import register
from MaxText.layers.embedding import Embedding
from MaxText.layers.part import Init, Position


@register("position", "learned")
class LearnedPositions(Embedding, Position):
    """A table with a row for each position (GPT-2)."""

    def __init__(self, keys: ModelSection, init: Init, rngs: nnx.Rngs):
        num_rows = keys.position.trainable_position_size
        if num_rows == -1:
            num_rows = init.dimensions.max_target_length
        super().__init__(num_rows, "position", init, rngs)

    def embed(self, positions_BT: jax.Array) -> jax.Array:
        return self(positions_BT)


@register("position", "axial")
class AxialPositions(Position):
    """Positions from two small tables of a and b rows: (first[p // b] + second[p % b]) / 2.

    Ho et al. 2019 with the mean of GPT-Neo; (a, b) is axial_pos_shape.
    """

    def __init__(self, keys: ModelSection, init: Init, rngs: nnx.Rngs):
        first, second = keys.position.axial_pos_shape
        self.first = Embedding(first, "position", init, rngs)
        self.second = Embedding(second, "position", init, rngs)
        self.period = second

    def embed(self, positions_BT: jax.Array) -> jax.Array:
        return 0.5 * (
            self.first(positions_BT // self.period) + self.second(positions_BT % self.period)
        )
