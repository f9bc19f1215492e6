"""Opens parameters at a path: a run's or a Hugging Face checkpoint."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from MaxText.checkpointing import layout, reading
from MaxText.checkpointing.description import Unreadable, metadata_if_any
from MaxText.conversion.weight_source import unreadable_checkpoint
from MaxText.errors import UserError

Show = Callable[[str], None]


class InitialWeights(NamedTuple):
    """Matching parameters, not yet read."""

    source: str  # one line, such as "parameters of runs/first/checkpoints/120"
    metadata: Mapping[str, Any]  # see matching.checkpoint_metadata; may be empty
    folder: str
    step: int | None  # last completed training step, if known
    read: Callable[[], Any]  # returns them on device


def open_parameters(
    path: str, key: str, abstract_params: Any, config_flat: Mapping[str, Any], show: Show
) -> InitialWeights:
    """Finds parameters and checks names and shapes.

    Args:
      path: A run, a step folder, its items/, hf:FOLDER, hf:HUB_ID or a folder with a config.json.
      key: The configuration key that holds the path, for UserError.
      abstract_params: jax.ShapeDtypeStruct with the target shardings.
    """
    from MaxText.conversion.hf_checkpoint import is_hf_checkpoint

    if is_hf_checkpoint(path):
        from MaxText.conversion.hf_import import open_folder

        folder, stored, read = open_folder(path, key, abstract_params, config_flat, show)
        return InitialWeights(f"parameters of {folder}", {"config": stored}, folder, None, read)
    stored = layout.find(path, key)
    with unreadable_is_user_error(key, stored):
        reading.check_params(stored, abstract_params, config_flat)

    def read_ours() -> Any:
        with unreadable_is_user_error(key, stored):
            return reading.read_params(stored, abstract_params, config_flat, show)

    return InitialWeights(
        f"parameters of {stored}", metadata_if_any(stored), str(stored), stored.step, read_ours
    )


@contextlib.contextmanager
def unreadable_is_user_error(key: str, stored: layout.Stored) -> Iterator[None]:
    """Converts Unreadable to UserError: a user's path is never replaced."""
    try:
        yield
    except Unreadable as error:
        raise UserError(f"{key}: {unreadable_checkpoint(stored, error)}") from error
