"""Plans a change of slots or depth, parameter by parameter.

Only the logical axes decide what may change: `slots`, the parameter tokens of Pattention (Wang et
al. 2024), and `layers`; every other size must agree.
"""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import numpy as np

from MaxText.checkpointing.compatibility import ArraySpec, mismatches
from MaxText.config.training_sections import CheckpointingConfig, GrowthMode
from MaxText.layers.pattention import slots_by_place
from MaxText.parallelism.logical_sharding import ParamSpec

SLOTS = "slots"
LAYERS = "layers"

Role = Literal["key", "value", "bias"]
Record = Mapping[str, Any]  # of `make_record`


class AxisResize(NamedTuple):
    """Stored and wanted size of an axis."""

    axis: int
    old: int
    new: int

    @property
    def differ(self) -> bool:
        return self.old != self.new


class ParamGrowth(NamedTuple):
    """The change of one parameter."""

    old: ArraySpec
    new: ArraySpec
    slots: AxisResize | None  # None without the axis
    layers: AxisResize | None
    role: Role | None  # whether slots are produced (key), summed over (value) or added to (bias)

    def takes_fresh(self, mode: GrowthMode) -> bool:
        """Returns whether new slots are freshly initialized instead of zero."""
        if self.slots is None or self.slots.new <= self.slots.old:
            return False
        return mode == "random" or (mode == "function_preserving" and self.role == "value")


class GrowthPlan(NamedTuple):
    """Parameter name -> ParamGrowth, in the order of the model."""

    leaves: Mapping[str, ParamGrowth]

    @property
    def slots(self) -> dict[str, tuple[int, int]]:
        """Parameter name -> (stored slots, new slots), if different."""
        return {
            name: (leaf.slots.old, leaf.slots.new)
            for name, leaf in self.leaves.items()
            if leaf.slots and leaf.slots.differ
        }

    @property
    def stored_slots(self) -> dict[str, int]:
        return {name: leaf.slots.old for name, leaf in self.leaves.items() if leaf.slots}

    @property
    def layers(self) -> tuple[int, int] | None:
        """(stored layers, new layers) if they differ, else None."""
        stacked = (leaf.layers for leaf in self.leaves.values() if leaf.layers)
        return next(((sizes.old, sizes.new) for sizes in stacked if sizes.differ), None)

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


def misfits(stored: Mapping[str, ArraySpec], wanted: Mapping[str, ParamSpec]) -> list[str]:
    """Describes obstacles to growing stored parameters into a model's."""
    if reason := _fixed_depth(stored, wanted):
        return [reason]
    specs = {name: _spec(spec) for name, spec in wanted.items()}
    return mismatches(stored, specs, lambda name: _forbidden_change(stored[name], wanted[name]))


def plan(stored: Mapping[str, ArraySpec], wanted: Mapping[str, ParamSpec]) -> GrowthPlan:
    """Returns the changes of stored parameters without `misfits`."""
    return GrowthPlan(
        {
            name: ParamGrowth(
                stored[name],
                _spec(spec),
                _resize(SLOTS, stored[name], spec),
                _resize(LAYERS, stored[name], spec),
                _role(spec),
            )
            for name, spec in wanted.items()
        }
    )


def _spec(spec: ParamSpec) -> ArraySpec:
    return ArraySpec(tuple(spec.shape), np.dtype(spec.dtype))


def _fixed_depth(stored: Mapping[str, ArraySpec], wanted: Mapping[str, ParamSpec]) -> str | None:
    old, new = _layers(stored), _layers(wanted)
    depths = sum(old.values()), sum(new.values())
    if depths[0] == depths[1]:
        return None
    connected = any(name.startswith("connections/") for name in wanted)
    if not connected and {*filter(str.isdigit, old)} == {*filter(str.isdigit, new)}:
        return None  # any number of repeats of a cycle has the same shapes
    reason = "no two layers have the same shapes, so none can be a copy of another"
    if connected:
        reason = "each layer of a model with dense connections sums another number of outputs"
    has_slots = any(SLOTS in spec.logical_axes for spec in wanted.values())
    only_slots = "; only slots can grow" if has_slots else ""
    return "layers {} -> {}: {}{}".format(*depths, reason, only_slots)


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
    source, place = [slice(*span) for span in spans], [slice(None)] * len(shape)
    if leaf.slots:
        axis, old, _ = leaf.slots
        start, stop = spans[axis]
        count = max(0, min(stop, old) - start)
        source[axis], place[axis] = slice(start, start + count), slice(count)
    if leaf.layers and leaf.layers.differ:
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
    record: Record | None = parent(metadata).get("growth")
    earlier = {"old_slots_learning_rate": "existing_slots_lr_scale"}  # read for one release
    return {earlier.get(name, name): one for name, one in record.items()} if record else None


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
