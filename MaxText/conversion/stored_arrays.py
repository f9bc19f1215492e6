"""Arrays of an Orbax checkpoint, read one at a time."""

from typing import Any

import jax
import numpy as np
from etils import epath

from MaxText.checkpointing import checkpoint_files
from MaxText.checkpointing.checkpoint_files import CheckpointCorruptedError
from MaxText.checkpointing.checksums import first_spec_mismatch, host_checksum
from MaxText.checkpointing.compatibility import ArraySpec, array_specs, leaf_path
from MaxText.checkpointing.orbax_errors import translate_errors
from MaxText.config import import_modules
from MaxText.config.schema import Config, unflatten
from MaxText.config.serialization import with_current_names
from MaxText.conversion.weight_source import WeightSource, check_arrays, corruption_as_user_error
from MaxText.errors import UserError

PARAMS = "params/"


class LazyCheckpointReader:
    """An Orbax PyTree on disk. Verifies checksums if they were saved.

    `leaves` maps paths such as "params/decoder_norm/scale" to shapes and formats, and includes
    optimizer state; `params` has names such as "decoder_norm/scale".
    """

    def __init__(self, folder: epath.Path):
        """Reads the tree metadata; UserError if unreadable or altered."""
        import orbax.checkpoint as ocp

        self.folder = folder
        with corruption_as_user_error(folder), translate_errors():
            tree = ocp.PyTreeCheckpointHandler().metadata(folder).tree
            checksums = checkpoint_files.StoredCheckpoint(folder, None).metadata.checksums
            # Optimizer states have entries without arrays.
            arrays = jax.tree.map(lambda leaf: leaf if hasattr(leaf, "shape") else None, tree)
            self.leaves: dict[str, ArraySpec] = array_specs(arrays)
            if checksums is not None and (found := first_spec_mismatch(self.leaves, checksums)):
                raise CheckpointCorruptedError(found)
        entries, self._structure = jax.tree_util.tree_flatten_with_path(tree)
        self._paths = [leaf_path(path) for path, _ in entries]
        self._checksums = checksums
        self.params = {
            path.removeprefix(PARAMS): leaf
            for path, leaf in self.leaves.items()
            if path.startswith(PARAMS)
        }

    def read(self, path: str) -> np.ndarray:
        import orbax.checkpoint as ocp

        which = self._paths.index(path)
        items: list[Any] = [ocp.PLACEHOLDER] * len(self._paths)
        items[which] = 0
        wanted = self._structure.unflatten(items)
        arguments = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), wanted)
        restore = ocp.args.PyTreeRestore(item=wanted, restore_args=arguments, partial_restore=True)
        with corruption_as_user_error(self.folder), translate_errors():
            with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
                restored = checkpointer.restore(self.folder, args=restore)
            array = np.asarray(jax.tree.leaves(restored)[which])
            if self._checksums is not None and host_checksum(array) != self._checksums[path]:
                raise CheckpointCorruptedError(f"{path}: checksum mismatch")
        return array


class RunWeights(WeightSource):
    """Weights of a checkpoint (checkpoint_files.resolve_checkpoint)."""

    def __init__(self, path: str, given: Config | None = None):
        """Reads names and shapes of a run, its checkpoints, a step or its items.

        `given` is the configuration for a checkpoint without one. Raises UserError for a missing,
        unreadable or mismatched checkpoint.
        """
        self.stored = checkpoint_files.resolve_checkpoint(path, "from")
        self.metadata = self.stored.try_metadata()
        super().__init__(given or self._own_config())
        self._arrays = LazyCheckpointReader(self.stored.items)
        check_arrays(
            self._arrays.params,
            {name: spec.shape for name, spec in self.model.parameters.items()},
            f"{self.stored} does not hold the model of its configuration",
            "Put the run's own config.yml before from=, or use a checkpoint of this program; "
            "from=maxtext:... reads MaxText's.",
        )
        self.formats = {name: leaf.dtype for name, leaf in self._arrays.params.items()}

    def _own_config(self) -> Config:
        flat = self.metadata.get("config")
        if not flat:
            raise UserError(
                f"{self.stored} has no configuration. Add it: convert.py CONFIG.yml from=..."
            )
        import_modules.check_named(flat, str(self.stored))
        return unflatten(with_current_names(flat, str(self.stored)))

    def read(self, name: str) -> np.ndarray:
        return self._arrays.read(PARAMS + name)

    @property
    def hugging_face(self) -> dict[str, Any]:
        """Record of the import; empty for trained weights."""
        return self.metadata.get("hugging_face") or {}
