"""config.json as our keys, by the tables of `families/`."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from MaxText.configuration import values as typed_values
from MaxText.configuration.catalogue import Key, all_keys
from MaxText.configuration.problems import Problem
from MaxText.conversion.families.known import FAMILIES, WITHOUT_PARTS
from MaxText.conversion.family import REQUIRED, TEXTS, Family, Setting
from MaxText.errors import UserError

# The object that says how rotary frequencies are changed, and what newer versions put in as well.
ROPE_SCALING = "rope_scaling"
_ROPE_PLAIN = ("rope_theta", "partial_rotary_factor")
_WORD = re.compile(r"[a-z]\w+")


def named_family(config: Mapping[str, Any]) -> Family | None:
    """The family that a config.json names, or None if it names none with a table."""
    model_type, architectures = config.get("model_type"), config.get("architectures")
    if isinstance(model_type, str) and (model_type in FAMILIES or model_type in WITHOUT_PARTS):
        return FAMILIES.get(model_type)
    # Classes that are not of transformers may be called anything, and need not be called.
    alone = (family for family in FAMILIES.values() if not family.in_transformers)
    return next((family for family in alone if architectures == [family.architecture]), None)


def family_of(config: Mapping[str, Any], where: str) -> Family:
    """The family that a config.json names.

    Raises:
      UserError: it names none, or one without a table.
    """
    family, model_type = named_family(config), config.get("model_type")
    if family is not None:
        return family
    known = ", ".join(FAMILIES)
    if not isinstance(model_type, str):
        alone = [f'["{f.architecture}"]' for f in FAMILIES.values() if not f.in_transformers]
        raise UserError(
            f"{where}: config.json has no model_type. Known here: {known}. Only with "
            f'"architectures": {" or ".join(alone)} it needs none.'
        )
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
    shorter = str(given.get("max_target_length", ""))
    if shorter.isdecimal():
        config[TEXTS] = int(shorter)
    problems: list[str] = []
    keys: dict[str, Any] = {"decoder_block": family.decoder_block, **family.parts}
    for setting in family.settings:
        if not says_something(setting, keys):
            continue
        value = setting.value_in(config)
        # What is computed from a wrong number is wrong as well, and the number has been named.
        derived = callable(setting.default) and not setting.is_given(config)
        if value is REQUIRED:
            if not (derived and problems):
                problems.append(f"{setting.name} is missing")
            continue
        ours = setting.ours_of(value, config)
        if ours is REQUIRED:
            problems.append(_cannot(setting, value))
            continue
        if (wrong := _unfit(setting, value)) and not (derived and problems):
            problems.append(wrong)
        elif setting.is_computed:
            wanted = setting.value_of_silence(config)
            if wanted not in (value, REQUIRED):
                problems.append(
                    f"{setting.name}={value} contradicts the other keys, which give {wanted}"
                )
        # Later defaults may be computed from this one.
        config.setdefault(setting.name, value)
        if not setting.is_implied(value, config):
            keys |= dict.fromkeys(setting.ours, ours)
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
    for name, value in nested.items():
        if isinstance(value, Mapping):
            raise UserError(
                f"{where}: config.json gives rotary angles that differ by layer ({name}), and all "
                "layers have the same here."
            )
        if value is not None:
            plain[name if name in _ROPE_PLAIN else f"{ROPE_SCALING}.{name}"] = value
    # A null here means "no window", not "the default".
    return (
        plain | {"sliding_window": config["sliding_window"]}
        if "sliding_window" in config
        else plain
    )


def _unfit(setting: Setting, value: Any) -> str:
    """What is wrong with a value that our keys are to take as it is; "" if nothing."""
    taken_as_it_is = setting.values is None and setting.read is None
    for name in setting.ours if taken_as_it_is else ():
        key = all_keys()[name]
        try:
            number = typed_values.convert(value, key.annotation)
        except typed_values.WrongValue as error:
            return f"{setting.name}: {error}"
        # -1 means "computed" in some of our keys, and nothing in theirs.
        if key.annotation is int and number < 1:
            return f"{setting.name}={number} is not >= 1"
        if key.out_of_bounds(number):
            return f"{setting.name}={number} is not {key.bounds_text}"
    return ""


def says_something(setting: Setting, values: Mapping[str, Any]) -> bool:
    """Whether a model with these keys has the part that a setting is about."""
    schema = all_keys()
    return not setting.ours or any(_has_effect(schema[name], values) for name in setting.ours)


def _cannot(setting: Setting, value: Any) -> str:
    if setting.values is None:
        return f"{setting.name}={value} cannot be imported. {setting.remedy}".rstrip()
    possible = " or ".join(
        "null" if theirs is None else str(theirs) for theirs, _ in setting.values
    )
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
        any(values.get(other, schema[other].default) in wanted for other, wanted in group.items())
        for group in key.conditions
    )


def in_their_words(family: Family, problems: Iterable[Problem], given: Mapping[str, Any]) -> str:
    """Impossible combinations of what config.json says, by its names; "" if others have a part.

    Args:
      problems: what a configuration made of `to_keys` was refused for.
      given: keys that the user set.
    """
    names = {ours: setting.name for setting in family.settings for ours in setting.ours}
    lines = []
    for problem in problems:
        keys = set(_WORD.findall(problem.what))
        if not keys & names.keys() or keys & given.keys() or _elsewhere(problem):
            return ""
        lines.append(_WORD.sub(lambda word: names.get(word[0], word[0]), problem.what))
    return "\n".join(f"  {line}" for line in lines)


def _elsewhere(problem: Problem) -> bool:
    """Whether an environment variable has a part in a problem."""
    return any(not place.startswith("argument of configure()") for place in problem.where)
