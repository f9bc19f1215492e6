"""Configurations of programs that start from trained weights (decode.py, eval.py, train.py).

A user types `decode.py load_parameters_path=...` and no model keys: the keys that describe the
model and its data come from the checkpoint, or are derived from Hugging Face's config.json.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from MaxText.config import import_modules
from MaxText.config.loading import LoadedConfig
from MaxText.config.loading import load as load_arguments
from MaxText.config.schema import all_keys
from MaxText.config.serialization import with_current_names
from MaxText.config.sources import CheckpointConfig

_KEY = "load_parameters_path"
# Keys that name the data. If the user sets one of them, none is taken from the checkpoint.
_DATA_KEYS = ("dataset_path", "grain_train_files", "grain_eval_files", "data_mixture_weights")
# Sections taken from the checkpoint. Devices, folders and schedules belong to the training run.
_CHECKPOINT_SECTIONS = ("model", "data", "masking", "preparation", "evaluation")


def load(arguments: Sequence[str], program: str | None = None) -> LoadedConfig:
    """Resolves a command line, possibly of load_parameters_path alone.

    The weights supply the configuration if there is neither a config file nor a preset.

    Args:
      arguments: The command line without the program: a config file, key=value arguments.
      program: The program's name, for messages.

    Raises:
      UserError: Configuration problems, or no weights at the path.
    """
    request = import_modules.collect(arguments)
    names_config = request.config_path is not None or request.last("model_name") is not None
    has_mistakes = request.problems or any(s.name not in all_keys() for s in request.settings)
    weights_path = request.last(_KEY)
    if names_config or has_mistakes or weights_path is None or not weights_path.origin.raw:
        return load_arguments(arguments, program)
    shapes = {s.name: s.value for s in request.settings if s.name == "max_target_length"}
    weights_config = _config_of_weights(weights_path.origin.raw, shapes)
    if weights_config is not None and any(request.last(name) for name in _DATA_KEYS):
        # The user chose other data, so none of the training data keys apply.
        values = {k: value for k, value in weights_config.values.items() if k not in _DATA_KEYS}
        weights_config = CheckpointConfig(values, weights_config.place)
    return load_arguments(arguments, program, own=weights_config)


def for_training(arguments: Sequence[str], program: str | None = None) -> LoadedConfig:
    """Resolves train.py's command line; Hugging Face weights add their keys."""
    from MaxText.conversion import hf_checkpoint

    weights_path = import_modules.collect(arguments).last(_KEY)
    if weights_path is None or not hf_checkpoint.is_hf_checkpoint(str(weights_path.origin.raw)):
        return load_arguments(arguments, program)
    return load(arguments, program)


def _config_of_weights(path: str, shape_overrides: Mapping[str, Any]) -> CheckpointConfig | None:
    """Returns the configuration stored with weights; None if a checkpoint has none.

    Args:
      path: load_parameters_path: a run, a checkpoint or Hugging Face weights.
      shape_overrides: max_target_length if the user set it. A Hugging Face model may be used with
        sequences shorter than its own window.
    """
    from MaxText.conversion import hf_checkpoint
    from MaxText.conversion.hf_config import config_from_hf, resolve_family
    from MaxText.input_pipeline.tokenization.interface import read_json

    if hf_checkpoint.is_hf_checkpoint(path):
        folder = hf_checkpoint.resolve_hf_path(path, _KEY)
        config_json = read_json(folder / hf_checkpoint.CONFIG)
        keys = config_from_hf(resolve_family(config_json, path), config_json, path, shape_overrides)
        return CheckpointConfig(keys, path)
    from MaxText.checkpointing import checkpoint_files

    checkpoint = checkpoint_files.resolve_checkpoint(path, _KEY)
    saved_config = checkpoint.try_metadata().get("config")
    if not saved_config:
        return None
    import_modules.check_named(saved_config, str(checkpoint))
    keys = {name for name, key in all_keys().items() if key.section[0] in _CHECKPOINT_SECTIONS}
    values = with_current_names(saved_config, str(checkpoint))
    values_of_weights = {name: value for name, value in values.items() if name in keys}
    return CheckpointConfig(values_of_weights, str(checkpoint))
