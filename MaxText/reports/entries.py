"""Compared items of a report, found in folders: runs, and groups of seeds."""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from etils import epath

from MaxText.config.problems import close_matches
from MaxText.config.serialization import diff_configs
from MaxText.config.values import to_yaml
from MaxText.errors import UserError
from MaxText.monitoring.events import EVENTS_FILE, MAIN_KEYS
from MaxText.monitoring.goodput import PARTS, SMALLEST_SHARE
from MaxText.monitoring.run_record import RunHistory, read_run, resolve_run_dir
from MaxText.storage.paths import natural_key, parse_path
from MaxText.value_types import JsonValue

COMPARISON_FILE = "comparison.json"


class DiscoveredRuns(NamedTuple):
    """Runs and their groups."""

    runs: list[RunHistory]  # each folder once, in command-line order
    groups: dict[str, list[str]]  # label -> folders of its seeds, from comparisons
    problems: list[str]  # one line per unreadable run inside a named folder


def find_runs(paths: Sequence[str], group_by: str = "") -> DiscoveredRuns:
    """Reads the runs in folders at any depth.

    Args:
        paths: of runs, or of folders that hold some.
        group_by: key whose values group the runs; by default the groups of comparison.json.

    Raises:
        UserError: a folder without runs, a named run that cannot be read, or an unknown key.
    """
    runs: dict[str, RunHistory] = {}
    groups: dict[str, list[str]] = {}
    problems: list[str] = []
    for path in paths:
        folder = parse_path(str(path), "RUN")
        unread = []
        try:
            # Without a run inside, reading the folder raises the error.
            inside = list(_folders_of_runs(folder, set())) if folder.is_dir() else []
            inside = inside or [folder]
            for run_folder in inside:
                real = resolve_run_dir(run_folder)
                try:
                    runs[real] = runs.get(real) or read_run(run_folder)
                except UserError as error:
                    if run_folder == folder:
                        raise
                    # A run that has just begun must not hide the others.
                    unread.append(f"Skipped: {error}")
            if len(unread) == len(inside):
                raise UserError("\n".join([f"No run in {path} is readable.", *unread]))
            problems += unread
            for label, members in _groups(folder).items():
                groups.setdefault(label, []).extend(members)
        except OSError as error:
            raise UserError(
                f"cannot read {path}: {error.strerror or error}. Check its permissions."
            ) from error
    found_runs = list(runs.values())
    if group_by:
        groups = _groups_by_key(found_runs, group_by)
    return DiscoveredRuns(found_runs, groups, problems)


def _groups_by_key(runs: Sequence[RunHistory], key: str) -> dict[str, list[str]]:
    """Returns a group per value of a key; UserError if no run has it."""
    groups: dict[str, list[str]] = {}
    for run in runs:
        if key in run.config:
            groups.setdefault(f"{key}={to_yaml(run.config[key])}", []).append(str(run.folder))
    if not groups:
        close = close_matches(key, {name for run in runs for name in run.config})
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
        return
    for child in sorted(folder.iterdir(), key=lambda path: natural_key(path.name)):
        if child.is_dir():
            yield from _folders_of_runs(child, visited)


def _groups(folder: epath.Path) -> Mapping[str, list[str]]:
    """Returns the groups in comparison.json, with full paths."""
    file = folder / COMPARISON_FILE
    if not file.exists():
        return {}
    try:
        groups: JsonValue = json.loads(file.read_text(encoding="utf-8"))["groups"]
        return {
            name: [str(folder / name_of_run) for name_of_run in runs]
            for name, runs in groups.items()
        }
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(
            f'{file} is not of the form {{"groups": {{label: [folder, ...]}}}}: '
            f"{type(error).__name__}: {error}. Restore it, or remove it to show runs ungrouped."
        ) from error


class Entry(NamedTuple):
    """A run, or a group of runs with different seeds."""

    label: str  # unique on the page
    color: int  # index of color and dashes
    runs: Mapping[str, RunHistory]  # by name
    is_group: bool = False


def group_runs(
    runs: Sequence[RunHistory], groups: Mapping[str, Sequence[str]] | None = None
) -> list[Entry]:
    """Groups runs and labels everything uniquely; groups come first.

    `groups` maps a label to the folders of its runs; folders of other runs are ignored.
    """
    by_folder = {resolve_run_dir(run.folder): run for run in runs}
    names = dict(zip(by_folder, _names(list(by_folder.values())), strict=True))
    entries: dict[str, dict[str, RunHistory]] = {}
    for label, folders in (groups or {}).items():
        folders_with_runs = [
            folder for folder in map(resolve_run_dir, folders) if folder in by_folder
        ]
        if folders_with_runs:
            entries[label] = {names[folder]: by_folder[folder] for folder in folders_with_runs}
    grouped = {id(run) for members in entries.values() for run in members.values()}
    num_groups = len(entries)
    for folder, run in by_folder.items():
        if id(run) not in grouped:
            # A run named like a group is labeled by its folder.
            label = str(run.folder) if names[folder] in entries else names[folder]
            entries[label] = {names[folder]: run}
    return [
        Entry(label, color, members, color < num_groups)
        for color, (label, members) in enumerate(entries.items())
    ]


def all_runs(entries: Sequence[Entry]) -> dict[str, RunHistory]:
    """Returns the runs of all entries by name."""
    return {name: run for entry in entries for name, run in entry.runs.items()}


def differing_keys(entries: Sequence[Entry]) -> dict[str, dict[str, Any]]:
    """Returns {key: {run: value}} of different values, main keys first."""
    configs = settings(entries)
    first = next(iter(configs.values()), {})
    changed = [key for config in configs.values() for key in diff_configs(first, config)]
    return {
        key: {name: config[key] for name, config in configs.items() if key in config}
        for key in sorted(dict.fromkeys(changed), key=main_keys_first)
        if key not in ("run_name", "base_output_directory")  # say nothing about the run
    }


def settings(entries: Sequence[Entry]) -> dict[str, dict[str, Any]]:
    """Returns configurations by run, with what replaced `auto`."""
    runs = {name: run for name, run in all_runs(entries).items() if run.config}
    # A run that has just begun does not say it; `auto` against its value would be no difference.
    all_resolved = all("resolved_keys" in run.facts for run in runs.values())
    configs = {}
    for name, run in runs.items():
        resolved = run.facts["resolved_keys"] if all_resolved else {}
        configs[name] = {**run.config, **(resolved or {})}
    return configs


def main_keys_first(key: str) -> int:
    """Sorts main keys before all others, in their own order."""
    return MAIN_KEYS.index(key) if key in MAIN_KEYS else len(MAIN_KEYS)


def alike(entries: Sequence[Entry], fact: Callable[[RunHistory], Any]) -> list[tuple[str, Any]]:
    """Returns (names of the runs, value) for each distinct value of a fact."""
    values: dict[str, tuple[list[str], Any]] = {}
    for name, run in all_runs(entries).items():
        value = fact(run)
        if value not in (None, "", {}):
            names, _ = values.setdefault(json.dumps(value, sort_keys=True), ([], value))
            names.append(name)
    return [(", ".join(names), value) for names, value in values.values()]


def shown_parts(runs: Iterable[RunHistory]) -> dict[str, str]:
    """Returns the visible parts of the time, with labels."""
    goodputs = [run.goodput for run in runs]
    return {
        part: label
        for part, label in PARTS.items()
        if any(goodput.share(part) > SMALLEST_SHARE for goodput in goodputs)
    }


def _names(runs: Sequence[RunHistory]) -> list[str]:
    """Returns run names, with parent folders where several runs have the same."""
    names = []
    for run in runs:
        homonyms = [resolve_run_dir(other.folder) for other in runs if other.name == run.name]
        common = os.path.commonprefix(homonyms).rpartition("/")[0]  # noqa: RUF071, of buckets, too
        path = resolve_run_dir(run.folder)[len(common) :].lstrip("/")
        longer = path if path.rpartition("/")[2] == run.name else f"{run.name} ({path})"
        names.append(run.name if len(homonyms) == 1 else longer)
    return names


def averaged(entry: Entry) -> list[RunHistory]:
    """Returns the runs in an entry's means, without diverged ones."""
    return [run for run in entry.runs.values() if run.state != "diverged" or not entry.is_group]


def differing_peaks(entries: Sequence[Entry]) -> list[float]:
    """Returns different device peaks in TFLOP/s, if one was measured.

    MFU is not compared then: a machine that was busy during the measurement would look better.
    """
    facts = [run.facts for run in all_runs(entries).values() if run.facts.get("peak_tflops")]
    peaks = sorted({float(fact["peak_tflops"]) for fact in facts})
    is_measured = any(str(fact.get("peak_source")).startswith("measured") for fact in facts)
    return peaks if len(peaks) > 1 and is_measured else []
