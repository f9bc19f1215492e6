"""Arrays of an Orbax checkpoint, read one at a time onto the host."""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from etils import epath

from MaxText.checkpointing.matching import Leaf, leaves_by_path
from MaxText.errors import UserError


class StoredArrays:
    """An Orbax PyTree on disk.

    Attributes:
      folder: the folder with the arrays (`items`).
      leaves: shape and format by path, such as "params/decoder_norm/scale". Paths of the
        optimizer's state are among them.
    """

    def __init__(self, folder: epath.Path):
        """
        Raises:
          UserError: the description of the tree cannot be read.
        """
        import orbax.checkpoint as ocp

        self.folder = folder
        with _damage_explained(folder):
            tree = self._tree = ocp.PyTreeCheckpointHandler().metadata(folder).tree
        # Optimizer states hold entries without an array.
        arrays = jax.tree.map(lambda leaf: leaf if hasattr(leaf, "shape") else None, tree)
        self.leaves: dict[str, Leaf] = leaves_by_path(arrays)

    def read(self, path: str) -> np.ndarray:
        """One array in its own format.

        Raises:
          UserError: its files are damaged.
        """
        import orbax.checkpoint as ocp

        names = path.split("/")
        wanted = _only(self._tree, names)
        arguments = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), wanted)
        with (
            _damage_explained(self.folder),
            ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer,
        ):
            value = checkpointer.restore(
                self.folder,
                args=ocp.args.PyTreeRestore(
                    item=wanted, restore_args=arguments, partial_restore=True
                ),
            )
        for name in names:
            value = value[int(name)] if isinstance(value, list | tuple) else value[name]
        return np.asarray(value)


def _only(tree: Any, names: list[str]) -> Any:
    """A tree with the one leaf that names lead to; entries of lists cannot be left out."""
    import orbax.checkpoint as ocp

    if not names:
        return 0
    first, rest = names[0], names[1:]
    if not isinstance(tree, list | tuple):
        return {first: _only(tree[first], rest)}
    return [
        _only(entry, rest) if str(i) == first else jax.tree.map(lambda _: ocp.PLACEHOLDER, entry)
        for i, entry in enumerate(tree)
    ]


@contextlib.contextmanager
def _damage_explained(folder: epath.Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, LookupError, RuntimeError) as error:
        reason = str(error).splitlines()[0][:300]
        raise UserError(
            f"the checkpoint at {folder} cannot be read: {reason}\n"
            "  Name an older step, or restore the files."
        ) from error
