"""Parameters that a path names: a checkpoint of ours, or a folder of Hugging Face."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from MaxText.checkpointing import layout, reading
from MaxText.checkpointing.description import Unreadable, metadata_if_any
from MaxText.errors import UserError

Show = Callable[[str], None]


class GivenParameters(NamedTuple):
    """Parameters that fit, not yet read.

    Attributes:
      source: one line for the record, such as "parameters of runs/first/checkpoints/120".
      metadata: what they say of themselves (matching.checkpoint_metadata); empty if nothing.
      folder: where they lie.
      step: the update after which they were saved, if known.
      read: gives them, on devices.
    """

    source: str
    metadata: Mapping[str, Any]
    folder: str
    step: int | None
    read: Callable[[], Any]


def open_parameters(
    path: str, key: str, abstract_params: Any, config_flat: Mapping[str, Any], show: Show
) -> GivenParameters:
    """Finds parameters and compares them with what is wanted, by names and shapes alone.

    Args:
      path: a run, a step folder, its items/, hf:FOLDER, hf:HUB_ID or a folder with a config.json.
      key: the configuration key that holds the path.
      abstract_params: of jax.ShapeDtypeStruct with the shardings wanted.
      config_flat: the current configuration by key.
      show: receives which checkpoint is taken, if not the newest, and the formats that change.

    Raises:
      UserError: nothing there, or parameters of another model.
    """
    from MaxText.conversion.hugging_face_folder import is_folder

    if is_folder(path):
        from MaxText.conversion.importing import open_folder

        folder, stored, read = open_folder(path, key, abstract_params, config_flat, show)
        return GivenParameters(f"parameters of {folder}", {"config": stored}, folder, None, read)
    stored = layout.find(path, key)
    with unreadable_is_user_error(key, stored):
        reading.check_params(stored, abstract_params, config_flat)

    def read_ours() -> Any:
        with unreadable_is_user_error(key, stored):
            return reading.read_params(stored, abstract_params, config_flat, show)

    return GivenParameters(
        f"parameters of {stored}", metadata_if_any(stored), str(stored), stored.step, read_ours
    )


@contextlib.contextmanager
def unreadable_is_user_error(key: str, stored: layout.Stored) -> Iterator[None]:
    """A path that the user gave is never replaced by another checkpoint behind their back."""
    try:
        yield
    except Unreadable as error:
        raise UserError(
            f"{key}: the checkpoint at {stored} cannot be read: {error}\n"
            "  Name an older step, or restore the files."
        ) from error
