"""What every source of weights offers: arrays under our names, read one at a time."""

from typing import Any, Protocol

import numpy as np

from MaxText.configuration.schema import Config
from MaxText.layers.model import Model


class Weights(Protocol):
    """A model somewhere on disk.

    Attributes:
      config: our configuration of it.
      model: its parameters' names and shapes.
      formats: of every array of ours.
    """

    config: Config
    model: Model
    formats: dict[str, np.dtype]

    def read(self, ours: str) -> np.ndarray:
        """One array of ours, all layers stacked."""
        ...


def model_of(config: Config) -> Model:
    """The abstract model of a configuration; how numbers are computed is settled for a CPU."""
    from MaxText.training.backend_defaults import resolve

    return Model(resolve(config.model, "cpu")[0])


def num_bytes(weights: Weights) -> dict[str, int]:
    """Bytes of every array of ours."""
    parameters = weights.model.parameters
    return {name: info.size * weights.formats[name].itemsize for name, info in parameters.items()}


def nested(flat: dict[str, Any]) -> dict[str, Any]:
    """A tree from paths such as "layers/mlp/wo/kernel"."""
    tree: dict[str, Any] = {}
    for path, value in flat.items():
        *folders, leaf = path.split("/")
        node = tree
        for folder in folders:
            node = node.setdefault(folder, {})
        node[leaf] = value
    return tree
