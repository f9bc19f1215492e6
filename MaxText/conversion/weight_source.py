"""Sources of weights and what their readers share."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from flax import traverse_util

from MaxText.checkpointing.checkpoint_files import CheckpointCorruptedError
from MaxText.checkpointing.compatibility import ArraySpec, mismatches
from MaxText.config.schema import Config
from MaxText.errors import UserError
from MaxText.layers.model import Model

_MAX_LINES = 20


class WeightSource:
    """Arrays under our names, read one at a time."""

    formats: dict[str, np.dtype]  # by parameter name

    def __init__(self, config: Config):
        self.config = config
        self.model = abstract_model(config)  # parameter names and shapes

    def read(self, name: str) -> np.ndarray:
        """Returns one parameter, all layers stacked."""
        raise NotImplementedError


def abstract_model(config: Config) -> Model:
    from MaxText.training.backend_defaults import resolve_auto

    return Model(resolve_auto(config.model, "cpu")[0])


@contextlib.contextmanager
def corruption_as_user_error(where: Any, key: str = "") -> Iterator[None]:
    """Converts CheckpointCorruptedError to UserError, naming a key."""
    try:
        yield
    except CheckpointCorruptedError as error:
        raise UserError(
            f"{key}{': ' if key else ''}the checkpoint at {where} cannot be read: {error}\n"
            "  Use an older step, or restore the files."
        ) from error


def unflatten(flat: dict[str, Any]) -> dict[str, Any]:
    """Returns a tree from paths such as "layers/mlp/wo/kernel"."""
    return traverse_util.unflatten_dict(flat, sep="/")


def common_format(formats: Iterable[str]) -> np.dtype:
    """Returns the format of an array assembled from tensors in `formats`.

    float16 widens losslessly to float32: there are no float16 parameters.
    """
    return np.dtype("bfloat16" if set(formats) == {"bfloat16"} else "float32")


def check_arrays(
    found: Mapping[str, Any], wanted: Mapping[str, Sequence[int]], what: str, advice: str
) -> None:
    """Checks stored arrays (see `mismatches`) against the shapes of a model.

    `what` and `advice` begin and end the message.
    """
    specs = {name: ArraySpec(tuple(shape), np.dtype("float32")) for name, shape in wanted.items()}
    if problems := mismatches(found, specs):
        more = len(problems) - _MAX_LINES
        lines = problems[:_MAX_LINES] + ([f"... and {more} more"] if more > 0 else [])
        raise UserError("\n  ".join([f"{what}:", *lines]) + f"\n{advice}")
