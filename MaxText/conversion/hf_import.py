"""Import of a Hugging Face checkpoint, one array at a time."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from MaxText.config.loading import load_config
from MaxText.config.maxtext_keys import ALIASES
from MaxText.config.problems import ConfigurationError
from MaxText.config.schema import flatten, with_entries
from MaxText.conversion.hf_checkpoint import CONFIG, TensorFiles, resolve_hf_path
from MaxText.conversion.hf_config import config_from_hf, resolve_family
from MaxText.conversion.tensor_map import TensorMap
from MaxText.conversion.weight_source import WeightSource, check_arrays
from MaxText.errors import UserError
from MaxText.input_pipeline.tokenization.interface import read_json


class HFWeights(WeightSource):
    """Weights of a Hugging Face checkpoint; `keys` is its model configuration."""

    def __init__(self, folder: Path, given: Mapping[str, Any] | None = None):
        """Reads config.json and tensor shapes. `given` keys override config.json."""
        self.folder = folder
        self.config_json = read_json(folder / CONFIG)
        self.family = resolve_family(self.config_json, str(folder))
        self.place = f"{folder} ({self.family.architecture})"
        keys = config_from_hf(self.family, self.config_json, str(folder), given or {})
        try:
            super().__init__(load_config(**keys))
        except ConfigurationError as error:
            raise UserError(f"{folder}: the model of its {CONFIG} has {error}") from error
        resolved = with_entries(flatten(self.config))
        self.keys = {name: resolved[name] for name in (ALIASES.get(one, one) for one in keys)}
        self.map = TensorMap(self.family, self.model)
        self.files = TensorFiles(folder)
        self._names = self._match()
        self._stored = {
            tensor: self.files.found[name].dtype for tensor, name in self._names.items()
        }
        self.formats = self.map.formats(self._stored)

    def _match(self) -> dict[str, str]:
        found, prefix = self.files.found, self.family.prefix
        names = {}
        for tensor in self.map.tensors:
            possible = (tensor.name, *tensor.legacy_names, tensor.name.removeprefix(prefix))
            names[tensor.name] = next((one for one in possible if one in found), tensor.name)
        head, used = None, set(names.values())
        if "logits_dense/kernel" not in self.model.parameters:  # it is tied
            rows = [row for row in self.family.rows if row.hf_name == self.family.head]
            possible = [name for row in rows for name in (row.hf_name, *row.legacy_names)]
            head = next((name for name in possible if name in found), None)
        check_arrays(
            {
                name: one
                for name, one in found.items()
                if name in used
                or not (name == head or name.endswith(self.family.ignored or ("\0",)))
            },
            {names[tensor.name]: tensor.shape for tensor in self.map.tensors},
            f"{self.folder} does not hold the {self.family.model_type} model of its {CONFIG}",
            f"Check that {CONFIG} and the tensors belong together.",
        )
        table = self.map.sources["token_embedder/embedding"][0].name
        if head and not np.array_equal(self.files.read(head), self.files.read(names[table])):
            raise UserError(
                f"{self.folder}: {CONFIG} says tie_word_embeddings=true, but {head} differs from "
                f"{table}. If the head is a matrix of its own, set tie_word_embeddings to false in "
                f"{CONFIG}."
            )
        return names

    @property
    def widened(self) -> dict[str, str]:
        """Formats of tensors stored in a narrower format than their array here."""
        return {
            tensor.name: self._stored[tensor.name]
            for tensor in self.map.tensors
            if self._stored[tensor.name] != self.formats[tensor.param_names[0]].name
        }

    def read(self, name: str) -> np.ndarray:
        return self.map.array(
            name, self.formats[name], lambda name: self.files.read(self._names[name])
        )


def open_weights(
    path: str, key: str, config_flat: Mapping[str, Any]
) -> tuple[HFWeights, dict[str, Any]]:
    """Returns the weights, and the configuration updated from config.json."""
    given = {}
    if config_flat["position_embedding"] != "learned":
        # Allows a checkpoint with a sliding window that the run's sequences do not exceed.
        given["max_target_length"] = config_flat["max_target_length"]
    weights = HFWeights(resolve_hf_path(path, key), given)
    stored_flat = with_entries(flatten(weights.config))
    return weights, {**config_flat, **{name: stored_flat[name] for name in weights.keys}}
