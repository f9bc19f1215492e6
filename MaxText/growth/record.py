"""Record of a run's growth, as JSON in its checkpoints.

mode                     value of growth.mode
slots                    {parameter name: [stored, now]} where the two differ
layers                   [stored, now] or null
zoom                     keys of the configuration that the growth fixed
moments, data            values of growth.opt_state and growth.data
existing_slots_lr_scale  factor of the updates of pre-existing slots
"""

from collections.abc import Mapping
from typing import Any

from MaxText.config.training_sections import CheckpointingConfig
from MaxText.growth.growth_plan import GrowthPlan
from MaxText.layers.pattention import slots_by_place

Record = Mapping[str, Any]


def make_record(
    growth: GrowthPlan, checkpoint: CheckpointingConfig, zoom: Mapping[str, float]
) -> Record:
    """Returns the record of a growth, with the fixed keys `zoom`."""
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
    record: Record | None = _parent(metadata).get("growth")
    earlier = {"old_slots_learning_rate": "existing_slots_lr_scale"}  # read for one release
    return {earlier.get(name, name): one for name, one in record.items()} if record else None


def existing_slots(record: Record | None) -> dict[str, int]:
    """Returns parameter name -> number of leading, pre-existing slots."""
    slots = record["slots"] if record else {}
    return {name: old for name, (old, new) in slots.items() if old < new}


def parent_folder(metadata: Mapping[str, Any]) -> str:
    """Returns the source folder of a checkpoint's run; empty if unknown."""
    return _parent(metadata).get("folder", "")


def _parent(metadata: Mapping[str, Any]) -> Mapping[str, Any]:
    return (metadata.get("lineage") or [{}])[-1]


def sizes(record: Record) -> dict[str, str]:
    """Describes changed sizes: {"slots": "24 -> 40", "layers": "18 -> 24"}."""
    slots = {name: f"{old} -> {new}" for name, (old, new) in record["slots"].items()}
    found = {"slots": slots_by_place(slots)} if slots else {}
    if record["layers"]:
        found["layers"] = "{} -> {}".format(*record["layers"])
    return found


def event_fields(record: Record, folder: str, grown: str = "") -> dict[str, Any]:
    """Returns the fields of a `growth` event; `grown` is convert.py's result."""
    begun = {"from": folder, "through": grown} if grown else {"from": folder}
    others = {name: record[name] for name in ("moments", "data", "existing_slots_lr_scale")}
    return {**begun, "mode": record["mode"], **sizes(record), **record["zoom"], **others}
