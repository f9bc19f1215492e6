"""Compared items of a report: runs, and groups of runs that differ in their seed only."""

import dataclasses
from collections.abc import Mapping, Sequence

from MaxText.metrics.run_record import RunRecord, real_folder


@dataclasses.dataclass(frozen=True)
class Entry:
    """A run, or the runs of a group.

    Attributes:
      label: Unique on the page.
      colour: Index of color and dashes.
      runs: Name of each run -> its record.
      is_group: Whether the runs are seeds of the same thing; a group may have one run so far.
    """

    label: str
    colour: int
    runs: Mapping[str, RunRecord]
    is_group: bool = False


def arrange(
    runs: Sequence[RunRecord], groups: Mapping[str, Sequence[str]] | None = None
) -> list[Entry]:
    """Groups runs and labels everything uniquely.

    Args:
      groups: Label -> folders of its runs; folders of other runs are ignored.

    Returns:
      Groups first, then the other runs.
    """
    names = dict(zip((real_folder(run.folder) for run in runs), _names(runs), strict=True))
    by_folder = {real_folder(run.folder): run for run in runs}
    members: dict[str, list[str]] = {
        label: [folder for folder in map(real_folder, folders) if folder in by_folder]
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
            # A run called like a group is told apart by where it lies.
            found.append((name if name not in taken else str(run.folder), {name: run}, False))
    return [
        Entry(label, colour, members, is_group)
        for colour, (label, members, is_group) in enumerate(found)
    ]


def all_runs(entries: Sequence[Entry]) -> dict[str, RunRecord]:
    """Returns the runs of all entries by name."""
    return {name: run for entry in entries for name, run in entry.runs.items()}


def _names(runs: Sequence[RunRecord]) -> list[str]:
    """Returns the name of each run, with as many parent folders as make it unique."""
    paths = [real_folder(run.folder).split("/") for run in runs]
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
    """Returns peaks of devices, TFLOP/s, if they differ and one of them was measured; else none.

    MFU is not compared then: of two equal runs the one whose machine was busy while its peak was
    measured would show the higher share.
    """
    facts = [run.facts for run in all_runs(entries).values() if run.facts.get("peak_tflops")]
    peaks = sorted({float(fact["peak_tflops"]) for fact in facts})
    is_measured = any(str(fact.get("peak_source")).startswith("measured") for fact in facts)
    return peaks if len(peaks) > 1 and is_measured else []
