"""Plans a change of slots or depth, parameter by parameter.

Only the logical axes decide what may change: `slots`, the parameter tokens of Pattention (Wang et
al. 2024), and `layers`; every other size must agree. Stored arrays are read one at a time.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import numpy as np

from MaxText.checkpointing import checkpoint_files
from MaxText.checkpointing.checkpoint_reader import OBJECTIVE
from MaxText.checkpointing.compatibility import (
    ArraySpec,
    ConfigDiff,
    format_mismatches,
    mismatches,
)
from MaxText.config.training_sections import CheckpointingConfig, GrowthMode
from MaxText.errors import UserError
from MaxText.layers.feed_forward.pattention import slots_by_place
from MaxText.parallelism.logical_sharding import ParamSpec

SLOTS = "slots"
LAYERS = "layers"
KEY = "load_parameters_path"

Role = Literal["key", "value", "bias"]
Record = Mapping[str, Any]  # of `make_record`: how a run's parameters grew, as JSON


class SizeChange(NamedTuple):
    """A size in the stored model and in the new one."""

    old_size: int
    new_size: int


class AxisResize(NamedTuple):
    """Stored and new size of an axis; they may be equal."""

    axis: int
    old_size: int
    new_size: int

    @property
    def change(self) -> SizeChange | None:
        """The sizes if they differ, else None."""
        if self.old_size == self.new_size:
            return None
        return SizeChange(self.old_size, self.new_size)


class ParamGrowth(NamedTuple):
    """The change of one parameter."""

    old_spec: ArraySpec  # of the stored array
    new_spec: ArraySpec
    slots: AxisResize | None  # None without the axis
    layers: AxisResize | None
    role: Role | None  # whether slots are produced (key), summed over (value) or added to (bias)

    def takes_fresh(self, mode: GrowthMode) -> bool:
        """Returns whether new slots are freshly initialized instead of zero."""
        grows = self.slots is not None and self.slots.new_size > self.slots.old_size
        values_grow = mode == "function_preserving" and self.role == "value"
        return grows and (mode == "random" or values_grow)


class GrowthPlan(NamedTuple):
    """What happens to each parameter."""

    leaves: Mapping[str, ParamGrowth]  # by parameter name, in the order of the model

    @property
    def slots(self) -> dict[str, SizeChange]:
        """Change of the number of slots by parameter name, without parameters that keep it."""
        changes = {name: leaf.slots.change for name, leaf in self.leaves.items() if leaf.slots}
        return {name: change for name, change in changes.items() if change}

    @property
    def stored_slots(self) -> dict[str, int]:
        """Number of stored slots by parameter name."""
        return {name: leaf.slots.old_size for name, leaf in self.leaves.items() if leaf.slots}

    @property
    def layers(self) -> SizeChange | None:
        """Change of the number of layers; None if it stays."""
        for leaf in self.leaves.values():
            if leaf.layers and leaf.layers.change:
                return leaf.layers.change
        return None

    @property
    def adds_slots(self) -> bool:
        """Whether any parameter gets more slots."""
        return any(change.new_size > change.old_size for change in self.slots.values())

    @property
    def drops(self) -> list[str]:
        """Descriptions of dropped stored slots and layers."""
        dropped_slots = {
            name: f"{change.old_size} -> {change.new_size}"
            for name, change in self.slots.items()
            if change.new_size < change.old_size
        }
        descriptions = [f"{SLOTS} {slots_by_place(dropped_slots)}"] if dropped_slots else []
        layers = self.layers
        if layers and layers.new_size < layers.old_size:
            descriptions.append(f"{LAYERS} {layers.old_size} -> {layers.new_size}")
        return descriptions


class SourceCheckpoint(NamedTuple):
    """Stored parameters, not yet read."""

    folder: str
    step: int | None  # step at which they were saved, if known
    metadata: Mapping[str, Any]  # as of compatibility.checkpoint_metadata; empty if there is none
    parameters: Mapping[str, ArraySpec]  # name -> shape and dtype
    read: Callable[[str], np.ndarray]  # returns a parameter by name
    stored: checkpoint_files.StoredCheckpoint | None = None  # None for a Hugging Face checkpoint
    state_specs: Mapping[str, ArraySpec] = {}  # by path: the whole train state, with moments
    read_state: Callable[[str], np.ndarray] | None = None  # returns an array of it by path

    def plan(
        self, param_specs: Mapping[str, ParamSpec], config_flat: Mapping[str, Any]
    ) -> GrowthPlan:
        """Returns the plan for a model with the parameters `param_specs`.

        Weights of an objective are left out if one of the models has none: it has another one.

        Args:
          config_flat: The configuration of that model by key, to explain a misfit.

        Raises:
          UserError: With all misfits.
        """
        stored_specs = self.parameters
        if any(map(_is_of_objective, stored_specs)) != any(map(_is_of_objective, param_specs)):
            stored_specs = {
                name: spec for name, spec in stored_specs.items() if not _is_of_objective(name)
            }
            param_specs = {
                name: spec for name, spec in param_specs.items() if not _is_of_objective(name)
            }
        new_specs = {
            name: ArraySpec(tuple(spec.shape), np.dtype(spec.dtype))
            for name, spec in param_specs.items()
        }
        problems = _fixed_depth(stored_specs, param_specs) or mismatches(
            stored_specs,
            new_specs,
            lambda name: _forbidden_change(stored_specs[name], param_specs[name]),
        )
        if problems:
            config_diff = ConfigDiff(self.metadata.get("config"), config_flat)
            lines = [f"{self.folder}: {format_mismatches(problems, config_diff)}"]
            if self.stored is None:
                command = f"python MaxText/convert.py from=hf:{self.folder} to=RUN"
                lines.append(f"  {command} writes a config.yml with these keys.")
            raise UserError("\n".join(lines))
        leaves = {
            name: ParamGrowth(
                old_spec=stored_specs[name],
                new_spec=new_specs[name],
                slots=_resize(SLOTS, stored_specs[name], param_spec),
                layers=_resize(LAYERS, stored_specs[name], param_spec),
                role=_role(param_spec),
            )
            for name, param_spec in param_specs.items()
        }
        return GrowthPlan(leaves)

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


def _is_of_objective(name: str) -> bool:
    """Returns whether a parameter belongs to the objective, by its name."""
    return name.startswith(f"{OBJECTIVE}/")


def open_source(path: str, config_flat: Mapping[str, Any]) -> SourceCheckpoint:
    """Opens load_parameters_path without reading arrays.

    `path` is a run, a step folder, its items/, hf:FOLDER, hf:HUB_ID or a folder with a config.json.
    """
    from MaxText.conversion.hf_checkpoint import is_hf_checkpoint

    if is_hf_checkpoint(path):
        from MaxText.conversion.hf_import import open_hf_weights

        weights, source_config = open_hf_weights(path, KEY, config_flat)
        parameters = {
            name: ArraySpec(tuple(spec.shape), weights.formats[name])
            for name, spec in weights.model.parameters.items()
        }
        return SourceCheckpoint(
            folder=str(weights.folder),
            step=None,
            metadata={"config": source_config},
            parameters=parameters,
            read=weights.read,
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
        state_specs=arrays.leaves,
        read_state=arrays.read,
    )


def _fixed_depth(
    stored_specs: Mapping[str, ArraySpec], param_specs: Mapping[str, ParamSpec]
) -> list[str]:
    """Returns why the depth cannot change, if it has to."""
    old_layers = _layers(stored_specs)
    new_layers = _layers(param_specs)
    old_depth = sum(old_layers.values())
    new_depth = sum(new_layers.values())
    if old_depth == new_depth:
        return []
    connected = any(name.startswith("connections/") for name in param_specs)
    if not connected and {*filter(str.isdigit, old_layers)} == {*filter(str.isdigit, new_layers)}:
        return []  # any number of repeats of a cycle has the same shapes
    reason = "no two layers have the same shapes, so none can be a copy of another"
    if connected:
        reason = "each layer of a model with dense connections sums another number of outputs"
    has_slots = any(SLOTS in spec.logical_axes for spec in param_specs.values())
    only_slots = "; only slots can grow" if has_slots else ""
    return [f"layers {old_depth} -> {new_depth}: {reason}{only_slots}"]


def _layers(parameters: Mapping[str, ArraySpec | ParamSpec]) -> dict[str, int]:
    """Returns the number of layers in each group of layers that the parameters' names show.

    Names are "layers/3/..." for layer 3, "layers/cycle/0/..." for the layers at the first position
    of a repeated cycle, and "layers/..." for all layers stacked. The keys are "3", "cycle/0" and
    "" then.
    """
    num_layers = {}
    for name, spec in parameters.items():
        folder, _, within = name.partition("/")
        first, _, after_first = within.partition("/")
        if folder != LAYERS:
            continue
        if first.isdigit():
            num_layers[first] = 1
        elif spec.shape:
            position = after_first.partition("/")[0]
            group = f"cycle/{position}" if first == "cycle" else ""
            num_layers[group] = spec.shape[0]
    return num_layers


def _forbidden_change(stored_spec: ArraySpec, param_spec: ParamSpec) -> str | None:
    """Describes forbidden size changes ("" for another rank), or None."""
    if len(stored_spec.shape) != len(param_spec.shape):
        return ""
    axes = zip(param_spec.logical_axes, stored_spec.shape, param_spec.shape, strict=True)
    changes = [
        f"{axis or 'unnamed'} {old_size} -> {new_size}"
        for axis, old_size, new_size in axes
        if old_size != new_size and axis not in (SLOTS, LAYERS)
    ]
    return f" ({', '.join(changes)})" if changes else None


def _resize(logical_axis: str, stored_spec: ArraySpec, param_spec: ParamSpec) -> AxisResize | None:
    """Returns the sizes along a logical axis; None if the parameter has no such axis."""
    if logical_axis not in param_spec.logical_axes:
        return None
    axis = param_spec.logical_axes.index(logical_axis)
    return AxisResize(axis, stored_spec.shape[axis], param_spec.shape[axis])


def _role(spec: ParamSpec) -> Role | None:
    """Returns what a parameter does with slots; None if it has none."""
    axes = [axis for axis in spec.logical_axes if axis != LAYERS]
    if SLOTS not in axes:
        return None
    assert axes.count(SLOTS) == 1, axes
    if spec.num_input_dims == 0:
        return "bias"
    return "value" if axes.index(SLOTS) < spec.num_input_dims else "key"


Index = tuple[slice, ...]


def grow_shard(
    leaf: ParamGrowth,
    stored: np.ndarray,
    index: Index | None = None,
    fresh: np.ndarray | float = 0.0,
) -> np.ndarray:
    """Returns a shard of a new array: stored slots, then `fresh` ones.

    Layer j of the new model copies layer floor(j * old / new): layers repeat or are omitted evenly.

    Args:
      stored: The whole stored array.
      index: The shard: a slice for each axis of the new array; None for all of it.
      fresh: Values of new slots: an array of the shard's shape, or a scalar.
    """
    shape = leaf.new_spec.shape
    if index is None:
        index = (slice(None),) * len(shape)
    bounds = [axis.indices(size)[:2] for axis, size in zip(index, shape, strict=True)]
    shard = np.full([stop - start for start, stop in bounds], fresh, leaf.new_spec.dtype)
    # What is copied: stored[source_index] to shard[target_index].
    source_index = [slice(start, stop) for start, stop in bounds]
    target_index = [slice(None)] * len(shape)
    if leaf.slots:
        axis = leaf.slots.axis
        start, stop = bounds[axis]
        num_stored = max(0, min(stop, leaf.slots.old_size) - start)
        source_index[axis] = slice(start, start + num_stored)
        target_index[axis] = slice(num_stored)
    if leaf.layers and leaf.layers.change:
        axis, old_size, new_size = leaf.layers
        copied_layers = [layer * old_size // new_size for layer in range(*bounds[axis])]
        source_index[axis] = slice(None)
        shard[tuple(target_index)] = np.take(stored[tuple(source_index)], copied_layers, axis)
    else:
        shard[tuple(target_index)] = stored[tuple(source_index)]
    return shard


def make_record(
    growth: GrowthPlan, checkpoint: CheckpointingConfig, zoom: Mapping[str, float]
) -> Record:
    """Returns the record of a growth, as JSON in the run's checkpoints.

    Args:
      zoom: The keys of the configuration that the growth fixed.
    """
    rate = checkpoint.growth.existing_slots_lr_scale
    return {
        "mode": checkpoint.growth.mode,
        "slots": {name: list(change) for name, change in growth.slots.items()},
        "layers": list(growth.layers) if growth.layers else None,
        "zoom": dict(zoom),
        "moments": checkpoint.growth.opt_state,
        "data": checkpoint.growth.data,
        "existing_slots_lr_scale": 1.0 if rate is None else rate,
    }


def from_metadata(metadata: Mapping[str, Any]) -> Record | None:
    """Returns the growth record in a checkpoint's metadata, or None."""
    return parent(metadata).get("growth") or None


def existing_slots(record: Record | None) -> dict[str, int]:
    """Returns parameter name -> number of leading, pre-existing slots."""
    changes = record["slots"] if record else {}
    return {name: old_size for name, (old_size, new_size) in changes.items() if old_size < new_size}


def parent(metadata: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the newest of a run's ancestors (run/restore.py), or {}."""
    return (metadata.get("lineage") or [{}])[-1]


def sizes(record: Record) -> dict[str, str]:
    """Describes changed sizes: {"slots": "24 -> 40", "layers": "18 -> 24"}."""
    slots = {
        name: f"{old_size} -> {new_size}" for name, (old_size, new_size) in record["slots"].items()
    }
    descriptions = {"slots": slots_by_place(slots)} if slots else {}
    if record["layers"]:
        descriptions["layers"] = "{} -> {}".format(*record["layers"])
    return descriptions


def event_fields(record: Record) -> dict[str, Any]:
    """Returns the fields of a `growth` event, besides its folders."""
    settings = {name: record[name] for name in ("moments", "data", "existing_slots_lr_scale")}
    return {"mode": record["mode"], **sizes(record), **record["zoom"], **settings}
