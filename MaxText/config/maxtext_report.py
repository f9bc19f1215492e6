"""Report on a YAML file of MaxText or one of its forks."""

from MaxText.config import config_files, values
from MaxText.config.catalog import Key, all_keys
from MaxText.config.loading import converted_value, format_accepted
from MaxText.config.maxtext_keys import ALIASES, VALUE_NOTES, find_mapping, find_unsupported
from MaxText.config.problems import close_matches

_HEADINGS = {
    "understood": "Supported",
    "changed": "Supported under another name or value",
    "idle": "Accepted, without effect here",
    "refused": "Known keys with values that are not accepted: change these",
    "ignored": "Not supported: remove these",
    "unknown": "Unknown: remove or correct these",
}


def report(path: str) -> str:
    """Returns one line per key of the file, grouped by outcome."""
    file = config_files.find_config(path)
    entries, problems = config_files.read(file)
    groups: dict[str, list[str]] = {heading: [] for heading in _HEADINGS}
    for entry in entries:
        group, line = _classify(entry)
        groups[group].append(f"  {entry.name}: {line}")
    lines = [f"{config_files.short_path(file)}, {len(entries)} keys"]
    for group, found in groups.items():
        if found:
            lines += ["", f"{_HEADINGS[group]} ({len(found)}):", *found]
    if problems:
        lines += ["", "Problems of the file itself:", *(f"  {p.what}" for p in problems)]
    return "\n".join(lines) + "\n"


def _classify(entry: config_files.YamlEntry) -> tuple[str, str]:
    if entry.name == "base_config":
        return "understood", f"{entry.raw} (its own keys are not part of this report)"
    name = ALIASES.get(entry.name, entry.name)
    if found := find_mapping(name, entry.value):
        return "changed" if found.name else "idle", f"{entry.raw} {found.sentence}"
    key = all_keys().get(name)
    if key is None:
        close = close_matches(entry.name, all_keys())
        if reason := find_unsupported(entry.name, tuple(close)):
            return "ignored", reason.sentence
        return "unknown", f"nearest: {', '.join(close)}" if close else "nothing like it"
    if refusal := _refusal(entry, key):
        return "refused", refusal
    return ("understood", entry.raw) if name == entry.name else ("changed", f"{name}: {entry.raw}")


def _refusal(entry: config_files.YamlEntry, key: Key) -> str:
    try:
        converted_value(entry.value, key)
    except values.InvalidValueError as error:
        note = VALUE_NOTES.get((key.name, str(entry.value)), "")
        return f"{error}" + (f" ({note})" if note else f"; {format_accepted(key)}")
    return ""
