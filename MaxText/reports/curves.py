"""Curves from rows of a run: axes, thinning, smoothing, bands of seeds."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from MaxText.metrics.run_record import RunRecord
from MaxText.reports.chart import Axis, AxisName, Points, Series
from MaxText.reports.downsampling import downsample, running_median
from MaxText.reports.entries import Entry, averaged

_GRID = 400  # number of points in a mean over seeds

_TIME_UNITS = ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes"), (1.0, "seconds"))

Row = Mapping[str, Any]


class Axes:
    """The horizontal axes of a report, shared by all runs, in button order."""

    def __init__(self, runs: Sequence[RunRecord]):
        longest = max(run.goodput.running_seconds for run in runs)
        # At least two units, so that the axis has labels.
        self._seconds, unit = next(
            ((size, name) for size, name in _TIME_UNITS if longest >= 2 * size), _TIME_UNITS[-1]
        )
        inherited = any(run.inherited_tokens or run.inherited_flops for run in runs)
        words = ", those of ancestors included" if inherited else ""
        self.axes = (
            Axis("tokens", f"tokens{words}", "tokens"),
            Axis("flops", f"floating point operations{words}", "FLOPs", powers=True),
            Axis("time", f"time running ({unit})", "time"),
            Axis("step", "step", "steps"),
        )

    def axis(self, name: AxisName) -> Axis:
        return next(axis for axis in self.axes if axis.name == name)

    def places(self, run: RunRecord, rows: Sequence[Row]) -> dict[AxisName, np.ndarray]:
        """Returns the positions of rows on each axis: float [N], NaN if unknown."""
        return {
            "tokens": _column(rows, "progress/tokens") + run.inherited_tokens,
            "flops": _column(rows, "progress/flops") + run.inherited_flops,
            "time": run.goodput.running_at(rows) / self._seconds,
            "step": _column(rows, "step"),
        }


def curve(
    entry: Entry,
    axes: Axes,
    rows_of: Callable[[RunRecord], Sequence[Row]],
    value: Callable[[RunRecord, Sequence[Row]], np.ndarray],
    *,
    label: str,
    smooth: bool,
) -> list[Series]:
    """Returns the series of a quantity for a run or a group.

    For a run: faint single steps and their running median, or the values alone. For a group: a thin
    line per seed, and their mean with its band.

    Args:
      value: (run, rows) -> float [N], NaN for none.
      smooth: Draw a running median over scattered steps.
    """
    raw: list[Series] = []
    lines: list[dict[AxisName, Points]] = []
    averaged_lines: list[dict[AxisName, Points]] = []
    in_mean = averaged(entry)
    for run in entry.runs.values():
        rows = rows_of(run)
        values = value(run, rows)
        if not np.isfinite(values).any():
            continue
        places = axes.places(run, rows)
        drawn = downsample(values)
        heights = values[drawn]  # one array for all axes: page_data stores shared values once
        every: dict[AxisName, Points] = {
            name: Points(x[drawn], heights) for name, x in places.items()
        }
        if smooth:
            indices, medians = running_median(values)
            smoothed: dict[AxisName, Points] = {
                name: Points(x[indices], medians) for name, x in places.items()
            }
            lines.append(smoothed)
            if not entry.is_group:
                raw.append(Series("", entry.label, entry.color, "raw", every))
        else:
            lines.append(every)
        if any(run is other for other in in_mean):
            averaged_lines.append(lines[-1])
    if not lines:
        return []
    if not entry.is_group:
        return [*raw, Series(label, entry.label, entry.color, "line", lines[0])]
    thin_lines = [Series("", entry.label, entry.color, "thin", line) for line in lines]
    mean: dict[AxisName, Points] = {
        name: _mean_of_lines([line[name] for line in averaged_lines or lines]) for name in lines[0]
    }
    return [*thin_lines, Series(label, entry.label, entry.color, "line", mean)]


def evaluations(entry: Entry, axes: Axes, color: int, label: str) -> list[Series]:
    """Returns the validation losses of a run, or their mean over a group's seeds."""
    measured: list[dict[int, tuple[dict[AxisName, float], float]]] = []
    for run in averaged(entry):
        rows = run.evaluations
        losses, places = _column(rows, "eval/avg_loss"), axes.places(run, rows)
        measured.append(
            {
                row["step"]: ({name: float(x[i]) for name, x in places.items()}, float(losses[i]))
                for i, row in enumerate(rows)
            }
        )
    measured = [found for found in measured if found]
    if not measured:
        return []
    # Seeds may have progressed differently: average only the steps that all have.
    steps = sorted(set(measured[0]).intersection(*measured[1:]))
    losses = np.array([[found[step][1] for step in steps] for found in measured], float)
    if not np.isfinite(losses).any():
        return []
    points: dict[AxisName, Points] = {}
    for axis in axes.axes:
        x = np.array([[found[step][0][axis.name] for step in steps] for found in measured], float)
        points[axis.name] = _mean_and_band(x.mean(0), losses)
    return [Series(label, entry.label, color, "dots", points)]


def _mean_of_lines(lines: Sequence[Points]) -> Points:
    """Returns the mean of curves over their common range."""
    whole = [_finite(line) for line in lines]
    if not all(x.size for x, _ in whole):
        return Points(np.zeros(0), np.zeros(0))
    begin, end = max(x[0] for x, _ in whole), min(x[-1] for x, _ in whole)
    if begin > end:
        return Points(np.zeros(0), np.zeros(0))
    # No denser than the curves themselves.
    grid = np.linspace(begin, end, min(_GRID, max(x.size for x, _ in whole)))
    return _mean_and_band(grid, np.stack([np.interp(grid, x, y) for x, y in whole]))


def _mean_and_band(x: np.ndarray, y_SN: np.ndarray) -> Points:
    """Returns mean, minimum and maximum over the seeds S; no band for one seed."""
    if len(y_SN) == 1:
        return Points(x, y_SN[0])
    return Points(x, y_SN.mean(0), y_SN.min(0), y_SN.max(0))


def _finite(line: Points) -> tuple[np.ndarray, np.ndarray]:
    there = np.isfinite(line.x) & np.isfinite(line.y)
    return line.x[there], line.y[there]


def _column(rows: Sequence[Row], name: str) -> np.ndarray:
    """Returns a field of each row; NaN if absent or null."""
    return np.array([row.get(name) for row in rows], float)


def column(name: str) -> Callable[[RunRecord, Sequence[Row]], np.ndarray]:
    """Returns a function that reads a field of rows."""
    return lambda _run, rows: _column(rows, name)
