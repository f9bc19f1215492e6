"""Opens parameters at a path: a run's or a Hugging Face checkpoint."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax

from MaxText.checkpointing import checkpoint_files
from MaxText.checkpointing.checkpoint_reader import CheckpointReader
from MaxText.checkpointing.compatibility import ConfigDiff, check_compatible, log_casts
from MaxText.conversion.weight_source import corruption_as_user_error, unflatten
from MaxText.errors import UserError

Log = Callable[[str], None]


class InitialWeights(NamedTuple):
    """Matching parameters, not yet read."""

    source: str  # one line, such as "parameters of runs/first/checkpoints/120"
    metadata: Mapping[str, Any]  # of compatibility.checkpoint_metadata; may be empty
    folder: str
    step: int | None  # last completed training step, if known
    read: Callable[[], Any]  # returns them on device


def open_pretrained(
    path: str, key: str, abstract_params: Any, config_flat: Mapping[str, Any], log: Log
) -> InitialWeights:
    """Finds parameters and checks names and shapes.

    `path`, the value of configuration key `key`, is a run, a step folder, its items/, hf:FOLDER,
    hf:HUB_ID or a folder with a config.json. `abstract_params` have the target shardings.
    """
    from MaxText.conversion.hf_checkpoint import is_hf_checkpoint

    if is_hf_checkpoint(path):
        return _open_hf(path, key, abstract_params, config_flat, log)
    stored = checkpoint_files.resolve_checkpoint(path, key)
    reader = CheckpointReader(stored, config_flat, log)
    with corruption_as_user_error(stored, key):
        reader.check_params(abstract_params)

    def read() -> Any:
        with corruption_as_user_error(stored, key):
            return reader.restore_params(abstract_params)

    return InitialWeights(
        f"parameters of {stored}", stored.try_metadata(), str(stored), stored.step, read
    )


def _open_hf(
    path: str, key: str, abstract_params: Any, config_flat: Mapping[str, Any], log: Log
) -> InitialWeights:
    from MaxText.conversion.hf_import import open_weights

    weights, stored_flat = open_weights(path, key, config_flat)
    shapes = {
        name: jax.ShapeDtypeStruct(spec.shape, weights.formats[name])
        for name, spec in weights.model.parameters.items()
    }
    try:
        hint = ConfigDiff(stored_flat, config_flat)
        casts = check_compatible({"params": unflatten(shapes)}, {"params": abstract_params}, hint)
    except UserError as error:
        raise UserError(
            f"{key}={path}: {error}\n"
            f"  python MaxText/convert.py from={path} to=RUN writes a config.yml with these keys."
        ) from None
    log_casts(casts, log)

    def place(location: Any, wanted: jax.ShapeDtypeStruct) -> jax.Array:
        # Only one array at a time is on the host; each device takes its shard.
        array = weights.read("/".join(entry.key for entry in location))
        sharding = wanted.sharding or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        return jax.make_array_from_callback(
            wanted.shape, sharding, lambda index: array[index].astype(wanted.dtype)
        )

    def read() -> Any:
        return jax.tree_util.tree_map_with_path(place, abstract_params)

    folder = str(weights.folder)
    return InitialWeights(f"parameters of {folder}", {"config": stored_flat}, folder, None, read)
