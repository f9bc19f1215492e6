"""Parameters to begin a run with, from a checkpoint of this program or of Hugging Face."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.tree_util import KeyPath

from MaxText.checkpointing import checkpoint_files, compatibility
from MaxText.checkpointing.checkpoint_reader import OBJECTIVE, CheckpointReader
from MaxText.conversion.hf_checkpoint import is_hf_checkpoint
from MaxText.conversion.hf_import import open_hf_weights
from MaxText.conversion.weight_source import corruption_as_user_error, unflatten
from MaxText.errors import UserError
from MaxText.value_types import PyTree

Log = Callable[[str], None]


class InitialWeights(NamedTuple):
    """Matching parameters, not yet read."""

    source: str  # one line, such as "parameters of runs/first/checkpoints/120"
    metadata: Mapping[str, Any]  # of compatibility.checkpoint_metadata; may be empty
    folder: str
    step: int | None  # last completed training step, if known
    read: Callable[[], PyTree]  # returns them on device; without an objective's if it has none


def open_pretrained(
    path: str, key: str, abstract_params: PyTree, config_flat: Mapping[str, Any], log: Log
) -> InitialWeights:
    """Finds parameters and checks their names and shapes, before anything is read.

    Args:
      path: A run, a step folder, its items/, hf:FOLDER, hf:HUB_ID or a folder with a config.json.
      key: The configuration key that has `path` as its value, for messages.
      abstract_params: The parameters of the model, with their target shardings.
      config_flat: The configuration by key, to explain a mismatch.
      log: Gets a line about each cast, and notes about the files.

    Raises:
      UserError: If there is no checkpoint, it does not fit or is damaged. `read` of the result
        raises it for damage and for weights that are not finite.
    """
    if is_hf_checkpoint(path):
        return _open_hf(path, key, abstract_params, config_flat, log)
    stored = checkpoint_files.resolve_checkpoint(path, key)
    reader = CheckpointReader(stored, config_flat, log)
    average = bool(config_flat.get("load_parameter_average"))
    with corruption_as_user_error(stored, key):
        reader.check_params(abstract_params, average=average)

    def read() -> PyTree:
        with corruption_as_user_error(stored, key):
            params = reader.restore_params(abstract_params, average=average)
        _require_finite(params, f"{key}={stored}")
        return params

    return InitialWeights(
        source=f"{'average of the parameters' if average else 'parameters'} of {stored}",
        metadata=stored.try_metadata(),
        folder=str(stored),
        step=stored.step,
        read=read,
    )


def _require_finite(params: PyTree, source: str) -> None:
    """Refuses restored parameters with NaN or infinity; a collective call.

    Args:
      source: Where they are from, for the message.
    """
    paths = [compatibility.leaf_path(path) for path, _ in jax.tree.leaves_with_path(params)]
    leaves = jax.tree.leaves(params)
    find_finite = jax.jit(lambda arrays: [jnp.isfinite(array).all() for array in arrays])
    for path, is_finite in zip(paths, find_finite(leaves), strict=True):
        if not is_finite:
            raise UserError(
                f"{source}: {path} has NaN or infinite weights. Use a checkpoint from before they "
                "appeared."
            )


def _open_hf(
    path: str, key: str, abstract_params: PyTree, config_flat: Mapping[str, Any], log: Log
) -> InitialWeights:
    """Does what `open_pretrained` does for a Hugging Face checkpoint."""
    weights, stored_flat = open_hf_weights(path, key, config_flat)
    for note in weights.notes:
        log(note)
    stored_specs = {
        name: jax.ShapeDtypeStruct(spec.shape, weights.formats[name])
        for name, spec in weights.model.parameters.items()
    }
    stored_params = unflatten(stored_specs)
    if OBJECTIVE not in stored_params:
        abstract_params = {x: tree for x, tree in abstract_params.items() if x != OBJECTIVE}
    try:
        casts = compatibility.check_compatible(
            {"params": stored_params},
            {"params": abstract_params},
            compatibility.ConfigDiff(stored_flat, config_flat),
        )
    except UserError as error:
        raise UserError(
            f"{key}={path}: {error}\n"
            f"  python MaxText/convert.py from={path} to=RUN writes a config.yml with these keys."
        ) from None
    compatibility.log_casts(casts, log)

    def read_param(tree_path: KeyPath, param_spec: jax.ShapeDtypeStruct) -> jax.Array:
        # Only one array at a time is on the host; each device takes its shard.
        array = weights.read("/".join(entry.key for entry in tree_path))
        sharding = param_spec.sharding
        if sharding is None:
            sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        return jax.make_array_from_callback(
            param_spec.shape, sharding, lambda index: array[index].astype(param_spec.dtype)
        )

    folder = str(weights.folder)
    return InitialWeights(
        source=f"parameters of {folder}",
        metadata={"config": stored_flat},
        folder=folder,
        step=None,
        read=lambda: jax.tree_util.tree_map_with_path(read_param, abstract_params),
    )
