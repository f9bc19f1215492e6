"""Layers of settings, from weakest to strongest."""

import dataclasses
import itertools
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from MaxText.config import axis_rules, config_files, values
from MaxText.config.config_files import Origin, Setting, Source, short_path
from MaxText.config.maxtext_keys import (
    ALIASES,
    UNSUPPORTED,
    find_mapping,
    find_unsupported,
    is_maxtext_base,
    is_maxtext_default,
    nearest_keys,
)
from MaxText.config.problems import ConfigIssue, ConfigurationError, close_matches, nearest_fact
from MaxText.config.schema import SCHEMA_VERSION, all_keys, all_names, split_entry
from MaxText.errors import shorten

# Keys by which a file stands for several runs, and what they stand for. Only compare.py does them.
SWEEP_KEYS = {
    "sweep": "several configurations",
    "stages": "several runs, each beginning from the one before",
}

# In a saved configuration and in a checkpoint's metadata: {module: SHA-256 of its source}.
IMPORTED = "imported_modules"
FILE_KEYS = ("base_config", "schema_version", IMPORTED, *SWEEP_KEYS)

_NAMES_DATA = ("dataset_path", "grain_train_files", "data_mixture_weights", "prepare_source")

# What an argument of a program is: key=value, or a config file.
ARGUMENT = re.compile(r"([A-Za-z_][\w.\-]*)=(.*)", re.DOTALL)
_NUMBER = re.compile(r"-\d.*", re.DOTALL)
YAML_PATH = re.compile(r".*\.ya?ml", re.IGNORECASE | re.DOTALL)


class CheckpointConfig(NamedTuple):
    """The configuration of recorded weights, in place of a config file."""

    values: Mapping[str, Any]  # by key
    place: str  # where the weights lie


@dataclasses.dataclass
class CollectedSettings:
    """All settings, weakest first, before their types are checked."""

    settings: list[Setting] = dataclasses.field(default_factory=list)
    problems: list[ConfigIssue] = dataclasses.field(default_factory=list)
    # whether a file, a preset or an argument that may be one could not be read
    is_incomplete: bool = False
    config_path: Path | None = None
    notices: list[str] = dataclasses.field(default_factory=list)
    sweep_blocks: dict[str, Setting] = dataclasses.field(default_factory=dict)  # by SWEEP_KEYS
    imported: dict[str, str] = dataclasses.field(default_factory=dict)  # IMPORTED of a file
    # Values that a copy of MaxText's base.yml has left as they are there: of keys here, and of
    # keys that are absent here.
    maxtext_defaults: list[Setting] = dataclasses.field(default_factory=list)
    absent_defaults: list[Setting] = dataclasses.field(default_factory=list)

    def last(self, name: str) -> Setting | None:
        return next((s for s in reversed(self.settings) if s.name == name), None)


def collect(
    arguments: Sequence[str],
    overrides: Mapping[str, Any] = {},
    own: CheckpointConfig | None = None,
    files: Sequence[str] = (),
) -> CollectedSettings:
    """Collects the settings of all sources.

    Args:
      arguments: Config paths, of which later ones win, and key=value.
      overrides: Python values that beat everything (of load_config()).
      own: Configuration that weights record, below a config file.
      files: Config paths below those of the arguments, whatever their suffix.
    """
    result = CollectedSettings()
    if own is not None:
        saved = _python_settings(own.values, Source.SAVED_CONFIG, note=f"of {own.place}")
        result.settings += distinct(saved, result)
    paths, typed = _read_arguments(arguments, result)
    typed += distinct(_python_settings(overrides, Source.ARGUMENT), result)
    environment_settings = _read_environment(result)
    for path in [*files, *paths]:
        try:
            result.config_path = config_files.find_config(path)
            result.settings += _read_chain(result.config_path, Source.CONFIG_FILE, result)
        except ConfigurationError as error:
            result.problems += error.problems
            result.is_incomplete = True

    place = len(result.settings)
    result.settings += environment_settings + typed
    preset = _read_named("model_name", config_files.MODELS, Source.PRESET, result)
    named = result.last("model_name")
    if preset and named is not None and named.origin.file is not None:
        # Keys written in the file that names the preset beat it.
        file = named.origin.file
        place = next(i for i, each in enumerate(result.settings) if each.origin.file == file)
    result.settings[place:place] = preset
    bundle = _read_named("decoder_block", config_files.DECODER_BLOCKS, Source.DECODER_BLOCK, result)
    defaults = result.maxtext_defaults
    if any(setting.name in _NAMES_DATA and setting.value for setting in result.settings):
        # MaxText's default would be synthetic data in place of the data that was named.
        defaults = [setting for setting in defaults if setting.name != "dataset_type"]
    result.settings[:0] = [*defaults, *bundle]
    return result


def _python_settings(given: Mapping[str, Any], source: Source, note: str = "") -> list[Setting]:
    return [
        Setting(name, value, Origin(source, raw=values.format_value(value), note=note), name)
        for name, value in given.items()
    ]


def _read_arguments(
    arguments: Sequence[str], result: CollectedSettings
) -> tuple[list[str], list[Setting]]:
    paths = []
    settings = []
    for argument in without_dashes(arguments, SWITCHES):
        if match := ARGUMENT.fullmatch(argument):
            name, text = match.groups()
            origin = Origin(Source.COMMAND_LINE, raw=text)
            settings.append(Setting(name, values.from_text(text), origin, name))
        elif YAML_PATH.fullmatch(argument) and not argument.startswith("-"):
            paths.append(argument)
        else:
            result.problems.append(_unreadable_argument(argument))
            # It may have been meant as the config file.
            is_option = argument.startswith("-")
            result.is_incomplete |= not is_option and re.search(r"[/.\\]", argument) is not None
    return paths, distinct(settings, result, last_wins=True)


# Keys that GPT-Neo's users type as flags without a value.
SWITCHES = ("auto_layout", "auto_layout_and_mesh_shape")


def _unreadable_argument(argument: str) -> ConfigIssue:
    """Returns the problem of an argument that is neither key=value nor a config file."""
    location = ("command line",)
    name = argument.lstrip("-").replace("-", "_")
    is_option = argument.startswith("-")
    if is_option and name in (*all_names(), *ALIASES):
        return ConfigIssue(f"argument {argument!r} has no value: write {name}=VALUE", location)
    nearest = nearest_fact(name, all_names(), "{}=...")
    if is_option and (reason := find_unsupported(name)):
        return ConfigIssue(f"argument {argument!r} is no key here: {reason.sentence}", location)
    if is_option:
        what = f"argument {argument!r} is neither a key nor an option"
        return ConfigIssue(what, location, (nearest,))
    what = f"argument {argument!r} is neither key=value nor a config file (.yml)"
    is_path = os.path.exists(os.path.expanduser(argument))
    remedy = f"dataset_path={argument}, if it is a data set" if is_path else ""
    return ConfigIssue(what, location, (("write", remedy), nearest))


def without_dashes(arguments: Sequence[str], switches: Sequence[str] = ()) -> list[str]:
    """Rewrites --key=value, --key value and --switch as key=value."""
    joined: list[str] = []
    for argument, following in itertools.zip_longest(arguments, arguments[1:], fillvalue=""):
        is_switch = argument.startswith("--") and argument[2:].replace("-", "_") in switches
        if is_switch and following.lower() not in ("true", "false"):
            argument += "=true"
        if argument == "--import" or argument.startswith("--import="):
            argument = argument.replace("--import", "--import_modules", 1)
        before = joined[-1] if joined else ""
        is_value = not ARGUMENT.fullmatch(argument) and not YAML_PATH.fullmatch(argument)
        is_value = is_value and (argument[:1] != "-" or _NUMBER.fullmatch(argument) is not None)
        if before.startswith("-") and is_value:
            joined[-1] = f"{before.lstrip('-').replace('-', '_')}={argument}"
        elif argument.startswith("-") and "=" in argument:
            name, _, text = argument.partition("=")
            joined.append(f"{name.lstrip('-').replace('-', '_')}={text}")
        else:
            joined.append(argument)
    return joined


def _read_environment(result: CollectedSettings) -> list[Setting]:
    by_variable = {f"M_{name.upper()}": name for name in (*all_keys(), *ALIASES)}
    settings = []
    for variable, text in sorted(os.environ.items()):
        if not variable.startswith("M_"):
            continue
        if name := by_variable.get(variable):
            origin = Origin(Source.ENVIRONMENT, raw=text, note=variable)
            settings.append(Setting(name, values.from_text(text), origin, name))
        elif reason := UNSUPPORTED.get(variable[2:].lower()):
            result.notices.append(f"warning: {variable} has no effect: {reason.sentence}")
        elif close := close_matches(variable[2:], all_keys(), count=1):
            name = f"M_{close[0].upper()}"
            result.notices.append(f"warning: {variable} has no effect; did you mean {name}?")
    return distinct(settings, result, last_wins=True)


def _read_chain(path: Path, layer: Source, result: CollectedSettings) -> list[Setting]:
    found: list[Setting] = []
    seen: list[Path] = []
    here = layer
    while True:
        seen.append(path)
        entries, problems = config_files.read(path, layer)
        result.problems += problems
        special = {entry.name: entry for entry in entries if entry.name in FILE_KEYS}
        if "schema_version" in special:
            _check_version(special["schema_version"], result)
            here = Source.SAVED_CONFIG if layer is Source.CONFIG_FILE else here
        if (entry := special.get(IMPORTED)) and isinstance(entry.value, dict):
            result.imported |= entry.value
        settings = [
            dataclasses.replace(entry, origin=dataclasses.replace(entry.origin, source=here))
            for entry in entries
            if entry.name not in FILE_KEYS
        ]
        if here is not Source.SAVED_CONFIG and is_maxtext_base([one.name for one in settings]):
            settings = _without_maxtext_defaults(path, settings, result)
        found[:0] = distinct(settings, result)
        blocks = {name: entry for name, entry in special.items() if name in SWEEP_KEYS}
        result.sweep_blocks = blocks | result.sweep_blocks
        base = special.get("base_config")
        if base is None or values.is_null(base.value):
            break
        try:
            if not isinstance(base.value, str):
                what = f"base_config: {base.origin.raw} is not the path of one YAML file"
                raise ConfigurationError([ConfigIssue(what)])
            path = config_files.find_config(base.value, next_to=path.parent)
            if path in seen:
                way = " -> ".join(short_path(step) for step in (*seen[seen.index(path) :], path))
                what = f"base_config: files refer to each other: {way}"
                raise ConfigurationError([ConfigIssue(what)])
        except ConfigurationError as error:
            at = (base.place,)
            result.problems += [dataclasses.replace(one, location=at) for one in error.problems]
            result.is_incomplete = True
            break
        if layer is Source.CONFIG_FILE:
            here = Source.BASE_CONFIG
    return found


# Of these a copy of MaxText's base.yml has a value that fits Google's machines and files.
_DETECTED = ("hardware", "tokenizer_type", "tokenizer_path", "grain_file_type")


def _without_maxtext_defaults(
    path: Path, settings: Sequence[Setting], result: CollectedSettings
) -> list[Setting]:
    """Returns the settings of a copy of MaxText's base.yml that its user changed.

    The others are defaults, which a decoder_block, a preset and a key set anywhere else beat.
    """
    changed: list[Setting] = []
    defaults: list[Setting] = []
    for setting in settings:
        if setting.name == "logical_axis_rules" and isinstance(setting.value, list):
            rules = [rule for rule in setting.value if not is_maxtext_default(setting.name, [rule])]
            setting = dataclasses.replace(setting, value=rules)
        if not is_maxtext_default(setting.name, setting.value):
            changed.append(setting)
        elif find_unsupported(setting.name, (setting.name,)):
            result.absent_defaults.append(setting)
        elif setting.name not in (*_DETECTED, "logical_axis_rules"):
            origin = dataclasses.replace(setting.origin, source=Source.MAXTEXT_DEFAULT)
            defaults.append(dataclasses.replace(setting, origin=origin))
    silent = CollectedSettings()  # no notices
    result.maxtext_defaults[:0] = distinct(defaults, silent)
    result.problems += silent.problems
    result.notices.append(
        f"note: {short_path(path)} is a copy of MaxText's base.yml: {len(result.absent_defaults)} "
        "keys that are not here have MaxText's defaults and no effect; "
        f"{', '.join(_DETECTED)} are detected unless changed"
    )
    return changed


def _check_version(entry: Setting, result: CollectedSettings) -> None:
    try:
        if (version := values.convert(entry.value, int)) <= SCHEMA_VERSION:
            return
        what = f"{version} was written by a newer version; update this program"
    except values.InvalidValueError as error:
        what = str(error)
    result.problems.append(ConfigIssue(f"schema_version: {what}", (entry.place,)))


def _read_named(name: str, folder: Path, layer: Source, result: CollectedSettings) -> list[Setting]:
    default = all_keys()[name].default
    setting = result.last(name) or Setting(name, default, Origin(Source.DEFAULT), name)
    origin = setting.origin
    place = (setting.place,) if result.last(name) else ()
    chosen = setting.value if isinstance(setting.value, str) else origin.raw
    is_saved = origin.source is Source.SAVED_CONFIG
    # A saved configuration already holds what its preset gave, and what beat it.
    if layer is Source.PRESET and (is_saved or chosen in ("", default) or values.is_null(chosen)):
        return []
    known = config_files.preset_names(folder)
    file = folder / f"{chosen}.yml"
    is_path = YAML_PATH.fullmatch(chosen)
    if not is_path and chosen not in known:
        result.problems.append(_unknown_name(name, str(chosen), file, place))
        result.is_incomplete = True
        return []
    try:
        if is_path:
            file = config_files.find_config(chosen, origin.file.parent if origin.file else None)
        settings = _read_chain(file, layer, result)
    except ConfigurationError as error:
        # A saved configuration has the keys of a bundle that has since been moved.
        if not is_saved:
            result.problems += [dataclasses.replace(one, location=place) for one in error.problems]
            result.is_incomplete = True
        return []
    kept = []
    for inner in settings:
        if inner.name == "model_name" and inner.value != chosen:
            what = f"model_name: a file of {short_path(folder)} cannot choose another preset"
            result.problems.append(ConfigIssue(what, (inner.place,)))
        elif inner.name not in ("model_name", name):
            kept.append(inner)
    return kept


def _unknown_name(name: str, chosen: str, file: Path, place: tuple[str, ...]) -> ConfigIssue:
    """Returns the problem of a decoder_block or model_name without a file."""
    known = config_files.preset_names(file.parent)
    family = re.match(r"[a-z]*", chosen)
    same_family = [one for one in known if family and family[0] and one.startswith(family[0])]
    closest = nearest_keys(name, chosen)
    nearest = close_matches(chosen, known) or same_family
    facts = (
        ("closest", closest),
        ("nearest", ", ".join(nearest)),
        ("known", "" if closest or nearest else ", ".join(known)),
        ("default", str(all_keys()[name].default)),
    )
    return ConfigIssue(f"{name}: there is no {short_path(file)}", place, facts)


def sweep_not_supported(name: str, place: str) -> ConfigIssue:
    """Returns the problem of a file for several runs in a single-run program."""
    what = f"{name}: stands for {SWEEP_KEYS[name]}, which only compare.py expands"
    remedy = f"python MaxText/compare.py CONFIG.yml ..., or take the key {name} out"
    return ConfigIssue(what, (place,), (("run", remedy),))


def distinct(
    settings: list[Setting], result: CollectedSettings, *, last_wins: bool = False
) -> list[Setting]:
    """Returns the settings of one source under our names, once each.

    With `last_wins` a key may be set twice; otherwise that is a problem.
    """
    kept: dict[str, Setting] = {}
    for setting in settings:
        name = ALIASES.get(setting.name, setting.name)
        value = setting.value
        typed = [f"{name}.{entry}" for entry in value] if isinstance(value, dict) else []
        typed = [one for one in (setting.name, *typed) if one in ALIASES]
        notices = [f"note: {one} is called {ALIASES[one]} here" for one in typed]
        if found := find_mapping(name, value):
            written = f"{setting.written}={setting.origin.raw}"
            notices.append(f"note: {written} {found.sentence}")
            name = found.name
            value = found.value
        if name == "logical_axis_rules" and isinstance(value, list):
            value, dropped = _without_foreign_rules(value)
            if dropped:
                notices.append(
                    f"note: logical_axis_rules: {dropped} of MaxText's own rules are for names or "
                    "axes that are not here"
                )
        if setting.origin.source is not Source.SAVED_CONFIG:  # by an older version of this program
            result.notices += notices
        if not name:
            continue
        key, entry = split_entry(name)
        setting = dataclasses.replace(setting, name=key, value={entry: value} if entry else value)
        earlier = kept.get(name)
        if earlier is not None and earlier.value != setting.value and last_wins:
            line = f"note: {name} is given twice: {setting.place} wins over {earlier.place}"
            result.notices.append(line)
        elif earlier is not None and earlier.value != setting.value:
            what = f"{name}: given twice with different values"
            result.problems.append(ConfigIssue(what, (earlier.place, setting.place)))
            continue
        kept[name] = setting
    return list(kept.values())


def _without_foreign_rules(rules: list[Any]) -> tuple[list[Any], int]:
    """Drops MaxText's default rules of names and axes that are not here; returns their number."""

    def is_foreign(rule: Any) -> bool:
        if not is_maxtext_default("logical_axis_rules", [rule]):
            return False
        try:
            axis_rules.parse([rule])
        except values.InvalidValueError:
            return True
        return False

    known = [rule for rule in rules if not is_foreign(rule)]
    return known, len(rules) - len(known)


def print_notices(notices: Sequence[str]) -> None:
    for notice in dict.fromkeys(notices):
        sys.stderr.write(shorten(notice) + "\n")
