"""Maps Hugging Face tensors to the arrays of one model."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from MaxText.config.registry import lookup
from MaxText.conversion.family import Family, WeightMapping, numbered
from MaxText.conversion.weight_source import common_format
from MaxText.errors import UserError
from MaxText.layers.block import mixer_class
from MaxText.layers.model import Model
from MaxText.parallelism.logical_sharding import ParamSpec


class MappedTensor(NamedTuple):
    """A Hugging Face tensor."""

    name: str  # with layer numbers filled in
    row: WeightMapping
    param_names: tuple[str, ...]  # parameters that it is part of
    index: tuple[int, ...]  # into them: layer and expert, if they hold several
    part: tuple[int, ...]  # shape of what it holds of each
    legacy_names: tuple[str, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        return self.row.hf_shape(self.part)


class TensorMap:
    """A family's rows, with the sizes of one model.

    `groups` maps parameters to the tensors they share, layer by layer; converting one needs all of
    the other. `sources` maps a parameter to its tensors: one, or one per layer and expert.
    """

    def __init__(self, family: Family, model: Model, rows: Sequence[WeightMapping] | None = None):
        """Uses the family's rows, or `rows` for another layout of its models."""
        self.family, self.model = family, model
        self.groups: dict[tuple[str, ...], list[MappedTensor]] = {}
        self._num_layers = model.config.shape.dimensions.num_layers
        for row, layer in self._declared() if rows is None else ():
            self._add(row, layer, self._stored(row, layer))
        declared = {(tensor.param_names[0], tensor.index) for tensor in self.tensors}
        for row in family.rows if rows is None else rows:
            for layer in range(self._num_layers) if row.in_layers else (0,):
                stored = self._stored(row, layer)
                if stored[0] not in declared and all(self._fits(row, name) for name, _ in stored):
                    self._add(row, layer, stored)
        self.sources = {name: group for names, group in self.groups.items() for name in names}
        if unknown := sorted(set(model.parameters) - set(self.sources)):
            raise UserError(
                f"the format {family.model_type} has no tensors for {', '.join(unknown)}.\n"
                "  What to do: map them in the part's hugging_face_names, or keep the checkpoint "
                "in this program's format."
            )
        assert sum(map(len, self.groups)) == len(self.sources), "the table has arrays twice"

    def _declared(self) -> Iterator[tuple[WeightMapping, int]]:
        for layer, one in enumerate(self.model.config.layers):
            feed_forward = lookup("feed_forward", one.config.feed_forward.feed_forward_type)
            for folder, part in (("self_attention", mixer_class(one)), ("mlp", feed_forward)):
                for param, hf_name in part.hugging_face_names.items() if part else ():
                    name = f"{folder}/{param}"
                    if spec := self.model.parameters.get(self.model.stored(layer, name)[0]):
                        hf_name = self.family.in_layer + hf_name
                        yield WeightMapping(hf_name, f"layers/{name}", *_linear(spec)), layer

    def _stored(self, row: WeightMapping, layer: int) -> list[tuple[str, tuple[int, ...]]]:
        """Returns the stored arrays of a row in a layer, and the index in each."""
        stored = []
        for name in row.param_names:
            found = numbered(name, self._num_layers, layer)
            folder, _, within = found.partition("/")
            found, index = self.model.stored(layer, within) if folder == "layers" else (found, None)
            stored.append((found, () if index is None else (index,)))
        return stored

    def _fits(self, row: WeightMapping, name: str) -> bool:
        num_dims = len(row.param_axes.split())
        return name in self.model.parameters and len(self._part(row, name)) == num_dims

    def _part(self, row: WeightMapping, name: str) -> tuple[int, ...]:
        param = self.model.parameters[name]
        return param.shape[("layers" in param.logical_axes) + row.in_experts :]

    def _add(
        self, row: WeightMapping, layer: int, stored: Sequence[tuple[str, tuple[int, ...]]]
    ) -> None:
        names, outer = tuple(name for name, _ in stored), stored[0][1]
        tensors, part = self.groups.setdefault(names, []), self._part(row, names[0])
        num_experts = self.model.config.mixture_of_experts.num_experts if row.in_experts else 1
        for expert in range(num_experts):
            hf_name, *legacy_names = (
                numbered(one, self._num_layers, layer, expert)
                for one in (row.hf_name, *row.legacy_names)
            )
            index = (*outer, expert) if row.in_experts else outer
            tensors.append(MappedTensor(hf_name, row, names, index, part, tuple(legacy_names)))

    @property
    def tensors(self) -> list[MappedTensor]:
        return [tensor for group in self.groups.values() for tensor in group]

    def formats(self, stored: Mapping[str, str]) -> dict[str, np.dtype]:
        """Returns the formats of parameters, from those of tensors by name."""
        return {
            name: common_format(stored[tensor.name] for tensor in self.sources[name])
            for name in self.model.parameters
        }

    def array(self, name: str, dtype: np.dtype, read: Callable[[str], np.ndarray]) -> np.ndarray:
        """Assembles a parameter from tensors read one at a time by name."""
        array = np.empty(self.model.parameters[name].shape, dtype)
        for one in self.sources[name]:
            parts = one.row.split(read(one.name), one.part)
            array[one.index] = parts[one.param_names.index(name)]
        return array


def _linear(spec: ParamSpec) -> tuple[str, str]:
    """Returns patterns of torch.nn.Linear, [outputs, inputs], for matrices."""
    names = [name for name in spec.logical_axes if name != "layers"]
    letters = "ABCDEFGHIKLM"[: len(names)]
    matrix = letters.replace("", " ")
    if spec.num_input_dims:
        first = names.count("exp")
        end = first + spec.num_input_dims
        inputs, outputs = " ".join(letters[first:end]), " ".join(letters[end:])
        matrix = f"{letters[:first]} ({outputs}) ({inputs})"
    return matrix.strip(), " ".join(letters)
