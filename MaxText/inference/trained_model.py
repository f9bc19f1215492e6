"""A model with its trained weights on device, for decode.py and eval.py."""

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from MaxText.compilation import compilation_cache
from MaxText.config import import_modules
from MaxText.config.schema import Config, flatten, unflatten
from MaxText.config.sources import print_notices
from MaxText.errors import UserError
from MaxText.inference.model_tokenizer import ModelTokenizer, open_tokenizer
from MaxText.runtime import start_up

if TYPE_CHECKING:
    from MaxText.layers.assembly.model import Model
    from MaxText.layers.params import Params
    from MaxText.parallelism.mesh import ShardingPlan

Log = Callable[[str], None]


class ResolvedWeights(NamedTuple):
    """Existing weights, not yet read."""

    path: str  # of one step, even if a run in progress saves another
    key: str  # configuration key that named them, for messages
    folder: str  # checkpoint step folder, or Hugging Face checkpoint
    metadata: Mapping[str, Any]  # of checkpointing.compatibility.checkpoint_metadata


@dataclasses.dataclass(frozen=True)
class TrainedModel:
    """A model with trained weights."""

    config: Config
    model: "Model"  # with backend defaults resolved
    sharding: "ShardingPlan"
    params: "Params"  # on device
    source: str  # one-line description of the weights' origin
    folder: str  # as of ResolvedWeights
    metadata: Mapping[str, Any]

    def open_tokenizer(self, *, typed: bool) -> ModelTokenizer:
        """Opens the tokenizer of the weights, see model_tokenizer."""
        return open_tokenizer(self.config, self.folder, self.metadata, typed=typed)


def load_model(
    config: Config, log: Log = print, weights: ResolvedWeights | None = None
) -> TrainedModel:
    """Loads weights on the devices of the mesh.

    Call start_up.choose_platform first: this imports jax.

    Args:
      config: Configuration of the model and its mesh.
      log: Takes lines for the terminal.
      weights: Default: those of resolve_weights.

    Raises:
      UserError: Weights are missing or of another model, or the mesh does not fit the devices, or
        it is called inside of a JAX trace, where arrays cannot be read from files.
    """
    import jax
    import jax.numpy as jnp
    from jax.core import Tracer

    from MaxText.conversion.open_weights import open_pretrained
    from MaxText.layers.assembly.model import Model
    from MaxText.parallelism.mesh import ShardingPlan, make_mesh
    from MaxText.training import backend_defaults

    run = config.run
    devices = start_up.find_devices(run.hardware)
    if isinstance(jnp.zeros(()), Tracer):
        raise UserError(
            f"{config.checkpoint.load_parameters_path}: weights cannot be loaded inside of a JAX "
            "trace (jax.jit, an objective). Load them before, or in "
            "`with jax.ensure_compile_time_eval():`."
        )
    log(compilation_cache.enable(run, devices[0].platform, may_make=False))
    sharding = ShardingPlan(make_mesh(config.mesh, devices), config.mesh.logical_axis_rules)
    weights = weights or resolve_weights(config)
    config = with_stored_zoom(config, weights.metadata)
    model_config, _ = backend_defaults.resolve_auto(config.model, devices[0].platform, sharding)
    model = Model(model_config)
    abstract = sharding.abstract_state(model.initialize, model.parameters)
    start_time = time.perf_counter()
    pretrained = open_pretrained(weights.path, weights.key, abstract, flatten(config), log)
    params = jax.block_until_ready(pretrained.read())
    if params.keys() != model.abstract.keys():
        raise UserError(
            f"{pretrained.folder} has no weights of the objective "
            f"{model_config.objective.name}: it was trained with another one, which is used if you "
            "do not set loss_type and mtp_num_layers"
        )
    print_notices(import_modules.changes(pretrained.metadata))
    log(
        f"{model.num_parameters:,} parameters of {pretrained.folder} in "
        f"{time.perf_counter() - start_time:.1f} s; {model_config.numerics.dtype} on "
        f"{len(devices)} x {devices[0].device_kind}"
    )
    return TrainedModel(
        config=config,
        model=model,
        sharding=sharding,
        params=params,
        source=pretrained.source,
        folder=pretrained.folder,
        metadata=pretrained.metadata,
    )


def with_stored_zoom(config: Config, metadata: Mapping[str, Any]) -> Config:
    """Returns the configuration with the zoom fixed by growth in training.

    A config file may lack it, and neither names nor shapes of the weights reveal the mismatch.
    """
    from MaxText.growth.resolve import inherited_zoom, stored_config

    zoom_keys = inherited_zoom(stored_config(metadata), config)
    return unflatten(flatten(config) | zoom_keys) if zoom_keys else config


def resolve_weights(config: Config) -> ResolvedWeights:
    """Finds the weights of load_parameters_path, or else of run_name's newest checkpoint.

    Raises UserError if there are none.
    """
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
        return ResolvedWeights(path=path, key=key, folder=folder, metadata={})
    checkpoint = checkpoint_files.resolve_checkpoint(path, key)
    return ResolvedWeights(
        path=str(checkpoint),
        key=key,
        folder=str(checkpoint),
        metadata=checkpoint.try_metadata(),
    )
