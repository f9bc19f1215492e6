"""Which tensor of theirs holds which arrays of ours: names and shapes of one model, no numbers."""

import dataclasses
import functools
from collections.abc import Iterator, Sequence

import numpy as np

from MaxText.conversion.family import Family, Row
from MaxText.layers.model import Model


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One tensor of theirs.

    Attributes:
      name: with the layer's number in it.
      shape: as it is stored there.
      row: the row of the table it comes from.
      layer: its layer, None outside of layers.
      older: other names that it may have in a file.
    """

    name: str
    shape: tuple[int, ...]
    row: Row
    layer: int | None
    older: tuple[str, ...] = ()


class TensorMap:
    """A family's rows, filled in with the sizes of one model.

    Attributes:
      family: whose table it is.
      model: our model.
      sizes: by the letters of layouts, without J.
      rows: the rows that apply: those whose arrays the model has.
    """

    def __init__(self, family: Family, model: Model):
        dimensions, slots = model.section.shape.dimensions, model.section.pattention
        self.family, self.model = family, model
        self.sizes = {
            "D": dimensions.emb_dim,
            "N": dimensions.num_query_heads,
            "K": dimensions.num_kv_heads,
            "H": dimensions.head_dim,
            "F": dimensions.mlp_dim,
            "V": dimensions.vocab_size,
            "Q": slots.num_slots("qkv", dimensions.emb_dim),
            "O": slots.num_slots("proj", dimensions.emb_dim),
            "S": slots.num_slots("ffn", dimensions.emb_dim),
        }
        self.num_layers = dimensions.num_layers
        if table := model.parameters.get("position_embedder/embedding"):
            self.sizes["P"] = table.shape[0]
        self.rows = [row for row in family.rows if row.ours[0] in model.parameters]
        named = [name for row in self.rows for name in row.ours]
        assert sorted(named) == sorted(model.parameters), "the table misses arrays of the model"

    def tensors_of(self, row: Row) -> Iterator[Tensor]:
        """The tensors of one row, layer by layer."""
        shape = row.layout.shape(self.sizes, len(row.ours))
        if not row.in_layers:
            yield Tensor(row.name(self.num_layers), shape, row, None, row.older)
            return
        for layer in range(self.num_layers):
            yield Tensor(row.name(self.num_layers, layer), shape, row, layer, row.older)

    @functools.cached_property
    def tensors(self) -> list[Tensor]:
        """All tensors, row by row."""
        return [tensor for row in self.rows for tensor in self.tensors_of(row)]

    @functools.cached_property
    def _places(self) -> dict[str, tuple[Row, int]]:
        return {name: (row, place) for row in self.rows for place, name in enumerate(row.ours)}

    def sources(self, ours: str) -> list[Tensor]:
        """The tensors that an array of ours is made of: one, or one for each layer."""
        return list(self.tensors_of(self._places[ours][0]))

    def part(self, ours: str, tensor: np.ndarray) -> np.ndarray:
        """What a tensor of theirs contributes to an array of ours; a view."""
        row, place = self._places[ours]
        return row.layout.split(tensor, self.sizes, len(row.ours))[place]

    def whole(self, tensor: Tensor, arrays: Sequence[np.ndarray]) -> np.ndarray:
        """A tensor of theirs from the arrays of ours of its row, all layers of each."""
        layers = arrays if tensor.layer is None else [array[tensor.layer] for array in arrays]
        return tensor.row.layout.join(layers, self.sizes)
