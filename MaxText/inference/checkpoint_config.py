"""Loads configurations of programs with trained weights as input."""

from collections.abc import Sequence
from typing import Any

from MaxText.config import import_modules
from MaxText.config.loading import LoadedConfig
from MaxText.config.loading import load as load_arguments
from MaxText.config.schema import all_keys
from MaxText.config.serialization import check_recorded
from MaxText.config.sources import CheckpointConfig

_KEY = "load_parameters_path"
_NAMES_DATA = ("dataset_path", "grain_train_files", "grain_eval_files", "data_mixture_weights")
# Sections taken from the weights. Devices, folders and schedules belong to the training run.
_OF_WEIGHTS = ("model", "data", "masking", "preparation", "evaluation")


def load(arguments: Sequence[str], program: str | None = None) -> LoadedConfig:
    """Resolves a command line, possibly of load_parameters_path alone.

    The weights supply the configuration if there is neither a config file nor a preset. Raises
    UserError for configuration problems, or if there are no weights at the path.
    """
    gathered = import_modules.collect(arguments)
    asks = gathered.config_path is not None or gathered.last("model_name") is not None
    mistaken = gathered.problems or any(s.name not in all_keys() for s in gathered.settings)
    path = gathered.last(_KEY)
    if asks or mistaken or path is None or not path.origin.raw:
        return load_arguments(arguments, program)
    shapes = {s.name: s.value for s in gathered.settings if s.name == "max_target_length"}
    own = _own_configuration(path.origin.raw, shapes)
    if own is not None and any(gathered.last(name) for name in _NAMES_DATA):
        # The user chose other data, so none of the training data keys apply.
        values = {name: own.values[name] for name in own.values if name not in _NAMES_DATA}
        own = CheckpointConfig(values, own.path)
    return load_arguments(arguments, program, recorded=own)


def for_training(arguments: Sequence[str], program: str | None = None) -> LoadedConfig:
    """Resolves train.py's command line; Hugging Face weights add their keys."""
    from MaxText.conversion import hf_checkpoint

    path = import_modules.collect(arguments).last(_KEY)
    if path is None or not hf_checkpoint.is_hf_checkpoint(str(path.origin.raw)):
        return load_arguments(arguments, program)
    return load(arguments, program)


def _own_configuration(path: str, given: dict[str, Any]) -> CheckpointConfig | None:
    from MaxText.conversion import hf_checkpoint
    from MaxText.conversion.hf_config import config_from_hf, resolve_family
    from MaxText.input_pipeline.tokenization.interface import read_json

    if hf_checkpoint.is_hf_checkpoint(path):
        folder = hf_checkpoint.resolve_hf_path(path, _KEY)
        config_json = read_json(folder / hf_checkpoint.CONFIG)
        keys = config_from_hf(resolve_family(config_json, path), config_json, path, given)
        return CheckpointConfig(keys, path)
    from MaxText.checkpointing import checkpoint_files

    stored = checkpoint_files.resolve_checkpoint(path, _KEY)
    flat = stored.try_metadata().get("config")
    if not flat:
        return None
    import_modules.check_named(flat, str(stored))
    of_weights = {name for name, key in all_keys().items() if key.section[0] in _OF_WEIGHTS}
    check_recorded(flat, str(stored))
    kept = {name: value for name, value in flat.items() if name in of_weights}
    return CheckpointConfig(kept, str(stored))
