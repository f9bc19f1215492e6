"""Description of charts, drawn by page.js on the page and by pictures.py as PNG."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np

# What the curves of a run can be drawn against.
AxisName = Literal["tokens", "flops", "time", "step"]

# Runs are told apart by colour, then by dashes. Told apart also by people who see few colours, on
# white and on dark.
PALETTE = (
    "#2f7ed8",
    "#d9485f",
    "#2a9d70",
    "#e08a1e",
    "#8661c1",
    "#1aa0b8",
    "#a0703c",
    "#c2559b",
    "#7a9a1f",
    "#7b8794",
)
DASHES = ("solid", "dash", "dot", "dashdot")

# Kind of mark -> symbol of plotly.js, marker of matplotlib.
SYMBOLS: dict[str, tuple[str, str]] = {
    "checkpoint": ("line-ns-open", "|"),
    "restart": ("diamond", "D"),
    "skipped update": ("x-thin-open", "x"),
    "skipped record": ("cross-thin-open", "+"),
    "rewind": ("triangle-left", "<"),
    "growth": ("star", "*"),
    "diverged or failed": ("x", "X"),
}

# raw: every step, faint. line: smoothed, or exact where nothing fluctuates. thin: one seed of
# several. dots: few measurements, joined.
Kind = Literal["raw", "line", "thin", "dots"]


@dataclasses.dataclass(frozen=True)
class Axis:
    """A horizontal axis.

    Attributes:
      title: With the unit.
      choice: Label of its button.
      powers: Write large numbers as powers of ten, not as K, M, B, T.
    """

    name: AxisName
    title: str
    choice: str
    powers: bool = False


@dataclasses.dataclass(frozen=True)
class Points:
    """A curve, [N] each.

    Attributes:
      x: Ascending.
      y: NaN interrupts the curve.
      low, high: Band of the seeds.
    """

    x: np.ndarray
    y: np.ndarray
    low: np.ndarray | None = None
    high: np.ndarray | None = None


@dataclasses.dataclass(frozen=True)
class Series:
    """A curve, with its points on each axis.

    Attributes:
      label: In the legend of a figure; empty for none.
      owner: Label of its run or group.
      colour: Index of color and dashes.
    """

    label: str
    owner: str
    colour: int
    kind: Kind
    points: Mapping[AxisName, Points]


@dataclasses.dataclass(frozen=True)
class Mark:
    """An event during a run, drawn on its curve.

    Attributes:
      kind: One of SYMBOLS.
      owner: Label of the run or group.
      places: (x, y) by axis.
    """

    kind: str
    owner: str
    text: str
    places: Mapping[AxisName, tuple[float, float]]


@dataclasses.dataclass(frozen=True)
class Chart:
    """Curves over a common axis.

    Attributes:
      name: Of its file, without ending.
      series: In drawing order.
      references: (label, y) of dashed horizontal lines.
      y_range: Initial range, so that a spike does not flatten everything else; None for all.
      log_y: Initially logarithmic.
      percent: y is a share.
    """

    name: str
    title: str
    y_title: str
    series: Sequence[Series]
    marks: Sequence[Mark] = ()
    references: Sequence[tuple[str, float]] = ()
    y_range: tuple[float, float] | None = None
    log_y: bool = False
    percent: bool = False


@dataclasses.dataclass(frozen=True)
class Bars:
    """A horizontal bar for each run, of parts whose shares add up to about 1.

    Attributes:
      name: Of its file, without ending.
      parts: Name of a part -> its share of each bar.
    """

    name: str
    title: str
    labels: Sequence[str]
    parts: Mapping[str, Sequence[float]]
    colours: Mapping[str, str]


def colour_of(index: int) -> str:
    return PALETTE[index % len(PALETTE)]


def dash_of(index: int) -> str:
    """Returns the dashes of a run, which change when the colors repeat."""
    return DASHES[index // len(PALETTE) % len(DASHES)]
