"""What a chart shows, said once: page.js draws it on the page, pictures.py as a PNG."""

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
      name: what the page calls it.
      title: with the unit.
      choice: the word on its button.
      powers: whether large numbers are written as powers of ten, not as K, M, B, T.
    """

    name: AxisName
    title: str
    choice: str
    powers: bool = False


@dataclasses.dataclass(frozen=True)
class Points:
    """A curve, [N] each.

    Attributes:
      x: along the axis, ascending.
      y: NaN where the run has no finite number; the curve is interrupted there.
      low: lower edge of the band of seeds.
      high: upper edge.
    """

    x: np.ndarray
    y: np.ndarray
    low: np.ndarray | None = None
    high: np.ndarray | None = None


@dataclasses.dataclass(frozen=True)
class Series:
    """A curve, and where it lies on each axis.

    Attributes:
      label: in the legend of a picture; empty for none.
      owner: label of the run or group it belongs to.
      colour: index that selects colour and dashes.
      kind: how it is drawn.
      points: by axis.
    """

    label: str
    owner: str
    colour: int
    kind: Kind
    points: Mapping[AxisName, Points]


@dataclasses.dataclass(frozen=True)
class Mark:
    """Something that happened during a run, drawn on its curve.

    Attributes:
      kind: one of SYMBOLS.
      owner: label of the run or group.
      text: what happened.
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
      name: of its picture, without ending.
      title: over it.
      y_title: quantity and unit.
      series: drawn in this order.
      marks: on the curves.
      references: (label, y) of dashed horizontal lines.
      y_range: shown at first, so that a spike does not flatten everything else; None for all.
      log_y: whether the vertical axis is logarithmic at first.
      percent: whether y is a share, written in percent.
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
    """One horizontal bar for each run, made of parts whose shares add up to 1, but for the tiniest.

    Attributes:
      name: of its picture, without ending.
      title: over it.
      labels: of the bars.
      parts: name of a part -> its share of each bar.
      colours: by name of the part.
    """

    name: str
    title: str
    labels: Sequence[str]
    parts: Mapping[str, Sequence[float]]
    colours: Mapping[str, str]


def colour_of(index: int) -> str:
    """The colour of a run."""
    return PALETTE[index % len(PALETTE)]


def dash_of(index: int) -> str:
    """The dashes of a run: another kind when the colours begin again."""
    return DASHES[index // len(PALETTE) % len(DASHES)]
