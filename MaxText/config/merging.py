"""Merges layers of settings: the strongest value of each key, in the key's type.

Every setting is converted, also one that a stronger layer beats, so that a mistake in a file is
reported even where the command line sets the key again.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from MaxText.config import axis_rules, config_files, import_modules, sources, values
from MaxText.config.base_shape import parse_base_shape
from MaxText.config.layer_plan import parse_kinds
from MaxText.config.maxtext_keys import VALUE_NOTES, find_unsupported
from MaxText.config.problems import ConfigIssue, close_matches, nearest_fact
from MaxText.config.schema import (
    Key,
    all_keys,
    keys_of_base_shape,
    keys_of_layers,
    named_sections,
    settable_names,
)
from MaxText.config.sources import Origin, Setting, Source

# More are counted: finding the nearest names of each takes milliseconds.
_MAX_UNKNOWN_KEYS = 100
SET_BY_USER = (Source.CONFIG_FILE, Source.ENVIRONMENT, Source.COMMAND_LINE, Source.ARGUMENT)


class MergedSettings(NamedTuple):
    """The strongest value of every key.

    Attributes:
      typed: Values by key, in their types. A key with a problem has the value that it beat.
      origins: By key.
      settings: Those that were accepted, weakest first.
      wrong: Keys with a problem.
    """

    typed: dict[str, Any]
    origins: dict[str, Origin]
    settings: list[Setting]
    wrong: set[str]

    @property
    def last(self) -> dict[str, Setting]:
        """The strongest accepted setting of each key that has one."""
        return {setting.name: setting for setting in self.settings}

    def is_set_by_user(self, name: str) -> bool:
        """Returns whether a key was set for this run to another value than its default."""
        is_default = self.typed[name] == all_keys()[name].default
        return self.origins[name].source in SET_BY_USER and not is_default

    def set_derived(self, name: str, value: values.TypedValue, note: str) -> None:
        """Sets a key to what follows from others.

        Args:
          name: The key.
          value: In its type.
          note: What it follows from, for --why.
        """
        self.typed[name] = value
        origin = Origin(source=Source.DERIVED, raw=values.to_yaml(value), note=note)
        self.origins[name] = origin


def merge(settings: Sequence[Setting], problems: list[ConfigIssue]) -> MergedSettings:
    """Returns the strongest value of every key, in its type.

    Args:
      settings: Weakest first.
      problems: Gets an issue for each setting that is refused.
    """
    keys = all_keys()
    typed = {name: key.default for name, key in keys.items()}
    origins = {
        name: Origin(source=Source.DEFAULT, raw=key.default_text) for name, key in keys.items()
    }
    typed["logical_axis_rules"] = ()
    merged = MergedSettings(typed=typed, origins=origins, settings=[], wrong=set())
    unknown: list[Setting] = []
    for setting in settings:
        key = keys.get(setting.name)
        if key is None:
            unknown.append(setting)
            if len(unknown) <= _MAX_UNKNOWN_KEYS:
                problems.append(_unknown(setting))
            continue
        # configs/base.yml lists every key so that people can read it. Its values are the schema's
        # defaults, so they rank as such: naming base.yml must not undo a decoder_block's choices.
        is_of_base = setting.origin.file == config_files.BASE_YML
        if is_of_base and values.to_yaml(setting.value) == key.default_text:
            continue
        try:
            value = _typed(setting, key)
        except values.InvalidValueError as error:
            problems.append(_type_error(setting, key, str(error)))
            merged.wrong.add(key.name)
            continue
        if setting.name == "logical_axis_rules":
            value = axis_rules.merge(typed["logical_axis_rules"], value)
        typed[setting.name] = value
        origins[setting.name] = setting.origin
        merged.settings.append(setting)
    if len(unknown) > _MAX_UNKNOWN_KEYS:
        first = unknown[_MAX_UNKNOWN_KEYS]
        num_more = len(unknown) - _MAX_UNKNOWN_KEYS
        message = f"{num_more:,} more unknown keys, the first: {first.written}"
        problems.append(ConfigIssue(message, (first.place,)))
    if not typed["override_logical_axis_rules"]:
        typed["logical_axis_rules"] = axis_rules.merge(
            axis_rules.default_rules(), typed["logical_axis_rules"]
        )
    return merged


def _typed(setting: Setting, key: Key) -> values.TypedValue:
    """Returns the value of a setting in its key's type, or raises values.InvalidValueError."""
    if key.name == import_modules.KEY:
        return import_modules.names_in(setting)
    value = setting.value
    # A text key takes what was typed as it is: prompt=[hello] stays text.
    from_shell = setting.origin.source in (Source.COMMAND_LINE, Source.ENVIRONMENT)
    if key.annotation is str and from_shell and not isinstance(value, str):
        value = values.UntypedScalar(setting.origin.raw)
    return converted_value(value, key)


def converted_value(value: values.UntypedValue, key: Key) -> values.TypedValue:
    """Converts a value to a key's type, or raises values.InvalidValueError."""
    if key.name == "logical_axis_rules":
        return axis_rules.parse(value)
    if key.name == "layer_kinds":
        layer_keys = keys_of_layers()
        return parse_kinds(value, lambda name, typed: converted_value(typed, layer_keys[name]))
    if key.name == "base_shape":
        sizes = keys_of_base_shape()
        return parse_base_shape(value, lambda name, typed: converted_value(typed, sizes[name]))
    return key.convert(value)


def _unknown(setting: Setting) -> ConfigIssue:
    """Returns the issue of a setting whose name is no key."""
    name = setting.written
    if name in sources.SWEEP_KEYS:
        return sources.sweep_not_supported(name, setting.place)
    if name in sources.FILE_KEYS:
        return ConfigIssue(f"{name}: only a YAML file can set it", (setting.place,))
    if setting.name in named_sections():
        return ConfigIssue(
            message=f"{setting.name}: {values.format_value(setting.value)} is not {{key: value}}",
            location=(setting.place,),
            context=(("accepted", _accepted_by_section(setting.name)),),
        )
    return unknown_key(name, (setting.place,))


def unknown_key(name: str, location: tuple[str, ...] = ()) -> ConfigIssue:
    """Returns the issue of a name that is no key, with the nearest ones.

    Of another program's key it says why it is not here.
    """
    nearest = _nearest_names(name)
    if reason := find_unsupported(name, tuple(nearest)):
        return ConfigIssue(f"{name}: not a key here: {reason.sentence}", location)
    return ConfigIssue(
        message=f"{name}: unknown key",
        location=location,
        context=(("nearest", ", ".join(nearest)), ("all keys", "configs/base.yml, or --help")),
    )


def _nearest_names(name: str) -> list[str]:
    """Returns the names most like one that is no key; of a named section's only its own keys."""
    section, _, field_name = name.rpartition(".")
    if section not in named_sections():
        return close_matches(name, settable_names())
    known_names = [key.field_name for key in named_sections()[section]]
    return [f"{section}.{near}" for near in close_matches(field_name, known_names) or known_names]


def _accepted_by_section(name: str) -> str:
    """Returns what values a named section takes, for messages and help."""
    return f"{{key: value}}, of {', '.join(key.field_name for key in named_sections()[name])}"


def format_accepted(key: Key) -> str:
    """Returns what values a key takes, for messages and help."""
    if key.name == "logical_axis_rules":
        return f"a list of [name, axis], [name, [axes]] or [name, null]; {axis_rules.KNOWN_AXES}"
    if key.name == "layer_kinds":
        return "{letter: {key: value}}, with keys of a layer's parts"
    if key.name == "base_shape":
        return "{key: value}, with keys that set sizes of the model"
    return values.type_name(key.annotation, key.constraints)


def _type_error(setting: Setting, key: Key, message: str) -> ConfigIssue:
    """Returns the issue of a value that does not fit its key.

    Args:
      setting: The setting.
      key: Its key.
      message: What is wrong with the value.
    """
    value = setting.value
    facts = [("accepted", format_accepted(key))]
    if key.choices and isinstance(value, str):
        facts.append(nearest_fact(value, filter(None, key.choices)))
        facts.append(("note", VALUE_NOTES.get((key.name, value), "")))
    if dict(key.bounds).get("ne") is not None:
        facts.append(("meaning", key.help))
    if key.name != "logical_axis_rules":
        facts.append(("default", key.default_text))
    return ConfigIssue(f"{key.name}: {message}", (setting.place,), facts)
