"""How a run's parameters grew, as JSON that is kept with its checkpoints and told in its records.

mode                     value of growth_mode
slots                    {parameter name: [stored, now]} where the two differ
layers                   [stored, now] or null
zoom                     keys of the configuration that the growth fixed
moments, data            values of growth_moments and growth_data
old_slots_learning_rate  the value of growth_old_slots_learning_rate
"""

from collections.abc import Mapping
from typing import Any

from MaxText.checkpointing.growth.plan import GrowthPlan
from MaxText.configuration.training_sections import Checkpoint

Record = Mapping[str, Any]


def make_record(growth: GrowthPlan, section: Checkpoint, zoom: Mapping[str, float]) -> Record:
    """The record of a growth.

    Args:
      growth: what became of the parameters.
      section: the keys that say how.
      zoom: keys of the configuration that were fixed.
    """
    return {
        "mode": section.mode_of_growth,
        "slots": {name: list(pair) for name, pair in growth.slots.items()},
        "layers": list(growth.layers) if growth.layers else None,
        "zoom": dict(zoom),
        "moments": section.growth_moments,
        "data": section.growth_data,
        "old_slots_learning_rate": section.growth_old_slots_learning_rate,
    }


def latest(metadata: Mapping[str, Any]) -> Record | None:
    """The record of the run that wrote a checkpoint; None if it did not begin with a growth."""
    lineage = metadata.get("lineage") or [{}]
    return lineage[-1].get("growth")


def sizes(record: Record) -> dict[str, str]:
    """What changed, in words: {"slots": "24 -> 40, 96 -> 160", "layers": "18 -> 24"}."""
    pairs = {
        "slots": sorted({tuple(pair) for pair in record["slots"].values()}),
        "layers": [record["layers"]] if record["layers"] else [],
    }
    return {
        name: ", ".join(f"{old} -> {new}" for old, new in found)
        for name, found in pairs.items()
        if found
    }


def event_facts(record: Record, folder: str) -> dict[str, Any]:
    """What the event of kind `growth` says, short enough for one line.

    Args:
      folder: of the smaller model.
    """
    others = {
        name: value
        for name, value in record.items()
        if name not in ("mode", "slots", "layers", "zoom")
    }
    return {"from": folder, "mode": record["mode"], **sizes(record), **record["zoom"], **others}
