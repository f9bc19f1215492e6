"""Weights of Hugging Face and fattorib/transformer, by their tables."""

import dataclasses
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from etils import epath
from flax import serialization, traverse_util

from MaxText.checkpointing.checkpoint_reader import OBJECTIVE
from MaxText.checkpointing.compatibility import ArraySpec
from MaxText.config import schema
from MaxText.config.loading import load_config
from MaxText.config.maxtext_keys import ALIASES
from MaxText.config.model_sections import LayerConfig
from MaxText.config.problems import ConfigurationError
from MaxText.config.registry import lookup
from MaxText.config.schema import Config, flatten
from MaxText.conversion.families.fattorib import FATTORIB, FLAX_ROWS
from MaxText.conversion.family import DEPTH, Family, WeightMapping, numbered
from MaxText.conversion.hf_checkpoint import (
    CONFIG,
    TensorFiles,
    resolve_hf_path,
    text_tensors,
    without_wrappers,
)
from MaxText.conversion.hf_config import config_from_hf, resolve_family, text_model
from MaxText.conversion.weight_source import (
    WeightSource,
    check_arrays,
    common_format,
    require_finite,
)
from MaxText.errors import UserError
from MaxText.input_pipeline.tokenization.interface import read_json
from MaxText.layers.assembly.block_variants import mixer_class
from MaxText.layers.assembly.model import Model
from MaxText.layers.part import Part
from MaxText.parallelism.logical_sharding import ParamSpec
from MaxText.storage.paths import parse_path
from MaxText.training.model_objective import own_layers


class MappedTensor(NamedTuple):
    """A tensor of a model in another program's format."""

    name: str  # with layer numbers filled in
    row: WeightMapping
    param_names: tuple[str, ...]  # parameters that it is part of
    index: tuple[int, ...]  # into them: layer, expert or head, if they hold several
    parts: tuple[tuple[int, ...], ...]  # shape of what it holds of each
    rotary_dims: int  # dimensions of a head that are in another order in the file
    num_groups: int = 1  # groups of heads that the row concatenates by themselves
    legacy_names: tuple[str, ...] = ()  # alternative names in published files

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the tensor in the file."""
        return self.row.hf_shape(self.parts)

    def split(self, tensor: np.ndarray) -> list[np.ndarray]:
        """Returns what the tensor holds of each parameter."""
        return self.row.split(tensor, self.parts, self.rotary_dims, self.num_groups)

    def join(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        """Returns the tensor with parts of parameters, whole arrays that `index` points into."""
        parts = [array[self.index] for array in arrays]
        return self.row.join(parts, self.rotary_dims, self.num_groups)


class TensorMap:
    """A family's rows, with the sizes of one model.

    Attributes:
      groups: Maps parameters to the tensors they share, layer by layer; converting one needs all of
        the other.
      sources: Maps a parameter to its tensors: one, or one per layer and expert.
      copies: Maps names of tensors to those that they repeat.
      left_out: Weights of multi-token prediction without tensors, which only training reads.
    """

    def __init__(self, family: Family, model: Model, rows: Sequence[WeightMapping] | None = None):
        """Uses the family's rows, or `rows` for another layout of its models."""
        self.family = family
        self.model = model
        self.groups: dict[tuple[str, ...], list[MappedTensor]] = {}
        self._num_layers = len(model.config.layers)
        # Those of multi-token prediction follow those of the model.
        self._layers = (*model.config.layers, *self._prediction_layers())
        if rows is None:
            for row, layer in self._declared():
                self._add(row, layer, self._stored(row, layer))
        declared = {(tensor.param_names[0], tensor.index) for tensor in self.tensors}
        for row in family.rows if rows is None else rows:
            for layer in range(self._num_layers) if row.in_layers else (0,):
                stored = self._stored(row, layer)
                if stored[0] not in declared and self._fits(row, layer, stored):
                    self._add(row, layer, stored)
        for layer in range(self._num_layers, len(self._layers)):
            for row in self._prediction_rows():
                stored = self._stored(row, layer)
                if stored[0] not in declared and self._fits(row, layer, stored):
                    self._add(row, layer, stored)
        self.sources = {name: group for names, group in self.groups.items() for name in names}
        self.copies = dict(self._copies())
        self.left_out = self._without_names()
        unknown = sorted(set(model.parameters) - set(self.sources) - self.left_out)
        if unknown:
            raise UserError(
                f"the format {family.model_type} has no tensors for {', '.join(unknown)}.\n"
                "  What to do: map them in the part's hugging_face_names, or keep the checkpoint "
                "in this program's format."
            )
        assert sum(map(len, self.groups)) == len(self.sources), "the table has arrays twice"

    def _prediction_layers(self) -> tuple[LayerConfig, ...]:
        """Returns the layers of multi-token prediction, if the format has names for them."""
        layers = own_layers(self.model.config) if self._predicts_tokens else ()
        table = self.family.prediction
        if table is None:
            return ()
        if table.most is not None and len(layers) > table.most:
            raise UserError(
                f"mtp_num_layers={len(layers)}: the format {self.family.model_type} has names for "
                f"{table.most} layer of multi-token prediction."
            )
        return layers

    @property
    def _predicts_tokens(self) -> bool:
        """Whether the objective is multi-token prediction."""
        return self.model.config.objective.name == "multi_token_prediction"

    def _prediction_rows(self) -> Iterator[WeightMapping]:
        """Yields the rows of a layer of multi-token prediction."""
        table = self.family.prediction
        assert table is not None, "there are no such layers"
        yield from table.rows
        for row in self.family.rows:
            if row.in_layers:
                hf_name = row.hf_name.replace(self.family.in_layer, table.in_layer, 1)
                yield dataclasses.replace(row, hf_name=hf_name, legacy_names=())

    def _in_layer_prefix(self, layer: int) -> str:
        """Returns the prefix of a layer's tensors, with placeholders."""
        if layer < self._num_layers or self.family.prediction is None:
            return self.family.in_layer
        return self.family.prediction.in_layer

    def _copies(self) -> Iterator[tuple[str, str]]:
        """Yields the names of tensors that repeat another one, with that one's."""
        table = self.family.prediction
        for layer in range(self._num_layers, len(self._layers)):
            for name, param in {} if table is None else table.copies.items():
                repeated = self.sources.get(param) or self.sources["token_embedder/embedding"]
                yield numbered(name, self._num_layers, layer), repeated[0].name

    def _without_names(self) -> set[str]:
        """Returns the weights of multi-token prediction, if the format has no names for them."""
        if self.family.prediction is not None or not self._predicts_tokens:
            return set()
        return {name for name in self.model.parameters if name.startswith(f"{OBJECTIVE}/")}

    def _declared(self) -> Iterator[tuple[WeightMapping, int]]:
        """Yields rows that parts of the layers declare (`hugging_face_names`), with the layer."""
        for layer, layer_config in enumerate(self._layers):
            feed_forward_type = layer_config.config.feed_forward.feed_forward_type
            hf_names = _declared_names("self_attention", mixer_class(layer_config))
            hf_names |= _declared_names("mlp", lookup("feed_forward", feed_forward_type))
            for name, hf_name in hf_names.items():
                stored_name, _ = self._stored_array(f"layers/{name}", layer)
                spec = self.model.parameters.get(stored_name)
                if spec is not None:
                    hf_axes, param_axes = _linear(spec)
                    row = WeightMapping(
                        self._in_layer_prefix(layer) + hf_name,
                        f"layers/{name}",
                        hf_axes,
                        param_axes,
                    )
                    yield row, layer

    def _stored(self, row: WeightMapping, layer: int) -> list[tuple[str, tuple[int, ...]]]:
        """Returns the stored arrays of a row in a layer, and the index in each."""
        return [self._stored_array(template, layer) for template in row.param_names]

    def _stored_array(self, template: str, layer: int) -> tuple[str, tuple[int, ...]]:
        """Returns the stored array of a parameter in a layer, and the index in it."""
        name = numbered(template, self._num_layers, layer)
        index = None
        folder, _, within = name.partition("/")
        depth = f"{OBJECTIVE}/depths/{layer - self._num_layers}"
        if folder == DEPTH:
            name = f"{depth}/{within}"
        elif folder == "layers" and layer >= self._num_layers:
            name = f"{depth}/block/{within}"
        elif folder == "layers":
            name, index = self.model.stored(layer, within)
        return name, () if index is None else (index,)

    def _fits(
        self, row: WeightMapping, layer: int, stored: Sequence[tuple[str, tuple[int, ...]]]
    ) -> bool:
        """Returns whether a row applies: its parameters exist, with the ranks of its patterns.

        Args:
          stored: Of `_stored`.
        """
        if row.only_with and not self._exists(row.only_with, layer):
            return False
        if row.only_without and self._exists(row.only_without, layer):
            return False
        return all(
            name in self.model.parameters and len(self._part(row, name)) == rank
            for (name, _), rank in zip(stored, row.ranks, strict=True)
        )

    def _exists(self, template: str, layer: int) -> bool:
        """Returns whether a layer has a parameter."""
        name, _ = self._stored_array(template, layer)
        return name in self.model.parameters

    def _part(self, row: WeightMapping, name: str) -> tuple[int, ...]:
        """Returns the shape of what one tensor holds of a parameter: one layer, one expert."""
        shape = self._in_layer(name)
        return shape[1:] if row.is_numbered else shape

    def _in_layer(self, name: str) -> tuple[int, ...]:
        """Returns the shape of a parameter in one layer."""
        param = self.model.parameters[name]
        return param.shape[1:] if "layers" in param.logical_axes else param.shape

    def _add(
        self, row: WeightMapping, layer: int, stored: Sequence[tuple[str, tuple[int, ...]]]
    ) -> None:
        """Adds the tensors of a row in a layer: one, or one for each expert or head.

        Args:
          stored: Of `_stored`.
        """
        names = tuple(name for name, _ in stored)
        _, layer_index = stored[0]
        tensors = self.groups.setdefault(names, [])
        num_tensors = self._in_layer(names[0])[0] if row.is_numbered else 1
        for number in range(num_tensors):
            hf_name, *legacy_names = (
                numbered(template, self._num_layers, layer, number)
                for template in (row.hf_name, *row.legacy_names)
            )
            tensors.append(
                MappedTensor(
                    name=hf_name,
                    row=row,
                    param_names=names,
                    index=(*layer_index, number) if row.is_numbered else layer_index,
                    parts=tuple(self._part(row, name) for name in names),
                    rotary_dims=self._permuted_dims(row, layer),
                    num_groups=self._num_groups(row, layer),
                    legacy_names=tuple(legacy_names),
                )
            )

    def _num_groups(self, row: WeightMapping, layer: int) -> int:
        """Returns the groups of heads that a row concatenates by themselves."""
        return self._layers[layer].config.recurrent.linear_num_key_heads if row.is_grouped else 1

    def _permuted_dims(self, row: WeightMapping, layer: int) -> int:
        """Returns the dimensions of a head that a row has in another order than the model."""
        config = self._layers[layer].config
        if row.rotary_order in ("halves", config.position.rope_pairs):
            return 0
        width = lookup("mixer", config.block.mixer).rotary_width(self._layers[layer])
        return int(width * config.position.rotary_pct)

    @property
    def tensors(self) -> list[MappedTensor]:
        """All tensors of the model."""
        return [tensor for group in self.groups.values() for tensor in group]

    def formats(self, stored: Mapping[str, str]) -> dict[str, np.dtype]:
        """Returns the formats of parameters.

        Args:
          stored: The formats of tensors, by name.
        """
        return {
            name: common_format(stored[tensor.name] for tensor in self.sources[name])
            for name in self.sources
        }

    def array(self, name: str, dtype: np.dtype, read: Callable[[str], np.ndarray]) -> np.ndarray:
        """Assembles a parameter.

        Args:
          name: Of the parameter.
          dtype: Of the result.
          read: Reads a tensor by name; called for one at a time.
        """
        array = np.empty(self.model.parameters[name].shape, dtype)
        for tensor in self.sources[name]:
            parts = tensor.split(read(tensor.name))
            array[tensor.index] = parts[tensor.param_names.index(name)]
        return array


def _declared_names(folder: str, part: type[Part] | None) -> dict[str, str]:
    """Returns `hugging_face_names` of a part of a layer, by "folder/parameter"."""
    hf_names = part.hugging_face_names if part else {}
    return {f"{folder}/{param}": hf_name for param, hf_name in hf_names.items()}


def _linear(spec: ParamSpec) -> tuple[str, str]:
    """Returns the patterns of the tensor and of the parameter for a declared name.

    A matrix is stored as torch.nn.Linear does, [outputs, inputs]; anything else as it is.
    """
    names = [name for name in spec.logical_axes if name != "layers"]
    letters = "ABCDEFGHIKLM"[: len(names)]
    matrix = letters.replace("", " ")
    if spec.num_input_dims:
        first = names.count("exp")
        end = first + spec.num_input_dims
        inputs = " ".join(letters[first:end])
        outputs = " ".join(letters[end:])
        matrix = f"{letters[:first]} ({outputs}) ({inputs})"
    return matrix.strip(), " ".join(letters)


_TIED = "tie_word_embeddings"
_QUANTIZED = "quantization_config"


class HFWeights(WeightSource):
    """Weights of a Hugging Face checkpoint.

    Attributes:
      keys: Its model configuration, by key.
      notes: Lines for the user on how the folder was read.
    """

    def __init__(
        self,
        folder: Path,
        user_keys: Mapping[str, Any] | None = None,
        *,
        prediction_layers: int = 0,
    ):
        """Reads config.json and tensor shapes; UserError if they do not fit.

        Args:
          user_keys: Keys that override config.json.
          prediction_layers: Layers of multi-token prediction to read, if the files have as many.
        """
        self.folder = folder
        self.notes: list[str] = []
        config_json = read_json(folder / CONFIG)
        self.family = resolve_family(config_json, str(folder))
        self.config_json = text_model(config_json)
        self._is_multimodal = self.config_json is not config_json
        self.description = f"{folder} ({self.family.architecture})"
        user_keys = user_keys or {}
        self._build_model(user_keys)
        self.files = TensorFiles(folder, self.config_json)
        if self._has_prediction_layers(prediction_layers):
            user_keys = {**user_keys, "mtp_num_layers": prediction_layers}
            self._build_model(user_keys)
        self._names = self._match()
        warning = self._warning_of_tied_head()
        if warning:
            self.config_json = {**self.config_json, _TIED: False}
            self._build_model(user_keys)
            self._names = self._match()
            self.notes.append(warning)
        self._check_copies()
        self._stored_formats = {
            name: self.files.found[file_name].dtype for name, file_name in self._names.items()
        }
        self.formats = self.map.formats(self._stored_formats)

    def _build_model(self, user_keys: Mapping[str, Any]) -> None:
        """Sets the configuration and the model of config.json, and their tensors."""
        keys = config_from_hf(self.family, self.config_json, str(self.folder), user_keys)
        try:
            super().__init__(load_config(**keys))
        except ConfigurationError as error:
            raise UserError(f"{self.folder}: the model of its {CONFIG} has {error}") from error
        resolved = flatten(self.config)
        self.keys = {name: resolved[name] for name in (ALIASES.get(key, key) for key in keys)}
        self.map = TensorMap(self.family, self.model)
        if self.map.left_out:
            count = self.config.model.objective.mtp_num_layers
            raise UserError(
                f"{self.folder}: mtp_num_layers={count}, and the format "
                f"{self.family.model_type} has no multi-token prediction.\n"
                "  What to do: import it without mtp_num_layers, and set it in training."
            )

    def _has_prediction_layers(self, count: int) -> bool:
        """Returns whether the files have that many layers of multi-token prediction."""
        table = self.family.prediction
        if count == 0 or table is None or (table.most is not None and count > table.most):
            return False
        num_layers = self.model.config.shape.dimensions.num_layers
        last = {numbered(row.hf_name, num_layers, num_layers + count - 1) for row in table.rows}
        return not last.isdisjoint(self.files.found)

    def _check_copies(self) -> None:
        """Refuses a layer of multi-token prediction with a token table or head of its own."""
        for name, repeated in self.map.copies.items():
            if name not in self.files.found:
                continue
            if not np.array_equal(self.files.read(name), self._read_tensor(repeated)):
                raise UserError(
                    f"{self.folder}: {name} differs from {repeated}. Multi-token prediction shares "
                    "the token table and the head with the model here."
                )

    def _match(self) -> dict[str, str]:
        """Returns the names in the files of the tensors that the model needs."""
        self.notes.clear()
        alternatives = {tensor.name: self._alternatives(tensor) for tensor in self.map.tensors}
        heads = self._tied_heads()
        expected = {name for names in alternatives.values() for name in names}.union(heads)
        text_names = self._text_names()
        file_names, wrappers = without_wrappers(text_names, expected)
        file_names = {name: text_names[text_name] for name, text_name in file_names.items()}
        if wrappers:
            self.notes.append(
                f"note: removed {', '.join(wrappers)} from the tensor names in {self.folder} "
                "(added by torch.compile, DistributedDataParallel, FSDP or another wrapper)"
            )
        # Of a tied model, transformers takes whichever of the two is there.
        alternatives[self._table] = (*alternatives[self._table], *heads)
        names = {
            name: next((candidate for candidate in candidates if candidate in file_names), name)
            for name, candidates in alternatives.items()
        }
        extra_names = file_names.keys() - names.values()
        self._head = next((file_names[name] for name in heads if name in extra_names), None)
        ignored = {
            name for name in extra_names if name in heads or name.endswith(self.family.ignored)
        }
        ignored |= self.map.copies.keys() & extra_names
        ignored |= self._skip_parts(extra_names - ignored)
        constants = self.family.constant_tensors(self.model.config.shape.dimensions.num_layers)
        for name in extra_names & constants.keys():
            self._check_constant(file_names[name], constants[name])
            ignored.add(name)
        check_arrays(
            {
                name: self.files.found[file_name]
                for name, file_name in file_names.items()
                if name not in ignored
            },
            {names[tensor.name]: tensor.shape for tensor in self.map.tensors},
            f"{self.folder} does not hold the {self.family.model_type} model of its {CONFIG}",
            self._advice,
        )
        return {name: file_names[candidates] for name, candidates in names.items()}

    @property
    def _advice(self) -> str:
        """Returns what to do if the tensors are not those of config.json."""
        if not self.config_json.get(_QUANTIZED):
            return f"Check that {CONFIG} and the tensors belong together."
        return (
            f"{CONFIG} has {_QUANTIZED}, and quantized weights are not read: load them in "
            "transformers with dequantize=True, and save the result."
        )

    def _text_names(self) -> dict[str, str]:
        """Returns the names in the files of the text model's tensors; notes those skipped."""
        if not self._is_multimodal:
            return {name: name for name in self.files.found}
        text_names, others = text_tensors(self.files.found)
        if others:
            self.notes.append(
                f"note: {self.folder} is a multimodal model, of which only the text model is read. "
                f"Skipped: {', '.join(others)}"
            )
        return text_names

    def _skip_parts(self, extra_names: Collection[str]) -> set[str]:
        """Returns the tensors of parts that are not read (`Family.skipped`); notes them."""
        num_layers = self.model.config.shape.dimensions.num_layers
        prefixes = [numbered(prefix, num_layers, 0) for prefix in self.family.skipped]
        skipped = {
            prefix: {name for name in extra_names if name.startswith(prefix)} for prefix in prefixes
        }
        parts = [f"{prefix}* ({len(names)} tensors)" for prefix, names in skipped.items() if names]
        if parts:
            self.notes.append(f"note: {self.folder}: not read: {', '.join(parts)}")
        return {name for names in skipped.values() for name in names}

    def _check_constant(self, name: str, value: float) -> None:
        """Refuses a tensor with another number than that of the architecture, but for rounding."""
        stored = self.files.read(name)
        if stored.size != 1 or abs(float(stored.reshape(())) - value) > abs(value) / 128:
            raise UserError(
                f"{self.folder}: {name} is {stored.reshape(-1)[:4]}, and only {value} can be "
                "imported."
            )

    @property
    def _table(self) -> str:
        """The name of the token table."""
        return self.map.sources["token_embedder/embedding"][0].name

    def _alternatives(self, tensor: MappedTensor) -> tuple[str, ...]:
        """Returns the names that a tensor has in published files."""
        bare_name = tensor.name.removeprefix(self.family.prefix)
        return (tensor.name, *tensor.legacy_names, bare_name)

    def _tied_heads(self) -> tuple[str, ...]:
        """Returns names of the output head that a tied model's files may have, too."""
        if "logits_dense/kernel" in self.model.parameters:
            return ()
        rows = [row for row in self.family.rows if row.hf_name == self.family.head]
        return tuple(name for row in rows for name in (row.hf_name, *row.legacy_names))

    def _warning_of_tied_head(self) -> str:
        """Returns a warning if config.json says that the head is tied, and the files differ.

        transformers then keeps both matrices. Raises UserError for a family without such a model.
        """
        if self._head is None:
            return ""
        table = self._names[self._table]
        if np.array_equal(self.files.read(self._head), self.files.read(table)):
            return ""
        fact = f"{self.folder}: {CONFIG} says {_TIED}=true, but {self._head} differs from {table}."
        if not any(_TIED in setting.hf_names and setting.keys for setting in self.family.settings):
            raise UserError(
                f"{fact} {self.family.model_type} models have no head of their own: copy the "
                "folder again."
            )
        return (
            f"WARNING: {fact} The head is read as a matrix of its own, as transformers does "
            f"({_TIED}=false)."
        )

    @property
    def widened(self) -> dict[str, str]:
        """Formats of tensors stored in a narrower format than their array here."""
        return {
            tensor.name: self._stored_formats[tensor.name]
            for tensor in self.map.tensors
            if self._stored_formats[tensor.name] != self.formats[tensor.param_names[0]].name
        }

    def read(self, name: str) -> np.ndarray:
        """Returns one parameter, all layers stacked; UserError if it is not finite."""
        return self.map.array(name, self.formats[name], self._read_tensor)

    def _read_tensor(self, name: str) -> np.ndarray:
        file_name = self._names[name]
        tensor = self.files.read(file_name)
        require_finite(tensor, file_name, self.files.found[file_name].file)
        return tensor


def open_hf_weights(
    path: str, key: str, config_flat: Mapping[str, Any]
) -> tuple[HFWeights, dict[str, Any]]:
    """Returns the weights, and the configuration updated from config.json.

    Args:
      path: hf:FOLDER, hf:HUB_ID or a folder with a config.json.
      key: The configuration key with this value, for messages.
      config_flat: The configuration of the run by key.
    """
    user_keys = {}
    if config_flat["position_embedding"] != "learned":
        # Allows a checkpoint with a sliding window that the run's sequences do not exceed.
        user_keys["max_target_length"] = config_flat["max_target_length"]
    count = len(own_layers(schema.unflatten(config_flat).model))
    folder = resolve_hf_path(path, key)
    weights = HFWeights(folder, user_keys, prediction_layers=count)
    if count and not own_layers(weights.config.model):
        weights.notes.append(
            f"note: {folder} does not hold the weights of mtp_num_layers={count}: they are drawn"
        )
    stored_flat = flatten(weights.config)
    return weights, {**config_flat, **{name: stored_flat[name] for name in weights.keys}}


_STEP = re.compile(r"params_(\d+)")


class FattoribCheckpoint(WeightSource):
    """Weights of a Flax checkpoint of fattorib/transformer."""

    def __init__(self, path: str, config: Config):
        """Reads the whole file, because msgpack has no index.

        `path` is params_STEP, a folder of such files (the newest is read), or a file of
        extract_weights.py; gs:// works too.
        """
        super().__init__(config)
        try:
            self.map = TensorMap(FATTORIB, self.model, FLAX_ROWS)
        except UserError as error:
            raise UserError(
                f"from=fattorib:{path}: the configuration is not a fattorib/transformer model; use "
                f"the one that was trained, for example model_name=fattorib-base: {error}"
            ) from error
        self.description = _find_params(parse_path(path, "from"), path)
        self._arrays = _read_msgpack(self.description)
        check_arrays(
            {name: ArraySpec(array.shape, array.dtype) for name, array in self._arrays.items()},
            {tensor.name: tensor.shape for tensor in self.map.tensors},
            f"{self.description} does not hold the model of the configuration",
            "Use the model that was trained, for example model_name=fattorib-base.",
        )
        stored = {name: array.dtype.name for name, array in self._arrays.items()}
        self.formats = self.map.formats(stored)

    def read(self, name: str) -> np.ndarray:
        """Returns one parameter, all layers stacked; UserError if it is not finite."""
        return self.map.array(name, self.formats[name], self._read_array)

    def _read_array(self, name: str) -> np.ndarray:
        require_finite(self._arrays[name], name, self.description)
        return self._arrays[name]


def _find_params(path: epath.Path, shown_path: str) -> epath.Path:
    """Returns a file of parameters, or the newest one of a folder.

    Args:
      shown_path: The path as the user wrote it, for messages.
    """
    if path.is_dir():
        files = {}
        for file in path.iterdir():
            match = _STEP.fullmatch(file.name)
            if match:
                files[int(match[1])] = file
        if not files:
            raise UserError(f"{shown_path} has no file params_STEP.")
        return files[max(files)]
    if not path.exists():
        raise UserError(f"{shown_path} does not exist.")
    return path


def _read_msgpack(file: epath.Path) -> dict[str, np.ndarray]:
    """Returns the arrays of a Flax msgpack file by path, without outer keys `params`."""
    try:
        tree = serialization.msgpack_restore(file.read_bytes())
    except Exception as error:
        raise UserError(f"{file} is not a Flax msgpack file, or is corrupted: {error}") from error
    while isinstance(tree, dict) and isinstance(tree.get("params"), dict):
        tree = tree["params"]
    leaves = traverse_util.flatten_dict(tree if isinstance(tree, dict) else {}, sep="/")
    return {path: leaf for path, leaf in leaves.items() if isinstance(leaf, np.ndarray)}
