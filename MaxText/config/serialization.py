"""Resolved configurations as flat YAML, and their differences.

A run folder holds its configuration as YAML by section, a checkpoint as a flat dictionary.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from MaxText.config import import_modules
from MaxText.config.schema import (
    SCHEMA_VERSION,
    Config,
    all_keys,
    flatten,
    keys_by_section,
)
from MaxText.config.sources import IMPORTED
from MaxText.config.values import TypedValue, to_yaml
from MaxText.errors import UserError

_LINE = 100


def resolved_yaml(
    config: Config, comments: Mapping[str, str] = {}, omitted: Collection[str] = ()
) -> str:
    """Returns a configuration as a YAML file, by section.

    `schema_version` marks it as resolved, so that its preset is not applied a second time.

    Args:
      config: The configuration.
      comments: By key, for the ends of lines.
      omitted: Keys to leave out.
    """
    values = {name: value for name, value in flatten(config).items() if name not in omitted}
    head = [f"schema_version: {SCHEMA_VERSION}"]
    if modules := import_modules.imported(config.run.import_modules):
        head += entry_lines(IMPORTED, modules)
    return section_lines(head, values, comments)


def section_lines(
    head: Sequence[str], values: Mapping[str, Any], comments: Mapping[str, str] = {}
) -> str:
    """Returns a YAML file of some keys, by section.

    Args:
      head: The first lines of the file.
      values: Values by key; keys without one are left out.
      comments: By key, for the ends of lines.
    """
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


def check_recorded(recorded: Mapping[str, Any], owner: str) -> None:
    """Raises UserError if recorded values have keys that this program does not know.

    Args:
      recorded: Flat values, for example of a checkpoint's metadata.
      owner: What recorded them, for the message.
    """
    if unknown := sorted(recorded.keys() - all_keys().keys()):
        raise UserError(
            f"{owner} was made by another version of this program: its configuration has "
            f"{', '.join(unknown)}, which this one does not know"
        )


def entry_lines(name: str, value: TypedValue, comment: str = "") -> list[str]:
    """Returns the YAML lines of one key; long items take a line each."""
    line = f"{name}: {to_yaml(value)}"
    end = f"  # {comment}" if comment else ""
    if len(line) <= _LINE or not isinstance(value, tuple | list | dict):
        return [line + end]
    if isinstance(value, dict):
        return [f"{name}:{end}", *(f"  {to_yaml(k)}: {to_yaml(v)}" for k, v in value.items())]
    return [f"{name}:{end}", *(f"  - {to_yaml(item)}" for item in value)]


def diff_configs(
    old_values: Mapping[str, Any], new_values: Mapping[str, Any]
) -> dict[str, tuple[str, str]]:
    """Returns {key: (old value, new value)} as YAML for two flat configurations."""
    changed = {}
    for name in dict.fromkeys([*new_values, *old_values]):
        old_text = to_yaml(old_values[name]) if name in old_values else "(no such key)"
        new_text = to_yaml(new_values[name]) if name in new_values else "(no such key)"
        if old_text != new_text:
            changed[name] = (old_text, new_text)
    return changed


def changed_keys(config: Config) -> dict[str, str]:
    """Returns the keys that differ from their default, with their values as YAML."""
    defaults = {name: key.default for name, key in all_keys().items()}
    differences = diff_configs(defaults, flatten(config))
    return {name: new_text for name, (_, new_text) in differences.items()}
