"""Opens parameters at a path: a run's or a Hugging Face checkpoint."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from MaxText.checkpointing import checkpoint_files, reading
from MaxText.checkpointing.checkpoint_files import CheckpointCorruptedError
from MaxText.errors import UserError

Show = Callable[[str], None]


class GivenParameters(NamedTuple):
    """Matching parameters, not yet read."""

    source: str  # one line, such as "parameters of runs/first/checkpoints/120"
    metadata: Mapping[str, Any]  # see matching.checkpoint_metadata; may be empty
    folder: str
    step: int | None  # last completed training step, if known
    read: Callable[[], Any]  # returns them on device


def open_parameters(
    path: str, key: str, abstract_params: Any, config_flat: Mapping[str, Any], show: Show
) -> GivenParameters:
    """Finds parameters and checks names and shapes.

    Args:
      path: A run, a step folder, its items/, hf:FOLDER, hf:HUB_ID or a folder with a config.json.
      key: The configuration key that holds the path, for UserError.
      abstract_params: jax.ShapeDtypeStruct with the target shardings.
    """
    from MaxText.conversion.hugging_face_folder import is_folder

    if is_folder(path):
        from MaxText.conversion.importing import open_folder

        folder, stored, read = open_folder(path, key, abstract_params, config_flat, show)
        return GivenParameters(f"parameters of {folder}", {"config": stored}, folder, None, read)
    stored = checkpoint_files.resolve_checkpoint(path, key)
    with corruption_as_user_error(key, stored):
        reading.check_params(stored, abstract_params, config_flat)

    def read_ours() -> Any:
        with corruption_as_user_error(key, stored):
            return reading.restore_params(stored, abstract_params, config_flat, show)

    return GivenParameters(
        f"parameters of {stored}", stored.try_metadata(), str(stored), stored.step, read_ours
    )


@contextlib.contextmanager
def corruption_as_user_error(key: str, stored: checkpoint_files.StoredCheckpoint) -> Iterator[None]:
    """Converts CheckpointCorruptedError to UserError: a user's path is never replaced."""
    try:
        yield
    except CheckpointCorruptedError as error:
        raise UserError(
            f"{key}: the checkpoint at {stored} cannot be read: {error}\n"
            "  Name an older step, or restore the files."
        ) from error
