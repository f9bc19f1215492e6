"""Which tensor of theirs holds which arrays of ours: names and shapes of one model, no numbers."""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import numpy as np

from MaxText.conversion.family import Family, Row, numbered
from MaxText.errors import UserError
from MaxText.layers.model import Model


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One tensor of theirs."""

    name: str  # with the layer's number in it
    shape: tuple[int, ...]  # as it is stored there
    row: Row  # the row of the table it comes from
    ours: tuple[str, ...]  # the arrays of ours that it is part of
    # in these arrays: layer and expert, as far as one array holds several of them
    place: tuple[int, ...]
    older: tuple[str, ...] = ()  # other names that it may have in a file


class UnknownParameters(UserError):
    """Parameters of a model that the format has no place for, such as those of a part of one's own.

    Attributes:
      names: of the parameters.
    """

    def __init__(self, family: str, names: Sequence[str]):
        self.names = ", ".join(names)
        super().__init__(
            f"the format {family} has no place for {self.names}.\n  What to do: add rows for them "
            "to the table in MaxText/conversion/families, or keep the checkpoint in our format."
        )


class TensorMap:
    """A family's rows, filled in with the sizes of one model.

    Attributes:
      family: whose table it is.
      model: our model.
      groups: arrays of ours that share tensors -> these tensors, layer by layer. Only together can
        either be made of the other.
    """

    def __init__(self, family: Family, model: Model, rows: Sequence[Row] | None = None):
        """Args: rows: others than the family's, for another layout of its models."""
        self.family, self.model = family, model
        self.groups: dict[tuple[str, ...], list[Tensor]] = {}
        num_layers = model.section.shape.dimensions.num_layers
        num_experts = model.section.mixture_of_experts.num_experts
        for row in family.rows if rows is None else rows:
            for layer in range(num_layers) if row.in_layers else (0,):
                stored = [
                    self._stored(numbered(name, num_layers, layer), layer) for name in row.ours
                ]
                ours = tuple(name for name, _ in stored)
                if ours[0] in model.parameters:
                    outer = stored[0][1]
                    for expert in range(num_experts) if row.in_experts else (0,):
                        place = (*outer, expert) if row.in_experts else outer
                        name = numbered(row.theirs, num_layers, layer, expert)
                        shape = row.layout.shape(self._sizes(row, ours[0]), len(ours))
                        older = tuple(numbered(one, num_layers, layer) for one in row.older)
                        tensor = Tensor(name, shape, row, ours, place, older)
                        self.groups.setdefault(ours, []).append(tensor)
        named = [name for ours in self.groups for name in ours]
        if unknown := sorted(set(model.parameters) - set(named)):
            raise UnknownParameters(family.model_type, unknown)
        assert sorted(named) == sorted(model.parameters), "the table has arrays twice"

    def _stored(self, name: str, layer: int) -> tuple[str, tuple[int, ...]]:
        """The array that holds ours of a table's row in a layer, and the place in it."""
        folder, _, within = name.partition("/")
        if folder != "layers":
            return name, ()
        found, row = self.model.stored(layer, within)
        return found, () if row is None else (row,)

    def _sizes(self, row: Row, ours: str) -> dict[str, int]:
        """Sizes of one array by the letters of its layout; they may differ from layer to layer."""
        info = self.model.parameters[ours]
        return row.layout.sizes(info.shape[("layers" in info.logical_axes) + row.in_experts :])

    @functools.cached_property
    def tensors(self) -> list[Tensor]:
        """All tensors."""
        return [tensor for group in self.groups.values() for tensor in group]

    @functools.cached_property
    def _places(self) -> dict[str, tuple[list[Tensor], int]]:
        return {
            name: (tensors, place)
            for ours, tensors in self.groups.items()
            for place, name in enumerate(ours)
        }

    def sources(self, ours: str) -> list[Tensor]:
        """The tensors that an array of ours is made of: one, or one for each layer and expert."""
        return self._places[ours][0]

    def array(self, ours: str, dtype: np.dtype, read: Callable[[str], np.ndarray]) -> np.ndarray:
        """An array of ours, of tensors of theirs that are read by name one after the other."""
        array = np.empty(self.model.parameters[ours].shape, dtype)
        for tensor in self.sources(ours):
            array[tensor.place] = self.part(ours, read(tensor.name))
        return array

    def part(self, ours: str, tensor: np.ndarray) -> np.ndarray:
        """What a tensor of theirs contributes to an array of ours; a view."""
        sources, place = self._places[ours]
        row = sources[0].row
        return row.layout.split(tensor, self._sizes(row, ours), len(row.ours))[place]

    def whole(self, tensor: Tensor, arrays: Sequence[np.ndarray]) -> np.ndarray:
        """A tensor of theirs from the arrays of ours of its group, all layers of each."""
        parts = [array[tensor.place] for array in arrays]
        return tensor.row.layout.join(parts, self._sizes(tensor.row, tensor.ours[0]))
