"""Our keys as config.json, and the family that a model of ours belongs to."""

from collections.abc import Mapping
from typing import Any, get_args

from MaxText.configuration.catalogue import all_keys, flat
from MaxText.configuration.layer_sections import SlotPlace
from MaxText.configuration.schema import Config
from MaxText.conversion.families.known import FAMILIES
from MaxText.conversion.family import REQUIRED, Family
from MaxText.conversion.settings import ROPE_SCALING, says_something, with_effect
from MaxText.errors import UserError

_SIZES = {  # sizes after global_parameter_scale, which config.json has no word for
    "base_emb_dim": "emb_dim",
    "base_num_query_heads": "num_query_heads",
    "base_num_kv_heads": "num_kv_heads",
    "base_mlp_dim": "mlp_dim",
    "base_num_decoder_layers": "num_layers",
    "head_dim": "head_dim",
}


def find_family(config: Config, asked: str) -> Family:
    """The family that a configuration of ours belongs to.

    Args:
      asked: the model_type that the user wants, or "" for the first that fits.

    Raises:
      UserError: no family has these parts; says what differs.
    """
    if asked and asked not in FAMILIES:
        raise UserError(f"family={asked} has no table. Known here: {', '.join(FAMILIES)}.")
    candidates = [FAMILIES[asked]] if asked else list(FAMILIES.values())
    mismatches = {family.model_type: _mismatches(family, config) for family in candidates}
    for family in candidates:
        if not mismatches[family.model_type]:
            return family
    if asked:
        lines = [f"family={asked} has other parts than this model:", *mismatches[asked]]
        raise UserError("\n  ".join(lines))
    distances = {
        family.model_type: len(mismatches[family.model_type]) + _num_one_sided(family, config)
        for family in candidates
    }
    nearest, *others = sorted(distances, key=lambda name: distances[name])
    what = "no family that can be written has the parts of this model. The nearest is"
    lines = "\n  ".join([f"{what} {nearest}, but for:", *mismatches[nearest]])
    counts = ", ".join(f"{name} {distances[name]}" for name in others)
    raise UserError(f"{lines}\nThe others differ in as many keys or more: {counts}.")


def _num_one_sided(family: Family, config: Config) -> int:
    """How many keys of the model mean something for one alone: this model, or the family's."""
    values = our_values(config)
    names = {key.name: None for key in all_keys().values() if key.section[0] == "model"}
    ours, theirs = (with_effect(v, names) for v in (values, {**values, **family.parts}))
    return len(ours.keys() ^ theirs.keys())


def _mismatches(family: Family, config: Config) -> list[str]:
    """What differs: keys of ours, their values, and why where the family says so."""
    values = our_values(config)
    found = [
        f"{name}={_shown(values[name])}, not {_shown(wanted)}" + _reason(family, name)
        for name, wanted in with_effect(values, family.parts).items()
        if values[name] != wanted
    ]
    written: dict[str, Any] = {}
    for setting in family.settings:
        ours = {name: values[name] for name in setting.ours}
        if not ours or not says_something(setting, values):
            continue
        if len(set(ours.values())) > 1:
            found.append(" and ".join(f"{name}={value}" for name, value in ours.items()))
            continue
        value = next(iter(ours.values()))
        if setting.is_computed:
            wanted = setting.value_of_silence(written)
            # Where a size it is computed from does not fit, that has been said.
            if wanted not in (value, REQUIRED):
                found.append(f"{setting.ours[0]}={value}, not {wanted}")
        if not setting.is_written:
            continue
        theirs = setting.theirs_of(values)
        if theirs is REQUIRED:
            found.append(f"{setting.ours[0]}={_shown(value)}{_reason(family, setting.ours[0])}")
        written[setting.name] = theirs
    return found


def _reason(family: Family, name: str) -> str:
    reason = family.reasons.get(name)
    return f" ({reason})" if reason else ""


def _shown(value: Any) -> str:
    return str(list(value)) if isinstance(value, tuple) else str(value)


def our_values(config: Config) -> dict[str, Any]:
    """Keys of the model, with sizes as they are after scaling."""
    values, dimensions = flat(config), config.model.shape.dimensions
    values |= {key: getattr(dimensions, size) for key, size in _SIZES.items()}
    # A table of positions decides the length of the other side; a rotary model has none.
    if values["trainable_position_size"] == -1:
        values["trainable_position_size"] = values["max_target_length"]
    if values["position_embedding"] == "learned":
        values["max_target_length"] = values["trainable_position_size"]
    return values | _slots(config) | _in_one_form(config)


def _in_one_form(config: Config) -> dict[str, Any]:
    """What can be said in several ways, with the default where it means the default."""
    model, dimensions = config.model, config.model.shape.dimensions
    experts = model.mixture_of_experts
    scale = model.attention.attention_scale
    return {
        "attention_types": ()
        if set(model.mixers) <= {"attention"}
        else model.attention.attention_types,
        "attention_scale": None if scale == dimensions.head_dim**-0.5 else scale,
        "moe_layers": None
        if all(one.section.mixture_of_experts.num_experts > 1 for one in model.layers)
        else experts.moe_layers,
        "moe_mlp_dim": -1 if experts.moe_mlp_dim == dimensions.mlp_dim else experts.moe_mlp_dim,
        "moe_activations": None
        if experts.moe_activations == model.feed_forward.mlp_activations
        else experts.moe_activations,
    }


def _slots(config: Config) -> dict[str, Any]:
    """Numbers of slots with every -1 replaced, and zooms that differ from them, else -1."""
    section, emb_dim = config.model.pattention, config.model.shape.dimensions.emb_dim
    values: dict[str, Any] = {"zoom_dim": 0.0}
    for place in get_args(SlotPlace):
        number, zoom = section.num_slots(place, emb_dim), section.zoom(place, emb_dim)
        values[f"{place}_slot_num"] = number
        values[f"{place}_zoom_dim"] = -1.0 if zoom == number else zoom
    # What query, key and value have is what the others follow unless they are set.
    return values | {"slot_num": values.pop("qkv_slot_num"), "qkv_slot_num": -1}


def to_config_json(family: Family, config: Config) -> dict[str, Any]:
    """config.json of a model of ours that belongs to the family."""
    values = our_values(config)
    result: dict[str, Any] = {"architectures": [family.architecture]}
    if family.has_model_type:
        result["model_type"] = family.model_type
    if family.auto_map:
        result["auto_map"] = dict(family.auto_map)
    for setting in family.settings:
        if setting.is_written and says_something(setting, values):
            *objects, name = setting.name.split(".")
            place = result.setdefault(objects[0], {}) if objects else result
            place[name] = setting.theirs_of(values)
    if result.get(ROPE_SCALING) == {"rope_type": "default"}:
        del result[ROPE_SCALING]  # what silence means, also to versions that do not know the word
    return result


def kept_window(
    family: Family, kept: Mapping[str, Any], written: Mapping[str, Any]
) -> dict[str, Any]:
    """The window and the length of the folder that unchanged weights came from, where they hold.

    Where an import shortened the length to the window, layers are global here. The longer texts of
    the first folder are then lost for us, not for the export.

    Args:
      kept: config.json of that folder.
      written: what the table gives.
    """
    if not family.window or family.window not in kept or written[family.window] is not None:
        return {}
    window = kept[family.window]
    length = next(s.name for s in family.settings if "max_target_length" in s.ours)
    if window is None or written[length] > window:
        return {}
    result = {family.window: window}
    if written[length] == window and length in kept:
        result[length] = kept[length]
    return result


def kept_words(family: Family, kept: Mapping[str, Any]) -> dict[str, Any]:
    """Words of the folder that the weights came from for what no key of ours decides.

    Several may mean the same, and the program beside that folder may know only its own.
    """
    undecided = [s for s in family.settings if not s.ours and s.name in kept]
    return {
        s.name: kept[s.name] for s in undecided if s.ours_of(kept[s.name], kept) is not REQUIRED
    }


def settled_names(family: Family) -> set[str]:
    """Keys of config.json that the table decides, older and newer names included."""
    names = {name.partition(".")[0] for setting in family.settings for name in setting.theirs}
    return names | {"rope_parameters", "rope_scaling", "architectures",
                    *(("model_type",) if family.has_model_type else ())}  # fmt: skip
