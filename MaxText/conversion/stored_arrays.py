"""Arrays of an Orbax checkpoint, read one at a time."""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from etils import epath

from MaxText.checkpointing import layout
from MaxText.checkpointing.checksums import host_checksum, other_leaf
from MaxText.checkpointing.description import Unreadable, describe, metadata_if_any
from MaxText.checkpointing.matching import Leaf, leaves_by_path
from MaxText.checkpointing.reading import damage_is_unreadable
from MaxText.config import import_modules
from MaxText.config.catalog import unflatten
from MaxText.config.schema import Config
from MaxText.config.serialization import with_current_names
from MaxText.conversion.weight_source import Weights, check_arrays, model_of
from MaxText.errors import UserError

_PARAMS = "params/"


class StoredArrays:
    """An Orbax PyTree on disk. Verifies checksums if they were saved.

    `leaves` maps paths such as "params/decoder_norm/scale" to shapes and formats, and includes
    optimizer state.
    """

    def __init__(self, folder: epath.Path):
        """Reads the tree metadata. Raises UserError if it is unreadable or altered."""
        import orbax.checkpoint as ocp

        self.folder = folder
        with _damage_explained(folder):
            tree = self._tree = ocp.PyTreeCheckpointHandler().metadata(folder).tree
            self._checksums = describe(layout.Stored(folder, None)).checksums
        # Optimizer states have entries without arrays.
        arrays = jax.tree.map(lambda leaf: leaf if hasattr(leaf, "shape") else None, tree)
        self.leaves: dict[str, Leaf] = leaves_by_path(arrays)
        if self._checksums is not None and (difference := other_leaf(self.leaves, self._checksums)):
            raise _unreadable(folder, difference)

    def read(self, path: str) -> np.ndarray:
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
    """Returns a tree with one leaf; list entries become placeholders."""
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


class RunWeights(Weights):
    """Weights of a run's newest checkpoint (layout.find), or of the one named."""

    def __init__(self, path: str, given: Config | None = None):
        """Reads names and shapes of a run, its checkpoints, a step or its items.

        `given` is the configuration for a checkpoint without one. Raises UserError for a missing,
        unreadable or mismatched checkpoint.
        """
        self.stored = layout.find(path, "from")
        self.metadata = metadata_if_any(self.stored)
        self.config = given or self._own_config()
        self.model = model_of(self.config)
        self._arrays = StoredArrays(self.stored.items)
        found = {
            path.removeprefix(_PARAMS): leaf
            for path, leaf in self._arrays.leaves.items()
            if path.startswith(_PARAMS)
        }
        check_arrays(
            found,
            {name: info.shape for name, info in self.model.parameters.items()},
            f"{self.stored} does not hold the model of its configuration",
            "Name the run's own config.yml before from=, or a checkpoint of this program; "
            "from=maxtext:... reads MaxText's.",
        )
        self.formats = {name: leaf.dtype for name, leaf in found.items()}

    def _own_config(self) -> Config:
        flat = self.metadata.get("config")
        if not flat:
            raise UserError(
                f"{self.stored} does not say which configuration it was made with. Name it first: "
                "convert.py CONFIG.yml from=..."
            )
        import_modules.check_named(flat, str(self.stored))
        return unflatten(with_current_names(flat, str(self.stored)))

    def read(self, ours: str) -> np.ndarray:
        return self._arrays.read(_PARAMS + ours)

    @property
    def hugging_face(self) -> dict[str, Any]:
        """Record of the import; empty for trained weights."""
        return self.metadata.get("hugging_face") or {}
