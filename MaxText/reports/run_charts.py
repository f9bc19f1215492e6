"""Charts of a report: losses, and all other recorded numbers."""

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from MaxText.metrics.run_record import RunHistory
from MaxText.reports.chart import Annotation, AxisName, Chart, Series
from MaxText.reports.curves import Axes, CurveKind, Values, column, curve, median_window
from MaxText.reports.entries import Entry, all_runs, differing_peaks
from MaxText.reports.run_tables import event_text

# Share of initial steps that are excluded from the y range if their high loss would flatten the
# rest to less than this share of the height.
_BEGINNING = 0.05
_MIN_HEIGHT = 0.4

_ROOM = 0.5  # a reference line is in the initial view if it raises the chart by at most this share

_GRAD_NORM = "learning/grad_norm"
_UPDATE_RATIO = "learning/update_norm / param_norm"

_OWN_CHARTS = (
    "learning/lm_loss",
    "learning/current_learning_rate",
    _GRAD_NORM,
    "perf/per_device_tokens_per_sec",
    "perf/mfu",
    "eval/avg_loss",
)

_steps = operator.attrgetter("steps")
_evaluations = operator.attrgetter("evaluations")

RowsOf = Callable[[RunHistory], Sequence[Mapping[str, Any]]]

_MAX_MARKS = 300  # maximum marks per kind and run, chosen evenly


def loss_charts(entries: Sequence[Entry], axes: Axes) -> list[Chart]:
    """Returns training and validation loss, one chart per kind of loss."""
    kinds: dict[str, list[Entry]] = {}
    for entry in entries:
        kinds.setdefault(next(iter(entry.runs.values())).loss_kind, []).append(entry)
    charts: list[Chart] = []
    for kind, entries_of_kind in kinds.items():
        chart = loss_chart(entries_of_kind, axes)
        if chart is not None and len(kinds) > 1:
            number = len(charts) + 1
            name = "loss" if number == 1 else f"loss_{number}"
            chart = chart._replace(name=name, title=f"Loss: {kind}")
        if chart is not None:
            charts.append(chart)
    if all(run.objective_in_nats for run in all_runs(entries).values()):
        return charts
    cross_entropy = loss_chart(entries, axes, train_tag="learning/lm_loss", eval_tag="eval/lm_loss")
    if cross_entropy is None:
        return charts
    title = "Cross entropy, beside objectives of other kinds"
    return [*charts, cross_entropy._replace(name="loss_in_nats", title=title)]


def loss_chart(
    entries: Sequence[Entry],
    axes: Axes,
    *,
    train_tag: str = "",
    eval_tag: str = "eval/avg_loss",
) -> Chart | None:
    """Returns the loss of runs of one kind; None if none is recorded.

    By default it is what each run is trained for.
    """
    is_single_run = len(entries) == 1 and not entries[0].is_group
    series: list[Series] = []
    for entry in entries:
        train = f"{entry.label}, training"
        validation = f"{entry.label}, validation"
        color = None
        if is_single_run:
            (run,) = entry.runs.values()
            last = next((row.get(eval_tag) for row in reversed(run.evaluations)), None)
            final = "" if last is None else f" (final {last:.4f})"
            train = f"training, running median of {median_window(len(run.steps))} reports"
            # A single run has two colors, several runs have one each.
            validation = f"validation{final}"
            color = entry.color + 1
        loss = _training_loss(train_tag)
        measured = column(eval_tag)
        series += curve(entry, axes, _steps, loss, label=train, kind="smooth")
        series += curve(
            entry, axes, _evaluations, measured, label=validation, kind="dots", color=color
        )
    if not series:
        return None
    runs = all_runs(entries).values()
    baselines = {run.facts.get("unigram_entropy_nats") for run in runs}
    in_nats = bool(train_tag) or all(run.objective_in_nats for run in runs)
    y_title = "loss (nats per token)" if in_nats else "loss (of the objective, per token)"
    level = baselines.pop()
    references: list[tuple[str, float]] = []
    if level is not None and not baselines:  # the same for all runs
        references = [(f"unigram entropy, {level:.2f}", level)]
    marks = [
        mark
        for entry in entries
        for run in entry.runs.values()
        for mark in _marks(entry, run, axes, series)
    ]
    y_range = _loss_range(series, [level for _, level in references])
    return Chart(
        name="loss",
        title="Loss",
        y_title=y_title,
        series=series,
        marks=marks,
        references=references,
        y_range=y_range,
        note=_cut_off(series, y_range[1]),
    )


def _training_loss(tag: str) -> Values:
    """Returns a function for a training loss of rows: of `tag`, or what the run is trained for."""
    return lambda run, rows: column(tag or run.loss_tag)(run, rows)


class _Quantity(NamedTuple):
    """A recorded number with a chart of its own."""

    name: str  # of the chart
    title: str
    y_title: str
    value: Values
    kind: CurveKind


def quantity_charts(entries: Sequence[Entry], axes: Axes) -> list[Chart]:
    """Returns the charts of all recorded numbers except losses."""
    charts = []
    for quantity in _MAIN_QUANTITIES:
        is_mfu = quantity.name == "mfu"
        series = _quantity(entries, axes, _steps, quantity.value, quantity.kind)
        if not series or (is_mfu and differing_peaks(entries)):
            continue
        log_y = quantity.name == "gradient_norm" and all(np.nanmin(line.y) > 0 for line in series)
        top = max(float(np.nanmax(line.y)) for line in series if line.kind != "raw")
        chart = Chart(
            name=quantity.name,
            title=quantity.title,
            y_title=quantity.y_title,
            series=series,
            y_range=None if log_y else (0.0, 1.08 * top or 1.0),
            log_y=log_y,
            percent=is_mfu,
        )
        charts.append(chart)
    charts += _folded_chart(_UPDATE_RATIO, _quantity(entries, axes, _steps, _update_ratio, "exact"))
    for tag in _tags(entries, _steps):
        charts += _folded_chart(tag, _quantity(entries, axes, _steps, column(tag), "exact"))
    for tag in _tags(entries, _evaluations):
        charts += _folded_chart(tag, _quantity(entries, axes, _evaluations, column(tag), "dots"))
    return charts


def _folded_chart(tag: str, series: list[Series]) -> list[Chart]:
    """Returns the chart of a recorded number, shown on request; none without values."""
    if not series:
        return []
    name = re.sub(r"\W+", "_", tag)
    return [Chart(name=name, title=tag, y_title="", series=series, folded=True)]


def _quantity(
    entries: Sequence[Entry], axes: Axes, rows_of: RowsOf, value: Values, kind: CurveKind
) -> list[Series]:
    """Returns the curves of a quantity for all entries."""
    return [
        line
        for entry in entries
        for line in curve(entry, axes, rows_of, value, label=entry.label, kind=kind)
    ]


def _update_ratio(run: RunHistory, rows: Sequence[Mapping[str, Any]]) -> np.ndarray:
    """Returns norm of the update / norm of the parameters, float [N]; NaN where unknown."""
    norm = column("learning/param_norm")(run, rows)
    return column("learning/update_norm")(run, rows) / np.where(norm == 0, np.nan, norm)


def _tags(entries: Sequence[Entry], rows_of: RowsOf) -> list[str]:
    """Returns the recorded numbers without their own chart."""
    runs = all_runs(entries).values()
    tags = dict.fromkeys(tag for run in runs for row in rows_of(run) for tag in row if "/" in tag)
    return [tag for tag in tags if tag not in _OWN_CHARTS and not tag.startswith("progress/")]


def _tokens_per_second(run: RunHistory, rows: Sequence[Mapping[str, Any]]) -> np.ndarray:
    """Returns tokens per second over all devices of each attempt."""
    devices = {
        attempt.number: attempt.first_row.get("num_devices") or 1
        for attempt in run.goodput.attempts
    }
    counts = np.array([devices[row["restart"]] for row in rows], float)
    return column("perf/per_device_tokens_per_sec")(run, rows) * counts


_MAIN_QUANTITIES = (
    _Quantity(
        name="learning_rate",
        title="Learning rate",
        y_title="",
        value=column("learning/current_learning_rate"),
        kind="exact",
    ),
    _Quantity(
        name="gradient_norm",
        title="Gradient norm",
        y_title="before clipping",
        value=column(_GRAD_NORM),
        kind="smooth",
    ),
    _Quantity(
        name="tokens_per_second",
        title="Tokens per second",
        y_title="all devices",
        value=_tokens_per_second,
        kind="smooth",
    ),
    _Quantity(
        name="mfu",
        title="MFU",
        y_title="share of the devices' peak",
        value=column("perf/mfu"),
        kind="smooth",
    ),
)


def _marks(entry: Entry, run: RunHistory, axes: Axes, series: Sequence[Series]) -> list[Annotation]:
    """Returns the events of a run, placed on its entry's curve."""
    line = next((s for s in series if s.owner == entry.label and s.kind == "line"), None)
    if line is None or not run.steps:
        return []
    positions = axes.places(run, run.steps)
    by_kind: dict[str, list[Mapping[str, Any]]] = {}
    for row in run.events:
        if row.get("step") is not None and (kind := _mark_kind(row)):
            by_kind.setdefault(kind, []).append(row)
    is_finite = np.isfinite(line.y)
    marks = []
    for kind, rows in by_kind.items():
        for row in rows[:: -(-len(rows) // _MAX_MARKS)]:
            x: dict[AxisName, float] = {
                name: float(np.interp(row["step"], positions["step"], positions_on_axis))
                for name, positions_on_axis in positions.items()
            }
            y = float(np.interp(row["step"], line.x["step"][is_finite], line.y[is_finite]))
            text = f"{event_text(row) or kind} (step {row['step']:,})"
            marks.append(Annotation(kind=kind, owner=entry.label, text=text, x=x, y=y))
    return marks


def _mark_kind(row: Mapping[str, Any]) -> str:
    """Returns the kind of mark of an event; empty for none."""
    kind = row["event"]
    if kind in ("start", "resume"):
        return "restart" if row["restart"] > 0 else ""
    if kind == "stop":
        return "diverged or failed" if row.get("reason") in ("diverged", "error") else ""
    skipped = {"step_skipped": "skipped step", "record_skipped": "skipped record"}
    return (skipped | {"checkpoint": kind, "rollback": kind, "growth": kind}).get(kind, "")


def _loss_range(series: Sequence[Series], references: Sequence[float]) -> tuple[float, float]:
    """Returns the range of losses without spikes, and without a beginning far above the rest."""
    smooth = [line.y for line in series if line.kind != "raw"]
    shown_losses = np.concatenate([y[int(_BEGINNING * y.size) :] for y in smooth])
    low = float(np.nanmin(shown_losses))
    high = float(np.nanmax(shown_losses))
    whole_high = float(np.nanmax(np.concatenate(smooth)))
    if high - low >= _MIN_HEIGHT * (whole_high - low):
        high = whole_high
    # A much higher level would squeeze the curves; "full range" on the page shows it.
    high = max([high, *(level for level in references if level < high + _ROOM * (high - low))])
    margin = 0.06 * max(high - low, 0.1)
    return low - margin, high + margin


def _cut_off(series: Sequence[Series], top: float) -> str:
    """Describes the losses above the initial range, the first ones separately; empty for none."""
    cut_points = [(line.x["step"][line.y > top], line.y[line.y > top]) for line in series]
    if not any(y.size for _, y in cut_points):
        return ""
    highest = max(float(y.max()) for _, y in cut_points if y.size)
    finite = [line.y[np.isfinite(line.y)] for line in series]
    first = max(y[0] for y in finite if y.size)
    parts = []
    if first > top:
        parts.append(f"the first losses, from {first:.4g}")
    if highest > max(first, top):
        last_step = int(max(steps.max() for steps, y in cut_points if y.size))
        parts.append(f"losses up to {highest:.4g}, the last at step {last_step:,}")
    return f"cut off above {top:.3g}: {'; '.join(parts)}"
