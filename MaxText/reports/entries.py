"""Compared items of a report: runs, and groups of runs that differ only in their seed."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from MaxText.metrics.goodput import PARTS, SMALLEST_SHARE
from MaxText.metrics.run_record import RunRecord, resolve_run_dir


@dataclasses.dataclass(frozen=True)
class Entry:
    """A run, or a group of runs that differ only in seed (maybe one run so far).

    `label` is unique on the page, `color` an index of color and dashes, `runs` maps names to
    records.
    """

    label: str
    color: int
    runs: Mapping[str, RunRecord]
    is_group: bool = False


def group_runs(
    runs: Sequence[RunRecord], groups: Mapping[str, Sequence[str]] | None = None
) -> list[Entry]:
    """Groups runs and labels everything uniquely; groups come first.

    `groups` maps a label to the folders of its runs; folders of other runs are ignored.
    """
    names = dict(zip((resolve_run_dir(run.folder) for run in runs), _names(runs), strict=True))
    by_folder = {resolve_run_dir(run.folder): run for run in runs}
    members: dict[str, list[str]] = {
        label: [folder for folder in map(resolve_run_dir, folders) if folder in by_folder]
        for label, folders in (groups or {}).items()
    }
    members = {label: folders for label, folders in members.items() if folders}
    grouped = {folder for folders in members.values() for folder in folders}
    found = [
        (label, {names[folder]: by_folder[folder] for folder in folders}, True)
        for label, folders in members.items()
    ]
    taken = set(members)
    for folder, run in by_folder.items():
        if folder not in grouped:
            name = names[folder]
            # Disambiguates a run named like a group by its folder.
            found.append((name if name not in taken else str(run.folder), {name: run}, False))
    return [
        Entry(label, color, members, is_group)
        for color, (label, members, is_group) in enumerate(found)
    ]


def all_runs(entries: Sequence[Entry]) -> dict[str, RunRecord]:
    """Returns the runs of all entries by name."""
    return {name: run for entry in entries for name, run in entry.runs.items()}


def shown_parts(runs: Iterable[RunRecord]) -> dict[str, str]:
    """Returns the parts of the time that some run spent enough on to show, with labels."""
    goodputs = [run.goodput for run in runs]
    return {
        part: label
        for part, label in PARTS.items()
        if any(goodput.share(part) > SMALLEST_SHARE for goodput in goodputs)
    }


def _names(runs: Sequence[RunRecord]) -> list[str]:
    """Returns run names, with as many parent folders as make them unique."""
    paths = [resolve_run_dir(run.folder).split("/") for run in runs]
    names = []
    for run, path in zip(runs, paths, strict=True):
        rivals = [
            other_path
            for other, other_path in zip(runs, paths, strict=True)
            if other is not run and other.name == run.name
        ]
        name = run.name
        for depth in range(1, len(path) + 1):
            if all(rival[-depth:] != path[-depth:] for rival in rivals):
                break
        else:
            depth = len(path)
        if rivals:
            name = "/".join(path[-depth:])
            if path[-1] != run.name:
                name = f"{run.name} ({name})"
        names.append(name)
    return names


def averaged(entry: Entry) -> list[RunRecord]:
    """Returns the runs in an entry's means: those that did not diverge, or its only run."""
    if not entry.is_group:
        return [*entry.runs.values()]
    return [run for run in entry.runs.values() if run.state != "diverged"]


def differing_peaks(entries: Sequence[Entry]) -> list[float]:
    """Returns device peaks in TFLOP/s if they differ and at least one was measured; else none.

    MFU is not compared then: a machine that was busy during the measurement would look better.
    """
    facts = [run.facts for run in all_runs(entries).values() if run.facts.get("peak_tflops")]
    peaks = sorted({float(fact["peak_tflops"]) for fact in facts})
    is_measured = any(str(fact.get("peak_source")).startswith("measured") for fact in facts)
    return peaks if len(peaks) > 1 and is_measured else []
