"""Writes report.html with its figures, and a run's loss_curve.png."""

import datetime
import os
import urllib.parse
from collections.abc import Mapping, Sequence
from pathlib import Path

from etils import epath

from MaxText.config.sources import IMPORTED
from MaxText.errors import UserError
from MaxText.monitoring.run_record import RunHistory, read_run, resolve_run_dir
from MaxText.reports import run_tables
from MaxText.reports.chart import AxisName, draw_chart
from MaxText.reports.curves import Axes
from MaxText.reports.entries import Entry, all_runs, differing_keys, group_runs
from MaxText.reports.page import PageSection, render
from MaxText.reports.plots import plot_chart, plot_goodput, plot_hyperparameters
from MaxText.reports.run_charts import loss_chart, loss_charts, quantity_charts
from MaxText.storage.atomic import atomic_write_bytes, atomic_write_text

PAGE_FILE = "report.html"
_LOSS_CURVE = "loss_curve.png"

_CURVES_NOTE = (
    "Each point of a training line is the median of the reports around it (a running median, which "
    'spikes do not move); the reports themselves are faint behind it ("raw"). Drag to zoom all '
    'charts, double-click to reset. "Only" shows a single run. Thin lines are single seeds, bands '
    "reach from the smallest to the largest. Folded charts show everything else that was recorded. "
    "Without JavaScript, see the PNG files next to this page."
)

# Keys with long values that are no hyperparameters; under Configuration differences.
_NOT_SHOWN = ("import_modules", IMPORTED)
_MAX_KEYS = 12  # maximum hyperparameters in the table of runs and in plots

_FIGURES: Sequence[AxisName] = ("tokens", "flops", "time")  # axes of loss_<axis>.png


def write_report(  # noqa: PLR0913
    runs: Sequence[RunHistory],
    output: Path,
    *,
    title: str = "",
    groups: Mapping[str, Sequence[str]] | None = None,
    leading: Sequence[PageSection] = (),
    sections: Sequence[PageSection] = (),
    warnings: Sequence[str] = (),
    compared: Sequence[RunHistory] = (),
    refresh: int = 0,
) -> Path:
    """Writes report.html and the figures atomically; returns the path.

    The curves come first, after the `leading` sections; `sections` follow the table of runs.

    Args:
        runs: to draw.
        output: folder of the page.
        title: of the page; by default from the names of the runs.
        groups: label -> folders of runs that differ only in seed, drawn in one color with mean and
            band.
        leading: sections before the curves.
        sections: sections after the table of runs.
        warnings: shown above everything.
        compared: whose final losses are compared; by default all runs.
        refresh: seconds after which the page reloads; 0 for never.

    Raises:
        UserError: the folder cannot be written.
    """
    entries = group_runs(runs, groups)
    labels = [entry.label for entry in entries]
    if len(labels) > 4:
        labels = [f"{len(labels)} runs: {labels[0]}", *labels[1:3], "..."]
    title = title or ", ".join(labels)
    axes = Axes(runs)
    charts = [*loss_charts(entries, axes), *quantity_charts(entries, axes)]
    differences = differing_keys(entries)
    hyperparameters = [item for item in differences.items() if item[0] not in _NOT_SHOWN]
    keys = dict(hyperparameters[:_MAX_KEYS])  # more would be unreadable
    omitted = len(differences) - len(keys)
    note = (
        f"Of {len(differences)} keys that differ, {len(keys)} are shown here and in plots, main "
        "keys first; all are under Configuration differences."
    )
    final = group_runs(compared, groups) if compared else entries
    losses = plot_hyperparameters(final, keys)
    page = render(
        title=title,
        made=_made(runs, refresh),
        warnings=[*warnings, *run_tables.warnings(final)],
        sections=[
            *leading,
            PageSection(
                "Curves",
                [_CURVES_NOTE if charts else "No step is recorded yet."],
                plots=[plot_chart(chart, axes) for chart in charts],
                has_controls=bool(charts),
            ),
            PageSection(
                "Runs" if len(runs) > 1 else "Run",
                [note] if omitted else [],
                run_tables.overview(entries, keys),
            ),
            *sections,
            *run_tables.provenance(entries),
            *run_tables.configuration(entries, differences if omitted else {}),
            PageSection(
                "Where the time went",
                table=run_tables.goodput_table(entries),
                plots=[plot_goodput(entries)],
            ),
            *([PageSection("Hyperparameters", plots=losses)] if losses else []),
            *run_tables.cost(entries),
            *run_tables.memory(entries),
            *run_tables.lineage(entries),
            *run_tables.samples(entries),
            *run_tables.event_table(entries),
        ],
        entries=entries,
        axes=[*axes.by_name.values()],
        charts=charts,
        links=_links(entries, output),
        refresh=refresh,
    )
    try:
        output.mkdir(parents=True, exist_ok=True)
        loss = next((chart for chart in charts if chart.name == "loss"), None)
        for axis in _FIGURES:
            figure = draw_chart(loss, axes.by_name[axis], title) if loss else None
            file = output / f"loss_{axis}.png"
            if figure is None:
                # A figure of an earlier report would be mistaken for one of this report.
                file.unlink(missing_ok=True)
            else:
                atomic_write_bytes(file, figure)
        atomic_write_text(output / PAGE_FILE, page)
    except OSError as error:
        raise UserError(
            f"cannot write to output={output}: {error.strerror}. Set output= to a writable folder."
        ) from error
    return output / PAGE_FILE


def write_page(sections: Sequence[PageSection], output: Path, *, title: str) -> Path:
    """Writes report.html of sections alone, without runs; returns its path.

    Raises:
        UserError: the folder cannot be written.
    """
    time = datetime.datetime.now().astimezone()
    page = render(
        sections,
        entries=[],
        charts=[],
        title=title,
        made=f"Made on {time:%Y-%m-%d at %H:%M:%S %Z} from {output}.",
        warnings=[],
        axes=[],
        links={},
        refresh=0,
    )
    try:
        atomic_write_text(output / PAGE_FILE, page)
    except OSError as error:
        raise UserError(
            f"cannot write to {output}: {error.strerror}. Set output= to a writable folder."
        ) from error
    return output / PAGE_FILE


def write_loss_curve(run_folder: str | epath.Path) -> epath.Path | None:
    """Draws loss over steps; returns the path, or None."""
    run = read_run(run_folder)
    axes = Axes([run])
    chart = loss_chart(group_runs([run]), axes)
    figure = draw_chart(chart, axes.by_name["step"], run.name) if chart else None
    if figure is None:
        return None
    path = run.folder / _LOSS_CURVE
    path.write_bytes(figure)
    return path


def _made(runs: Sequence[RunHistory], refresh: int) -> str:
    time = datetime.datetime.now().astimezone()
    folders = ", ".join(str(run.folder) for run in runs[:8])
    remaining = f" and {len(runs) - 8} more" if len(runs) > 8 else ""
    reload_note = f" The page reloads every {refresh} seconds." if refresh else ""
    return (
        f"Made by MaxText/report.py on {time:%Y-%m-%d at %H:%M:%S %Z} from {folders}{remaining}."
        f"{reload_note} Goodput is the share of the time running that went into useful steps; "
        "docs/reference/run_folder_and_events.md defines it and its parts."
    )


def _links(entries: Sequence[Entry], output: Path) -> dict[str, str]:
    """Returns relative addresses of the runs' existing reports."""
    pages = {
        name: Path(resolve_run_dir(run.folder), "report", PAGE_FILE)
        for name, run in all_runs(entries).items()
    }
    return {
        name: urllib.parse.quote(os.path.relpath(page, output.resolve()))
        for name, page in pages.items()
        if page.exists() and page.parent != output.resolve()
    }
