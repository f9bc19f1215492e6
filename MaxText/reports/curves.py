"""Curves from rows of a run: axes, thinning, smoothing, bands of seeds."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from MaxText.metrics.run_record import RunHistory
from MaxText.metrics.tables import time_unit
from MaxText.reports.chart import Axis, AxisName, Kind, Series
from MaxText.reports.entries import Entry, averaged

Row = Mapping[str, Any]
Values = Callable[[RunHistory, Sequence[Row]], np.ndarray]  # of rows, float [N], NaN for none

MAX_POINTS = 1200  # about a screen's columns; more would only slow the page down
MAX_SMOOTH_POINTS = 400

_MIN_HALF = 4  # minimum half window of the running median
_WINDOWS = 25  # the window is 1/_WINDOWS of all points


class Axes:
    """The horizontal axes of a report, shared by all runs, in button order."""

    def __init__(self, runs: Sequence[RunHistory]):
        longest = max(run.goodput.running_seconds for run in runs)
        self._seconds, unit = time_unit(longest)  # two units, so that the axis has labels
        inherited = any(run.inherited_tokens or run.inherited_flops for run in runs)
        words = ", those of ancestors included" if inherited else ""
        axes = (
            Axis("tokens", f"tokens{words}", "tokens"),
            Axis("flops", f"floating point operations{words}", "FLOPs"),
            Axis("time", f"time running ({unit})", "time"),
            Axis("step", "step", "steps"),
        )
        self.by_name: dict[AxisName, Axis] = {axis.name: axis for axis in axes}

    def places(self, run: RunHistory, rows: Sequence[Row]) -> dict[AxisName, np.ndarray]:
        """Returns the positions of rows on each axis: float [N], NaN if unknown."""
        return {
            "tokens": column("progress/tokens")(run, rows) + run.inherited_tokens,
            "flops": column("progress/flops")(run, rows) + run.inherited_flops,
            "time": run.goodput.running_at(rows) / self._seconds,
            "step": column("step")(run, rows),
        }


def curve(
    entry: Entry,
    axes: Axes,
    rows_of: Callable[[RunHistory], Sequence[Row]],
    value: Values,
    *,
    label: str,
    kind: Literal["smooth", "exact", "dots"],
    color: int | None = None,
) -> list[Series]:
    """Returns the series of a quantity for a run or a group.

    For a run: its values, with "smooth" faint below their running median. For a group: their mean
    over the seeds with its band, and a thin line per seed unless there are few values ("dots").
    """
    color = entry.color if color is None else color
    raw: list[Series] = []
    lines: dict[int, Series] = {}  # by id of the run
    for run in entry.runs.values():
        rows = rows_of(run)
        values = value(run, rows)
        places = axes.places(run, rows)

        def drawn(kind: Kind, indices: np.ndarray, y: np.ndarray, places=places) -> Series:
            x = {name: place[indices] for name, place in places.items()}
            return Series("", entry.label, color, kind, x, y)

        kept = downsample(values)
        points = running_median(values) if kind == "smooth" else (kept, values[kept])
        line = drawn("dots" if kind == "dots" else "line", *points)
        if np.isfinite(line.y).any():
            lines[id(run)] = line
            raw.append(drawn("raw", kept, values[kept]))
    if not lines:
        return []
    if not entry.is_group:
        (line,) = lines.values()
        return [*(raw if kind == "smooth" else ()), line._replace(label=label)]
    known = [lines[id(run)] for run in averaged(entry) if id(run) in lines]
    mean = _mean(known or list(lines.values()))
    thin = [each._replace(kind="thin") for each in lines.values() if kind != "dots"]
    return [*thin, mean._replace(label=label)] if mean.y.size else thin


def _mean(lines: Sequence[Series]) -> Series:
    """Returns the mean of seeds with its band, until the shortest ends."""
    known = [np.isfinite(line.y) for line in lines]
    steps_of = [line.x["step"][there] for line, there in zip(lines, known, strict=True)]
    steps = np.unique(np.concatenate(steps_of))
    begin = max(steps[0] for steps in steps_of)
    end = min(steps[-1] for steps in steps_of)
    steps = steps[(begin <= steps) & (steps <= end)]
    x: dict[AxisName, np.ndarray] = {
        name: np.mean([np.interp(steps, line.x["step"], line.x[name]) for line in lines], axis=0)
        for name in lines[0].x
    }
    y_SN = np.stack(
        [
            np.interp(steps, own, line.y[there])
            for line, own, there in zip(lines, steps_of, known, strict=True)
        ]
    )
    band = (y_SN.min(0), y_SN.max(0)) if len(lines) > 1 else (None, None)
    return Series("", lines[0].owner, lines[0].color, lines[0].kind, x, y_SN.mean(0), *band)


def column(name: str) -> Values:
    """Returns a function for a field of rows; NaN if absent or null."""
    return lambda _run, rows: np.array([row.get(name) for row in rows], float)


def downsample(values_N: np.ndarray, most: int = MAX_POINTS) -> np.ndarray:
    """Returns ascending indices of points to draw, at most `most`.

    Keeps minimum, maximum and the first NaN (so that the gap shows) of equal ranges.
    """
    count = values_N.size
    if count <= most:
        return np.arange(count)
    # Up to three points per range, and both ends.
    edges = np.linspace(0, count, (most - 2) // 3 + 1).astype(np.int64)
    kept = [0, count - 1]
    for begin, end in itertools.pairwise(edges):
        stretch = values_N[begin:end]
        absent = np.isnan(stretch)
        if absent.any():
            kept.append(begin + int(absent.argmax()))
        if not absent.all():
            kept += [begin + int(np.nanargmin(stretch)), begin + int(np.nanargmax(stretch))]
    return np.unique(np.array(kept, np.int64))


def median_window(count: int) -> int:
    """Returns the window of a running median: 1/25, nine at least."""
    return 2 * max(count // (2 * _WINDOWS), _MIN_HALF) + 1


def running_median(values_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns (indices [M], medians [M]), M at most 400; NaN where values are."""
    count = values_N.size
    half = median_window(values_N.size) // 2
    indices_M = np.unique(np.linspace(0, count - 1, min(count, MAX_SMOOTH_POINTS)).astype(int))
    medians_M = values_N[indices_M]
    for place in np.flatnonzero(np.isfinite(medians_M)):
        # The window shrinks on both sides at the steep start, on one side at the flat end.
        index = indices_M[place]
        reach = min(half, index)
        medians_M[place] = np.nanmedian(values_N[index - reach : index + reach + 1])
    return indices_M, medians_M
