"""Resolves files, environment and command line into one configuration.

`load` and `load_config` do it in these steps:

1. sources.collect reads all settings, weakest first; import_modules.collect first imports the
   modules that they name, whose parts have keys.
2. `merge` converts each value to the type of its key and takes the strongest of each key.
3. `_derive` fills in what other keys decide.
4. Keys without effect are looked for, and the rules about combinations of keys are checked.

All problems are reported together in one ConfigurationError.

Order, last wins: schema default, bundle of the decoder_block, base_config chain, config file,
preset of model_name, environment (M_<KEY>), command line. jax is not imported, so that a mistake is
reported in a fraction of a second.
"""

import contextlib
import dataclasses
import datetime
import io
import os
import secrets
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from MaxText.config import axis_rules, config_files, import_modules, sources, values
from MaxText.config.keys import Options
from MaxText.config.layer_plan import parse_kinds
from MaxText.config.maxtext_keys import VALUE_NOTES, current_entry, find_unsupported
from MaxText.config.problems import ConfigIssue, ConfigurationError, close_matches, nearest_fact
from MaxText.config.rules import RULES, broken_letters
from MaxText.config.schema import Config, Key, all_keys, all_names, keys_of_layers, unflatten
from MaxText.config.sources import CheckpointConfig, CollectedSettings, Origin, Setting, Source

# More are counted: finding the nearest names of each takes milliseconds.
_MAX_UNKNOWN_KEYS = 100
_SET_BY_USER = (Source.CONFIG_FILE, Source.ENVIRONMENT, Source.COMMAND_LINE, Source.ARGUMENT)

__all__ = ["LoadedConfig", "Origin", "Setting", "Source", "load", "load_config"]


@dataclasses.dataclass(frozen=True)
class LoadedConfig:
    """A configuration and the origins of its values.

    Attributes:
      config: Resolved: every default filled in, and every -1 and empty name that another key
        decides.
      origins: By key.
      config_path: The config file that was named, or None.
      settings: Everything that was set, weakest first, beaten values included.
    """

    config: Config
    origins: dict[str, Origin]
    config_path: Path | None
    settings: tuple[Setting, ...]

    def typed(self, name: str) -> bool:
        """Returns whether a key was set for this start, outside of files."""
        return self.origins[name].source in _SET_BY_USER[1:]


def load(
    arguments: Sequence[str],
    program: str | None = None,
    *,
    for_compare: bool = False,
    recorded: CheckpointConfig | None = None,
) -> LoadedConfig:
    """Resolves a command line.

    Args:
      arguments: Optional config paths, then key=value.
      program: Such as "train.py"; adds the rules of that program.
      for_compare: Leave `sweep:` and `stages:` of a file to the caller instead of refusing them.
      recorded: Configuration that weights record, below a config file.

    Raises:
      ConfigurationError: with everything that is wrong.
    """
    collected = import_modules.collect(arguments, recorded=recorded)
    if for_compare:
        collected.sweep_blocks = {}
    return _resolve(collected, program)


class FileReview(NamedTuple):
    """What this program makes of a config file, as `train.py FILE` would.

    Attributes:
      settings: Accepted values, weakest first.
      defaults: Values that a copy of MaxText's base.yml has left as they are.
      absent_defaults: The same, of keys that are not here.
      notices: Lines about other names, and about keys without effect.
      problems: What is wrong with the file.
      missing: What the program needs besides the file.
    """

    settings: list[Setting]
    defaults: list[Setting]
    absent_defaults: list[Setting]
    notices: list[str]
    problems: list[ConfigIssue]
    missing: list[ConfigIssue]


def review_file(path: str, arguments: Sequence[str], program: str) -> FileReview:
    """Validates a config file by the rules of a program, without its notices and errors.

    Args:
      path: Of a YAML or JSON file.
      arguments: Config paths and key=value over the file.
      program: Such as "train.py".
    """
    collected = import_modules.collect(arguments, files=[path])
    notices = collected.notices
    collected.notices = []
    problems, unused = _problems_and_notices(collected, None)
    of_program, _ = _problems_and_notices(collected, program)
    missing = [problem for problem in of_program if problem not in problems]
    notices += unused
    refused_places = {place for problem in problems for place in problem.location}
    reviewed_sources = (Source.CONFIG_FILE, Source.BASE_CONFIG, Source.SAVED_CONFIG, *_SET_BY_USER)
    accepted = []
    for setting in collected.settings:
        has_effect = not any(line.endswith(f"({setting.place})") for line in unused)
        is_reviewed = setting.origin.source in reviewed_sources
        if is_reviewed and has_effect and setting.place not in refused_places:
            accepted.append(setting)
    defaults = collected.maxtext_defaults
    return FileReview(
        settings=accepted,
        defaults=[setting for setting in defaults if setting.place not in refused_places],
        absent_defaults=collected.absent_defaults,
        notices=list(dict.fromkeys(notices)),
        problems=problems,
        missing=missing,
    )


def _problems_and_notices(
    collected: CollectedSettings, program: str | None
) -> tuple[list[ConfigIssue], list[str]]:
    """Returns the problems of a configuration, and notices of keys without effect."""
    notices = io.StringIO()
    problems: list[ConfigIssue] = []
    try:
        with contextlib.redirect_stderr(notices):
            _resolve(collected, program)
    except ConfigurationError as error:
        problems += error.problems
    return problems, notices.getvalue().splitlines()


def load_config(config_file: str | Path | None = None, **overrides: Any) -> Config:
    """Returns the configuration of a file and Python values, as `load`."""
    arguments = [] if config_file is None else [str(config_file)]
    return _resolve(import_modules.collect(arguments, overrides), None).config


class _Merged(NamedTuple):
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
        return self.origins[name].source in _SET_BY_USER and not is_default

    def set_derived(self, name: str, value: Any, note: str) -> None:
        """Sets a key to what follows from others.

        Args:
          name: The key.
          value: In its type.
          note: What it follows from, for --why.
        """
        self.typed[name] = value
        origin = Origin(source=Source.DERIVED, raw=values.to_yaml(value), note=note)
        self.origins[name] = origin


def _resolve(collected: CollectedSettings, program: str | None) -> LoadedConfig:
    """Returns the configuration of collected settings.

    Args:
      collected: The settings.
      program: Such as "train.py"; None checks only the rules of all programs.

    Raises:
      ConfigurationError: with everything that is wrong.
    """
    sources.print_notices(collected.notices)
    problems = list(collected.problems)
    problems += [
        sources.sweep_not_supported(name, setting.origin.place)
        for name, setting in collected.sweep_blocks.items()
    ]
    merged = merge(collected.settings, problems)
    typed = merged.typed
    _derive(merged, collected.config_path)
    unused = _find_unused_keys(merged)
    problems += _find_unused_decoder_block(merged)
    config = unflatten({name: value for name, value in typed.items() if name not in merged.wrong})
    rule_issues = _check_rules(config, merged, program)
    # What rules miss may stand in a file that could not be read, or in a preset that is not there.
    problems += [] if collected.is_incomplete else rule_issues.broken
    unused |= {name: issue for name, issue in rule_issues.unused.items() if name not in unused}
    if typed["strict_config"] is True:
        problems += unused.values()
    if problems:
        raise ConfigurationError(problems)
    for name, issue in unused.items():
        severity = "warning" if all_keys()[name].section[0] == "model" else "note"
        sources.print_notices([f"{severity}: {issue.message} ({issue.location[0]})"])
    return LoadedConfig(config, merged.origins, collected.config_path, tuple(merged.settings))


def merge(settings: Sequence[Setting], problems: list[ConfigIssue]) -> _Merged:
    """Returns the strongest value of every key, in its type.

    Args:
      settings: Weakest first.
      problems: Gets an issue for each setting that is refused.
    """
    keys = all_keys()
    typed = {name: key.default for name, key in keys.items()}
    origins = {
        name: Origin(source=Source.DEFAULT, raw=values.to_yaml(typed[name])) for name in keys
    }
    typed["logical_axis_rules"] = ()
    merged = _Merged(typed=typed, origins=origins, settings=[], wrong=set())
    unknown: list[Setting] = []
    for setting in settings:
        key = keys.get(setting.name)
        if key is None:
            unknown.append(setting)
            if len(unknown) <= _MAX_UNKNOWN_KEYS:
                problems.append(_unknown(setting))
            continue
        try:
            value = _typed(setting, key)
        except values.InvalidValueError as error:
            problems.append(_type_error(setting, key, str(error)))
            merged.wrong.add(key.name)
            continue
        # configs/base.yml lists every key so that people can read it. Its values are the schema's
        # defaults, so they rank as such: naming base.yml must not undo a decoder_block's choices.
        if setting.origin.file == config_files.BASE_YML and value == key.default:
            continue
        if setting.name == "logical_axis_rules":
            value = axis_rules.merge(typed["logical_axis_rules"], value)
        if key.entries:
            value = typed[setting.name].updated(value)
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


def _typed(setting: Setting, key: Key) -> Any:
    """Returns the value of a setting in its key's type, or raises values.InvalidValueError."""
    if key.name == import_modules.KEY:
        return import_modules.names_in(setting)
    value = setting.value
    # A text key takes what was typed as it is: prompt=[hello] stays text.
    from_shell = setting.origin.source in (Source.COMMAND_LINE, Source.ENVIRONMENT)
    if key.annotation is str and from_shell and not isinstance(value, str):
        value = values.UntypedScalar(setting.origin.raw)
    return converted_value(value, key)


def converted_value(value: Any, key: Key) -> Any:
    """Converts a value to a key's type, or raises values.InvalidValueError."""
    if key.parser is not None and isinstance(value, str):
        return key.parser.read(value)
    if key.entries:
        return _options(value, key)
    if key.name == "logical_axis_rules":
        return axis_rules.parse(value)
    if key.name == "layer_kinds":
        layer_keys = keys_of_layers()
        return parse_kinds(value, lambda name, typed: converted_value(typed, layer_keys[name]))
    converted = values.convert(value, key.annotation)
    if key.violates_bounds(converted):
        raise values.InvalidValueError(f"{values.format_value(converted)} is not {key.bounds_text}")
    return converted


def _options(value: Any, key: Key) -> Options:
    """Returns the value of a key with entries, in which only the typed entries are set.

    Raises:
      values.InvalidValueError: the first entry that is wrong.
    """
    if isinstance(value, Options):
        return value
    if not isinstance(value, dict):
        raise values.InvalidValueError(f"{values.format_value(value)} is not {{entry: value}}")
    entries = {}
    for written_name, entry_value in value.items():
        name = current_entry(key.name, written_name)
        if name in entries:
            raise values.InvalidValueError(f"{name}: given twice")
        if name not in key.entries:
            nearest = close_matches(name, key.entries) or key.entries
            raise values.InvalidValueError(f"no entry {name}; nearest: {', '.join(nearest)}")
        try:
            entries[name] = converted_value(entry_value, key.entries[name])
        except values.InvalidValueError as error:
            raise values.InvalidValueError(f"{name}: {error}") from None
    return key.annotation(**entries)


def _unknown(setting: Setting) -> ConfigIssue:
    """Returns the issue of a setting whose name is no key."""
    name = setting.written
    if name in sources.SWEEP_KEYS:
        return sources.sweep_not_supported(name, setting.place)
    if name in sources.FILE_KEYS:
        return ConfigIssue(f"{name}: only a YAML file can set it", (setting.place,))
    return unknown_key(name, (setting.place,))


def unknown_key(name: str, location: tuple[str, ...] = ()) -> ConfigIssue:
    """Returns the issue of a name that is no key, with the nearest ones.

    Of another program's key it says why it is not here.
    """
    nearest = close_matches(name, all_names())
    if reason := find_unsupported(name, tuple(nearest)):
        return ConfigIssue(f"{name}: not a key here: {reason.sentence}", location)
    return ConfigIssue(
        message=f"{name}: unknown key",
        location=location,
        context=(("nearest", ", ".join(nearest)), ("all keys", "configs/base.yml, or --help")),
    )


def format_accepted(key: Key) -> str:
    """Returns what values a key takes, for messages and help."""
    if key.name == "logical_axis_rules":
        return f"a list of [name, axis], [name, [axes]] or [name, null]; {axis_rules.KNOWN_AXES}"
    if key.name == "layer_kinds":
        return "{letter: {key: value}}, with keys of a layer's parts"
    if key.parser is not None:
        return key.parser.accepts
    if key.entries:
        return f"{{entry: value}}, of {', '.join(key.entries)}"
    bounds = f", {key.bounds_text}" if key.bounds_text else ""
    return values.type_name(key.annotation) + bounds


def _type_error(setting: Setting, key: Key, message: str) -> ConfigIssue:
    """Returns the issue of a value that does not fit its key.

    Args:
      setting: The setting.
      key: Its key.
      message: What is wrong. It begins with the name of an entry if that is at fault.
    """
    name = key.name
    value = setting.value
    entry = message.partition(":")[0]
    if entry in key.entries:
        entry_values = {current_entry(name, written): item for written, item in value.items()}
        value = entry_values[entry]
        key = key.entries[entry]
    facts = [("accepted", format_accepted(key))]
    if key.choices and isinstance(value, str):
        facts.append(nearest_fact(value, filter(None, key.choices)))
        facts.append(("note", VALUE_NOTES.get((key.name, value), "")))
    if dict(key.bounds).get("ne") is not None:
        facts.append(("meaning", key.help))
    if key.name != "logical_axis_rules":
        facts.append(("default", values.to_yaml(key.default)))
    return ConfigIssue(f"{name}: {message}", (setting.place,), facts)


def _derive(merged: _Merged, config_path: Path | None) -> None:
    """Fills in the keys that follow from others.

    Args:
      merged: Values and origins, which are changed.
      config_path: The config file that was named, or None.
    """
    _derive_steps(merged)
    if merged.typed["mlm_training"] and merged.origins["causal"].source == Source.DEFAULT:
        merged.set_derived("causal", False, "from mlm_training")
    _derive_eval_interval(merged)
    _derive_data(merged)
    _derive_expert_capacity(merged)
    _derive_run_name(merged, config_path)
    _derive_run_folder(merged)


def _derive_steps(merged: _Merged) -> None:
    """Replaces -1 of the run's length or the schedule's by the other."""
    steps = merged.typed["steps"]
    schedule_steps = merged.typed["learning_rate_schedule_steps"]
    if schedule_steps == -1:
        merged.set_derived("learning_rate_schedule_steps", steps, "from steps")
    elif steps == -1:
        merged.set_derived("steps", schedule_steps, "from learning_rate_schedule_steps")


def _derive_eval_interval(merged: _Merged) -> None:
    """Switches evaluation off where there is nothing to evaluate on."""
    typed = merged.typed
    if typed["eval_interval"] == 0:
        merged.set_derived("eval_interval", -1, "0 is never, too")
    source = merged.origins["eval_interval"].source
    is_asked_for = source in (Source.COMMAND_LINE, Source.ARGUMENT)
    reads_records = typed["dataset_type"] == "grain" and typed["grain_train_files"]
    has_eval_data = typed["grain_eval_files"] or typed["dataset_path"]
    if typed["eval_interval"] == -1 or is_asked_for or has_eval_data or not reads_records:
        return
    sources.print_notices(["note: no evaluation: grain_eval_files names no records for it"])
    merged.set_derived("eval_interval", -1, "without records to evaluate on")


def _derive_data(merged: _Merged) -> None:
    """Empties a weaker choice of training data.

    What to train on is one choice of several keys: the key that was set last beats the others.
    """
    typed = merged.typed
    for name in ("dataset_path", "grain_train_files"):
        if not typed[name] or not typed["data_mixture_weights"]:
            continue
        rank = merged.origins[name].source.rank
        mixture_rank = merged.origins["data_mixture_weights"].source.rank
        if rank < mixture_rank:
            merged.set_derived(name, "", "because of data_mixture_weights")
        elif rank > mixture_rank:
            merged.set_derived("data_mixture_weights", (), f"because of {name}")


def _derive_expert_capacity(merged: _Merged) -> None:
    """Limits the capacity of experts on several devices, which cannot be dropless."""
    typed = merged.typed
    sizes = (typed["ici_expert_parallelism"], typed["dcn_expert_parallelism"])
    if typed["num_experts"] == 1 or all(size in (0, 1) for size in sizes):
        return
    for name, factor in (("capacity_factor", 1.25), ("eval_capacity_factor", 2.0)):
        is_chosen = merged.origins[name].source not in (Source.DEFAULT, Source.DECODER_BLOCK)
        if typed[name] == -1 and not is_chosen:
            sources.print_notices([f"note: {name}={factor:g}: experts are on several devices"])
            merged.set_derived(name, factor, "for experts on several devices")


def _derive_run_name(merged: _Merged, config_path: Path | None) -> None:
    """Names a run that has no name, by its job, else by what it trains and the time."""
    typed = merged.typed
    if typed["run_name"]:
        return
    if job := os.environ.get("JOBSET_NAME"):
        merged.set_derived("run_name", job, "from $JOBSET_NAME")
        return
    if typed["model_name"] not in ("default", ""):
        source = "model_name"
        stem = typed["model_name"]
        if sources.YAML_PATH.fullmatch(stem):
            stem = Path(stem).stem
    elif config_path:
        source = "the config file's name"
        stem = config_path.stem
    else:
        source = stem = "run"
    time = datetime.datetime.now().strftime("%Y-%m-%d-%H-%M-%S")
    # A sweep may start several runs in one second.
    name = f"{stem}_{time}-{secrets.token_hex(2)}"
    merged.set_derived("run_name", name, f"from {source} and time of start")


def _derive_run_folder(merged: _Merged) -> None:
    """Splits a run_name that is a whole path, and fills in an empty base_output_directory."""
    typed = merged.typed
    name = typed["run_name"]
    root = typed["base_output_directory"]
    is_whole_path = name.startswith(("/", "~")) or "://" in name
    if not is_whole_path:
        if not root:
            merged.set_derived("base_output_directory", "./maxtext_output", "because it is empty")
        return
    parent, _, last_part = name.rstrip("/").rpartition("/")
    if root and root.rstrip("/") != parent:
        sources.print_notices([f"note: base_output_directory={root}: run_name is a whole path"])
    merged.set_derived("base_output_directory", parent or "/", "from run_name, a whole path")
    note = "from the last part of the path given as run_name"
    merged.set_derived("run_name", last_part, note)


def _find_unused_keys(merged: _Merged) -> dict[str, ConfigIssue]:
    """Returns explicitly set keys without effect, with the reasons.

    Values of a preset, bundle or base file are silently inert, as is one of the config file if a
    stronger layer made the choice that disables it: `file.yml dataset_type=synthetic` need not
    empty dataset_path.
    """
    typed = merged.typed
    last = merged.last
    issues = {}
    # A key has an effect if it has one in any kind of layers.
    typed_of_layers = [typed, *(typed | dict(keys) for _, keys in typed["layer_kinds"])]
    for name, key in all_keys().items():
        if name in merged.wrong or not merged.is_set_by_user(name):
            continue
        changed_entries = [
            entry_key
            for entry, entry_key in key.entries.items()
            if getattr(typed[name], entry) != entry_key.default
        ]
        conditions = [
            (checked_key, group)
            for checked_key in (key, *changed_entries)
            for group in checked_key.conditions
        ]
        for checked_key, group in conditions:
            if merged.wrong.intersection(group) or _is_met(group, typed_of_layers):
                continue
            if _is_decided_by_a_stronger_source(group, name, merged.origins):
                continue
            choices = " and ".join(f"{other}={values.to_yaml(typed[other])}" for other in group)
            location = [last[name].place]
            for other in group:
                location.append(last[other].place if other in last else f"{other} is the default")
            issues[name] = ConfigIssue(
                message=f"{checked_key.name}: has no effect with {choices}",
                location=tuple(location),
                context=(
                    ("needs", key.condition_text(group)),
                    ("default", values.to_yaml(checked_key.default)),
                ),
            )
    return issues


def _is_met(group: Mapping[str, Any], typed_of_layers: Sequence[Mapping[str, Any]]) -> bool:
    """Returns whether one key of a group of conditions enables the key, in one kind of layers."""
    return any(typed[other] in group[other] for typed in typed_of_layers for other in group)


def _is_decided_by_a_stronger_source(
    group: Iterable[str], name: str, origins: Mapping[str, Origin]
) -> bool:
    """Returns whether a key of a group was set by a stronger source than the key `name`."""
    rank = origins[name].source.rank
    deciding_sources = [origins[other].source for other in group]
    return any(source is not Source.DERIVED and source.rank > rank for source in deciding_sources)


def _find_unused_decoder_block(merged: _Merged) -> list[ConfigIssue]:
    """Returns the issue of a decoder_block that a saved configuration leaves without effect."""
    chosen = [setting for setting in merged.settings if setting.name == "decoder_block"]
    saved = [setting for setting in chosen if setting.origin.source is Source.SAVED_CONFIG]
    if not saved or merged.origins["decoder_block"].source is Source.SAVED_CONFIG:
        return []
    last_chosen = chosen[-1]
    last_saved = saved[-1]
    is_same = last_chosen.value == last_saved.value
    if is_same or last_chosen.origin.source is Source.PRESET:
        return []
    remedy = "start from a config file that is not saved, or set the parts"
    return [
        ConfigIssue(
            message="decoder_block: has no effect over a saved configuration, which sets every "
            "part",
            location=(last_chosen.place, last_saved.place),
            context=(("instead", remedy),),
        )
    ]


class _RuleIssues(NamedTuple):
    broken: list[ConfigIssue]  # impossible combinations
    unused: dict[str, ConfigIssue]  # keys without effect that the user set


def _check_rules(config: Config, merged: _Merged, program: str | None) -> _RuleIssues:
    """Returns the issues that rules find, with the places where their keys were set.

    Args:
      config: The configuration; keys with a problem have their default.
      merged: Values and origins of the same keys.
      program: Such as "train.py"; None checks only the rules of all programs.
    """
    stem = Path(program).stem if program else None
    broken: list[ConfigIssue] = []
    unused: dict[str, ConfigIssue] = {}
    for rule in RULES:
        if merged.wrong.intersection(rule.keys) or not rule.applies_to(stem):
            continue
        # A derived value is only as wrong as the key it comes from, which has a rule of its own.
        only_key = rule.keys[0] if len(rule.keys) == 1 else None
        if only_key and merged.origins[only_key].source is Source.DERIVED:
            continue
        issue = rule.check(config)
        if issue is None:
            continue
        located = _located(issue, rule.keys, merged)
        if not rule.finds_unused:
            broken.append(located)
            continue
        # Nothing is said of values that a bundle, a preset or a base file sets. The first key of
        # the issue is the one without effect.
        by_user = [name for name in issue.keys[:1] or rule.keys if merged.is_set_by_user(name)]
        if by_user:
            place = merged.last[by_user[0]].place
            unused[by_user[0]] = dataclasses.replace(located, location=(place,))
    if broken:
        return _RuleIssues(broken, unused)
    for issue in broken_letters(config):
        place = merged.last["layer_kinds"].place
        broken.append(dataclasses.replace(issue, location=(place,)))
    return _RuleIssues(broken, unused)


def _located(issue: ConfigIssue, rule_keys: tuple[str, ...], merged: _Merged) -> ConfigIssue:
    """Returns an issue with the places of its keys, and the values of those that nothing set."""
    last = merged.last
    origins = merged.origins
    set_keys = [name for name in issue.keys if name in last] or rule_keys
    defaults = [
        f"{name}={origins[name].raw}"
        for name in issue.keys or rule_keys
        if origins[name].source is Source.DEFAULT
    ]
    return dataclasses.replace(
        issue,
        location=tuple(last[name].place for name in set_keys if name in last),
        context=(("default", ", ".join(defaults)),),
    )
