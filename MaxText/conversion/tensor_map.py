"""Map between Hugging Face tensors and arrays of one model, by names and shapes."""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import numpy as np

from MaxText.config.registry import lookup
from MaxText.conversion.family import Family, Row, numbered
from MaxText.conversion.layouts import Layout
from MaxText.errors import UserError
from MaxText.layers.arrangements import mixer_of
from MaxText.layers.model import Model
from MaxText.parallelism.constraints import ParameterInfo


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A Hugging Face tensor."""

    name: str  # with the layer's number in it
    shape: tuple[int, ...]  # as it is stored there
    row: Row  # the row of the table it comes from
    ours: tuple[str, ...]  # the arrays of ours that it is part of
    # in these arrays: layer and expert, as far as one array holds several of them
    place: tuple[int, ...]
    older: tuple[str, ...] = ()  # other names that it may have in a file


class UnknownParameters(UserError):
    """Parameters that the format has no place for, such as those of a user's part."""

    def __init__(self, family: str, names: Sequence[str]):
        self.names = ", ".join(names)
        super().__init__(
            f"the format {family} has no place for {self.names}.\n  What to do: name them in the "
            "part's hugging_face_names, or keep the checkpoint in our format."
        )


class TensorMap:
    """A family's rows, filled in with the sizes of one model.

    Attributes:
      groups: Arrays of ours that share tensors -> these tensors, layer by layer. Neither can be
        made without all of the other.
    """

    def __init__(self, family: Family, model: Model, rows: Sequence[Row] | None = None):
        """Fills in the rows of the family, or others for another layout of its models."""
        self.family, self.model = family, model
        self.groups: dict[tuple[str, ...], list[Tensor]] = {}
        num_layers = model.section.shape.dimensions.num_layers
        for row, layer in self._declared() if rows is None else ():
            self._add(row, layer)
        declared = {(tensor.ours[0], tensor.place) for tensor in self.tensors}
        for row in family.rows if rows is None else rows:
            for layer in range(num_layers) if row.in_layers else (0,):
                stored = self._stored(row, layer)
                if stored[0] not in declared and all(self._fits(row, name) for name, _ in stored):
                    self._add(row, layer)
        named = [name for ours in self.groups for name in ours]
        if unknown := sorted(set(model.parameters) - set(named)):
            raise UnknownParameters(family.model_type, unknown)
        assert sorted(named) == sorted(model.parameters), "the table has arrays twice"

    def _declared(self) -> list[tuple[Row, int]]:
        """Returns rows that mixers and feed-forwards declare, and the layer of each."""
        found = []
        for layer, one in enumerate(self.model.section.layers):
            feed_forward = lookup("feed_forward", one.section.feed_forward.feed_forward_type)
            for folder, part in (("self_attention", mixer_of(one)), ("mlp", feed_forward)):
                for ours, theirs in part.hugging_face_names.items() if part else ():
                    name = f"{folder}/{ours}"
                    if info := self.model.parameters.get(self.model.stored(layer, name)[0]):
                        theirs = self.family.in_layer + theirs
                        found.append((Row(theirs, (f"layers/{name}",), _linear(info)), layer))
        return found

    def _add(self, row: Row, layer: int) -> None:
        section = self.model.section
        num_layers, num_experts = section.shape.dimensions.num_layers, 1
        if row.in_experts:
            num_experts = section.mixture_of_experts.num_experts
        stored = self._stored(row, layer)
        ours, outer = tuple(name for name, _ in stored), stored[0][1]
        shape = row.layout.shape(self._sizes(row, ours[0]), len(ours))
        older = tuple(numbered(one, num_layers, layer) for one in row.older)
        for expert in range(num_experts):
            place = (*outer, expert) if row.in_experts else outer
            name = numbered(row.theirs, num_layers, layer, expert)
            tensor = Tensor(name, shape, row, ours, place, older)
            self.groups.setdefault(ours, []).append(tensor)

    def _stored(self, row: Row, layer: int) -> list[tuple[str, tuple[int, ...]]]:
        """Returns the stored arrays of a row in a layer, and the index in each."""
        stored = []
        for name in row.ours:
            found = numbered(name, self.model.section.shape.dimensions.num_layers, layer)
            folder, _, within = found.partition("/")
            found, place = self.model.stored(layer, within) if folder == "layers" else (found, None)
            stored.append((found, () if place is None else (place,)))
        return stored

    def _fits(self, row: Row, ours: str) -> bool:
        """Returns whether the model has an array of a row, with as many dimensions."""
        info = self.model.parameters.get(ours)
        if info is None:
            return False
        outer = ("layers" in info.logical_axes) + row.in_experts
        return len(info.shape) - outer == len(row.layout.ours.split())

    def _sizes(self, row: Row, ours: str) -> dict[str, int]:
        """Returns sizes by the letters of a layout; they may differ from layer to layer."""
        info = self.model.parameters[ours]
        return row.layout.sizes(info.shape[("layers" in info.logical_axes) + row.in_experts :])

    @property
    def tensors(self) -> list[Tensor]:
        return [tensor for group in self.groups.values() for tensor in group]

    @functools.cached_property
    def _places(self) -> dict[str, tuple[list[Tensor], int]]:
        return {
            name: (tensors, place)
            for ours, tensors in self.groups.items()
            for place, name in enumerate(ours)
        }

    def sources(self, ours: str) -> list[Tensor]:
        """Returns the tensors of an array of ours: one, or one for each layer and expert."""
        return self._places[ours][0]

    def array(self, ours: str, dtype: np.dtype, read: Callable[[str], np.ndarray]) -> np.ndarray:
        """Returns an array of ours from tensors that are read by name, one after the other."""
        array = np.empty(self.model.parameters[ours].shape, dtype)
        for tensor in self.sources(ours):
            array[tensor.place] = self.part(ours, read(tensor.name))
        return array

    def part(self, ours: str, tensor: np.ndarray) -> np.ndarray:
        """Returns what a tensor contributes to an array of ours, as a view."""
        sources, place = self._places[ours]
        row = sources[0].row
        return row.layout.split(tensor, self._sizes(row, ours), len(row.ours))[place]

    def whole(self, tensor: Tensor, arrays: Sequence[np.ndarray]) -> np.ndarray:
        """Returns a tensor from the arrays of ours of its group, all layers of each."""
        parts = [array[tensor.place] for array in arrays]
        return tensor.row.layout.join(parts, self._sizes(tensor.row, tensor.ours[0]))


def _linear(info: ParameterInfo) -> Layout:
    """Returns the layout of torch.nn.Linear, [outputs, inputs]; other arrays as they are."""
    names = [name for name in info.logical_axes if name != "layers"]
    letters = "ABCDEFGHIKLM"[: len(names)]
    matrix = letters.replace("", " ")
    if info.num_in_dims:
        first = names.count("exp")
        inputs, outputs = letters[first:][: info.num_in_dims], letters[first + info.num_in_dims :]
        matrix = f"{letters[:first]} ({' '.join(outputs)}) ({' '.join(inputs)})"
    return Layout(matrix.strip(), " ".join(letters))
