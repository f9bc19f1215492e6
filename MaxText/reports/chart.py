"""Descriptions of charts, drawn by plots.py (plotly) and figures.py."""

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
    """A curve of N points."""

    label: str  # in the legend; empty for none
    owner: str  # label of its run or group
    color: int  # index of color and dashes
    kind: Kind
    x: Mapping[AxisName, np.ndarray]  # positions on each axis, ascending: float [N]
    y: np.ndarray  # float [N]; NaN interrupts the curve
    low: np.ndarray | None = None  # smallest value of the seeds, [N]; None without seeds
    high: np.ndarray | None = None


@dataclasses.dataclass(frozen=True)
class Annotation:
    """An event of a run, drawn on its curve."""

    kind: str
    owner: str
    text: str
    x: Mapping[AxisName, float]
    y: float


@dataclasses.dataclass(frozen=True)
class Chart:
    """Curves over a common axis."""

    name: str  # of its file, without extension
    title: str
    y_title: str
    series: Sequence[Series]  # in drawing order
    marks: Sequence[Annotation] = ()
    references: Sequence[tuple[str, float]] = ()  # label and y of dashed horizontal lines
    # Initial range, so that a spike does not flatten everything else; None for all.
    y_range: tuple[float, float] | None = None
    log_y: bool = False  # initially
    percent: bool = False  # y is a share
    folded: bool = False  # shown on request


def color_of(index: int) -> str:
    return PALETTE[index % len(PALETTE)]


def dash_of(index: int) -> str:
    """Returns a run's dash style, different for repeated colors."""
    return DASHES[index // len(PALETTE) % len(DASHES)]
