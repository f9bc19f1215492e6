"""Maps Hugging Face tensors to the arrays of one model, by names and shapes."""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import numpy as np

from MaxText.config.registry import lookup
from MaxText.conversion.family import Family, Row, numbered
from MaxText.conversion.layouts import Layout
from MaxText.errors import UserError
from MaxText.layers.block_variants import mixer_class
from MaxText.layers.model import Model
from MaxText.parallelism.logical_sharding import ParamSpec


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A Hugging Face tensor."""

    name: str  # with layer numbers filled in
    shape: tuple[int, ...]
    row: Row
    ours: tuple[str, ...]  # parameters that it is part of
    place: tuple[int, ...]  # index into them: layer and expert, if they hold several
    older: tuple[str, ...] = ()  # alternative names


class UnknownParameters(UserError):
    """Parameters that the format lacks, such as those of a user's part."""

    def __init__(self, family: str, names: Sequence[str]):
        self.names = ", ".join(names)
        super().__init__(
            f"the format {family} has no place for {self.names}.\n  What to do: name them in the "
            "part's hugging_face_names, or keep the checkpoint in our format."
        )


class TensorMap:
    """A family's rows, with the sizes of one model.

    `groups` maps arrays of ours to the tensors they share, layer by layer. Converting one needs all
    of the other.
    """

    def __init__(self, family: Family, model: Model, rows: Sequence[Row] | None = None):
        """Uses the family's rows, or `rows` for another layout of its models."""
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
        """Returns the rows that mixers and feed-forwards declare, with their layers."""
        found = []
        for layer, one in enumerate(self.model.section.layers):
            feed_forward = lookup("feed_forward", one.section.feed_forward.feed_forward_type)
            for folder, part in (("self_attention", mixer_class(one)), ("mlp", feed_forward)):
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
        """Returns whether the model has the array with the row's dimensions."""
        info = self.model.parameters.get(ours)
        if info is None:
            return False
        outer = ("layers" in info.logical_axes) + row.in_experts
        return len(info.shape) - outer == len(row.layout.ours.split())

    def _sizes(self, row: Row, ours: str) -> dict[str, int]:
        """Returns sizes by layout letter; they may differ between layers."""
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
        """Returns the tensors of an array of ours: one, or one per layer and expert."""
        return self._places[ours][0]

    def array(self, ours: str, dtype: np.dtype, read: Callable[[str], np.ndarray]) -> np.ndarray:
        """Assembles an array of ours from tensors read one at a time by name."""
        array = np.empty(self.model.parameters[ours].shape, dtype)
        for tensor in self.sources(ours):
            array[tensor.place] = self.part(ours, read(tensor.name))
        return array

    def part(self, ours: str, tensor: np.ndarray) -> np.ndarray:
        """Returns a tensor's contribution to an array of ours, as a view."""
        sources, place = self._places[ours]
        row = sources[0].row
        return row.layout.split(tensor, self._sizes(row, ours), len(row.ours))[place]

    def whole(self, tensor: Tensor, arrays: Sequence[np.ndarray]) -> np.ndarray:
        """Assembles a tensor from the arrays of its group, each with all layers."""
        parts = [array[tensor.place] for array in arrays]
        return tensor.row.layout.join(parts, self._sizes(tensor.row, tensor.ours[0]))


def _linear(info: ParamSpec) -> Layout:
    """Returns torch.nn.Linear's layout, [outputs, inputs], for matrices."""
    names = [name for name in info.logical_axes if name != "layers"]
    letters = "ABCDEFGHIKLM"[: len(names)]
    matrix = letters.replace("", " ")
    if info.num_in_dims:
        first = names.count("exp")
        inputs, outputs = letters[first:][: info.num_in_dims], letters[first + info.num_in_dims :]
        matrix = f"{letters[:first]} ({' '.join(outputs)}) ({' '.join(inputs)})"
    return Layout(matrix.strip(), " ".join(letters))
