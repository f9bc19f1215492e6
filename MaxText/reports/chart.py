"""Descriptions of charts, drawn here as PNG and by plots.py for the page."""

import io
import textwrap
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from MaxText.formatting import short_count

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Horizontal axes of a run's curves, sizes of models, and swept keys.
AxisName = Literal[
    "tokens", "flops", "time", "step", "width", "depth", "parameters", "learning_rate"
]

# Runs differ by color, then by dashes. A test simulates three color-vision deficiencies.
PALETTE = (
    "#057fdc",
    "#dc4a66",
    "#1b9062",
    "#d27a3b",
    "#785cb6",
    "#1b9eb9",
    "#af7747",
    "#cf5da7",
    "#688115",
    "#3f6b84",
)
DASHES = ("solid", "dash", "dot", "dashdot")

# Kind of mark -> plotly symbol, matplotlib marker.
SYMBOLS: dict[str, tuple[str, str]] = {
    "checkpoint": ("line-ns-open", "|"),
    "restart": ("diamond", "D"),
    "skipped step": ("x-thin-open", "x"),
    "skipped record": ("cross-thin-open", "+"),
    "rollback": ("triangle-left", "<"),
    "growth": ("star", "*"),
    "diverged or failed": ("x", "X"),
}

_INK = "#333333"
_GRID = "#e6e6e6"
_REFERENCE = "#7a7a7a"

_TITLE_WIDTH = 90  # characters of a line of the title

# matplotlib style of each kind of curve.
_STYLES = {
    "raw": {"alpha": 0.25, "linewidth": 0.8},
    "thin": {"alpha": 0.35, "linewidth": 0.8},
    "line": {"linewidth": 1.8},
    "dots": {"linewidth": 1.2, "marker": "o", "markersize": 4.5},
    "points": {"linewidth": 0, "marker": "o", "markersize": 5},
}
_DASHES = {"solid": "-", "dash": "--", "dot": ":", "dashdot": "-."}

# raw: every report, faint. line: smoothed, or exact if nothing fluctuates. thin: one of several
# seeds. dots: few measurements, joined. points: not joined, with error bars instead of a band.
Kind = Literal["raw", "line", "thin", "dots", "points"]


class Axis(NamedTuple):
    """A horizontal axis; `choice` is the label of its button."""

    name: AxisName
    title: str
    choice: str


class Series(NamedTuple):
    """A curve of N points."""

    label: str  # in the legend; empty for none
    owner: str  # label of its run or group
    color: int  # index of color and dashes
    kind: Kind
    x: Mapping[AxisName, np.ndarray]  # positions on each axis, ascending: float [N]
    y: np.ndarray  # float [N]; NaN interrupts the curve
    # Ends of the band: smallest and largest value of the seeds, or of an interval, [N].
    low: np.ndarray | None = None
    high: np.ndarray | None = None


class Annotation(NamedTuple):
    """An event of a run, drawn on its curve."""

    kind: str
    owner: str
    text: str
    x: Mapping[AxisName, float]
    y: float


class Chart(NamedTuple):
    """Curves over a common axis."""

    name: str  # of its file, without extension
    title: str
    y_title: str
    series: Sequence[Series]  # in drawing order
    marks: Sequence[Annotation] = ()
    references: Sequence[tuple[str, float]] = ()  # label and y of dashed horizontal lines
    # Initial range, so that a spike does not flatten everything else; None for all.
    y_range: tuple[float, float] | None = None
    log_x: bool = False
    log_y: bool = False  # initially
    percent: bool = False  # y is a share
    folded: bool = False  # shown on request
    note: str = ""  # what the initial range cuts off


def color_of(index: int) -> str:
    """Returns a run's color, as #rrggbb."""
    return PALETTE[index % len(PALETTE)]


def dash_of(index: int) -> str:
    """Returns a run's dash style, different for repeated colors."""
    return DASHES[index // len(PALETTE) % len(DASHES)]


def draw_chart(chart: Chart, axis: Axis, title: str = "") -> bytes | None:
    """Draws a chart over one of its axes as PNG; None without points.

    `title` precedes the chart's own.
    """
    if not any(np.isfinite(series.x[axis.name]).any() for series in chart.series):
        return None
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter

    # Not pyplot: it keeps figures alive and may ask for a display.
    figure = Figure(figsize=(9, 5.5 + 0.08 * len(chart.series)), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    _draw_data(axes, chart, axis)
    if chart.log_x:
        axes.set_xscale("log")
    if chart.y_range is not None:
        axes.set_ylim(*chart.y_range)
    if axis.name in ("width", "depth"):
        axes.set_xscale("log", base=2)
    if axis.name not in ("flops", "learning_rate"):  # powers of ten read better
        axes.xaxis.set_major_formatter(FuncFormatter(short_count))
    axes.set_xlabel(axis.title, color=_INK)
    axes.set_ylabel(chart.y_title, color=_INK)
    title = ", ".join(part for part in (title, chart.title) if part)
    title = textwrap.fill(title, _TITLE_WIDTH, max_lines=2)
    if chart.note:
        title += f"\n{textwrap.fill(chart.note, _TITLE_WIDTH, max_lines=2)}"
    axes.set_title(title, loc="left", fontsize=11, color=_INK, parse_math=False)
    axes.grid(True, color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.02)
    # Outside, as a long legend would hide the curves.
    legend = figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    for text in legend.get_texts():
        text.set_parse_math(False)
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        # Glyphs missing in the font are drawn as boxes.
        warnings.filterwarnings("ignore", "Glyph .* missing from")
        figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _draw_data(axes: "Axes", chart: Chart, axis: Axis) -> None:
    """Draws the curves, reference lines and marks of a chart."""
    for series in chart.series:
        x = series.x[axis.name]
        color = color_of(series.color)
        dashes = dash_of(series.color)
        if series.low is not None and series.high is not None:
            if series.kind == "points":
                axes.vlines(x, series.low, series.high, color=color, linewidth=1.2)
            else:
                axes.fill_between(x, series.low, series.high, color=color, alpha=0.18, linewidth=0)
        # matplotlib hides labels that start with an underscore.
        label = f" {series.label}" if series.label.startswith("_") else series.label
        style = _STYLES[series.kind] | {"linestyle": _DASHES[dashes]}
        if series.kind == "points" and series.low is not None:
            style["markerfacecolor"] = "white"  # hollow: an estimate, not a run
        axes.plot(x, series.y, color=color, label=label, **style)
    for label, level in chart.references:
        axes.axhline(level, color=_REFERENCE, linestyle="--", linewidth=1, label=label)
    for kind, (_, marker) in SYMBOLS.items():
        marks = [mark for mark in chart.marks if mark.kind == kind]
        if marks:
            x = [mark.x[axis.name] for mark in marks]
            y = [mark.y for mark in marks]
            axes.scatter(x, y, marker=marker, color=_INK, s=34, zorder=3, label=kind)
