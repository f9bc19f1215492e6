"""The smaller source model of a growth; arrays are read one at a time."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from MaxText.checkpointing import checkpoint_files
from MaxText.checkpointing.compatibility import ArraySpec, ConfigDiff, format_mismatches
from MaxText.errors import UserError
from MaxText.growth.growth_plan import GrowthPlan, misfits, plan
from MaxText.parallelism.logical_sharding import ParamSpec

KEY = "load_parameters_path"


class SourceCheckpoint(NamedTuple):
    """Stored parameters, not yet read."""

    folder: str
    step: int | None  # step at which they were saved, if known
    metadata: Mapping[str, Any]  # as of compatibility.checkpoint_metadata; empty if there is none
    parameters: Mapping[str, ArraySpec]  # name -> shape and dtype
    read: Callable[[str], np.ndarray]  # returns a parameter by name
    stored: checkpoint_files.StoredCheckpoint | None = None  # None for a Hugging Face checkpoint
    others: Mapping[str, ArraySpec] = {}  # by path: the whole train state, with moments
    read_other: Callable[[str], np.ndarray] | None = None  # returns one of them by path

    def plan(
        self, parameters: Mapping[str, ParamSpec], config_flat: Mapping[str, Any]
    ) -> GrowthPlan:
        """Returns the plan for a model; raises UserError with all misfits."""
        if problems := misfits(self.parameters, parameters):
            hint = ConfigDiff(self.metadata.get("config"), config_flat)
            lines = [f"{self.folder}: {format_mismatches(problems, hint)}"]
            if self.stored is None:
                command = f"python MaxText/convert.py from=hf:{self.folder} to=RUN"
                lines.append(f"  {command} writes a config.yml with these keys.")
            raise UserError("\n".join(lines))
        return plan(self.parameters, parameters)

    def position(self) -> dict[str, Any]:
        """Returns the data position; raises UserError if it is not stored."""
        position = None
        if self.stored and (self.stored.folder / checkpoint_files.POSITION).exists():
            position = self.stored.position()
        if not position:
            raise UserError(
                f"growth.data=continue: {self.folder} has no data position. Name a checkpoint of a "
                "run, or restart the data with growth.data=restart."
            )
        return position


def open_source(path: str, config_flat: Mapping[str, Any]) -> SourceCheckpoint:
    """Opens load_parameters_path without reading arrays.

    `path` is a run, a step folder, its items/, hf:FOLDER, hf:HUB_ID or a folder with a config.json.
    """
    from MaxText.conversion.hf_checkpoint import is_hf_checkpoint

    if is_hf_checkpoint(path):
        from MaxText.conversion.hf_import import open_weights

        weights, source_config = open_weights(path, KEY, config_flat)
        parameters = {
            name: ArraySpec(tuple(spec.shape), weights.formats[name])
            for name, spec in weights.model.parameters.items()
        }
        return SourceCheckpoint(
            str(weights.folder), None, {"config": source_config}, parameters, weights.read
        )
    from MaxText.conversion.weight_source import PARAMS, LazyCheckpointReader

    stored = checkpoint_files.resolve_checkpoint(path, KEY)
    arrays = LazyCheckpointReader(stored.items)
    return SourceCheckpoint(
        folder=str(stored),
        step=stored.step,
        metadata=stored.try_metadata(),
        parameters=arrays.params,
        read=lambda name: arrays.read(PARAMS + name),
        stored=stored,
        others=arrays.leaves,
        read_other=arrays.read,
    )
