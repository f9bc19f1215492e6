"""Draws losses as PNG."""

import io
import textwrap
import warnings

import numpy as np

from MaxText.metrics.tables import short_count
from MaxText.reports.chart import SYMBOLS, Axis, Chart, Series, color_of, dash_of

_INK, _GRID, _REFERENCE = "#333333", "#e6e6e6", "#7a7a7a"
_MAX_LEGEND_ROWS = 14

_TITLE_WIDTH = 90  # characters of a line of the title

# matplotlib style of each kind of curve.
_STYLES = {
    "raw": {"alpha": 0.25, "linewidth": 0.8},
    "thin": {"alpha": 0.35, "linewidth": 0.8},
    "line": {"linewidth": 1.8},
    "dots": {"linewidth": 1.2, "marker": "o", "markersize": 4.5},
}
_DASHES = {"solid": "-", "dash": "--", "dot": ":", "dashdot": "-."}


def draw_chart(chart: Chart, axis: Axis, title: str = "") -> bytes | None:
    """Draws a chart over one of its axes as PNG; None without points.

    `title` precedes the chart's own.
    """
    if not any(np.isfinite(each.x[axis.name]).any() for each in chart.series):
        return None
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter

    height = 5.5 + 0.08 * max(len(chart.series) - _MAX_LEGEND_ROWS, 0)
    # Not pyplot: it keeps figures alive and may ask for a display.
    figure = Figure(figsize=(9, height), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for series in chart.series:
        _draw_series(axes, series, axis)
    for label, level in chart.references:
        axes.axhline(level, color=_REFERENCE, linestyle="--", linewidth=1, label=label)
    for kind, (_, marker) in SYMBOLS.items():
        if marks := [mark for mark in chart.marks if mark.kind == kind]:
            x, y = [mark.x[axis.name] for mark in marks], [mark.y for mark in marks]
            axes.scatter(x, y, marker=marker, color=_INK, s=34, zorder=3, label=kind)
    if chart.y_range is not None:
        axes.set_ylim(*chart.y_range)
    if axis.name != "flops":  # powers of ten read better
        axes.xaxis.set_major_formatter(FuncFormatter(short_count))
    axes.set_xlabel(axis.title, color=_INK)
    axes.set_ylabel(chart.y_title, color=_INK)
    title = ", ".join(part for part in (title, chart.title) if part)
    title = textwrap.fill(title, _TITLE_WIDTH, max_lines=2)
    axes.set_title(title, loc="left", fontsize=11, color=_INK, parse_math=False)
    axes.grid(True, color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.02)
    _legend(figure, axes)
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        # Glyphs missing in the font are drawn as boxes.
        warnings.filterwarnings("ignore", "Glyph .* missing from")
        figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _draw_series(axes, series: Series, axis: Axis) -> None:
    x, color, dashes = series.x[axis.name], color_of(series.color), dash_of(series.color)
    if series.low is not None and series.high is not None:
        axes.fill_between(x, series.low, series.high, color=color, alpha=0.18, linewidth=0)
    # matplotlib hides labels that start with an underscore.
    label = f" {series.label}" if series.label.startswith("_") else series.label
    style = _STYLES[series.kind] | {"color": color, "linestyle": _DASHES[dashes], "label": label}
    axes.plot(x, series.y, **style)


def _legend(figure, axes) -> None:
    _, labels = axes.get_legend_handles_labels()
    # Long legends would hide the curves.
    is_long = len(labels) > _MAX_LEGEND_ROWS
    place = {"loc": "outside lower center", "ncols": 3} if is_long else {}
    if labels:
        legend = (figure if is_long else axes).legend(frameon=False, fontsize=9, **place)
        for text in legend.get_texts():
            text.set_parse_math(False)
