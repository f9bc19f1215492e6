"""Resolves files, environment and command line into one configuration.

`load` and `load_config` do it in these steps:

1. sources.collect reads all settings, weakest first; import_modules.collect first imports the
   modules that they name, whose parts have keys.
2. merging.merge converts each value to the type of its key and takes the strongest of each key.
3. derived_values.derive fills in what other keys decide.
4. checking.py looks for keys without effect, and checks the rules about combinations of keys.

All problems are reported together in one ConfigurationError.

Order, last wins: schema default, bundle of the decoder_block, base_config chain, config file,
preset of model_name, environment (M_<KEY>), command line. jax is not imported, so that a mistake is
reported in a fraction of a second.
"""

import contextlib
import dataclasses
import io
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from MaxText.config import import_modules, sources
from MaxText.config.checking import check_rules, find_unused_decoder_block, find_unused_keys
from MaxText.config.derived_values import derive
from MaxText.config.merging import SET_BY_USER, merge
from MaxText.config.problems import ConfigIssue, ConfigurationError
from MaxText.config.schema import Config, all_keys, unflatten
from MaxText.config.sources import CheckpointConfig, CollectedSettings, Origin, Setting, Source
from MaxText.config.values import UntypedValue

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
        return self.origins[name].source in SET_BY_USER[1:]


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
    if collected.absent_family is not None:
        return FileReview([], [], [], [], problems, [])
    refused_places = set(itertools.chain.from_iterable(issue.location for issue in problems))
    reviewed_sources = (Source.CONFIG_FILE, Source.BASE_CONFIG, Source.SAVED_CONFIG, *SET_BY_USER)
    accepted = []
    for setting in collected.settings:
        has_effect = not any(line.endswith(f"({setting.place})") for line in unused)
        is_reviewed = setting.origin.source in reviewed_sources
        # Whether keys of the model go together is unknown without its preset or bundle.
        is_checked = not collected.is_incomplete or not _is_of_model(setting)
        is_refused = setting.place in refused_places or not is_checked
        if is_reviewed and has_effect and not is_refused:
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


def _is_of_model(setting: Setting) -> bool:
    """Returns whether a setting is of the model, as opposed to its training."""
    key = all_keys().get(setting.name)
    return key is not None and key.section[0] == "model"


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


def load_config(config_file: str | Path | None = None, **overrides: UntypedValue) -> Config:
    """Returns the configuration of a file and Python values, as `load`."""
    arguments = [] if config_file is None else [str(config_file)]
    return _resolve(import_modules.collect(arguments, overrides), None).config


def _resolve(collected: CollectedSettings, program: str | None) -> LoadedConfig:
    """Returns the configuration of collected settings.

    Args:
      collected: The settings.
      program: Such as "train.py"; None checks only the rules of all programs.

    Raises:
      ConfigurationError: with everything that is wrong.
    """
    if collected.absent_family is not None:
        raise ConfigurationError([collected.absent_family])
    sources.print_notices(collected.notices)
    problems = list(collected.problems)
    problems += [
        sources.sweep_not_supported(name, setting.origin.place)
        for name, setting in collected.sweep_blocks.items()
    ]
    merged = merge(collected.settings, problems)
    typed = merged.typed
    derive(merged, collected.config_path)
    unused = find_unused_keys(merged)
    problems += find_unused_decoder_block(merged)
    config = unflatten({name: value for name, value in typed.items() if name not in merged.wrong})
    rule_issues = check_rules(config, merged, program)
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
