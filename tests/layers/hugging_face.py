"""Hugging Face state dicts as our parameters, by the tables that convert.py uses."""

import numpy as np

from MaxText.configuration.loading import configure
from MaxText.conversion.settings import family_of, to_keys
from MaxText.conversion.tensor_map import TensorMap
from MaxText.conversion.weights import model_of, nested

Arrays = dict[str, np.ndarray]


def parameters(weights: Arrays, config: dict) -> dict:
    """Our nested parameters (or gradients) from tensors by their names and a config.json."""
    family = family_of(config, "a golden file")
    keys = to_keys(family, config, "a golden file", {})
    tensors = TensorMap(family, model_of(configure(**keys)))

    def array(ours: str) -> np.ndarray:
        parts = []
        for tensor in tensors.sources(ours):
            name = next(name for name in (tensor.name, *tensor.older) if name in weights)
            parts.append(tensors.part(ours, weights[name]))
        return np.stack(parts) if ours.startswith("layers/") else parts[0]

    return nested({ours: array(ours) for ours in tensors.model.parameters})
