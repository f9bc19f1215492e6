"""A checkpoint of ours as a source of weights."""

from typing import Any

import numpy as np

from MaxText.checkpointing import layout
from MaxText.checkpointing.description import metadata_if_any
from MaxText.configuration.catalogue import build
from MaxText.configuration.saved import under_todays_names
from MaxText.configuration.schema import Config
from MaxText.conversion.stored_arrays import StoredArrays
from MaxText.conversion.weights import check_arrays, model_of
from MaxText.errors import UserError

_PARAMS = "params/"


class RunWeights:
    """The newest checkpoint of a run (layout.find), or the one that was named.

    Attributes:
      stored: where it lies.
      metadata: what it says of itself.
      config: its configuration.
      model: its parameters' names and shapes.
      formats: of its arrays.
    """

    def __init__(self, path: str, given: Config | None = None):
        """Reads names and shapes; no numbers.

        Args:
          path: a run, its checkpoints, a step folder or its items.
          given: the configuration, for a checkpoint that does not hold its own.

        Raises:
          UserError: no checkpoint, none that can be read, or arrays that do not fit.
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
        self.formats: dict[str, np.dtype] = {name: leaf.dtype for name, leaf in found.items()}

    def _own_config(self) -> Config:
        flat = self.metadata.get("config")
        if not flat:
            raise UserError(
                f"{self.stored} does not say which configuration it was made with. Name it first: "
                "convert.py CONFIG.yml from=..."
            )
        return build(under_todays_names(flat, str(self.stored)))

    def read(self, ours: str) -> np.ndarray:
        """One array, all layers stacked."""
        return self._arrays.read(_PARAMS + ours)

    @property
    def hugging_face(self) -> dict[str, Any]:
        """What the import of a folder noted beside the weights; empty for trained ones."""
        return self.metadata.get("hugging_face") or {}
