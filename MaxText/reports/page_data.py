"""Charts as the JSON that page.js draws."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from MaxText.reports.chart import (
    SYMBOLS,
    AxisName,
    Chart,
    Points,
    Series,
    color_of,
    dash_of,
)
from MaxText.reports.curves import Axes
from MaxText.reports.entries import Entry


def page_json(entries: Sequence[Entry], axes: Axes, charts: Sequence[Chart]) -> str:
    """Returns the JSON for page.js; "<" is escaped, so nothing can end its script element."""
    data = {
        "axes": [vars(axis) for axis in axes.axes],
        "entries": [
            {
                "label": entry.label,
                "color": color_of(entry.color),
                "seeds": len(entry.runs) if entry.is_group else 0,
            }
            for entry in entries
        ],
        "symbols": {kind: symbol for kind, (symbol, _) in SYMBOLS.items()},
        "charts": [_chart(chart) for chart in charts],
    }
    return json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def _chart(chart: Chart) -> dict[str, Any]:
    return {
        "name": chart.name,
        "title": chart.title,
        "yTitle": chart.y_title,
        "range": chart.y_range,
        "logY": chart.log_y,
        "percent": chart.percent,
        "references": chart.references,
        "series": [_series(series) for series in chart.series],
        "marks": [
            {
                "kind": mark.kind,
                "owner": mark.owner,
                "text": mark.text,
                "places": {name: _numbers(np.array(place)) for name, place in mark.places.items()},
            }
            for mark in chart.marks
        ],
    }


def _series(series: Series) -> dict[str, Any]:
    return {
        "label": series.label,
        "owner": series.owner,
        "kind": series.kind,
        "color": color_of(series.color),
        "dash": dash_of(series.color),
        "x": {name: _numbers(points.x) for name, points in series.points.items()},
        **_heights(series.points),
    }


def _heights(points: Mapping[AxisName, Points]) -> dict[str, Any]:
    """Returns y and the band, once if all axes share them, else by axis."""
    found: dict[str, Any] = {}
    for part in ("y", "low", "high"):
        values = {name: getattr(each, part) for name, each in points.items()}
        # Seeds may overlap, and thus have a band, on one axis only.
        there = {name: value for name, value in values.items() if value is not None}
        first = next(iter(values.values()))
        if there and all(value is first for value in values.values()):
            found[part] = _numbers(first)
        elif there:
            found[part] = {name: _numbers(value) for name, value in there.items()}
    return found


def _numbers(values: np.ndarray) -> list[float | None]:
    """Rounds to seven significant digits; NaN becomes null."""
    return [float(f"{v:.7g}") if np.isfinite(v) else None for v in values.tolist()]
