"""Parameters of a folder of Hugging Face for a run that starts from them."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax

from MaxText.checkpointing.matching import ConfigHint, check_matches, describe_casts
from MaxText.configuration.saved import flat
from MaxText.conversion.hugging_face_folder import find_folder
from MaxText.conversion.importing import FolderWeights
from MaxText.conversion.weights import nested
from MaxText.errors import UserError


class FolderStart(NamedTuple):
    """A folder that fits a configuration."""

    folder: str  # where it lies
    # the current configuration by key, with what the folder says of its model
    config_flat: dict[str, Any]
    read: Callable[[], Any]  # gives the parameters, on devices


def open_weights(
    path: str, key: str, config_flat: Mapping[str, Any]
) -> tuple[FolderWeights, dict[str, Any]]:
    """The weights of a folder, and the current configuration with what the folder says of them.

    Args: as of open_folder.

    Raises:
      UserError: no such folder, or one that cannot be imported.
    """
    given = {}
    if config_flat["position_embedding"] != "learned":
        # A window that the run's texts do not exceed is no obstacle.
        given["max_target_length"] = config_flat["max_target_length"]
    weights = FolderWeights(find_folder(path, key), given)
    theirs = flat(weights.config)
    return weights, {**config_flat, **{name: theirs[name] for name in weights.keys}}


def open_folder(
    path: str,
    key: str,
    abstract_params: Any,
    config_flat: Mapping[str, Any],
    show: Callable[[str], None],
) -> FolderStart:
    """Compares a folder with the configuration, by names and shapes alone.

    Args:
      path: hf:FOLDER, hf:HUB_ID or a folder with a config.json.
      key: the configuration key that holds the path.
      abstract_params: of jax.ShapeDtypeStruct with the shardings wanted.
      config_flat: the current configuration by key.
      show: receives the formats that change.

    Raises:
      UserError: no such folder, one that cannot be imported, or one of another model.
    """
    weights, stored_flat = open_weights(path, key, config_flat)
    shapes = {
        name: jax.ShapeDtypeStruct(info.shape, weights.formats[name])
        for name, info in weights.model.parameters.items()
    }
    try:
        hint = ConfigHint(stored_flat, config_flat)
        casts = check_matches({"params": nested(shapes)}, {"params": abstract_params}, hint)
    except UserError as error:
        raise UserError(
            f"{key}={path}: {error}\n"
            f"  python MaxText/convert.py from={path} to=RUN writes a config.yml with these keys."
        ) from None
    for line in describe_casts(casts):
        show(line)

    def read() -> Any:
        def place(location: Any, wanted: jax.ShapeDtypeStruct) -> jax.Array:
            # One array at a time is on the host; each device takes its part of it.
            array = weights.read("/".join(entry.key for entry in location))
            sharding = wanted.sharding or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
            return jax.make_array_from_callback(
                wanted.shape, sharding, lambda index: array[index].astype(wanted.dtype)
            )

        return jax.tree_util.tree_map_with_path(place, abstract_params)

    return FolderStart(str(weights.folder), stored_flat, read)
