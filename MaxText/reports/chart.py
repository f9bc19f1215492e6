"""Descriptions of charts, independent of their drawing.

plots.py draws them as HTML with plotly, figures.py as PNG.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np

# Horizontal axes of a run's curves.
AxisName = Literal["tokens", "flops", "time", "step"]

# Runs differ by color, then by dashes. A test simulates three color-vision deficiencies.
PALETTE = (
    "#057fdc", "#dc4a66", "#1b9062", "#d27a3b", "#785cb6",
    "#1b9eb9", "#af7747", "#cf5da7", "#688115", "#3f6b84",
)  # fmt: skip
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

# raw: every report, faint. line: smoothed, or exact if nothing fluctuates. thin: one of several
# seeds. dots: few measurements, joined.
Kind = Literal["raw", "line", "thin", "dots"]


@dataclasses.dataclass(frozen=True)
class Axis:
    """A horizontal axis; `choice` is the label of its button."""

    name: AxisName
    title: str
    choice: str


@dataclasses.dataclass(frozen=True)
class Series:
    """A curve of N points.

    Attributes:
      label: Shown in the legend; empty for none.
      owner: Label of its run or group.
      color: Index of color and dashes.
      x: Positions on each axis, ascending: float [N].
      y: Values: float [N]; NaN interrupts the curve.
      low: Smallest value of the seeds, [N]; None without seeds. `high` is the largest.
    """

    label: str
    owner: str
    color: int
    kind: Kind
    x: Mapping[AxisName, np.ndarray]
    y: np.ndarray
    low: np.ndarray | None = None
    high: np.ndarray | None = None


@dataclasses.dataclass(frozen=True)
class Annotation:
    """An event of a run, drawn on its curve.

    `x` has its position on each axis.
    """

    kind: str
    owner: str
    text: str
    x: Mapping[AxisName, float]
    y: float


@dataclasses.dataclass(frozen=True)
class Chart:
    """Curves over a common axis.

    Attributes:
      name: File name without extension.
      series: In drawing order.
      references: (label, y) of dashed horizontal lines.
      y_range: Initial range, so that a spike does not flatten everything else; None for all.
      log_y: Initially logarithmic.
      percent: y is a share.
      folded: Shown on request.
    """

    name: str
    title: str
    y_title: str
    series: Sequence[Series]
    marks: Sequence[Annotation] = ()
    references: Sequence[tuple[str, float]] = ()
    y_range: tuple[float, float] | None = None
    log_y: bool = False
    percent: bool = False
    folded: bool = False


def color_of(index: int) -> str:
    return PALETTE[index % len(PALETTE)]


def dash_of(index: int) -> str:
    """Returns a run's dash style, different for repeated colors."""
    return DASHES[index // len(PALETTE) % len(DASHES)]
