"""Arrays of an Orbax checkpoint, read one at a time onto the host."""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from etils import epath

from MaxText.checkpointing import layout
from MaxText.checkpointing.checksums import host_checksum, other_leaf
from MaxText.checkpointing.description import Unreadable, describe
from MaxText.checkpointing.matching import Leaf, leaves_by_path
from MaxText.checkpointing.reading import damage_is_unreadable
from MaxText.errors import UserError


class StoredArrays:
    """An Orbax PyTree on disk. Arrays that were saved with checksums are verified as they are read.

    Attributes:
      folder: the folder with the arrays (`items`).
      leaves: shape and format by path, such as "params/decoder_norm/scale". Paths of the
        optimizer's state are among them.
    """

    def __init__(self, folder: epath.Path):
        """
        Raises:
          UserError: the description of the tree cannot be read, or is not the one that was saved.
        """
        import orbax.checkpoint as ocp

        self.folder = folder
        with _damage_explained(folder):
            tree = self._tree = ocp.PyTreeCheckpointHandler().metadata(folder).tree
            self._checksums = describe(layout.Stored(folder, None)).checksums
        # Optimizer states hold entries without an array.
        arrays = jax.tree.map(lambda leaf: leaf if hasattr(leaf, "shape") else None, tree)
        self.leaves: dict[str, Leaf] = leaves_by_path(arrays)
        if self._checksums is not None and (difference := other_leaf(self.leaves, self._checksums)):
            raise _unreadable(folder, difference)

    def read(self, path: str) -> np.ndarray:
        """One array in its own format.

        Raises:
          UserError: its files are damaged, or its numbers are not those that were saved.
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
        array = np.asarray(value)
        if self._checksums is not None and host_checksum(array) != self._checksums[path]:
            raise _unreadable(self.folder, f"{path}: its checksum is not that of what was saved")
        return array


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
        with damage_is_unreadable():
            yield
    except Unreadable as error:
        raise _unreadable(folder, str(error)) from error


def _unreadable(folder: epath.Path, reason: str) -> UserError:
    return UserError(
        f"the checkpoint at {folder} cannot be read: {reason}\n"
        "  Name an older step, or restore the files."
    )
