"""Plans a change of slots or depth, parameter by parameter.

Only the logical axes decide what may change: `slots`, the parameter tokens of Pattention (Wang et
al. 2024), and `layers`; every other size must agree. Stored arrays are read one at a time.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import numpy as np

from MaxText.checkpointing import checkpoint_files
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
Record = Mapping[str, Any]  # of `make_record`


class AxisResize(NamedTuple):
    """Stored and wanted size of an axis."""

    axis: int
    old: int
    new: int


class ParamGrowth(NamedTuple):
    """The change of one parameter."""

    old: ArraySpec
    new: ArraySpec
    slots: AxisResize | None  # None without the axis
    layers: AxisResize | None
    role: Role | None  # whether slots are produced (key), summed over (value) or added to (bias)

    def takes_fresh(self, mode: GrowthMode) -> bool:
        """Returns whether new slots are freshly initialized instead of zero."""
        grows = self.slots is not None and self.slots.new > self.slots.old
        values_grow = mode == "function_preserving" and self.role == "value"
        return grows and (mode == "random" or values_grow)


class GrowthPlan(NamedTuple):
    """Parameter name -> ParamGrowth, in the order of the model."""

    leaves: Mapping[str, ParamGrowth]

    @property
    def slots(self) -> dict[str, tuple[int, int]]:
        """Parameter name -> (stored slots, new slots), if different."""
        sizes = {name: leaf.slots for name, leaf in self.leaves.items() if leaf.slots}
        return {name: (old, new) for name, (_, old, new) in sizes.items() if old != new}

    @property
    def stored_slots(self) -> dict[str, int]:
        return {name: leaf.slots.old for name, leaf in self.leaves.items() if leaf.slots}

    @property
    def layers(self) -> tuple[int, int] | None:
        """(stored layers, new layers) if they differ, else None."""
        stacked = (leaf.layers for leaf in self.leaves.values() if leaf.layers)
        return next(((old, new) for _, old, new in stacked if old != new), None)

    @property
    def adds_slots(self) -> bool:
        return any(new > old for old, new in self.slots.values())

    @property
    def drops(self) -> list[str]:
        """Descriptions of dropped stored slots and layers."""
        slots = {name: f"{old} -> {new}" for name, (old, new) in self.slots.items() if new < old}
        words = [f"{SLOTS} {slots_by_place(slots)}"] if slots else []
        if self.layers and self.layers[1] < self.layers[0]:
            words.append("{} {} -> {}".format(LAYERS, *self.layers))
        return words


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

    def plan(self, wanted: Mapping[str, ParamSpec], config_flat: Mapping[str, Any]) -> GrowthPlan:
        """Returns the plan for a model; raises UserError with all misfits."""
        stored = self.parameters
        specs = {name: ArraySpec(tuple(x.shape), np.dtype(x.dtype)) for name, x in wanted.items()}
        problems = _fixed_depth(stored, wanted) or mismatches(
            stored, specs, lambda name: _forbidden_change(stored[name], wanted[name])
        )
        if problems:
            hint = ConfigDiff(self.metadata.get("config"), config_flat)
            lines = [f"{self.folder}: {format_mismatches(problems, hint)}"]
            if self.stored is None:
                command = f"python MaxText/convert.py from=hf:{self.folder} to=RUN"
                lines.append(f"  {command} writes a config.yml with these keys.")
            raise UserError("\n".join(lines))
        leaves = {}
        for name, spec in wanted.items():
            old = stored[name]
            sizes = _resize(SLOTS, old, spec), _resize(LAYERS, old, spec)
            leaves[name] = ParamGrowth(old, specs[name], *sizes, _role(spec))
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


def _fixed_depth(stored: Mapping[str, ArraySpec], wanted: Mapping[str, ParamSpec]) -> list[str]:
    """Returns why the depth cannot change, if it has to."""
    old = _layers(stored)
    new = _layers(wanted)
    depths = sum(old.values()), sum(new.values())
    if depths[0] == depths[1]:
        return []
    connected = any(name.startswith("connections/") for name in wanted)
    if not connected and {*filter(str.isdigit, old)} == {*filter(str.isdigit, new)}:
        return []  # any number of repeats of a cycle has the same shapes
    reason = "no two layers have the same shapes, so none can be a copy of another"
    if connected:
        reason = "each layer of a model with dense connections sums another number of outputs"
    has_slots = any(SLOTS in spec.logical_axes for spec in wanted.values())
    only_slots = "; only slots can grow" if has_slots else ""
    return ["layers {} -> {}: {}{}".format(*depths, reason, only_slots)]


def _layers(parameters: Mapping[str, ArraySpec | ParamSpec]) -> dict[str, int]:
    """Returns the number of layers by layer or place in a cycle, or in all."""
    layers = {}
    for name, spec in parameters.items():
        folder, first, *rest = *name.split("/"), ""
        if folder == LAYERS and first.isdigit():
            layers[first] = 1
        elif folder == LAYERS and spec.shape:
            layers["cycle/" + rest[0] if first == "cycle" else ""] = spec.shape[0]
    return layers


def _forbidden_change(old: ArraySpec, spec: ParamSpec) -> str | None:
    """Describes forbidden size changes ("" for another rank), or None."""
    if len(old.shape) != len(spec.shape):
        return ""
    changed = [
        f"{axis or 'unnamed'} {before} -> {after}"
        for axis, before, after in zip(spec.logical_axes, old.shape, spec.shape, strict=True)
        if before != after and axis not in (SLOTS, LAYERS)
    ]
    return f" ({', '.join(changed)})" if changed else None


def _resize(name: str, old: ArraySpec, spec: ParamSpec) -> AxisResize | None:
    if name not in spec.logical_axes:
        return None
    axis = spec.logical_axes.index(name)
    return AxisResize(axis, old.shape[axis], spec.shape[axis])


def _role(spec: ParamSpec) -> Role | None:
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
    index: Index | None = None,  # a slice per axis of the new array; None for all of it
    fresh: np.ndarray | float = 0.0,  # like the part, or a scalar
) -> np.ndarray:
    """Returns a shard of a new array: stored slots, then `fresh` ones.

    Layer j of the new model copies layer floor(j * old / new): layers repeat or are omitted evenly.
    """
    shape = leaf.new.shape
    index = (slice(None),) * len(shape) if index is None else index
    spans = [piece.indices(size)[:2] for piece, size in zip(index, shape, strict=True)]
    part = np.full([stop - start for start, stop in spans], fresh, leaf.new.dtype)
    source = [slice(*span) for span in spans]
    place = [slice(None)] * len(shape)
    if leaf.slots:
        axis, old, _ = leaf.slots
        start, stop = spans[axis]
        count = max(0, min(stop, old) - start)
        source[axis], place[axis] = slice(start, start + count), slice(count)
    if leaf.layers and leaf.layers.old != leaf.layers.new:
        axis, old, new = leaf.layers
        layers = [layer * old // new for layer in range(*spans[axis])]
        source[axis] = slice(None)
        part[tuple(place)] = np.take(stored[tuple(source)], layers, axis)
    else:
        part[tuple(place)] = stored[tuple(source)]
    return part


def make_record(
    growth: GrowthPlan, checkpoint: CheckpointingConfig, zoom: Mapping[str, float]
) -> Record:
    """Returns the record of a growth, as JSON in the run's checkpoints.

    `zoom` are the keys of the configuration that the growth fixed.
    """
    rate = checkpoint.growth.existing_slots_lr_scale
    return {
        "mode": checkpoint.growth.mode,
        "slots": {name: list(pair) for name, pair in growth.slots.items()},
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
    slots = record["slots"] if record else {}
    return {name: old for name, (old, new) in slots.items() if old < new}


def parent(metadata: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the newest of a run's ancestors (run/restore.py), or {}."""
    return (metadata.get("lineage") or [{}])[-1]


def sizes(record: Record) -> dict[str, str]:
    """Describes changed sizes: {"slots": "24 -> 40", "layers": "18 -> 24"}."""
    slots = {name: f"{old} -> {new}" for name, (old, new) in record["slots"].items()}
    found = {"slots": slots_by_place(slots)} if slots else {}
    if record["layers"]:
        found["layers"] = "{} -> {}".format(*record["layers"])
    return found


def event_fields(record: Record) -> dict[str, Any]:
    """Returns the fields of a `growth` event, besides its folders."""
    others = {name: record[name] for name in ("moments", "data", "existing_slots_lr_scale")}
    return {"mode": record["mode"], **sizes(record), **record["zoom"], **others}
