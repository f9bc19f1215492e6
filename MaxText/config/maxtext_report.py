"""Report on a YAML file of MaxText or one of its forks."""

from MaxText.config import config_files, sources
from MaxText.config.loading import merge
from MaxText.config.problems import Problem

_SHOWN_FACTS = ("accepted", "nearest", "note")


def report(path: str) -> str:
    """Returns supported keys, keys accepted with a note, and wrong ones."""
    file = config_files.find_config(path)
    entries, problems = config_files.read(file)
    given = [entry for entry in entries if entry.name not in sources.FILE_KEYS]
    result = sources.CollectedSettings(problems=problems)
    supported = merge(sources.distinct(given, result), result.problems).kept
    groups = {
        "Supported": [f"{one.name}: {one.origin.raw}" for one in supported],
        "Accepted under another name or value, or without effect": result.notices,
        "Not supported: change or remove these": list(map(_line, result.problems)),
    }
    lines = [f"{config_files.short_path(file)}, {len(entries)} keys"]
    for heading, found in groups.items():
        lines += ["", f"{heading} ({len(found)}):", *(f"  {line}" for line in found)]
    return "\n".join(lines) + "\n"


def _line(problem: Problem) -> str:
    facts = (f"{label}: {text}" for label, text in problem.facts if label in _SHOWN_FACTS)
    return "; ".join([problem.what, *facts])
