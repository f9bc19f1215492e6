"""Arrays of an Orbax checkpoint, read one at a time."""

from typing import Any

import jax
import numpy as np
from etils import epath

from MaxText.checkpointing import checkpoint_files
from MaxText.checkpointing.checkpoint_files import CheckpointCorruptedError
from MaxText.checkpointing.checksums import first_spec_mismatch, host_checksum
from MaxText.checkpointing.compatibility import ArraySpec, array_specs
from MaxText.checkpointing.orbax_errors import translate_errors
from MaxText.config import import_modules
from MaxText.config.catalog import unflatten
from MaxText.config.schema import Config
from MaxText.config.serialization import with_current_names
from MaxText.conversion.weight_source import (
    WeightSource,
    abstract_model,
    check_arrays,
    corruption_as_user_error,
)
from MaxText.errors import UserError

_PARAMS = "params/"


class LazyCheckpointReader:
    """An Orbax PyTree on disk. Verifies checksums if they were saved.

    `leaves` maps paths such as "params/decoder_norm/scale" to shapes and formats, and includes
    optimizer state.
    """

    def __init__(self, folder: epath.Path):
        """Reads the tree metadata; UserError if unreadable or altered."""
        import orbax.checkpoint as ocp

        self.folder = folder
        with corruption_as_user_error(folder), translate_errors():
            tree = self._tree = ocp.PyTreeCheckpointHandler().metadata(folder).tree
            stored = checkpoint_files.StoredCheckpoint(folder, None)
            checksums = self._checksums = stored.metadata.checksums
            # Optimizer states have entries without arrays.
            arrays = jax.tree.map(lambda leaf: leaf if hasattr(leaf, "shape") else None, tree)
            self.leaves: dict[str, ArraySpec] = array_specs(arrays)
            if checksums is not None and (found := first_spec_mismatch(self.leaves, checksums)):
                raise CheckpointCorruptedError(found)

    def read(self, path: str) -> np.ndarray:
        import orbax.checkpoint as ocp

        names = path.split("/")
        wanted = _only(self._tree, names)
        arguments = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), wanted)
        restore = ocp.args.PyTreeRestore(item=wanted, restore_args=arguments, partial_restore=True)
        with corruption_as_user_error(self.folder), translate_errors():
            with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
                value = checkpointer.restore(self.folder, args=restore)
            for name in names:
                value = value[int(name)] if isinstance(value, list | tuple) else value[name]
            array = np.asarray(value)
            if self._checksums is not None and host_checksum(array) != self._checksums[path]:
                raise CheckpointCorruptedError(f"{path}: checksum mismatch")
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


class RunWeights(WeightSource):
    """Weights of a checkpoint (checkpoint_files.resolve_checkpoint)."""

    def __init__(self, path: str, given: Config | None = None):
        """Reads names and shapes of a run, its checkpoints, a step or its items.

        `given` is the configuration for a checkpoint without one. Raises UserError for a missing,
        unreadable or mismatched checkpoint.
        """
        self.stored = checkpoint_files.resolve_checkpoint(path, "from")
        self.metadata = self.stored.try_metadata()
        self.config = given or self._own_config()
        self.model = abstract_model(self.config)
        self._arrays = LazyCheckpointReader(self.stored.items)
        found = {
            path.removeprefix(_PARAMS): leaf
            for path, leaf in self._arrays.leaves.items()
            if path.startswith(_PARAMS)
        }
        check_arrays(
            found,
            {name: spec.shape for name, spec in self.model.parameters.items()},
            f"{self.stored} does not hold the model of its configuration",
            "Put the run's own config.yml before from=, or use a checkpoint of this program; "
            "from=maxtext:... reads MaxText's.",
        )
        self.formats = {name: leaf.dtype for name, leaf in found.items()}

    def _own_config(self) -> Config:
        flat = self.metadata.get("config")
        if not flat:
            raise UserError(
                f"{self.stored} has no configuration. Add it: convert.py CONFIG.yml from=..."
            )
        import_modules.check_named(flat, str(self.stored))
        return unflatten(with_current_names(flat, str(self.stored)))

    def read(self, name: str) -> np.ndarray:
        return self._arrays.read(_PARAMS + name)

    @property
    def hugging_face(self) -> dict[str, Any]:
        """Record of the import; empty for trained weights."""
        return self.metadata.get("hugging_face") or {}
