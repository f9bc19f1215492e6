"""Layers of settings, from weakest to strongest.

`collect` reads every source of a configuration: files, presets, environment, command line. The
result is one list of settings, weakest first, under today's names of keys. Types are not checked
here, and nothing is thrown away: merging.py takes the last setting of each key and remembers what
it beat.
"""

import dataclasses
import itertools
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from MaxText.config import axis_rules, config_files, maxtext_blocks, values
from MaxText.config.config_files import Origin, Setting, Source, short_path
from MaxText.config.maxtext_keys import (
    ALIASES,
    SANDWICH_KEYS,
    UNSUPPORTED,
    absent_family,
    block_of_model,
    find_mapping,
    find_unsupported,
    is_maxtext_base,
    is_maxtext_default,
)
from MaxText.config.problems import ConfigIssue, ConfigurationError, close_matches, nearest_fact
from MaxText.config.schema import (
    SCHEMA_VERSION,
    all_keys,
    dotted,
    named_sections,
    settable_names,
)
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
    """The configuration of recorded weights, in place of a config file.

    Attributes:
      values: By key.
      path: Of the weights.
    """

    values: Mapping[str, Any]
    path: str


@dataclasses.dataclass
class CollectedSettings:
    """All settings, before their types are checked, and what was met on the way.

    Attributes:
      settings: Weakest first.
      problems: Of what could not be read.
      is_incomplete: Whether a file, a preset or an argument that may be one could not be read.
      config_path: The config file that was named, or None.
      notices: Lines to print: aliases, values without effect, keys that are given twice.
      sweep_blocks: Settings of the SWEEP_KEYS in the config file.
      imported: {module: SHA-256 of its source} in a saved configuration.
      maxtext_defaults: Values of keys here that a copy of MaxText's base.yml has left as they are.
      absent_defaults: The same of keys that are not here.
      absent_family: The problem of a model of MaxText whose family is not here. It is reported
        alone: most other problems are of keys that only this family has.
    """

    settings: list[Setting] = dataclasses.field(default_factory=list)
    problems: list[ConfigIssue] = dataclasses.field(default_factory=list)
    is_incomplete: bool = False
    config_path: Path | None = None
    notices: list[str] = dataclasses.field(default_factory=list)
    sweep_blocks: dict[str, Setting] = dataclasses.field(default_factory=dict)
    imported: dict[str, str] = dataclasses.field(default_factory=dict)
    maxtext_defaults: list[Setting] = dataclasses.field(default_factory=list)
    absent_defaults: list[Setting] = dataclasses.field(default_factory=list)
    absent_family: ConfigIssue | None = None

    def last(self, name: str) -> Setting | None:
        """Returns the strongest setting of a key, or None."""
        for setting in reversed(self.settings):
            if setting.name == name:
                return setting
        return None

    def add_problems(
        self, problems: Iterable[ConfigIssue], location: tuple[str, ...] | None = None
    ) -> None:
        """Adds problems of a file that could not be read.

        Args:
          problems: What is wrong.
          location: Where the file is named; None leaves the problems as they are.
        """
        for problem in problems:
            if location is not None:
                problem = dataclasses.replace(problem, location=location)
            self.problems.append(problem)
        self.is_incomplete = True


def collect(
    arguments: Sequence[str],
    overrides: Mapping[str, Any] = {},
    recorded: CheckpointConfig | None = None,
    files: Sequence[str] = (),
) -> CollectedSettings:
    """Collects the settings of all sources.

    Args:
      arguments: Config paths, of which later ones win, and key=value.
      overrides: Python values that beat everything (of load_config()).
      recorded: Configuration that weights record, below a config file.
      files: Config paths below those of the arguments, whatever their suffix.
    """
    result = CollectedSettings()
    if recorded is not None:
        saved = _python_settings(recorded.values, Source.SAVED_CONFIG, note=f"of {recorded.path}")
        result.settings += distinct(saved, result)
    paths, typed = _read_arguments(arguments, result)
    typed += distinct(_python_settings(overrides, Source.ARGUMENT), result)
    environment_settings = _read_environment(result)
    for path in [*files, *paths]:
        try:
            result.config_path = config_files.find_config(path)
            result.settings += _read_chain(result.config_path, Source.CONFIG_FILE, result)
        except ConfigurationError as error:
            result.add_problems(error.problems)

    num_file_settings = len(result.settings)
    result.settings += environment_settings + typed
    preset = _read_named("model_name", config_files.MODELS, Source.PRESET, result)
    # A preset lies over all files, but keys written in the file that names it beat it.
    preset_index = num_file_settings
    model_name = result.last("model_name")
    if preset and model_name is not None and model_name.origin.file is not None:
        files_of_settings = [setting.origin.file for setting in result.settings]
        preset_index = files_of_settings.index(model_name.origin.file)
    result.settings[preset_index:preset_index] = preset
    bundle = _read_named("decoder_block", config_files.DECODER_BLOCKS, Source.DECODER_BLOCK, result)
    if (multimodal := result.last("use_multimodal")) is not None:
        reason = find_unsupported("use_multimodal")
        assert reason is not None
        message = f"use_multimodal: models of text and images are not here ({reason.sentence})"
        result.absent_family = ConfigIssue(message, (multimodal.place,))
        result.is_incomplete = True
    defaults = result.maxtext_defaults
    if any(setting.name in _NAMES_DATA and setting.value for setting in result.settings):
        # MaxText's default would be synthetic data in place of the data that was named.
        defaults = [setting for setting in defaults if setting.name != "dataset_type"]
    result.settings[:0] = [*defaults, *bundle]
    return result


def _python_settings(
    python_values: Mapping[str, Any], source: Source, note: str = ""
) -> list[Setting]:
    """Returns the settings of Python values, by key."""
    settings = []
    for name, value in python_values.items():
        origin = Origin(source=source, raw=values.format_value(value), note=note)
        settings.append(Setting(name=name, value=value, origin=origin, written=name))
    return settings


def _read_arguments(
    arguments: Sequence[str], result: CollectedSettings
) -> tuple[list[str], list[Setting]]:
    """Returns the config paths of a command line, and its settings."""
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
    if is_option and name in (*settable_names(), *ALIASES):
        return ConfigIssue(f"argument {argument!r} has no value: write {name}=VALUE", location)
    nearest = nearest_fact(name, settable_names(), "{}=...")
    if is_option and (reason := find_unsupported(name)):
        return ConfigIssue(f"argument {argument!r} is no key here: {reason.sentence}", location)
    if is_option:
        message = f"argument {argument!r} is neither a key nor an option"
        return ConfigIssue(message, location, (nearest,))
    is_path = os.path.exists(os.path.expanduser(argument))
    remedy = f"dataset_path={argument}, if it is a data set" if is_path else ""
    return ConfigIssue(
        message=f"argument {argument!r} is neither key=value nor a config file (.yml)",
        location=location,
        context=(("write", remedy), nearest),
    )


def without_dashes(arguments: Sequence[str], switches: Sequence[str] = ()) -> list[str]:
    """Rewrites --key=value, --key value and --switch as key=value.

    Args:
      arguments: The words of a command line.
      switches: Names that are typed without a value.
    """
    joined: list[str] = []
    for argument, following in itertools.zip_longest(arguments, arguments[1:], fillvalue=""):
        is_switch = argument.startswith("--") and argument[2:].replace("-", "_") in switches
        if is_switch and following.lower() not in ("true", "false"):
            argument += "=true"
        if argument == "--import" or argument.startswith("--import="):
            argument = argument.replace("--import", "--import_modules", 1)
        previous = joined[-1] if joined else ""
        is_value = not ARGUMENT.fullmatch(argument) and not YAML_PATH.fullmatch(argument)
        is_value = is_value and (argument[:1] != "-" or _NUMBER.fullmatch(argument) is not None)
        if previous.startswith("-") and is_value:
            joined[-1] = f"{previous.lstrip('-').replace('-', '_')}={argument}"
        elif argument.startswith("-") and "=" in argument:
            name, _, text = argument.partition("=")
            joined.append(f"{name.lstrip('-').replace('-', '_')}={text}")
        else:
            joined.append(argument)
    return joined


def variable_of(name: str) -> str:
    """Returns the environment variable that sets a key: M_STEPS, M_ADAFACTOR__MOMENTUM."""
    return f"M_{name.upper().replace('.', '__')}"


def _read_environment(result: CollectedSettings) -> list[Setting]:
    """Returns the settings of variables M_<KEY>; warns of other variables of that form."""
    variables = sorted(item for item in os.environ.items() if item[0].startswith("M_"))
    if not variables:
        return []
    by_variable = {variable_of(name): name for name in (*settable_names(), *ALIASES)}
    settings = []
    for variable, text in variables:
        if name := by_variable.get(variable):
            origin = Origin(Source.ENVIRONMENT, raw=text, note=variable)
            settings.append(Setting(name, values.from_text(text), origin, name))
        elif reason := UNSUPPORTED.get(variable[2:].lower()):
            result.notices.append(f"warning: {variable} has no effect: {reason.sentence}")
        elif close := close_matches(variable[2:], all_keys(), count=1):
            meant = variable_of(close[0])
            result.notices.append(f"warning: {variable} has no effect; did you mean {meant}?")
    return distinct(settings, result, last_wins=True)


def _read_chain(path: Path, layer: Source, result: CollectedSettings) -> list[Setting]:
    """Returns the settings of a file and of its chain of base_config, weakest first.

    Args:
      path: The file.
      layer: The layer of its settings, CONFIG_FILE, PRESET or DECODER_BLOCK. Of a config file the
        settings of bases, and of files that are saved configurations, have layers of their own.
      result: Gets problems, notices and what else the files hold.
    """
    chain: list[Setting] = []
    read_paths: list[Path] = []
    source = layer
    while True:
        read_paths.append(path)
        contents = config_files.read(path, layer)
        result.problems += contents.problems
        special = {entry.name: entry for entry in contents.settings if entry.name in FILE_KEYS}
        if "schema_version" in special:
            _check_version(special["schema_version"], result)
            source = Source.SAVED_CONFIG if layer is Source.CONFIG_FILE else source
        if (entry := special.get(IMPORTED)) and isinstance(entry.value, dict):
            result.imported |= entry.value
        settings = [
            dataclasses.replace(entry, origin=dataclasses.replace(entry.origin, source=source))
            for entry in contents.settings
            if entry.name not in FILE_KEYS
        ]
        is_saved = source is Source.SAVED_CONFIG
        if layer is Source.CONFIG_FILE and not is_saved:
            settings = maxtext_blocks.translate(settings, result.notices)
        if not is_saved and is_maxtext_base([setting.name for setting in settings]):
            settings = _without_maxtext_defaults(path, settings, result)
        chain[:0] = distinct(settings, result)
        blocks = {name: entry for name, entry in special.items() if name in SWEEP_KEYS}
        result.sweep_blocks = blocks | result.sweep_blocks
        base = special.get("base_config")
        if base is None or values.is_null(base.value):
            return chain
        try:
            path = _find_base(base, read_paths)
        except ConfigurationError as error:
            result.add_problems(error.problems, location=(base.place,))
            return chain
        if layer is Source.CONFIG_FILE:
            source = Source.BASE_CONFIG


def _find_base(base: Setting, read_paths: Sequence[Path]) -> Path:
    """Returns the file that a `base_config` names.

    Args:
      base: The setting of base_config.
      read_paths: The files of the chain so far; the last one has the setting.

    Raises:
      ConfigurationError: it names no file, or one that was read before.
    """
    if not isinstance(base.value, str):
        message = f"base_config: {base.origin.raw} is not the path of one YAML file"
        raise ConfigurationError([ConfigIssue(message)])
    path = config_files.find_config(base.value, next_to=read_paths[-1].parent)
    if path in read_paths:
        circle = [*read_paths[read_paths.index(path) :], path]
        names = " -> ".join(map(short_path, circle))
        raise ConfigurationError([ConfigIssue(f"base_config: files refer to each other: {names}")])
    return path


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
    """Adds a problem if a saved configuration is of a newer version than this program."""
    try:
        version = values.convert(entry.value, int)
        if version <= SCHEMA_VERSION:
            return
        reason = f"{version} was written by a newer version; update this program"
    except values.InvalidValueError as error:
        reason = str(error)
    result.problems.append(ConfigIssue(f"schema_version: {reason}", (entry.place,)))


def _read_named(name: str, folder: Path, layer: Source, result: CollectedSettings) -> list[Setting]:
    """Returns the settings of the file that a key chooses by name.

    Args:
      name: The key, model_name or decoder_block.
      folder: Of the files.
      layer: The layer of their settings.
      result: Has the settings of the key; gets problems.
    """
    default = all_keys()[name].default
    setting = result.last(name) or Setting(
        name=name, value=default, origin=Origin(Source.DEFAULT), written=name
    )
    origin = setting.origin
    location = (setting.place,) if result.last(name) else ()
    chosen = setting.value if isinstance(setting.value, str) else origin.raw
    is_saved = origin.source is Source.SAVED_CONFIG
    # A saved configuration already holds what its preset gave, and what beat it.
    if layer is Source.PRESET and (is_saved or chosen in ("", default) or values.is_null(chosen)):
        return []
    file = folder / f"{chosen}.yml"
    is_path = YAML_PATH.fullmatch(chosen)
    if not is_path and chosen not in config_files.preset_names(folder):
        if family := absent_family(name, chosen):
            issue = ConfigIssue(f"{name}: {chosen} is not here ({family})", location)
            result.absent_family = result.absent_family or issue
            result.is_incomplete = True
        else:
            result.add_problems([_unknown_name(name, str(chosen), file)], location)
        return []
    try:
        if is_path:
            file = config_files.find_config(chosen, origin.file.parent if origin.file else None)
        settings = _read_chain(file, layer, result)
    except ConfigurationError as error:
        # A saved configuration has the keys of a bundle that has since been moved.
        if not is_saved:
            result.add_problems(error.problems, location)
        return []
    remaining = []
    for inner in settings:
        if inner.name == "model_name" and inner.value != chosen:
            message = f"model_name: a file of {short_path(folder)} cannot choose another preset"
            result.problems.append(ConfigIssue(message, (inner.place,)))
        elif inner.name not in ("model_name", name):
            remaining.append(inner)
    return remaining


def _unknown_name(name: str, chosen: str, file: Path) -> ConfigIssue:
    """Returns the problem of a decoder_block or model_name without a file."""
    presets = config_files.preset_names(file.parent)
    family = re.match(r"[a-z]*", chosen)
    same_family = [
        preset for preset in presets if family and family[0] and preset.startswith(family[0])
    ]
    nearest = close_matches(chosen, presets) or same_family
    closest = ""
    if name == "model_name" and (block := block_of_model(chosen)):
        closest = f"MaxText's models/{chosen}.yml as config file, with decoder_block={block}"
    preset_lines = []
    if not nearest:
        is_model = name == "model_name"
        preset_lines = config_files.by_family(presets) if is_model else [", ".join(presets)]
    return ConfigIssue(
        message=f"{name}: there is no {short_path(file)}",
        context=(
            ("nearest", ", ".join(nearest)),
            ("closest", closest),
            *(("known", line) for line in preset_lines),
            ("default", str(all_keys()[name].default)),
        ),
    )


def sweep_not_supported(name: str, location: str) -> ConfigIssue:
    """Returns the problem of a file for several runs in a single-run program."""
    return ConfigIssue(
        message=f"{name}: stands for {SWEEP_KEYS[name]}, which only compare.py expands",
        location=(location,),
        context=(("run", f"python MaxText/compare.py CONFIG.yml ..., or take the key {name} out"),),
    )


def distinct(
    settings: list[Setting], result: CollectedSettings, *, last_wins: bool = False
) -> list[Setting]:
    """Returns the settings of one source under our names, once each.

    Args:
      settings: As they were written.
      result: Gets notices of other names and values, and problems.
      last_wins: Whether a key may be set twice; otherwise that is a problem.
    """
    result.problems += _single_output_norms(settings)
    by_name: dict[str, Setting] = {}
    for written in itertools.chain.from_iterable(map(_by_key, settings)):
        notices: list[str] = []
        setting = _under_our_name(written, notices)
        if written.origin.source is not Source.SAVED_CONFIG:  # which names nobody typed
            result.notices += notices
        if setting is None:
            continue
        name = setting.name
        earlier = by_name.get(name)
        if earlier is not None and earlier.value != setting.value:
            if not last_wins:
                message = f"{name}: given twice with different values"
                issue = ConfigIssue(message, (earlier.place, setting.place))
                result.problems.append(issue)
                continue
            result.notices.append(
                f"note: {name} is given twice: {setting.place} wins over {earlier.place}"
            )
        by_name[name] = setting
    return list(by_name.values())


def _by_key(setting: Setting) -> Iterator[Setting]:
    """Yields a setting, or those of its keys if it is a mapping for a named section."""
    if setting.name not in named_sections() or not isinstance(setting.value, Mapping):
        yield setting
        return
    for name, value in dotted({setting.name: setting.value}).items():
        origin = dataclasses.replace(setting.origin, raw=values.to_yaml(value))
        if origin.source is Source.ENVIRONMENT:
            origin = dataclasses.replace(origin, note=f"{origin.note}, {name}")
        yield Setting(name=name, value=value, origin=origin, written=name)


def _single_output_norms(settings: Sequence[Setting]) -> list[ConfigIssue]:
    """Returns the issue of a norm after one of both branches.

    MaxText has a key for each branch, and here norm_placement is about both.
    """
    switched_on = [
        setting
        for setting in settings
        if setting.name in SANDWICH_KEYS
        and (mapping := find_mapping(setting.name, setting.value))
        and mapping.name
    ]
    if {setting.name for setting in switched_on} in (set(), SANDWICH_KEYS):
        return []
    [missing] = SANDWICH_KEYS - {switched_on[0].name}
    return [
        ConfigIssue(
            message=f"{switched_on[0].name}=true without {missing}=true: norm_placement is about "
            "the outputs of both branches",
            location=(switched_on[0].place,),
            context=(("instead", f"{missing}=true, or norm_placement=sandwich"),),
        )
    ]


def _under_our_name(setting: Setting, notices: list[str]) -> Setting | None:
    """Returns a setting under the name and with the value that it has here.

    Args:
      setting: As it was written, maybe for another program.
      notices: Gets what users should know of the difference.

    Returns:
      The setting; None if nothing has to be set here.
    """
    name = ALIASES.get(setting.name, setting.name)
    value = setting.value
    if setting.name in ALIASES:
        notices.append(f"note: {setting.name} is called {name} here")
    if mapping := find_mapping(name, value):
        notices.append(f"note: {setting.written}={setting.origin.raw} {mapping.sentence}")
        name = mapping.name
        value = mapping.value
    if name == "logical_axis_rules" and isinstance(value, list):
        value, num_dropped = _without_foreign_rules(value)
        if num_dropped:
            notices.append(
                f"note: logical_axis_rules: {num_dropped} of MaxText's own rules are for names or "
                "axes that are not here"
            )
    return dataclasses.replace(setting, name=name, value=value) if name else None


def _without_foreign_rules(rules: list[Any]) -> tuple[list[Any], int]:
    """Drops MaxText's default rules of names and axes that are not here; returns their number."""

    def is_foreign(rule: values.UntypedValue) -> bool:
        if not is_maxtext_default("logical_axis_rules", [rule]):
            return False
        try:
            axis_rules.parse([rule])
        except values.InvalidValueError:
            return True
        return False

    remaining = [rule for rule in rules if not is_foreign(rule)]
    return remaining, len(rules) - len(remaining)


def print_notices(notices: Sequence[str]) -> None:
    """Writes notes and warnings to standard error, each once."""
    for notice in dict.fromkeys(notices):
        sys.stderr.write(shorten(notice) + "\n")
