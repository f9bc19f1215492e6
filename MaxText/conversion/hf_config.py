"""Conversion between config.json and keys, by the tables of `families/`."""

from collections.abc import Collection, Mapping
from typing import Any, get_args

from MaxText.config import values as typed_values
from MaxText.config.layer_sections import SlotPlace
from MaxText.config.maxtext_keys import ALIASES
from MaxText.config.registry import KINDS, Registration, registration
from MaxText.config.schema import Config, Key, all_keys, flatten, split_entry, with_entries
from MaxText.conversion.families import FAMILIES
from MaxText.conversion.family import REQUESTED_LENGTH, REQUIRED, ConfigMapping, Family, evaluate
from MaxText.errors import UserError

# The config.json object for rotary scaling, and other keys that newer versions put in it.
_ROPE_SCALING = "rope_scaling"
_ROPE_PLAIN = ("rope_theta", "partial_rotary_factor")
_MAXTEXT_OBJECT = "maxtext"  # config.json object for keys of registered parts, which no family has
_SIZES = {  # sizes after global_parameter_scale, which config.json cannot express
    "base_emb_dim": "emb_dim",
    "base_num_query_heads": "num_query_heads",
    "base_num_kv_heads": "num_kv_heads",
    "base_mlp_dim": "mlp_dim",
    "base_num_decoder_layers": "num_layers",
    "head_dim": "head_dim",
}


def lookup_family(config: Mapping[str, Any]) -> Family | None:
    model_type = config.get("model_type")
    architectures = config.get("architectures")
    if isinstance(model_type, str) and model_type in FAMILIES:
        return FAMILIES[model_type]
    # Classes outside transformers may have any model_type, or none.
    alone = (family for family in FAMILIES.values() if not family.in_transformers)
    return next((family for family in alone if architectures == [family.architecture]), None)


def resolve_family(config: Mapping[str, Any], where: str) -> Family:
    """Returns the family named in a config.json; UserError if unknown."""
    if family := lookup_family(config):
        return family
    alone = " or ".join(f'["{f.architecture}"]' for f in FAMILIES.values() if not f.in_transformers)
    raise UserError(
        f"{where}: config.json has model_type={config.get('model_type')}. Known here: "
        f'{", ".join(FAMILIES)}. Only with "architectures": {alone} it needs none.'
    )


def config_from_hf(
    family: Family, config: Mapping[str, Any], where: str, given: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns our keys for the model of a config.json.

    `given` are keys set by the user; they may shorten the length below a window.
    """
    config = _flattened(config, where)
    shorter = str(given.get("max_target_length", ""))
    if shorter.isdecimal():
        config[REQUESTED_LENGTH] = int(shorter)
    problems: list[str] = []
    keys = {
        "decoder_block": family.decoder_block,
        **family.parts,
        **_registered_part_keys(config, where),
    }
    for setting in family.settings:
        if not _is_relevant(setting, keys):
            continue
        found = [config[x] for x in setting.hf_names if x in config and config[x] != setting.unset]
        value = found[-1] if found else evaluate(setting.default, config)
        converted = REQUIRED if value is REQUIRED else setting.to_key_value(value, config)
        problem = _problem(setting, value, converted, config)
        # Omits defaults computed from a value already reported as wrong.
        if problem and not (problems and callable(setting.default) and not found):
            problems.append(problem)
        if converted is not REQUIRED:
            # Later defaults may depend on this one.
            config.setdefault(setting.name, value)
            if evaluate(setting.implied, config) != value:
                keys |= dict.fromkeys(setting.keys, converted)
    if problems:
        lines = "\n".join(f"  {problem}" for problem in problems)
        raise UserError(f"{where}: config.json ({family.model_type}) cannot be imported:\n{lines}")
    keys |= given
    return drop_unused_keys(keys, keys)


def _registered_part_keys(config: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """Returns keys of the model and of parts stored in a config.json.

    Refuses others: `import_modules`, for example, would run code that the user did not name.
    """
    own = config.get(_MAXTEXT_OBJECT, {})
    if not isinstance(own, Mapping):
        raise UserError(f"{where}: config.json: {_MAXTEXT_OBJECT}={own} is not a JSON object.")
    for name in own:
        if name in ALIASES or (name in all_keys() and all_keys()[name].section[0] != "model"):
            raise UserError(
                f"{where}: config.json: {_MAXTEXT_OBJECT}.{name} is not a key of a registered part."
            )
    return own


def _problem(setting: ConfigMapping, value: Any, converted: Any, config: Mapping[str, Any]) -> str:
    name = setting.name
    if value is REQUIRED:
        return f"{name} is missing"
    if converted is REQUIRED:
        known = [
            "null" if hf_value is None else str(hf_value) for hf_value, _ in setting.values or ()
        ]
        only = f": only {' or '.join(known)} can be" if known else " cannot be"
        return f"{name}={value}{only} imported. {setting.hint}".rstrip()
    taken_as_it_is = setting.values is None and setting.read is None
    for key in [all_keys()[name] for name in setting.keys] if taken_as_it_is else ():
        try:
            number = typed_values.convert(value, key.annotation)
        except typed_values.InvalidValueError as error:
            return f"{name}: {error}"
        # -1 means "computed" for some of our keys only.
        if key.annotation is int and number < 1:
            return f"{name}={number} is not >= 1"
        if key.violates_bounds(number):
            return f"{name}={number} is not {key.bounds_text}"
    wanted = evaluate(setting.default, config) if setting.is_computed else REQUIRED
    if wanted not in (value, REQUIRED):
        return f"{name}={value} contradicts the other keys, which give {wanted}"
    return ""


def _flattened(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    plain = {name: value for name, value in config.items() if value is not None}
    for name in ("rope_scaling", "rope_parameters"):
        if not isinstance(config.get(name) or {}, Mapping):
            raise UserError(f"{where}: config.json: {name}={config[name]} is not a JSON object.")
    # With both, transformers uses the older name alone (PreTrainedConfig.__post_init__).
    nested = dict(config.get("rope_scaling") or config.get("rope_parameters") or {})
    if "type" in nested:
        nested.setdefault("rope_type", nested["type"])
    for name, value in nested.items():
        if isinstance(value, Mapping):
            raise UserError(
                f"{where}: config.json has rotary parameters that differ by layer ({name}), which "
                "is not supported."
            )
        if value is not None:
            plain[name if name in _ROPE_PLAIN else f"{_ROPE_SCALING}.{name}"] = value
    # A null here means "no window", not "the default".
    if "sliding_window" in config:
        plain["sliding_window"] = config["sliding_window"]
    return plain


def _is_relevant(setting: ConfigMapping, values: Mapping[str, Any]) -> bool:
    schema = all_keys()
    return not setting.keys or any(_has_effect(schema[name], values) for name in setting.keys)


def drop_unused_keys(values: Mapping[str, Any], names: Mapping[str, Any]) -> dict[str, Any]:
    """Drops disabled keys from `names`, refused by a configuration.

    `values` holds all known keys of the configuration; absent ones have their default.
    """
    schema = all_keys()

    def is_read(name: str) -> bool:
        name, entry = split_entry(name)
        if name not in schema:
            return True
        key = schema[name]
        own = key.entries.get(entry)  # a configuration refuses unknown ones
        return _has_effect(key, values) and (own is None or _has_effect(own, values))

    return {name: value for name, value in names.items() if is_read(name)}


def model_keys(values: Mapping[str, Any], chosen: Collection[str] | None = None) -> dict[str, Any]:
    known = [key.name for key in all_keys().values() if key.section[0] == "model"]
    names = [name for name in known if chosen is None or name in chosen]
    return drop_unused_keys(values, {name: values[name] for name in names})


def _has_effect(key: Key, values: Mapping[str, Any]) -> bool:
    schema = all_keys()
    return all(
        any(values.get(other, schema[other].default) in wanted for other, wanted in group.items())
        for group in key.conditions
    )


def find_family(config: Config, asked: str, imported_as: Family | None = None) -> Family:
    """Returns the `asked` family, the import's, or the first fit; UserError."""
    if asked and asked not in FAMILIES:
        raise UserError(f"family={asked} has no table. Known here: {', '.join(FAMILIES)}.")
    by_preference = sorted(FAMILIES.values(), key=lambda family: family is not imported_as)
    candidates = [FAMILIES[asked]] if asked else by_preference
    mismatches = {family.model_type: _mismatches(family, config) for family in candidates}
    nearest = min(mismatches, key=lambda name: len(mismatches[name]))
    if not (lines := mismatches[nearest]):
        return FAMILIES[nearest]
    what = f"no family matches this model. The nearest is {nearest}, but for:"
    if asked:
        what = f"family={asked} differs from this model:"
        if any(line.startswith("zoom_dims.") for line in lines):
            lines.append("No weights make up for its zoom: export the model before it grew.")
    raise UserError("\n  ".join([what, *lines]))


def _chosen_parts(config: Config) -> list[Registration]:
    sections = [layer.config for layer in config.model.layers]
    chosen = {("mixer", one.block.mixer) for one in sections}
    chosen |= {("feed_forward", one.feed_forward.feed_forward_type) for one in sections}
    return [registration(*one) for one in sorted(chosen)]


def _names_tensors(part: Registration) -> bool:
    return not part.is_built_in or bool(part.load().hugging_face_names)


def part_keys(family: Family, config: Config) -> dict[str, Any]:
    """Returns keys for parts with own tensor names: choices and part keys.

    Empty if other layers use parts that the family does not have.
    """
    parts = _chosen_parts(config)
    block = config.model.block
    own = [part for part in parts if _names_tensors(part)]
    others = [part for part in parts if part not in own]
    if any(part.name != family.parts.get(KINDS[part.kind], part.name) for part in others):
        return {}
    names = {KINDS[part.kind] for part in own}
    names.update(*(part.keys.model_fields for part in own if part.keys))
    of_letters = {name.partition(".")[0] for _, keys in block.layer_kinds for name, _ in keys}
    if names and names >= of_letters:
        names |= {"layer_pattern", "layer_kinds"} if block.layer_pattern else set()
    return {name: value for name, value in flatten(config).items() if name in names}


def absent_in_transformers(family: Family, config: Config) -> str:
    own = [part.name for part in _chosen_parts(config) if _names_tensors(part)]
    return " and ".join(own) or ("" if family.in_transformers else family.architecture)


def _mismatches(family: Family, config: Config) -> list[str]:
    values = model_config_values(config)
    own = part_keys(family, config)
    read_there = drop_unused_keys(values | family.parts, family.parts)
    found = [
        f"{name}={_shown(values[name])}, not {_shown(wanted)}"
        for name, wanted in drop_unused_keys(values, read_there).items()
        if values[name] != wanted and name not in own
    ]
    written = _written(family, values)
    for setting in family.settings:
        if not setting.keys or not _is_relevant(setting, values):
            continue
        name = setting.keys[0]
        value = values[setting.keys[0]]
        wanted = evaluate(setting.default, written) if setting.is_computed else REQUIRED
        if any(values[other] != value for other in setting.keys):
            found.append(" and ".join(f"{one}={values[one]}" for one in setting.keys))
        # REQUIRED if a size it depends on does not fit, which is already reported.
        elif wanted not in (value, REQUIRED):
            found.append(f"{name}={value}, not {wanted}")
        elif setting.is_written and written[setting.name] is REQUIRED:
            found.append(f"{name}={_shown(value)}")
    return found


def _written(family: Family, values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns config.json values by setting, REQUIRED where it has no value."""
    settings = (one for one in family.settings if one.is_written and _is_relevant(one, values))
    return {setting.name: setting.to_hf_value(values) for setting in settings}


def _shown(value: Any) -> str:
    return str(list(value)) if isinstance(value, tuple) else str(value)


def model_config_values(config: Config) -> dict[str, Any]:
    """Returns the model keys in normalized form, with sizes after scaling."""
    values = with_entries(flatten(config))
    model = config.model
    dimensions = model.shape.dimensions
    pattention = model.pattention
    values |= {key: getattr(dimensions, size) for key, size in _SIZES.items()}
    # A position table determines the length; a rotary model has no table.
    if values["trainable_position_size"] == -1:
        values["trainable_position_size"] = values["max_target_length"]
    if values["position_embedding"] == "learned":
        values["max_target_length"] = values["trainable_position_size"]
    # Slot numbers without -1, and zooms if different, else -1.
    values["zoom_dim"] = 0.0
    for place in get_args(SlotPlace):
        number = pattention.num_slots(place, dimensions.emb_dim)
        zoom = pattention.zoom(place, dimensions.emb_dim)
        values[f"{place}_slot_num"] = number
        values[f"zoom_dims.{place}"] = -1.0 if zoom == number else zoom
    # slot_num is the query/key/value count, which other places default to.
    values |= {"slot_num": values["qkv_slot_num"], "qkv_slot_num": -1}
    experts = model.mixture_of_experts
    mlp_activations = model.feed_forward.mlp_activations
    has_experts = all(one.config.mixture_of_experts.num_experts > 1 for one in model.layers)
    equivalent = (  # key, default, whether its value means the same
        # dense_conn distinguishes the two.
        ("connection_type", "auto", model.block.connection_type in ("residual", "dense")),
        ("attention_types", (), set(model.mixers) <= {"attention"}),
        ("attention_scale", None, model.attention.attention_scale == dimensions.head_dim**-0.5),
        ("moe_layers", None, has_experts),
        ("moe_mlp_dim", -1, experts.moe_mlp_dim == dimensions.mlp_dim),
        ("moe_activations", None, experts.moe_activations == mlp_activations),
    )
    return values | {name: default for name, default, is_default in equivalent if is_default}


def to_config_json(family: Family, config: Config) -> dict[str, Any]:
    values = model_config_values(config)
    result: dict[str, Any] = {"architectures": [family.architecture]}
    if family.has_model_type:
        result["model_type"] = family.model_type
    if family.auto_map:
        result["auto_map"] = dict(family.auto_map)
    for setting, value in _written(family, values).items():
        *objects, name = setting.split(".")
        place = result.setdefault(objects[0], {}) if objects else result
        place[name] = value
    if result.get(_ROPE_SCALING) == {"rope_type": "default"}:
        del result[_ROPE_SCALING]  # the default, also in versions that lack this value
    if own := part_keys(family, config):
        result[_MAXTEXT_OBJECT] = own
    return result


def table_names(family: Family) -> set[str]:
    """Returns config.json keys determined by the model, with older names."""
    of_model = [setting for setting in family.settings if setting.keys]
    names = {name.partition(".")[0] for setting in of_model for name in setting.hf_names}
    return names | {
        _MAXTEXT_OBJECT,
        "rope_parameters",
        "rope_scaling",
        "architectures",
        *(("model_type",) if family.has_model_type else ()),
    }
