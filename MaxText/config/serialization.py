"""Resolved configurations as flat YAML, and their differences."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from MaxText.config import import_modules
from MaxText.config.keys import Options
from MaxText.config.maxtext_keys import ALIASES, current_entry, find_unsupported
from MaxText.config.schema import (
    SCHEMA_VERSION,
    Config,
    all_keys,
    flatten,
    keys_by_section,
    split_entry,
)
from MaxText.config.sources import IMPORTED
from MaxText.config.values import to_yaml
from MaxText.errors import UserError

_LINE = 100


def resolved_yaml(
    config: Config, comments: Mapping[str, str] = {}, omitted: Collection[str] = ()
) -> str:
    """Returns keys but `omitted` by section, with comments at line ends.

    `schema_version` marks it as resolved, so that its preset is not applied a second time.
    """
    values = {name: value for name, value in flatten(config).items() if name not in omitted}
    head = [f"schema_version: {SCHEMA_VERSION}"]
    if modules := import_modules.imported(config.run.import_modules):
        head += entry_lines(IMPORTED, modules)
    return section_lines(head, values, comments)


def section_lines(
    head: Sequence[str], values: Mapping[str, Any], comments: Mapping[str, str] = {}
) -> str:
    """Returns a YAML file of some keys by section, after its first lines."""
    lines = [*head]
    for section, keys in keys_by_section().items():
        entries = [
            line
            for key in keys
            if key.name in values
            for line in entry_lines(key.name, values[key.name], comments.get(key.name, ""))
        ]
        lines += ["", f"# {'.'.join(section)}", *entries] if entries else []
    return "\n".join(lines) + "\n"


def with_current_names(recorded: Mapping[str, Any], place: str) -> dict[str, Any]:
    values = renamed(recorded)
    known = all_keys()
    if unknown := sorted(values.keys() - known.keys()):
        raise UserError(
            f"{place} was made by another version of this program: its configuration has "
            f"{', '.join(unknown)}, which this one does not know"
        )
    return values


def renamed(recorded: Mapping[str, Any]) -> dict[str, Any]:
    """Returns values under current key names, without keys known to be gone."""
    values: dict[str, Any] = {}
    for name, value in recorded.items():
        name, *stage = name.split(" of stage ")  # in the identity of a comparison's arm
        key, entry = split_entry(ALIASES.get(name, name))
        stored = " of stage ".join([key, *stage])
        if entry:
            earlier = values.get(stored) or all_keys()[key].default.as_dict()
            values[stored] = {**earlier, entry: value}
        elif not find_unsupported(key, (key,)):
            is_mapping = isinstance(value, dict) and key in all_keys() and all_keys()[key].entries
            entries = {current_entry(key, one): v for one, v in value.items()} if is_mapping else {}
            values[stored] = entries or value
    return values


def entry_lines(name: str, value: Any, comment: str = "") -> list[str]:
    """Returns the YAML lines of one key; long items take a line each."""
    line = f"{name}: {to_yaml(value)}"
    end = f"  # {comment}" if comment else ""
    value = value.as_dict() if isinstance(value, Options) else value
    if len(line) <= _LINE or not isinstance(value, tuple | list | dict):
        return [line + end]
    if isinstance(value, dict):
        return [f"{name}:{end}", *(f"  {to_yaml(k)}: {to_yaml(v)}" for k, v in value.items())]
    return [f"{name}:{end}", *(f"  - {to_yaml(item)}" for item in value)]


def diff_configs(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Returns {key: (old, new)} as YAML for two flat configurations."""
    old = renamed(old)
    new = renamed(new)
    changed = {}
    for name in dict.fromkeys([*new, *old]):
        before, after = (
            to_yaml(values[name]) if name in values else "(no such key)" for values in (old, new)
        )
        if before != after:
            changed[name] = (before, after)
    return changed


def changed_keys(config: Config) -> dict[str, str]:
    defaults = {name: key.default for name, key in all_keys().items()}
    return {name: new for name, (_, new) in diff_configs(defaults, flatten(config)).items()}
