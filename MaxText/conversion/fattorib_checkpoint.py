"""Checkpoints of fattorib/transformer: a Flax tree in one msgpack file."""

import re
from typing import Any

import numpy as np

from MaxText.buckets.paths import path_of
from MaxText.configuration.schema import Config
from MaxText.errors import UserError

PREFIX = "fattorib:"
_STEP = re.compile(r"params_(\d+)")
_MOST_LINES = 20


class FattoribWeights:
    """The parameters of a checkpoint under our names.

    Attributes:
      file: the msgpack file.
      config: the configuration that was named for it.
      model: its parameters' names and shapes.
      formats: of our arrays.
    """

    def __init__(self, path: str, config: Config):
        """Reads the file: all numbers, because msgpack has no index.

        Args:
          path: params_STEP, a folder with such files, of which the newest is read, or a file
            of extract_weights.py; also gs://.

        Raises:
          UserError: no such file, or its arrays are not those of the configuration.
        """
        # The tables know the model, so they import jax.
        from MaxText.conversion.families.fattorib import FATTORIB, FLAX_ROWS
        from MaxText.conversion.tensor_map import TensorMap, UnknownParameters
        from MaxText.conversion.weights import model_of

        self.config, self.model = config, model_of(config)
        try:
            self.map = TensorMap(FATTORIB, self.model, FLAX_ROWS)
        except UnknownParameters as error:
            raise UserError(
                f"from={PREFIX}{path}: the configuration is of another model than "
                f"fattorib/transformer's: it has {error.names}. Name the one that was trained, for "
                "example model_name=fattorib-base."
            ) from error
        self.file = _find(path_of(path, "from"), path)
        self._arrays = _flattened(_restored(self.file))
        self._check()
        self.formats: dict[str, np.dtype] = {
            name: self._format(name) for name in self.model.parameters
        }

    def _check(self) -> None:
        wanted = {tensor.name: tensor.shape for tensor in self.map.tensors}
        found = {name: array.shape for name, array in self._arrays.items()}
        problems = [
            f"missing     {name}: wanted {list(wanted[name])}" for name in wanted.keys() - found
        ]
        problems += [
            f"other shape {name}: stored {list(found[name])}, wanted {list(wanted[name])}"
            for name in wanted.keys() & found.keys()
            if wanted[name] != found[name]
        ]
        problems += [
            f"extra       {name}: stored {list(found[name])}, unknown to this model"
            for name in found.keys() - wanted.keys()
        ]
        if problems:
            more = len(problems) - _MOST_LINES
            lines = sorted(problems)[:_MOST_LINES] + ([f"... and {more} more"] if more > 0 else [])
            raise UserError(
                f"{self.file} does not hold the model of the configuration:\n  "
                + "\n  ".join(lines)
                + "\nName the model that was trained, for example model_name=fattorib-base."
            )

    def _format(self, ours: str) -> np.dtype:
        formats = {self._arrays[tensor.name].dtype.name for tensor in self.map.sources(ours)}
        return np.dtype("bfloat16" if formats == {"bfloat16"} else "float32")

    def read(self, ours: str) -> np.ndarray:
        """One array of ours."""
        array = np.empty(self.model.parameters[ours].shape, self.formats[ours])
        for tensor in self.map.sources(ours):
            array[tensor.place] = self.map.part(ours, self._arrays[tensor.name])
        return array


def _find(path: Any, given: str) -> Any:
    if path.is_dir():
        steps = {int(m[1]): file for file in path.iterdir() if (m := _STEP.fullmatch(file.name))}
        if not steps:
            raise UserError(f"{given} has no file params_STEP.")
        return steps[max(steps)]
    if not path.exists():
        raise UserError(f"{given}: there is no such file or folder.")
    return path


def _restored(file: Any) -> Any:
    from flax import serialization

    try:
        return serialization.msgpack_restore(file.read_bytes())
    except Exception as error:
        raise UserError(f"{file} is no msgpack file of Flax, or is damaged: {error}") from error


def _flattened(tree: Any) -> dict[str, np.ndarray]:
    """Arrays by path; the tree may lie in the state of a run, under params."""
    while isinstance(tree, dict) and isinstance(tree.get("params"), dict):
        tree = tree["params"]
    arrays: dict[str, np.ndarray] = {}

    def walk(node: Any, path: str) -> None:
        if isinstance(node, dict):
            for name, value in node.items():
                walk(value, f"{path}/{name}" if path else str(name))
        elif isinstance(node, np.ndarray):
            arrays[path] = node

    walk(tree, "")
    return arrays
