"""Opens trained models for objectives that read them, such as teachers."""

import functools
import logging

from MaxText.config.schema import Config, flatten
from MaxText.conversion.open_weights import open_pretrained
from MaxText.errors import UserError
from MaxText.inference import checkpoint_config
from MaxText.inference.trained_model import resolve_weights, with_stored_zoom
from MaxText.layers.assembly.model import Model
from MaxText.layers.params import Params
from MaxText.parallelism.logical_sharding import platform
from MaxText.training import backend_defaults
from MaxText.training.model_objective import PretrainedModel

_log = logging.getLogger(__name__)


def open_frozen_model(path: str, key: str) -> PretrainedModel:
    """Opens a trained model that an objective reads and does not train.

    The model has the configuration that is saved with its weights. `auto` is resolved for the
    devices that the objective is traced for. Nothing but metadata is read until the weights are
    needed.

    Args:
      path: A run, a checkpoint of one, or "hf:FOLDER" for a Hugging Face folder, as
        load_parameters_path. Of a run it is the newest checkpoint: name a checkpoint, such as
        maxtext_output/teacher/checkpoints/1000, if the run may go on, so that a restart reads the
        same weights.
      key: The configuration key that has `path` as its value, for messages.

    Raises:
      UserError: There are no weights, or they need a module that is not imported. `read` of the
        result raises it for weights that do not fit or are damaged.
    """
    if not path:
        raise UserError(f"{key} is not set: name a run, a checkpoint or hf:FOLDER")
    return _opened(path, key, platform())


@functools.lru_cache(maxsize=16)
def _opened(path: str, key: str, backend: str) -> PretrainedModel:
    """Caches `open_frozen_model` for a platform, so that all of a run has one model."""
    config = _config_of(path, key)
    model_config, _ = backend_defaults.resolve_auto(config.model, backend)
    weights = resolve_weights(config)

    def read(abstract_params: Params) -> Params:
        pretrained = open_pretrained(weights.path, key, abstract_params, flatten(config), _log.info)
        return pretrained.read()

    return PretrainedModel(Model(model_config), read, f"{key}={weights.folder}")


def _config_of(path: str, key: str) -> Config:
    """Returns the configuration of weights; UserError naming the key if they have none."""
    try:
        config = checkpoint_config.load([f"load_parameters_path={path}"]).config
        weights = resolve_weights(config)
    except UserError as error:
        raise UserError(f"{key}={path}: {error}") from error
    return with_stored_zoom(config, weights.metadata)
