"""Charts of a report: loss, learning rate, gradient norm, speed, goodput."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from MaxText.metrics.goodput import PARTS, is_step_skip
from MaxText.metrics.run_record import RunRecord
from MaxText.reports.chart import Annotation, AxisName, Bars, Chart, Series
from MaxText.reports.curves import Axes, column, curve, evaluations
from MaxText.reports.downsampling import median_window
from MaxText.reports.entries import Entry, all_runs, differing_peaks, shown_parts

_PART_COLORS = {
    "useful": "#2a9d70",
    "data_wait": "#e08a1e",
    "start_up": "#a9bccf",
    "compile": "#5d7fa3",
    "evaluation": "#8661c1",
    "checkpoint": "#1aa0b8",
    "lost": "#d9485f",
    "finish": "#c9b27c",
    "other": "#8f989f",
}

# Share of initial steps left out of the y range: their high loss would flatten the rest.
_BEGINNING = 0.05

_ROOM = 0.5  # a reference line is in the initial view if it raises the chart by at most this share

_MAX_MARKS = 300  # maximum marks per kind and run, chosen evenly


def loss_charts(entries: Sequence[Entry], axes: Axes) -> list[Chart]:
    """Returns training and validation loss, one chart per kind of loss."""
    kinds: dict[str, list[Entry]] = {}
    for entry in entries:
        kinds.setdefault(next(iter(entry.runs.values())).loss_kind, []).append(entry)
    charts = []
    for kind, alike in kinds.items():
        chart = loss_chart(alike, axes)
        if chart is not None and len(kinds) > 1:
            name = f"loss_{len(charts) + 1}" if charts else "loss"
            chart = dataclasses.replace(chart, name=name, title=f"Loss: {kind}")
        charts += [] if chart is None else [chart]
    return charts


def loss_chart(entries: Sequence[Entry], axes: Axes) -> Chart | None:
    """Returns the loss of runs of one kind; None if none is recorded."""
    alone = len(entries) == 1 and not entries[0].is_group
    series: list[Series] = []
    for entry in entries:
        run = next(iter(entry.runs.values()))
        train = f"training (median of {median_window(len(run.steps))} reports)"
        validation = "validation"
        if alone and run.final_loss is not None:
            validation = f"validation (final {run.final_loss:.4f})"
        if not alone:
            train, validation = (f"{entry.label}, {words}" for words in ("training", "validation"))
        series += curve(entry, axes, _steps, column("learning/lm_loss"), label=train, smooth=True)
        # A single run has two colors, several runs have one each.
        color = entry.color + 1 if alone else entry.color
        series += evaluations(entry, axes, color, validation)
    if not series:
        return None
    references = _unigram_entropy(entries)
    marks = [
        mark
        for entry in entries
        for run in entry.runs.values()
        for mark in _marks(entry, run, axes, series)
    ]
    shown = _loss_range(series, [level for _, level in references])
    return Chart("loss", "Loss", "loss (nats per token)", series, marks, references, y_range=shown)


def quantity_charts(entries: Sequence[Entry], axes: Axes) -> list[Chart]:
    """Returns learning rate, gradient norm, speed and, for equal peaks, MFU, if recorded."""
    charts = []
    for name, title, y_title, value, smooth in (
        ("learning_rate", "Learning rate", "", column("learning/current_learning_rate"), False),
        ("gradient_norm", "Gradient norm", "before clipping", column("learning/grad_norm"), True),
        ("tokens_per_second", "Tokens per second", "all devices", _tokens_per_second, True),
        ("mfu", "MFU", "share of the devices' peak", column("perf/mfu"), True),
    ):
        if name == "mfu" and differing_peaks(entries):
            continue
        series = [
            line
            for entry in entries
            for line in curve(entry, axes, _steps, value, label=entry.label, smooth=smooth)
        ]
        if series:
            log_y = name == "gradient_norm" and _is_positive(series)
            y_range = None if log_y else _range_from_zero(series)
            is_mfu = name == "mfu"
            chart = Chart(
                name, title, y_title, series, y_range=y_range, log_y=log_y, percent=is_mfu
            )
            charts.append(chart)
    return charts


def goodput_bars(entries: Sequence[Entry]) -> Bars:
    runs = all_runs(entries)
    parts = {
        label: [run.goodput.share(part) for run in runs.values()]
        for part, label in shown_parts(runs.values()).items()
    }
    colors = {words: _PART_COLORS[part] for part, words in PARTS.items()}
    return Bars("goodput", "Where the time went", list(runs), parts, colors)


def _steps(run: RunRecord) -> Sequence[Mapping[str, Any]]:
    return run.steps


def _tokens_per_second(run: RunRecord, rows: Sequence[Mapping[str, Any]]) -> np.ndarray:
    """Returns tokens per second over all devices, whose number may vary between attempts."""
    devices = {
        attempt.number: attempt.first_row.get("num_devices") or 1
        for attempt in run.goodput.attempts
    }
    counts = np.array([devices[row["attempt"]] for row in rows], float)
    return column("perf/per_device_tokens_per_sec")(run, rows) * counts


def _unigram_entropy(entries: Sequence[Entry]) -> list[tuple[str, float]]:
    """Returns the unigram baseline if it is the same for all runs."""
    found = {run.facts.get("unigram_entropy") for run in all_runs(entries).values()}
    level = found.pop()
    return [] if found or level is None else [(f"unigram entropy, {level:.2f}", level)]


def _marks(entry: Entry, run: RunRecord, axes: Axes, series: Sequence[Series]) -> list[Annotation]:
    """Returns the events of a run, placed on its entry's curve."""
    line = next((s for s in series if s.owner == entry.label and s.kind == "line"), None)
    if line is None or not run.steps:
        return []
    places = axes.places(run, run.steps)
    steps = places["step"]
    by_kind: dict[str, list[tuple[Mapping[str, Any], str]]] = {}
    for row in run.events:
        kind, text = _described(row)
        if kind is not None and row.get("step") is not None:
            by_kind.setdefault(kind, []).append((row, text))
    shown = [
        (kind, row, text)
        for kind, rows in by_kind.items()
        for row, text in rows[:: -(-len(rows) // _MAX_MARKS)]
    ]
    marks = []
    for kind, row, text in shown:
        at: dict[AxisName, tuple[float, float]] = {}
        for name, points in line.points.items():
            x = float(np.interp(row["step"], steps, places[name]))
            there = np.isfinite(points.y)
            if there.any():
                at[name] = x, float(np.interp(x, points.x[there], points.y[there]))
        marks.append(Annotation(kind, entry.label, f"{text} (step {row['step']:,})", at))
    return marks


def _described(row: Mapping[str, Any]) -> tuple[str | None, str]:
    """Returns (kind of mark or None, text)."""
    kind, reason = row["event"], row.get("reason") or "no reason given"
    if kind == "checkpoint":
        return "checkpoint", "checkpoint"
    if kind in ("start", "resume") and row["attempt"] > 0:
        lost = (row.get("lost") or {}).get("steps") or 0
        return "restart", f"restart {row['attempt']}, {lost:,} steps lost"
    if kind == "skip":
        return f"skipped {'step' if is_step_skip(row) else 'record'}", f"skipped: {reason}"
    if kind == "rewind":
        return "rollback", f"rollback to step {row.get('to')}: {reason}"
    if kind == "growth":
        return "growth", "growth"
    if kind == "stop" and row.get("reason") in ("diverged", "error"):
        return "diverged or failed", str(row["reason"])
    return None, ""


def _loss_range(series: Sequence[Series], references: Sequence[float]) -> tuple[float, float]:
    """Returns the range of losses without spikes and the beginning."""
    shown: list[float] = []
    for each in series:
        y = each.points["step"].y
        if each.kind in ("line", "thin"):
            y = y[int(_BEGINNING * y.size) :]
        if each.kind != "raw":
            shown += y[np.isfinite(y)].tolist()
    if not shown:
        first = np.concatenate([each.points["step"].y for each in series])
        shown = first[np.isfinite(first)].tolist()
    low, high = min(shown), max(shown)
    # A much higher level would squeeze the curves; a double-click on the page shows it.
    high = max([high, *(level for level in references if level < high + _ROOM * (high - low))])
    margin = 0.06 * max(high - low, 0.1)
    return low - margin, high + margin


def _range_from_zero(series: Sequence[Series]) -> tuple[float, float]:
    tops = [
        float(np.nanmax(each.points["step"].y))
        for each in series
        if each.kind != "raw" and np.isfinite(each.points["step"].y).any()
    ]
    return 0.0, 1.08 * max(tops, default=1.0) or 1.0


def _is_positive(series: Sequence[Series]) -> bool:
    values = np.concatenate([each.points["step"].y for each in series])
    return bool((values[np.isfinite(values)] > 0).all())
