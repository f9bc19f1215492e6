"""A model with its trained weights on devices, for decode.py and eval.py."""

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any

from MaxText.config import import_modules
from MaxText.config.catalogue import build, flat
from MaxText.config.schema import Config
from MaxText.errors import UserError
from MaxText.runtime import compilation_cache, start_up

Show = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class TrainedModel:
    """Weights that can be run.

    Attributes:
      model: With backend defaults resolved (layers.model.Model).
      source: One line about their origin.
      folder: A step folder, or a Hugging Face checkpoint.
      metadata: See checkpointing.matching.checkpoint_metadata.
    """

    config: Config
    model: Any
    layout: Any
    params: Any
    source: str
    folder: str
    metadata: Mapping[str, Any]


def open_trained_model(config: Config, show: Show = print) -> TrainedModel:
    """Reads the weights of load_parameters_path, else of the newest checkpoint of run_name.

    Call start_up.choose_platform first: this imports jax.

    Raises:
      UserError: No weights, weights of another model, or devices that the mesh does not fit.
    """
    import jax

    from MaxText.conversion.given_parameters import open_parameters
    from MaxText.layers.model import Model
    from MaxText.parallelism import mesh
    from MaxText.training import backend_defaults

    run = config.run
    devices = start_up.find_devices(run.hardware)
    show(compilation_cache.use(run, devices[0].platform, may_make=False))
    layout = mesh.Layout(mesh.make_mesh(config.mesh, devices), config.mesh.logical_axis_rules)
    path, key = weights_path(config)
    config = with_stored_zoom(config, path, key)
    section, _ = backend_defaults.resolve(config.model, devices[0].platform, layout)
    model = Model(section)
    abstract = layout.abstract_state(model.initialize, model.parameters)
    began = time.perf_counter()
    given = open_parameters(path, key, abstract, flat(config), show)
    params = jax.block_until_ready(given.read())
    for warning in import_modules.changes(given.metadata):
        show(warning)
    show(
        f"{model.num_parameters:,} parameters of {given.folder} in "
        f"{time.perf_counter() - began:.1f} s; {section.numerics.dtype} on {len(devices)} x "
        f"{devices[0].device_kind}"
    )
    return TrainedModel(config, model, layout, params, given.source, given.folder, given.metadata)


def with_stored_zoom(config: Config, path: str, key: str) -> Config:
    """The configuration with the zoom that slots were trained with, where growth has fixed it.

    Weights that bring their own configuration have it already; a config file may lack it, and
    nothing in names and shapes would tell.
    """
    from MaxText.checkpointing import description, layout
    from MaxText.conversion.hugging_face_folder import is_folder
    from MaxText.growth import zoom

    if is_folder(path):
        return config
    metadata = description.metadata_if_any(layout.find(path, key))
    keys = zoom.inherited(zoom.stored_config(metadata), config)
    return build(flat(config) | keys) if keys else config


def weights_path(config: Config) -> tuple[str, str]:
    """Where the weights are and the key that says so.

    Raises:
      UserError: neither load_parameters_path nor a checkpoint of run_name.
    """
    from MaxText.checkpointing import layout
    from MaxText.storage.paths import path_of

    path = config.checkpoint.load_parameters_path
    if path:
        return path, "load_parameters_path"
    run = config.run
    folder = f"{run.base_output_directory}/{run.run_name}"
    if layout.complete_steps(path_of(folder, "run_name") / layout.CHECKPOINTS):
        return folder, "run_name"
    raise UserError(
        "no weights to run: load_parameters_path is not set, and there is no checkpoint in "
        f"{folder}.\n"
        "  What to do: name a run, a checkpoint or a folder of Hugging Face, for example "
        "load_parameters_path=maxtext_output/quickstart or load_parameters_path=hf:models/gpt2."
    )
