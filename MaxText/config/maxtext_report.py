"""Report on a YAML file that was written for MaxText or one of its forks."""

from MaxText.config import config_files, values
from MaxText.config.catalogue import Key, all_keys
from MaxText.config.loading import accepted, converted_value
from MaxText.config.maxtext_keys import ALIASES, VALUE_NOTES, absent, translation
from MaxText.config.problems import nearest

_HEADINGS = {
    "understood": "Understood as they are",
    "changed": "Understood under another name or in other words",
    "idle": "Accepted, without effect here",
    "refused": "Known keys with values that are not accepted: change these",
    "ignored": "Not here: leave these out",
    "unknown": "Not recognised: leave these out or correct them",
}


def report(path: str) -> str:
    """Returns one line per key of the file, grouped by what happens to it."""
    file = config_files.find(path)
    entries, problems = config_files.read(file)
    groups: dict[str, list[str]] = {heading: [] for heading in _HEADINGS}
    for entry in entries:
        group, line = _judge(entry)
        groups[group].append(f"  {entry.name}: {line}")
    lines = [f"{config_files.display(file)}, {len(entries)} keys"]
    for group, found in groups.items():
        if found:
            lines += ["", f"{_HEADINGS[group]} ({len(found)}):", *found]
    if problems:
        lines += ["", "Problems of the file itself:", *(f"  {p.what}" for p in problems)]
    return "\n".join(lines) + "\n"


def _judge(entry: config_files.Entry) -> tuple[str, str]:
    if entry.name == "base_config":
        return "understood", f"{entry.raw} (its own keys are not part of this report)"
    name = ALIASES.get(entry.name, entry.name)
    if found := translation(name, entry.value):
        return "changed" if found.name else "idle", f"{entry.raw} {found.sentence}"
    key = all_keys().get(name)
    if key is None:
        close = nearest(entry.name, all_keys())
        if reason := absent(entry.name, tuple(close)):
            return "ignored", reason.sentence
        return "unknown", f"nearest: {', '.join(close)}" if close else "nothing like it"
    if refusal := _refusal(entry, key):
        return "refused", refusal
    return ("understood", entry.raw) if name == entry.name else ("changed", f"{name}: {entry.raw}")


def _refusal(entry: config_files.Entry, key: Key) -> str:
    try:
        converted = converted_value(entry.value, key)
    except values.WrongValue as error:
        note = VALUE_NOTES.get((key.name, str(entry.value)), "")
        return f"{error}" + (f" ({note})" if note else f"; {accepted(key)}")
    outside = key.out_of_bounds(converted)
    return f"{entry.raw} is not {key.bounds_text}" if outside else ""
