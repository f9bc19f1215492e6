"""Curves from rows of a run: axes, thinning, smoothing, bands of seeds."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from MaxText.formatting import time_unit
from MaxText.monitoring.run_record import RunHistory
from MaxText.reports.chart import Axis, AxisName, Kind, Series
from MaxText.reports.entries import Entry, averaged

Row = Mapping[str, Any]
Values = Callable[[RunHistory, Sequence[Row]], np.ndarray]  # of rows, float [N], NaN for none
CurveKind = Literal["smooth", "exact", "dots"]

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
        suffix = ", those of ancestors included" if inherited else ""
        axes = (
            Axis("tokens", f"tokens{suffix}", "tokens"),
            Axis("flops", f"floating point operations{suffix}", "FLOPs"),
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
    kind: CurveKind,
    color: int | None = None,
) -> list[Series]:
    """Returns the series of a quantity for a run or a group.

    For a run: its values, with "smooth" faint below their running median. For a group: their mean
    over the seeds with its band, and a thin line per seed unless there are few values ("dots").

    Args:
        entry: a run or a group of seeds.
        axes: on which the points are placed.
        rows_of: the rows of a run with the quantity: its steps or its evaluations.
        value: of rows.
        label: in the legend.
        kind: "smooth" for noisy values, "exact" for others, "dots" for few measurements.
        color: index of color and dashes; by default the entry's.
    """
    color = entry.color if color is None else color
    raw: list[Series] = []
    lines: dict[int, Series] = {}  # by id of the run
    for run in entry.runs.values():
        rows = rows_of(run)
        values = value(run, rows)
        positions = axes.places(run, rows)

        def series_at(kind: Kind, indices: np.ndarray, y: np.ndarray, positions=positions):
            x = {name: position[indices] for name, position in positions.items()}
            return Series(label="", owner=entry.label, color=color, kind=kind, x=x, y=y)

        kept_indices = downsample(values)
        points = (
            running_median(values) if kind == "smooth" else (kept_indices, values[kept_indices])
        )
        indices, y = points
        line = series_at("dots" if kind == "dots" else "line", indices, y)
        if np.isfinite(line.y).any():
            lines[id(run)] = line
            raw.append(series_at("raw", kept_indices, values[kept_indices]))
    if not lines:
        return []
    if not entry.is_group:
        (line,) = lines.values()
        return [*(raw if kind == "smooth" else ()), line._replace(label=label)]
    averaged_lines = [lines[id(run)] for run in averaged(entry) if id(run) in lines]
    mean = _mean(averaged_lines or list(lines.values()))
    thin = [line_of_seed._replace(kind="thin") for line_of_seed in lines.values() if kind != "dots"]
    return [*thin, mean._replace(label=label)] if mean.y.size else thin


def _mean(lines: Sequence[Series]) -> Series:
    """Returns the mean of seeds with its band, until the shortest ends."""
    is_finite = [np.isfinite(line.y) for line in lines]
    steps_of = [line.x["step"][mask] for line, mask in zip(lines, is_finite, strict=True)]
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
            np.interp(steps, steps_of_line, line.y[mask])
            for line, steps_of_line, mask in zip(lines, steps_of, is_finite, strict=True)
        ]
    )
    mean = lines[0]._replace(label="", x=x, y=y_SN.mean(0), low=None, high=None)
    if len(lines) == 1:
        return mean
    return mean._replace(low=y_SN.min(0), high=y_SN.max(0))


def column(name: str) -> Values:
    """Returns a function for a field of rows; NaN if absent or null."""
    return lambda _run, rows: np.array([row.get(name) for row in rows], float)


def downsample(values_N: np.ndarray, max_points: int = MAX_POINTS) -> np.ndarray:
    """Returns ascending indices of points to draw, at most `max_points`.

    Keeps minimum, maximum and the first NaN (so that the gap shows) of equal ranges.
    """
    count = values_N.size
    if count <= max_points:
        return np.arange(count)
    # Up to three points per range, and both ends.
    edges = np.linspace(0, count, (max_points - 2) // 3 + 1).astype(np.int64)
    indices = [0, count - 1]
    for begin, end in itertools.pairwise(edges):
        values = values_N[begin:end]
        is_nan = np.isnan(values)
        if is_nan.any():
            indices.append(begin + int(is_nan.argmax()))
        if not is_nan.all():
            indices += [begin + int(np.nanargmin(values)), begin + int(np.nanargmax(values))]
    return np.unique(np.array(indices, np.int64))


def median_window(count: int) -> int:
    """Returns the window of a running median: 1/25, nine at least."""
    return 2 * max(count // (2 * _WINDOWS), _MIN_HALF) + 1


def running_median(values_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns (indices [M], medians [M]), M at most 400; NaN where values are."""
    count = values_N.size
    half = median_window(values_N.size) // 2
    indices_M = np.unique(np.linspace(0, count - 1, min(count, MAX_SMOOTH_POINTS)).astype(int))
    medians_M = values_N[indices_M]
    for position in np.flatnonzero(np.isfinite(medians_M)):
        # The window shrinks on both sides at the steep start, on one side at the flat end.
        index = indices_M[position]
        reach = min(half, index)
        medians_M[position] = np.nanmedian(values_N[index - reach : index + reach + 1])
    return indices_M, medians_M
