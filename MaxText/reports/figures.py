"""Draws charts as PNG."""

import io
import warnings
from collections.abc import Sequence

import numpy as np

from MaxText.metrics.tables import short_count
from MaxText.reports.chart import (
    SYMBOLS,
    Annotation,
    Axis,
    Bars,
    Chart,
    Series,
    color_of,
    dash_of,
)

_INK, _GRID, _REFERENCE = "#333333", "#e6e6e6", "#7a7a7a"
_MAX_LEGEND_ROWS = 14

_LONGEST_TITLE = 90  # maximum characters of a title

# matplotlib style of each kind of curve.
_STYLES = {
    "raw": {"alpha": 0.25, "linewidth": 0.8},
    "thin": {"alpha": 0.35, "linewidth": 0.8},
    "line": {"linewidth": 1.8},
    "dots": {"linewidth": 1.2, "marker": "o", "markersize": 4.5},
}
_DASHES = {"solid": "-", "dash": "--", "dot": ":", "dashdot": "-."}


def draw_chart(
    chart: Chart, axis: Axis, title: str = "", *, above: Axis | None = None
) -> bytes | None:
    """Draws a chart over one of its axes as PNG; None if no curve has points there.

    `title` precedes the chart's own; `above` is a second axis on top, if proportional to the first.
    """
    if not any(np.isfinite(each.points[axis.name].x).any() for each in chart.series):
        return None
    from matplotlib.ticker import FuncFormatter, PercentFormatter

    figure, axes = _figure(5.5)
    for series in chart.series:
        _draw_series(axes, series, axis)
    for label, level in chart.references:
        axes.axhline(level, color=_REFERENCE, linestyle="--", linewidth=1, label=label)
    for kind in SYMBOLS:
        _draw_marks(axes, kind, [mark for mark in chart.marks if mark.kind == kind], axis)
    if chart.log_y:
        axes.set_yscale("log")
    elif chart.y_range is not None:
        axes.set_ylim(*chart.y_range)
    if not axis.powers:
        axes.xaxis.set_major_formatter(FuncFormatter(short_count))
    if chart.percent:
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    elif chart.name == "tokens_per_second":
        axes.yaxis.set_major_formatter(FuncFormatter(short_count))
    axes.set_xlabel(axis.title, color=_INK)
    y_title = chart.y_title if chart.name == "loss" else f"{chart.title}, {chart.y_title}"
    axes.set_ylabel(y_title.rstrip(", "), color=_INK)
    _legend(axes)
    if above is not None:
        _draw_axis_above(axes, chart, axis, above)
    return _png(figure, axes, ", ".join(part for part in (title, chart.title) if part))


def draw_bars(bars: Bars, title: str = "") -> bytes:
    """Draws the goodput of each run as a bar."""
    figure, axes = _figure(1.9 + 0.42 * len(bars.labels))
    left = np.zeros(len(bars.labels))
    places = np.arange(len(bars.labels))
    for part, shares in bars.parts.items():
        axes.barh(places, shares, left=left, color=bars.colors[part], label=part, height=0.7)
        left += shares
    from matplotlib.ticker import PercentFormatter

    axes.set_yticks(places, bars.labels, parse_math=False)
    axes.invert_yaxis()
    axes.set_xlim(0, 1)
    axes.xaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_xlabel("share of the time running", color=_INK)
    # Outside, because bars fill their rows.
    figure.legend(loc="outside lower center", ncols=5, frameon=False, fontsize=9)
    return _png(figure, axes, ", ".join(part for part in (title, bars.title) if part))


def _draw_series(axes, series: Series, axis: Axis) -> None:
    points = series.points[axis.name]
    color = color_of(series.color)
    if points.low is not None and points.high is not None:
        axes.fill_between(points.x, points.low, points.high, color=color, alpha=0.18, linewidth=0)
    style = _STYLES[series.kind]
    dashes = _DASHES[dash_of(series.color)]
    # matplotlib hides labels that start with an underscore.
    label = f" {series.label}" if series.label.startswith("_") else series.label
    axes.plot(points.x, points.y, color=color, linestyle=dashes, label=label, **style)


def _draw_marks(axes, kind: str, marks: Sequence[Annotation], axis: Axis) -> None:
    places = [mark.places[axis.name] for mark in marks if axis.name in mark.places]
    if places:
        x, y = zip(*places, strict=True)
        axes.scatter(x, y, marker=SYMBOLS[kind][1], color=_INK, s=34, zorder=3, label=kind)


def _draw_axis_above(axes, chart: Chart, axis: Axis, above: Axis) -> None:
    """Draws another axis if it is a linear function of the first."""
    lines = [each.points for each in chart.series if each.kind == "line"]
    x = np.concatenate([points[axis.name].x for points in lines] or [np.zeros(0)])
    values = np.concatenate([points[above.name].x for points in lines] or [np.zeros(0)])
    known = np.isfinite(x) & np.isfinite(values)
    if np.unique(x[known]).size < 2:
        return
    slope, offset = np.polyfit(x[known], values[known], 1)
    if slope <= 0 or np.abs(slope * x[known] + offset - values[known]).max() > slope:
        return
    second = axes.secondary_xaxis(
        "top", functions=(lambda at: at * slope + offset, lambda at: (at - offset) / slope)
    )
    second.set_xlabel(above.title, color=_INK)
    second.xaxis.set_major_formatter(short_count)


def _legend(axes) -> None:
    _, labels = axes.get_legend_handles_labels()
    if labels:
        columns = -(-len(labels) // _MAX_LEGEND_ROWS)
        for text in axes.legend(frameon=False, fontsize=9, ncols=columns).get_texts():
            text.set_parse_math(False)


def _figure(height: float):
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # Not pyplot: it keeps figures alive and may ask for a display.
    figure = Figure(figsize=(9, height), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots()


def _png(figure, axes, title: str) -> bytes:
    if len(title) > _LONGEST_TITLE:
        title = f"... {title[-_LONGEST_TITLE:]}"
    axes.set_title(title, loc="left", fontsize=11, color=_INK, parse_math=False)
    axes.grid(True, color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.02)
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        # Glyphs missing in the font are drawn as boxes.
        warnings.filterwarnings("ignore", "Glyph .* missing from")
        figure.savefig(buffer, format="png")
    return buffer.getvalue()
