"""Charts as plotly figures; page.js applies the reader's choices."""

import html
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go

from MaxText.reports.chart import SYMBOLS, Axis, AxisName, Chart, Series, color_of, dash_of
from MaxText.reports.curves import Axes
from MaxText.reports.entries import Entry, all_runs, shown_parts
from MaxText.reports.page import Plot
from MaxText.value_types import JsonValue

_QUIET = "#7a8691"
_GRID = "#dde3e8"
_INK = "#1d2730"

_LOGARITHMIC = 30.0  # ratio of the largest to the smallest value that a logarithmic axis suits

_LEGEND = {"orientation": "h", "traceorder": "normal", "y": 1, "yanchor": "bottom"}

_PERCENT = ".3~p"  # three digits, also of an MFU below 1 %

_MAX_DESCRIBED = 8  # maximum series in the text alternative of a chart

_LINES: Mapping[str, Mapping[str, Any]] = {
    "raw": {"opacity": 0.3, "hoverinfo": "skip", "line_width": 0.8},
    "thin": {"opacity": 0.4, "hoverinfo": "skip", "line_width": 0.9},
    "line": {"line_width": 2},
    "dots": {"line_width": 1.4, "mode": "lines+markers", "marker_size": 6},
    "points": {"line_width": 0, "mode": "markers", "marker_size": 8},
}


def plot_chart(chart: Chart, axes: Axes) -> Plot:
    """Returns the plot of a chart.

    Traces have their positions on each axis as customdata [N, axes]. A trace's `meta` says what
    page.js needs: its owner, its kind, and the switches that must all be on (`needs`).
    """
    names: list[AxisName] = [*axes.by_name]
    # The colors of several runs are explained above the charts.
    colors = {(series.owner, series.color) for series in chart.series}
    is_alone = len({owner for owner, _ in colors}) < len(colors)
    figure = _figure(hovermode="x unified", showlegend=is_alone, legend=_LEGEND)
    for series in chart.series:
        _add_series(figure, chart, series, names)
    for kind, owner in dict.fromkeys((mark.kind, mark.owner) for mark in chart.marks):
        marks = [mark for mark in chart.marks if (mark.kind, mark.owner) == (kind, owner)]
        symbol, _ = SYMBOLS[kind]
        figure.add_scatter(
            customdata=np.array([[mark.x[name] for name in names] for mark in marks], np.float32),
            y=np.array([mark.y for mark in marks], np.float32),
            text=[html.escape(mark.text) for mark in marks],
            name=html.escape(owner),
            mode="markers",
            marker={"symbol": symbol, "size": 10, "color": _QUIET},
            marker_line={"width": 1.6 if symbol.endswith("-open") else 0, "color": _QUIET},
            hovertemplate="%{text}",
            showlegend=False,
            meta={"owner": owner, "kind": "mark", "needs": [f"run {owner}", f"mark {kind}"]},
        )
    for label, level in chart.references:
        ends = np.stack([[line.x[name][[0, -1]] for name in names] for line in chart.series])
        figure.add_scatter(
            customdata=np.stack([np.nanmin(ends, (0, 2)), np.nanmax(ends, (0, 2))], dtype="f4"),
            y=np.full(2, level, np.float32),
            mode="lines+text",
            text=["", html.escape(label)],
            textposition="top left",
            line={"color": _QUIET, "width": 1, "dash": "dash"},
            hoverinfo="skip",
            showlegend=False,
            meta={"kind": "reference", "needs": []},
        )
    kind = "log" if chart.log_y else "linear"
    tick_format = _PERCENT if chart.percent else None
    figure.update_yaxes(type=kind, range=chart.y_range, tickformat=tick_format)
    size = ""
    if chart.name.startswith("loss"):
        size = "wide"
    elif chart.folded:
        size = "folded"
    subtitle = "; ".join(text for text in (chart.y_title, chart.note) if text)
    if chart.note:
        subtitle += ' ("full range" shows them)'
    return Plot(
        name=chart.name,
        title=chart.title,
        figure=figure,
        description=_describe(chart),
        subtitle=subtitle,
        size=size,
    )


def _add_series(figure: go.Figure, chart: Chart, series: Series, names: Sequence[Any]) -> None:
    """Adds the trace of a curve, with its band if it has one, to a figure."""
    needs = [f"run {series.owner}"]
    if chart.name.startswith("loss"):
        needs.append("validation" if series.kind == "dots" else "training")
    meta = {"owner": series.owner, "kind": series.kind, "needs": needs}
    color = color_of(series.color)
    common = {
        "customdata": np.stack([series.x[name] for name in names], axis=1, dtype=np.float32),
        "name": html.escape(series.label),
        "showlegend": bool(series.label),
        "mode": "lines",
        "line": {"color": color, "dash": dash_of(series.color)},
    }
    if series.low is not None and series.high is not None:
        edge = common | {"line": {"width": 0}, "hoverinfo": "skip", "meta": meta | {"kind": "band"}}
        figure.add_scatter(**edge, y=series.low.astype(np.float32))
        figure.add_scatter(
            **edge, y=series.high.astype(np.float32), fill="tonexty", fillcolor=color, opacity=0.18
        )
    style = {**_LINES[series.kind]}
    if "hoverinfo" not in style:
        step = names.index("step")
        tokens = names.index("tokens")
        style["hovertemplate"] = (
            f"%{{y:{_PERCENT if chart.percent else '.5~g'}}} (step %{{customdata[{step}]:,d}}, "
            f"%{{customdata[{tokens}]:.4~s}} tokens)"
        )
    line = common.pop("line") | {"width": style.pop("line_width")}
    figure.add_scatter(**common | style, line=line, y=series.y.astype(np.float32), meta=meta)


def plot_over(chart: Chart, axis: Axis) -> Plot:
    """Returns the plot of a chart over one axis, apart from the page's choice of axes."""
    figure = _figure(hovermode="closest", showlegend=True, legend=_LEGEND)
    for series in chart.series:
        _add_fixed_series(figure, series, series.x[axis.name])
    for label, level in chart.references:
        figure.add_hline(level, line_dash="dash", line_color=_QUIET, annotation_text=label)
    figure.update_xaxes(
        type="log" if chart.log_x else "linear", title_text=axis.title, exponentformat="e"
    )
    figure.update_yaxes(type="log" if chart.log_y else "linear", range=chart.y_range)
    return Plot(
        name=chart.name,
        title=chart.title,
        figure=figure,
        description=_describe(chart),
        subtitle="; ".join(text for text in (chart.y_title, chart.note) if text),
        size="wide",
    )


def _add_fixed_series(figure: go.Figure, series: Series, x: np.ndarray) -> None:
    """Adds a curve with its band, or points with their error bars, at fixed positions."""
    # Lists, because page.js saves what is drawn as CSV and decodes arrays of chosen axes only.
    y = series.y.tolist()
    style = {**_LINES[series.kind]}
    color = color_of(series.color)
    line = {"color": color, "dash": dash_of(series.color), "width": style.pop("line_width")}
    positions = {"x": x.tolist()}
    error_y = None
    if series.low is not None and series.high is not None:
        if series.kind == "points":
            error_y = {
                "array": (series.high - series.y).tolist(),
                "arrayminus": (series.y - series.low).tolist(),
                "color": color,
                "symmetric": False,
            }
            style["marker_symbol"] = "circle-open"  # an estimate, not a run
        else:
            edge = positions | {"mode": "lines", "line_width": 0, "hoverinfo": "skip"}
            edge["showlegend"] = False
            band = {"fill": "tonexty", "fillcolor": color, "opacity": 0.18}
            figure.add_scatter(**edge, y=series.low.tolist())
            figure.add_scatter(**edge, **band, y=series.high.tolist())
    common = {"name": html.escape(series.label), "showlegend": bool(series.label)}
    style = {"mode": "lines", "marker_color": color} | style
    figure.add_scatter(**positions, **common, **style, line=line, y=y, error_y=error_y)


def _describe(chart: Chart) -> str:
    """Returns the text alternative of a chart."""
    lines = [series for series in chart.series if series.label]
    descriptions = []
    for series in lines[:_MAX_DESCRIBED]:
        y = series.y[np.isfinite(series.y)]
        ends = f"from {y[0]:.4g} to {y[-1]:.4g}"
        descriptions.append(f"{series.label}: {ends}, lowest {y.min():.4g}, highest {y.max():.4g}")
    num_hidden = len(lines) - _MAX_DESCRIBED
    if num_hidden > 0:
        descriptions.append(f"{num_hidden} more curves")
    return f"{chart.title}. {'; '.join(descriptions)}."


def plot_goodput(entries: Sequence[Entry]) -> Plot:
    """Returns a stacked horizontal bar per run with the parts of its time."""
    runs = all_runs(entries)
    bar_positions = list(range(len(runs)))
    figure = _figure(barmode="stack", showlegend=True, hovermode="closest", legend=_LEGEND)
    for index, (part, label) in enumerate(shown_parts(runs.values()).items()):
        figure.add_bar(
            x=[run.goodput.share(part) for run in runs.values()],
            y=bar_positions,
            name=label,
            orientation="h",
            marker_color=color_of(index),
            hovertemplate="%{x:.1%}",
        )
    labels = [html.escape(name) for name in runs] if len(runs) > 1 else [""]
    figure.update_xaxes(range=[0, 1], tickformat=".0%")
    figure.update_yaxes(tickvals=bar_positions, ticktext=labels, autorange="reversed")
    return Plot("goodput", "Goodput", figure, size="wide", height=80 + 28 * len(runs))


def plot_hyperparameters(
    entries: Sequence[Entry], keys: Mapping[str, Mapping[str, Any]]
) -> list[Plot]:
    """Plots validation loss against each key.

    `keys` maps a key to its value by run. Nothing for fewer than two evaluated runs.
    """
    losses = {}
    for name, run in all_runs(entries).items():
        if run.final_loss is not None:
            losses[name] = run.final_loss
    keys = {
        key: {name: _plottable(value) for name, value in values.items()}
        for key, values in keys.items()
        if not key.endswith("seed")
    }
    if len(losses) < 2 or not keys:
        return []
    plots = []
    for key, values in keys.items():
        figure = _figure(hovermode="closest")
        for entry in entries:
            names = [name for name in entry.runs if name in losses and name in values]
            figure.add_scatter(
                x=[values[name] for name in names],
                y=[losses[name] for name in names],
                text=[html.escape(name) for name in names],
                mode="markers",
                marker={"size": 9, "color": color_of(entry.color)},
                hovertemplate="%{text}<br>%{x}: %{y:.4f}<extra></extra>",
                meta={"owner": entry.label, "needs": [f"run {entry.label}"]},
            )
        is_numeric = all(type(value) in (int, float) for value in values.values())
        is_log = is_numeric and max(values.values()) > _LOGARITHMIC * min(values.values()) > 0
        kind = "category"
        if is_numeric:
            kind = "log" if is_log else "linear"
        figure.update_xaxes(type=kind, title_text=html.escape(key), exponentformat="e")
        plots.append(Plot(f"loss against {key}", f"Validation loss against {key}", figure))
    return plots


def _plottable(value: JsonValue) -> int | float | str:
    """Returns a number as it is, and everything else as a category."""
    return value if type(value) in (int, float) else str(value)


def _figure(**layout: Any) -> go.Figure:
    axis = {"gridcolor": _GRID, "linecolor": _GRID, "zeroline": False, "automargin": True}
    axis["exponentformat"] = "B"
    return go.Figure(
        layout={
            "template": "none",
            "paper_bgcolor": "rgba(0,0,0,0)",
            "plot_bgcolor": "rgba(0,0,0,0)",
            "font": {"family": "system-ui, sans-serif", "size": 13, "color": _INK},
            "margin": {"l": 8, "r": 14, "t": 10, "b": 8},
            "showlegend": False,
            "xaxis": axis | {"nticks": 8},
            "yaxis": axis | {"nticks": 7},
            **layout,
        }
    )
