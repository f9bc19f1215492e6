"""Checkpoints of fattorib/transformer: a Flax tree in one msgpack file."""

import re
from typing import Any

import numpy as np
from flax import serialization, traverse_util

from MaxText.checkpointing.compatibility import ArraySpec
from MaxText.config.schema import Config
from MaxText.conversion.families.fattorib import FATTORIB, FLAX_ROWS
from MaxText.conversion.tensor_map import TensorMap
from MaxText.conversion.weight_source import WeightSource, check_arrays
from MaxText.errors import UserError
from MaxText.storage.paths import parse_path

_STEP = re.compile(r"params_(\d+)")


class FattoribCheckpoint(WeightSource):
    """Parameters of a fattorib/transformer checkpoint."""

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
        self.place = _find(parse_path(path, "from"), path)
        self._arrays = _arrays(self.place)
        check_arrays(
            {name: ArraySpec(array.shape, array.dtype) for name, array in self._arrays.items()},
            {tensor.name: tensor.shape for tensor in self.map.tensors},
            f"{self.place} does not hold the model of the configuration",
            "Use the model that was trained, for example model_name=fattorib-base.",
        )
        stored = {name: array.dtype.name for name, array in self._arrays.items()}
        self.formats = self.map.formats(stored)

    def read(self, name: str) -> np.ndarray:
        return self.map.array(name, self.formats[name], self._arrays.__getitem__)


def _find(path: Any, given: str) -> Any:
    if path.is_dir():
        steps = {int(m[1]): file for file in path.iterdir() if (m := _STEP.fullmatch(file.name))}
        if not steps:
            raise UserError(f"{given} has no file params_STEP.")
        return steps[max(steps)]
    if not path.exists():
        raise UserError(f"{given} does not exist.")
    return path


def _arrays(file: Any) -> dict[str, np.ndarray]:
    try:
        tree = serialization.msgpack_restore(file.read_bytes())
    except Exception as error:
        raise UserError(f"{file} is not a Flax msgpack file, or is corrupted: {error}") from error
    while isinstance(tree, dict) and isinstance(tree.get("params"), dict):
        tree = tree["params"]
    leaves = traverse_util.flatten_dict(tree if isinstance(tree, dict) else {}, sep="/")
    return {path: leaf for path, leaf in leaves.items() if isinstance(leaf, np.ndarray)}
