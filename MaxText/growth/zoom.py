"""The zoom of Pattention's scores, constant while slots are added.

Theta multiplies by sqrt(n). A larger n changes the function even if every new key is zero, unless
zoom_dim (model.pattention in the configuration) keeps the n of training.
"""

from collections.abc import Mapping
from typing import Any

from MaxText.config.layer_sections import SlotPlace
from MaxText.config.schema import Config, all_keys, unflatten
from MaxText.config.serialization import renamed
from MaxText.growth.growth_plan import GrowthPlan
from MaxText.layers.pattention import ZOOMED, slot_place


def places(config: Config) -> list[SlotPlace]:
    """Returns the places of slots in a model."""
    found: list[SlotPlace] = []
    if config.model.attention.attention_projections == "pattention":
        found.extend(("qkv", "proj"))
    if config.model.feed_forward.feed_forward_type == "pattention":
        found.append("ffn")
    return found


def fixed_zooms(config: Config) -> dict[SlotPlace, float]:
    """Returns place -> zoom where it does not follow the number of slots."""
    pattention = config.model.pattention
    zooms: dict[SlotPlace, float] = {}
    for place in places(config):
        default = 4 * pattention.zoom_dim if place == "ffn" else pattention.zoom_dim
        own = getattr(pattention.zoom_dims, place)
        if zoom := default if own == -1 else own:
            zooms[place] = zoom
    return zooms


def inherited(stored: Config | None, config: Config, *, by_keys: bool = False) -> dict[str, float]:
    """Returns keys to keep the zoom of `stored`; empty if the user sets one.

    With `by_keys`, a place without a fixed zoom follows its new number of slots.
    """
    uses_zoom = config.model.pattention.normalize_type in ZOOMED
    if stored is None or not uses_zoom or not fixed_zooms(stored) or fixed_zooms(config):
        return {}
    return zoom_dim_overrides(fixed_zooms(stored) if by_keys else _zooms(stored, config), config)


def _zooms(stored: Config, config: Config) -> dict[SlotPlace, float]:
    width = stored.model.shape.dimensions.emb_dim
    return {place: float(stored.model.pattention.zoom(place, width)) for place in places(config)}


def stored_config(metadata: Mapping[str, Any]) -> Config | None:
    """Returns the configuration of a checkpoint, or None."""
    values = metadata.get("config")
    if not values:
        return None
    # A checkpoint of an earlier version may hold keys that were removed since.
    current = renamed(values)
    return unflatten({name: value for name, value in current.items() if name in all_keys()})


def source_zoom_dims(
    stored: Config | None, growth: GrowthPlan, config: Config
) -> dict[SlotPlace, float]:
    """Returns place -> zoom in training, by slots if `stored` is unknown."""
    if stored is not None:
        return _zooms(stored, config)
    slots = {slot_place(name): float(number) for name, number in growth.stored_slots.items()}
    zooms: dict[SlotPlace, float] = {place: slots[place] for place in places(config)}
    return zooms | fixed_zooms(config)


def zoom_dim_overrides(zooms: Mapping[SlotPlace, float], config: Config) -> dict[str, float]:
    """Returns keys to fix the zoom of each place; empty if already set."""
    if zooms.items() <= fixed_zooms(config).items():
        return {}
    pattention = config.model.pattention
    bases = {zoom / 4 if place == "ffn" else zoom for place, zoom in zooms.items()}
    is_whole = zooms.keys() == {*places(config)}
    if is_whole and len(bases) == 1 and all(own == -1 for _, own in pattention.zoom_dims):
        return {"zoom_dim": bases.pop()}
    return {f"zoom_dims.{place}": zoom for place, zoom in zooms.items()}


def other_changes(stored: Config | None, config: Config) -> list[str]:
    """Describes differing keys of model.pattention, except sizes and zoom."""
    if stored is None or not places(config):
        return []
    old, new = stored.model.pattention, config.model.pattention
    was, now = (
        dict(pattention) | {f"scale_factors.{name}": one for name, one in pattention.scale_factors}
        for pattention in (old, new)
    )
    return [
        f"{name} {was[name]} -> {now[name]}"
        for name in now
        if not name.endswith(("slot_num", "zoom_dim", "zoom_dims", "scale_factors"))
        if was[name] != now[name]
    ]
