"""config.json as our keys, and our keys as config.json, by the tables of `families/`."""

from collections.abc import Mapping
from typing import Any

from MaxText.configuration.catalogue import Key, all_keys, flat
from MaxText.configuration.schema import Config
from MaxText.conversion.families.known import FAMILIES, WITHOUT_PARTS
from MaxText.conversion.family import REQUIRED, Family, Setting
from MaxText.errors import UserError

_SIZES = {  # sizes after global_parameter_scale, which config.json has no word for
    "base_emb_dim": "emb_dim",
    "base_num_query_heads": "num_query_heads",
    "base_num_kv_heads": "num_kv_heads",
    "base_mlp_dim": "mlp_dim",
    "base_num_decoder_layers": "num_layers",
    "head_dim": "head_dim",
}


def family_of(config: Mapping[str, Any], where: str) -> Family:
    """The family that a config.json names.

    Raises:
      UserError: it names none, or one without a table.
    """
    model_type = config.get("model_type")
    known = ", ".join(FAMILIES)
    if not isinstance(model_type, str):
        raise UserError(f"{where}: config.json has no model_type. Known here: {known}.")
    if model_type in FAMILIES:
        return FAMILIES[model_type]
    reason = WITHOUT_PARTS.get(model_type)
    because = f": {reason}" if reason else ""
    raise UserError(
        f"{where}: model_type={model_type} cannot be converted{because}. Known here: {known}."
    )


def to_keys(
    family: Family, config: Mapping[str, Any], where: str, given: Mapping[str, Any]
) -> dict[str, Any]:
    """Our keys that make the model of a config.json.

    Args:
      config: config.json.
      where: the folder, for messages.
      given: keys that the user set, which may shorten the length below a window.

    Raises:
      UserError: everything in it that our parts cannot do, in one message.
    """
    config = _flattened(config, where)
    problems: list[str] = []
    keys: dict[str, Any] = {"decoder_block": family.decoder_block, **family.parts}
    for setting in family.settings:
        value = _value(setting, config)
        if value is REQUIRED:
            why = ", and the other sizes do not give it" if callable(setting.default) else ""
            problems.append(f"{setting.name} is missing{why}")
            continue
        ours = _ours(setting, value)
        if ours is REQUIRED:
            problems.append(_cannot(setting, value))
            continue
        # Later defaults may be computed from this one.
        config.setdefault(setting.name, value)
        keys |= dict.fromkeys(setting.ours, ours)
    if family.window and not problems:
        name, default = family.window
        window, length = config.get(name, default), keys["max_target_length"]
        shorter = str(given.get("max_target_length", ""))
        # What is no number is for the configuration to refuse.
        length = int(shorter) if shorter.isdecimal() else length
        if window is not None and not isinstance(window, int | float):
            problems.append(f"{name}={window} is no number of tokens")
        elif window is not None and isinstance(length, int | float) and window < length:
            problems.append(
                f"{name}={window} is below the length of {length} tokens, and attention has no "
                f"window here. Up to {window} tokens both are the same: add "
                f"max_target_length={window}."
            )
    if problems:
        lines = "\n".join(f"  {problem}" for problem in problems)
        raise UserError(f"{where}: config.json ({family.model_type}) cannot be imported:\n{lines}")
    keys |= given
    return with_effect(keys, keys)


def _flattened(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """config.json without nulls, and what newer and older versions nest, under its plain names."""
    plain = {name: value for name, value in config.items() if value is not None}
    nested: dict[str, Any] = {}
    for name in ("rope_scaling", "rope_parameters"):
        value = config.get(name) or {}
        if not isinstance(value, Mapping):
            raise UserError(f"{where}: config.json: {name}={value} is no JSON object.")
        nested |= value
    if "type" in nested:
        nested.setdefault("rope_type", nested["type"])
    for name in ("rope_theta", "partial_rotary_factor", "rope_type"):
        if nested.get(name) is not None:
            plain[name] = nested[name]
    # A null here means "no window", not "the default".
    return (
        plain | {"sliding_window": config["sliding_window"]}
        if "sliding_window" in config
        else plain
    )


def _value(setting: Setting, config: Mapping[str, Any]) -> Any:
    found = [config[name] for name in setting.theirs if name in config]
    if found:
        return found[-1] if len(setting.theirs) > 1 else found[0]
    if not callable(setting.default):
        return setting.default
    try:
        return setting.default(config)
    except (KeyError, TypeError, ZeroDivisionError):
        return REQUIRED  # the other key is missing or no size, which is said as well


def _ours(setting: Setting, value: Any) -> Any:
    if setting.values is None:
        return value
    return next((ours for theirs, ours in setting.values if theirs == value), REQUIRED)


def _cannot(setting: Setting, value: Any) -> str:
    assert setting.values is not None
    possible = " or ".join(str(theirs) for theirs, _ in setting.values)
    return f"{setting.name}={value}: only {possible} can be imported. {setting.remedy}".rstrip()


def with_effect(values: Mapping[str, Any], names: Mapping[str, Any]) -> dict[str, Any]:
    """Without the keys that another one switches off, which a configuration refuses.

    Args:
      values: all that is known of the configuration; absent keys have their default.
      names: keys to choose from, with their values.
    """
    schema = all_keys()
    return {
        name: value
        for name, value in names.items()
        # A name that is no key is for the configuration to refuse.
        if name not in schema or _has_effect(schema[name], values)
    }


def _has_effect(key: Key, values: Mapping[str, Any]) -> bool:
    schema = all_keys()
    return all(
        values.get(other, schema[other].default) in wanted for other, wanted in key.only_if.items()
    )


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
    lines = [f"  {name}: {'; '.join(found)}" for name, found in mismatches.items()]
    what = (
        f"family={asked} has other parts than this model"
        if asked
        else "no family of Hugging Face has the parts of this model, so transformers cannot run it"
    )
    raise UserError(what + ":\n" + "\n".join(lines))


def _mismatches(family: Family, config: Config) -> list[str]:
    values = our_values(config)
    found = [
        f"{name}={_shown(values[name])}, not {_shown(wanted)}"
        for name, wanted in with_effect(values, family.parts).items()
        if values[name] != wanted
    ]
    written: dict[str, Any] = {}
    for setting in family.settings:
        ours = {name: values[name] for name in setting.ours}
        if not ours:
            continue
        if len(set(ours.values())) > 1:
            found.append(" and ".join(f"{name}={value}" for name, value in ours.items()))
            continue
        value = next(iter(ours.values()))
        if not setting.is_written:
            wanted = _value(Setting((), default=setting.default), written)
            # Where a size it is computed from does not fit, that has been said.
            if wanted not in (value, REQUIRED):
                found.append(f"{setting.ours[0]}={value}, not {wanted}")
            continue
        theirs = _theirs(setting, value)
        if theirs is REQUIRED:
            found.append(f"{setting.ours[0]}={_shown(value)}")
        written[setting.name] = theirs
    return found


def _theirs(setting: Setting, value: Any) -> Any:
    if setting.values is None:
        return value
    return next((theirs for theirs, ours in setting.values if ours == value), REQUIRED)


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
    return values


def to_config_json(family: Family, config: Config) -> dict[str, Any]:
    """config.json of a model of ours that belongs to the family."""
    values = our_values(config)
    result: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
    }
    for setting in family.settings:
        if setting.is_written:
            result[setting.name] = _theirs(setting, values[setting.ours[0]])
    if family.window:
        result[family.window[0]] = None
    return result


def settled_names(family: Family) -> set[str]:
    """Keys of config.json that the table decides, older and newer names included."""
    names = {name for setting in family.settings for name in setting.theirs}
    return names | {"rope_parameters", "rope_scaling", "architectures", "model_type",
                    *((family.window[0],) if family.window else ())}  # fmt: skip
