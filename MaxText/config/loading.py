"""Resolves files, environment and command line into one configuration.

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
from collections.abc import Mapping, Sequence
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
    """A configuration and the origins of its values."""

    # resolved: every default filled in, every -1 and empty name that another key decides
    config: Config
    origins: dict[str, Origin]  # by key
    config_path: Path | None  # the config file that was named, or None
    settings: tuple[Setting, ...]  # everything that was set, weakest first, beaten values included

    def typed(self, name: str) -> bool:
        """Returns whether a key was set for this start, outside of files."""
        return self.origins[name].source in _SET_BY_USER[1:]


def load(
    arguments: Sequence[str],
    program: str | None = None,
    *,
    for_compare: bool = False,
    own: CheckpointConfig | None = None,
) -> LoadedConfig:
    """Resolves a command line.

    Args:
      arguments: Optional config paths, then key=value.
      program: Such as "train.py"; adds the rules of that program.
      for_compare: Leave `sweep:` and `stages:` of a file to the caller instead of refusing them.
      own: Configuration that weights record, below a config file.
    """
    collected = import_modules.collect(arguments, own=own)
    if for_compare:
        collected.sweep_blocks = {}
    return _resolve(collected, program)


class FileReview(NamedTuple):
    """What this program makes of a config file, as `train.py FILE` would."""

    settings: list[Setting]  # accepted values, weakest first
    defaults: list[Setting]  # values that a copy of MaxText's base.yml has left as they are
    absent_defaults: list[Setting]  # the same, of keys that are not here
    notices: list[str]
    problems: list[ConfigIssue]
    missing: list[ConfigIssue]  # what the program needs besides the file


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
    places = {place for problem in problems for place in problem.location}
    accepted = [
        setting
        for setting in collected.settings
        if setting.place not in places
        and not any(line.endswith(f"({setting.place})") for line in unused)
    ]
    shown = (Source.CONFIG_FILE, Source.BASE_CONFIG, Source.SAVED_CONFIG, *_SET_BY_USER)
    defaults = collected.maxtext_defaults
    return FileReview(
        settings=[one for one in accepted if one.origin.source in shown],
        defaults=[setting for setting in defaults if setting.place not in places],
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
    typed: dict[str, Any]  # values by key
    origins: dict[str, Origin]
    kept: list[Setting]  # that took part, weakest first
    wrong: set[str]  # keys with a problem

    @property
    def last(self) -> dict[str, Setting]:
        return {setting.name: setting for setting in self.kept}

    def is_set_by_user(self, name: str) -> bool:
        is_default = self.typed[name] == all_keys()[name].default
        return self.origins[name].source in _SET_BY_USER and not is_default


def _resolve(collected: CollectedSettings, program: str | None) -> LoadedConfig:
    sources.print_notices(collected.notices)
    problems = list(collected.problems)
    problems += [
        sources.sweep_not_supported(name, one.origin.place)
        for name, one in collected.sweep_blocks.items()
    ]
    winners = merge(collected.settings, problems)
    typed, origins, kept, wrong = winners
    _derive(typed, origins, collected.config_path)
    idle = _find_unused_keys(winners)
    problems += _find_unused_decoder_block(origins, kept)
    config = unflatten({name: value for name, value in typed.items() if name not in wrong})
    rule_issues = _check_rules(config, winners, program)
    # What rules miss may stand in a file that could not be read, or in a preset that is not there.
    problems += [] if collected.is_incomplete else rule_issues.broken
    idle |= {name: issue for name, issue in rule_issues.unused.items() if name not in idle}
    if typed["strict_config"] is True:
        problems += idle.values()
    if problems:
        raise ConfigurationError(problems)
    for name, problem in idle.items():
        kind = "warning" if all_keys()[name].section[0] == "model" else "note"
        sources.print_notices([f"{kind}: {problem.message} ({problem.location[0]})"])
    return LoadedConfig(config, origins, collected.config_path, tuple(kept))


def merge(settings: Sequence[Setting], problems: list[ConfigIssue]) -> _Merged:
    """Returns the typed winners of settings; appends to `problems`."""
    keys = all_keys()
    typed = {name: key.default for name, key in keys.items()}
    origins = {name: Origin(Source.DEFAULT, raw=values.to_yaml(typed[name])) for name in keys}
    typed["logical_axis_rules"] = ()
    kept: list[Setting] = []
    wrong: set[str] = set()
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
            wrong.add(key.name)
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
        kept.append(setting)
    if len(unknown) > _MAX_UNKNOWN_KEYS:
        first = unknown[_MAX_UNKNOWN_KEYS]
        what = f"{len(unknown) - _MAX_UNKNOWN_KEYS:,} more unknown keys, the first: {first.written}"
        problems.append(ConfigIssue(what, (first.place,)))
    if not typed["override_logical_axis_rules"]:
        typed["logical_axis_rules"] = axis_rules.merge(
            axis_rules.default_rules(), typed["logical_axis_rules"]
        )
    return _Merged(typed, origins, kept, wrong)


def _typed(setting: Setting, key: Key) -> Any:
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
    if key.entries:
        return _options(value, key)
    if key.name == "logical_axis_rules":
        return axis_rules.parse(value)
    if key.name == "layer_kinds":
        of_layers = keys_of_layers()
        return parse_kinds(value, lambda name, one: converted_value(one, of_layers[name]))
    converted = values.convert(value, key.annotation)
    if key.violates_bounds(converted):
        raise values.InvalidValueError(f"{values.format_value(converted)} is not {key.bounds_text}")
    return converted


def _options(value: Any, key: Key) -> Options:
    if isinstance(value, Options):
        return value
    if not isinstance(value, dict):
        raise values.InvalidValueError(f"{values.format_value(value)} is not {{entry: value}}")
    given = {}
    for name, one in value.items():
        name = current_entry(key.name, name)
        if name in given:
            raise values.InvalidValueError(f"{name}: given twice")
        if name not in key.entries:
            close = close_matches(name, key.entries) or key.entries
            raise values.InvalidValueError(f"no entry {name}; nearest: {', '.join(close)}")
        try:
            given[name] = converted_value(one, key.entries[name])
        except values.InvalidValueError as error:
            raise values.InvalidValueError(f"{name}: {error}") from None
    return key.annotation(**given)


def _unknown(setting: Setting) -> ConfigIssue:
    name = setting.written
    if name in sources.SWEEP_KEYS:
        return sources.sweep_not_supported(name, setting.place)
    if name in sources.FILE_KEYS:
        return ConfigIssue(f"{name}: only a YAML file can set it", (setting.place,))
    return unknown_key(name, (setting.place,))


def unknown_key(name: str, places: tuple[str, ...] = ()) -> ConfigIssue:
    close = close_matches(name, all_names())
    if reason := find_unsupported(name, tuple(close)):
        return ConfigIssue(f"{name}: not a key here: {reason.sentence}", places)
    facts = ("nearest", ", ".join(close)), ("all keys", "configs/base.yml, or --help")
    return ConfigIssue(f"{name}: unknown key", places, facts)


def format_accepted(key: Key) -> str:
    if key.name == "logical_axis_rules":
        return f"a list of [name, axis], [name, [axes]] or [name, null]; {axis_rules.KNOWN}"
    if key.name == "layer_kinds":
        return "{letter: {key: value}}, with keys of a layer's parts"
    if key.entries:
        return f"{{entry: value}}, of {', '.join(key.entries)}"
    bounds = f", {key.bounds_text}" if key.bounds_text else ""
    return values.type_name(key.annotation) + bounds


def _type_error(setting: Setting, key: Key, message: str) -> ConfigIssue:
    name = key.name
    value = setting.value
    entry = message.partition(":")[0]
    if entry in key.entries:
        value = {current_entry(name, given): one for given, one in value.items()}[entry]
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


def _derive(typed: dict[str, Any], origins: dict[str, Origin], config_path: Path | None) -> None:
    def set_derived(name: str, value: Any, note: str) -> None:
        typed[name] = value
        origins[name] = Origin(Source.DERIVED, raw=values.to_yaml(value), note=note)

    schedule = typed["learning_rate_schedule_steps"]
    if schedule == -1:
        set_derived("learning_rate_schedule_steps", typed["steps"], "from steps")
    elif typed["steps"] == -1:
        set_derived("steps", schedule, "from learning_rate_schedule_steps")

    if typed["mlm_training"] and origins["causal"].source == Source.DEFAULT:
        set_derived("causal", False, "from mlm_training")

    if typed["eval_interval"] == 0:
        set_derived("eval_interval", -1, "0 is never, too")

    reads_records = typed["dataset_type"] == "grain" and typed["grain_train_files"]
    by_user = origins["eval_interval"].source in (Source.COMMAND_LINE, Source.ARGUMENT)
    nothing_held_out = not (typed["grain_eval_files"] or typed["dataset_path"])
    if reads_records and nothing_held_out and typed["eval_interval"] != -1 and not by_user:
        sources.print_notices(["note: no evaluation: grain_eval_files names no records for it"])
        set_derived("eval_interval", -1, "without records to evaluate on")

    # What to train on is one choice: the key that was set last beats the others.
    for name in ("dataset_path", "grain_train_files"):
        if typed[name] and typed["data_mixture_weights"]:
            rank, other = (origins[one].source.rank for one in (name, "data_mixture_weights"))
            if rank < other:
                set_derived(name, "", "because of data_mixture_weights")
            elif rank > other:
                set_derived("data_mixture_weights", (), f"because of {name}")

    sizes = typed["ici_expert_parallelism"], typed["dcn_expert_parallelism"]
    if typed["num_experts"] > 1 and any(size not in (0, 1) for size in sizes):
        for name, factor in (("capacity_factor", 1.25), ("eval_capacity_factor", 2.0)):
            if typed[name] == -1 and origins[name].source in (Source.DEFAULT, Source.DECODER_BLOCK):
                sources.print_notices([f"note: {name}={factor:g}: experts are on several devices"])
                set_derived(name, factor, "for experts on several devices")

    if not typed["run_name"]:
        if job := os.environ.get("JOBSET_NAME"):
            set_derived("run_name", job, "from $JOBSET_NAME")
        else:
            chosen = typed["model_name"] if typed["model_name"] != "default" else ""
            if sources.YAML_PATH.fullmatch(chosen):
                chosen = Path(chosen).stem
            stem = chosen or (config_path.stem if config_path else "run")
            time = datetime.datetime.now().strftime("%Y-%m-%d-%H-%M-%S")
            time += f"-{secrets.token_hex(2)}"  # a sweep may start several runs in one second
            source = "model_name" if chosen else "the config file's name" if config_path else "run"
            set_derived("run_name", f"{stem}_{time}", f"from {source} and time of start")
    name = typed["run_name"]
    if name.startswith(("/", "~")) or "://" in name:
        base = typed["base_output_directory"]
        parent, _, last = name.rstrip("/").rpartition("/")
        if base and base.rstrip("/") != parent:
            sources.print_notices([f"note: base_output_directory={base}: run_name is a whole path"])
        set_derived("base_output_directory", parent or "/", "from run_name, a whole path")
        set_derived("run_name", last, "from the last part of the path given as run_name")
    elif not typed["base_output_directory"]:
        set_derived("base_output_directory", "./maxtext_output", "because it is empty")


def _find_unused_keys(winners: _Merged) -> dict[str, ConfigIssue]:
    """Returns explicitly set keys without effect, with the reasons.

    Values of a preset, bundle or base file are silently inert, as is one of the config file if a
    stronger layer made the choice that disables it: `file.yml dataset_type=synthetic` need not
    empty dataset_path.
    """
    typed, origins, _, wrong = winners
    last = winners.last
    problems = {}
    layers = [typed, *(typed | dict(keys) for _, keys in typed["layer_kinds"])]
    for name, key in all_keys().items():
        source = origins[name].source
        if name in wrong or not winners.is_set_by_user(name):
            continue
        set_entries = [
            one for entry, one in key.entries.items() if getattr(typed[name], entry) != one.default
        ]
        judged = [(one, group) for one in (key, *set_entries) for group in one.conditions]
        for one, group in judged:
            matters = any(of[other] in group[other] for of in layers for other in group)
            if matters or wrong.intersection(group):
                continue
            chosen_by = [origins[other].source for other in group]
            if any(by is not Source.DERIVED and by.rank > source.rank for by in chosen_by):
                continue
            as_it_is = " and ".join(f"{other}={values.to_yaml(typed[other])}" for other in group)
            what = f"{one.name}: has no effect with {as_it_is}"
            places = [last[name].place]
            for other in group:
                places.append(last[other].place if other in last else f"{other} is the default")
            facts = (
                ("needs", key.condition_text(group)),
                ("default", values.to_yaml(one.default)),
            )
            problems[name] = ConfigIssue(what, tuple(places), facts)
    return problems


def _find_unused_decoder_block(
    origins: Mapping[str, Origin], kept: Sequence[Setting]
) -> list[ConfigIssue]:
    given = [setting for setting in kept if setting.name == "decoder_block"]
    saved = [setting for setting in given if setting.origin.source is Source.SAVED_CONFIG]
    if not saved or origins["decoder_block"].source is Source.SAVED_CONFIG:
        return []
    chosen = given[-1]
    if chosen.value == saved[-1].value or chosen.origin.source is Source.PRESET:
        return []
    what = "decoder_block: has no effect over a saved configuration, which sets every part"
    facts = (("instead", "start from a config file that is not saved, or set the parts"),)
    return [ConfigIssue(what, (chosen.place, saved[-1].place), facts)]


class _RuleIssues(NamedTuple):
    broken: list[ConfigIssue]  # impossible combinations
    unused: dict[str, ConfigIssue]  # keys without effect that the user set


def _check_rules(config: Config, winners: _Merged, program: str | None) -> _RuleIssues:
    """Returns the issues that rules find, with the places where their keys were set.

    Args:
      config: The configuration; keys with a problem have their default.
      winners: Values and origins of the same keys.
      program: Such as "train.py"; None checks only the rules of all programs.
    """
    stem = Path(program).stem if program else None
    broken: list[ConfigIssue] = []
    unused: dict[str, ConfigIssue] = {}
    for rule in RULES:
        if winners.wrong.intersection(rule.keys) or not rule.applies_to(stem):
            continue
        # A derived value is only as wrong as the key it comes from, which has a rule of its own.
        only_key = rule.keys[0] if len(rule.keys) == 1 else None
        if only_key and winners.origins[only_key].source is Source.DERIVED:
            continue
        issue = rule.check(config)
        if issue is None:
            continue
        located = _located(issue, rule.keys, winners)
        if not rule.finds_unused:
            broken.append(located)
            continue
        # Nothing is said of values that a bundle, a preset or a base file sets. The first key of
        # the issue is the one without effect.
        by_user = [name for name in issue.keys[:1] or rule.keys if winners.is_set_by_user(name)]
        if by_user:
            place = winners.last[by_user[0]].place
            unused[by_user[0]] = dataclasses.replace(located, location=(place,))
    if broken:
        return _RuleIssues(broken, unused)
    for issue in broken_letters(config):
        place = winners.last["layer_kinds"].place
        broken.append(dataclasses.replace(issue, location=(place,)))
    return _RuleIssues(broken, unused)


def _located(issue: ConfigIssue, rule_keys: tuple[str, ...], winners: _Merged) -> ConfigIssue:
    """Returns an issue with the places of its keys, and the values of those that nothing set."""
    last = winners.last
    origins = winners.origins
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
