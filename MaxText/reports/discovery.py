"""Finds the runs of a command line: run folders, folders of runs."""

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from etils import epath

from MaxText.config.problems import close_matches
from MaxText.config.values import to_yaml
from MaxText.errors import UserError
from MaxText.metrics.events import EVENTS_FILE
from MaxText.metrics.run_record import RunHistory, read_run, resolve_run_dir
from MaxText.storage.paths import natural_key, parse_path

COMPARISON_FILE = "comparison.json"


@dataclasses.dataclass(frozen=True)
class DiscoveredRuns:
    """Runs and their groups."""

    runs: list[RunHistory]  # each folder once, in command-line order
    groups: dict[str, list[str]]  # label -> folders of its seeds, from comparisons
    problems: list[str]  # one line per unreadable run inside a named folder


def find_runs(paths: Sequence[str], group_by: str = "") -> DiscoveredRuns:
    """Reads the runs in folders at any depth.

    Groups are those of comparison.json, or of the runs with the same value of a key. Raises
    UserError for a folder without runs, a named run that cannot be read, or an unknown key.
    """
    runs: dict[str, RunHistory] = {}
    found = DiscoveredRuns([], {}, [])
    for path in paths:
        folder, problems = parse_path(str(path), "RUN"), []
        try:
            # Without a run inside, reading the folder raises the error.
            inside = list(_folders_of_runs(folder, set())) or [folder]
            for each in inside:
                real = resolve_run_dir(each)
                try:
                    runs[real] = runs.get(real) or read_run(each)
                except UserError as error:
                    if each == folder:
                        raise
                    # A run that has just begun must not hide the others.
                    problems.append(f"Skipped: {error}")
            if len(problems) == len(inside):
                raise UserError("\n".join([f"No run in {path} is readable.", *problems]))
            found.problems.extend(problems)
            for label, members in _groups(folder).items():
                found.groups.setdefault(label, []).extend(members)
        except OSError as error:
            raise UserError(
                f"cannot read {path}: {error.strerror or error}. Check its permissions."
            ) from error
    found.runs.extend(runs.values())
    if group_by:
        return dataclasses.replace(found, groups=_groups_by_key(found.runs, group_by))
    return found


def _groups_by_key(runs: Sequence[RunHistory], key: str) -> dict[str, list[str]]:
    """Returns a group per value of a key; UserError if no run has it."""
    groups: dict[str, list[str]] = {}
    for run in runs:
        if key in run.config:
            groups.setdefault(f"{key}={to_yaml(run.config[key])}", []).append(str(run.folder))
    if not groups:
        known = [name for run in runs for name in run.config]
        close = close_matches(key, list(dict.fromkeys(known)))
        meant = f" Did you mean {close[0]}?" if close else ""
        raise UserError(f"group_by={key}: no run has this key in its config.yml.{meant}")
    return groups


def _folders_of_runs(folder: epath.Path, visited: set[str]) -> Iterator[epath.Path]:
    """Yields run folders below a folder, without searching inside runs."""
    real = resolve_run_dir(folder)
    if real in visited:  # links may form cycles
        return
    visited.add(real)
    if (folder / EVENTS_FILE).exists():
        yield folder
    elif folder.is_dir():
        for child in sorted(folder.iterdir(), key=lambda path: natural_key(path.name)):
            yield from _folders_of_runs(child, visited)


def _groups(folder: epath.Path) -> Mapping[str, list[str]]:
    """Returns the groups in comparison.json, with full paths."""
    file = folder / COMPARISON_FILE
    if not file.exists():
        return {}
    try:
        groups: Any = json.loads(file.read_text())["groups"]
        return {name: [str(folder / each) for each in runs] for name, runs in groups.items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(
            f'{file} is not of the form {{"groups": {{label: [folder, ...]}}}}: '
            f"{type(error).__name__}: {error}. Restore it, or remove it to show runs ungrouped."
        ) from error
