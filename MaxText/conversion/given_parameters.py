"""Parameters that a path names: a checkpoint, or a Hugging Face checkpoint."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from MaxText.checkpointing import layout, reading
from MaxText.checkpointing.description import Unreadable, metadata_if_any
from MaxText.errors import UserError

Show = Callable[[str], None]


class GivenParameters(NamedTuple):
    """Matching parameters, not yet read.

    Attributes:
      source: One line, such as "parameters of runs/first/checkpoints/120".
      metadata: See matching.checkpoint_metadata; empty if there is none.
      step: The update after which they were saved, if known.
      read: Returns them, on devices.
    """

    source: str
    metadata: Mapping[str, Any]
    folder: str
    step: int | None
    read: Callable[[], Any]


def open_parameters(
    path: str, key: str, abstract_params: Any, config_flat: Mapping[str, Any], show: Show
) -> GivenParameters:
    """Finds parameters and compares names and shapes with those wanted.

    Args:
      path: A run, a step folder, its items/, hf:FOLDER, hf:HUB_ID or a folder with a config.json.
      key: The configuration key that holds the path.
      abstract_params: jax.ShapeDtypeStruct with the shardings wanted.

    Raises:
      UserError: Nothing there, or parameters of another model.
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
    """Converts Unreadable to a UserError: a path from the user is never replaced silently."""
    try:
        yield
    except Unreadable as error:
        raise UserError(
            f"{key}: the checkpoint at {stored} cannot be read: {error}\n"
            "  Name an older step, or restore the files."
        ) from error
