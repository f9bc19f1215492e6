"""Writes the report of one or several runs: report.html and its figures."""

import datetime
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from MaxText.errors import UserError
from MaxText.metrics.run_record import RunRecord
from MaxText.reports import model_tables, run_tables
from MaxText.reports.chart import AxisName, Bars, Chart, colour_of
from MaxText.reports.content import Section
from MaxText.reports.curves import Axes
from MaxText.reports.entries import Entry, arrange
from MaxText.reports.page import Page, render
from MaxText.reports.page_data import page_json
from MaxText.reports.pictures import draw_bars, draw_chart
from MaxText.reports.run_charts import goodput_bars, loss_charts, quantity_charts

PAGE_FILE = "report.html"

# Figure -> chart and axis.
_PICTURES: Mapping[str, tuple[str, AxisName]] = {
    "loss_tokens.png": ("loss", "tokens"),
    "loss_flops.png": ("loss", "flops"),
    "loss_time.png": ("loss", "time"),
    "learning_rate.png": ("learning_rate", "step"),
    "gradient_norm.png": ("gradient_norm", "step"),
    "tokens_per_second.png": ("tokens_per_second", "time"),
    "mfu.png": ("mfu", "time"),
}
_GOODPUT_PICTURE = "goodput.png"


def write_report(
    runs: Sequence[RunRecord],
    output: Path,
    *,
    title: str = "",
    groups: Mapping[str, Sequence[str]] | None = None,
    sections: Sequence[Section] = (),
    warnings: Sequence[str] = (),
    refresh: int = 0,
) -> Path:
    """Writes report.html and the figures, each atomically; returns the path of report.html.

    Args:
      output: Folder for all files; created if absent.
      title: Page title; by default the names of the runs.
      groups: Label -> folders of runs that differ only in seed, drawn in one color with mean and
        band. Other runs are drawn on their own.
      sections: Shown before the table of runs.
      refresh: Seconds after which the page reloads; 0 for never.

    Raises:
      UserError: The folder cannot be written.
    """
    entries = arrange(runs, groups)
    title = title or _title(entries)
    axes = Axes(runs)
    charts = [*loss_charts(entries, axes), *quantity_charts(entries, axes)]
    bars = goodput_bars(entries)
    page = Page(
        title=title,
        made=_made(runs, refresh),
        warnings=[*warnings, *model_tables.warnings(entries)],
        overview=run_tables.overview(entries),
        before_runs=sections,
        charts_json=page_json(entries, axes, charts) if charts else "",
        bars=bars,
        goodput=run_tables.goodput_table(entries),
        sections=[
            *model_tables.configuration(entries),
            *model_tables.cost(entries),
            *model_tables.memory(entries),
            *model_tables.lineage(entries),
            *model_tables.samples(entries),
            *run_tables.happenings(entries),
        ],
        colours=_colours(entries),
        refresh=refresh,
    )
    try:
        output.mkdir(parents=True, exist_ok=True)
        for name, picture in _pictures(charts, bars, axes, title):
            if picture is None:
                # A figure of an earlier report would be mistaken for one of this report.
                (output / name).unlink(missing_ok=True)
            else:
                _replace(output / name, picture)
        _replace(output / PAGE_FILE, render(page).encode("utf-8"))
    except OSError as error:
        raise UserError(
            f"output={output} cannot be written: {error.strerror}. Give a folder that you may "
            "write to."
        ) from error
    return output / PAGE_FILE


def warnings_about(
    runs: Sequence[RunRecord], groups: Mapping[str, Sequence[str]] | None = None
) -> list[str]:
    """Returns why the losses of these runs cannot be compared, or only with care."""
    return model_tables.warnings(arrange(runs, groups))


def _title(entries: Sequence[Entry]) -> str:
    labels = [entry.label for entry in entries]
    if len(labels) > 4:
        return f"{len(labels)} runs: {', '.join(labels[:3])}, ..."
    return ", ".join(labels)


def _made(runs: Sequence[RunRecord], refresh: int) -> str:
    now = datetime.datetime.now().astimezone()
    folders = ", ".join(str(run.folder) for run in runs[:8])
    more = f" and {len(runs) - 8} more" if len(runs) > 8 else ""
    again = f" The page loads itself again every {refresh} seconds." if refresh else ""
    return (
        f"Made by MaxText/report.py on {now:%Y-%m-%d at %H:%M:%S %Z} from {folders}{more}.{again} "
        "Goodput is the share of the time running that went into useful steps; "
        "docs/reference/run_folder_and_events.md defines it and its parts."
    )


def _colours(entries: Sequence[Entry]) -> dict[str, str]:
    colours = {}
    if sum(len(entry.runs) for entry in entries) > 1:
        for entry in entries:
            for name in (*entry.runs, entry.label):
                colours[name] = colour_of(entry.colour)
    return colours


def _pictures(
    charts: Sequence[Chart], bars: Bars, axes: Axes, title: str
) -> Iterator[tuple[str, bytes | None]]:
    by_name = {chart.name: chart for chart in charts}
    for file, (name, axis) in _PICTURES.items():
        chart = by_name.get(name)
        yield file, None if chart is None else draw_chart(chart, axes.axis(axis), title)
    yield _GOODPUT_PICTURE, draw_bars(bars, title)


def _replace(path: Path, content: bytes) -> None:
    temporary = path.with_name(f"{path.name}.writing")
    temporary.write_bytes(content)
    os.replace(temporary, path)
