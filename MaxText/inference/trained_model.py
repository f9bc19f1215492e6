"""A model with its trained weights on device, for decode.py and eval.py."""

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from MaxText.compilation import compilation_cache
from MaxText.config import import_modules
from MaxText.config.schema import Config, flatten, unflatten
from MaxText.config.sources import print_notices
from MaxText.errors import UserError
from MaxText.inference.model_tokenizer import ModelTokenizer, open_tokenizer
from MaxText.runtime import start_up

Log = Callable[[str], None]


class ResolvedWeights(NamedTuple):
    """Existing weights, not yet read."""

    path: str  # of one step, even if a run in progress saves another
    key: str  # that named them
    folder: str  # checkpoint step folder, or Hugging Face checkpoint
    metadata: Mapping[str, Any]  # of checkpointing.compatibility.checkpoint_metadata


@dataclasses.dataclass(frozen=True)
class TrainedModel:
    """A model with trained weights."""

    config: Config
    model: Any  # layers.model.Model, with backend defaults resolved
    sharding: Any
    params: Any
    source: str  # one-line description of the weights' origin
    folder: str  # as of ResolvedWeights
    metadata: Mapping[str, Any]

    def open_tokenizer(self, *, typed: bool) -> ModelTokenizer:
        """Opens the tokenizer of the weights, see model_tokenizer."""
        return open_tokenizer(self.config, self.folder, self.metadata, typed=typed)


def load_model(
    config: Config, log: Log = print, weights: ResolvedWeights | None = None
) -> TrainedModel:
    """Loads weights, by default those of resolve_weights.

    Call start_up.choose_platform first: this imports jax. Raises UserError if weights are missing
    or of another model, or if the mesh does not fit the devices.
    """
    import jax

    from MaxText.conversion.open_weights import open_pretrained
    from MaxText.layers.assembly.model import Model
    from MaxText.parallelism.mesh import ShardingPlan, make_mesh
    from MaxText.training import backend_defaults

    run = config.run
    devices = start_up.find_devices(run.hardware)
    log(compilation_cache.enable(run, devices[0].platform, may_make=False))
    sharding = ShardingPlan(make_mesh(config.mesh, devices), config.mesh.logical_axis_rules)
    weights = weights or resolve_weights(config)
    config = with_stored_zoom(config, weights.metadata)
    model_config, _ = backend_defaults.resolve_auto(config.model, devices[0].platform, sharding)
    model = Model(model_config)
    abstract = sharding.abstract_state(model.initialize, model.parameters)
    began = time.perf_counter()
    given = open_pretrained(weights.path, weights.key, abstract, flatten(config), log)
    params = jax.block_until_ready(given.read())
    print_notices(import_modules.changes(given.metadata))
    log(
        f"{model.num_parameters:,} parameters of {given.folder} in "
        f"{time.perf_counter() - began:.1f} s; {model_config.numerics.dtype} on {len(devices)} x "
        f"{devices[0].device_kind}"
    )
    return TrainedModel(config, model, sharding, params, given.source, given.folder, given.metadata)


def with_stored_zoom(config: Config, metadata: Mapping[str, Any]) -> Config:
    """Returns the configuration with the zoom fixed by growth in training.

    A config file may lack it, and neither names nor shapes of the weights reveal the mismatch.
    """
    from MaxText.growth.resolve import inherited_zoom, stored_config

    keys = inherited_zoom(stored_config(metadata), config)
    return unflatten(flatten(config) | keys) if keys else config


def resolve_weights(config: Config) -> ResolvedWeights:
    """Finds load_parameters_path, or else the newest checkpoint of run_name."""
    from MaxText.checkpointing import checkpoint_files
    from MaxText.conversion import hf_checkpoint
    from MaxText.storage.paths import parse_path

    path = config.checkpoint.load_parameters_path
    key = "load_parameters_path"
    run = config.run
    if not path:
        path = f"{run.base_output_directory}/{run.run_name}"
        key = "run_name"
        checkpoints = parse_path(path, key) / checkpoint_files.CHECKPOINTS
        if not checkpoint_files.finalized_steps(checkpoints):
            raise UserError(
                "no weights: load_parameters_path is not set, and there is no checkpoint in "
                f"{path}.\n"
                "  What to do: set load_parameters_path to a run, a checkpoint or a Hugging Face "
                "folder, for example load_parameters_path=maxtext_output/quickstart or "
                "load_parameters_path=hf:models/gpt2."
            )
    if hf_checkpoint.is_hf_checkpoint(path):
        folder = str(hf_checkpoint.resolve_hf_path(path, key))
        return ResolvedWeights(path, key, folder, {})
    stored = checkpoint_files.resolve_checkpoint(path, key)
    return ResolvedWeights(str(stored), key, str(stored), stored.try_metadata())
