"""Checks a merged configuration: keys without effect, and the rules about combinations of keys.

An issue gets the places where its keys were set, and the defaults of those that nothing set.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from MaxText.config import values
from MaxText.config.merging import MergedSettings
from MaxText.config.parametrization_rules import broken_at_base_shape
from MaxText.config.problems import ConfigIssue
from MaxText.config.rules import RULES, broken_letters
from MaxText.config.schema import Config, all_keys
from MaxText.config.sources import Origin, Source


def find_unused_keys(merged: MergedSettings) -> dict[str, ConfigIssue]:
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
        for group in key.conditions:
            if merged.wrong.intersection(group) or _is_met(group, typed_of_layers):
                continue
            if _is_decided_by_a_stronger_source(group, name, merged.origins):
                continue
            choices = " and ".join(f"{other}={values.to_yaml(typed[other])}" for other in group)
            location = [last[name].place]
            for other in group:
                location.append(last[other].place if other in last else f"{other} is the default")
            issues[name] = ConfigIssue(
                message=f"{name}: has no effect with {choices}",
                location=tuple(location),
                context=(
                    ("needs", key.condition_text(group)),
                    ("default", key.default_text),
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


def find_unused_decoder_block(merged: MergedSettings) -> list[ConfigIssue]:
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


class RuleIssues(NamedTuple):
    """What the rules find in a configuration."""

    broken: list[ConfigIssue]  # impossible combinations
    unused: dict[str, ConfigIssue]  # keys without effect that the user set


def check_rules(config: Config, merged: MergedSettings, program: str | None) -> RuleIssues:
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
            setting = merged.last[by_user[0]]
            unused[by_user[0]] = dataclasses.replace(located, location=(setting.place,))
    if broken:
        return RuleIssues(broken, unused)
    for issue in broken_letters(config):
        setting = merged.last["layer_kinds"]
        broken.append(dataclasses.replace(issue, location=(setting.place,)))
    for issue in broken_at_base_shape(config):
        broken.append(_located(issue, ("base_shape",), merged))
    return RuleIssues(broken, unused)


def _located(issue: ConfigIssue, rule_keys: tuple[str, ...], merged: MergedSettings) -> ConfigIssue:
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
