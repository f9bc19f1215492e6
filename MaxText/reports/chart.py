"""Chart descriptions, drawn by page.js in HTML and by figures.py as PNG."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np

# Horizontal axes of a run's curves.
AxisName = Literal["tokens", "flops", "time", "step"]

# Runs differ by color, then by dashes. The palette suits color-blind readers, white and dark pages.
PALETTE = (
    "#2f7ed8", "#d9485f", "#2a9d70", "#e08a1e", "#8661c1",
    "#1aa0b8", "#a0703c", "#c2559b", "#7a9a1f", "#7b8794",
)  # fmt: skip
DASHES = ("solid", "dash", "dot", "dashdot")

# Kind of mark -> plotly.js symbol, matplotlib marker.
SYMBOLS: dict[str, tuple[str, str]] = {
    "checkpoint": ("line-ns-open", "|"),
    "restart": ("diamond", "D"),
    "skipped step": ("x-thin-open", "x"),
    "skipped record": ("cross-thin-open", "+"),
    "rollback": ("triangle-left", "<"),
    "growth": ("star", "*"),
    "diverged or failed": ("x", "X"),
}

# raw: every step, faint. line: smoothed, or exact if nothing fluctuates. thin: one seed of several.
# dots: few measurements, joined.
Kind = Literal["raw", "line", "thin", "dots"]


@dataclasses.dataclass(frozen=True)
class Axis:
    """A horizontal axis.

    `choice` is the label of its button; `powers` writes powers of ten instead of K, M, B, T.
    """

    name: AxisName
    title: str
    choice: str
    powers: bool = False


@dataclasses.dataclass(frozen=True)
class Points:
    """A curve, [N] each: x ascends, NaN in y interrupts it, low and high are the seeds' band."""

    x: np.ndarray
    y: np.ndarray
    low: np.ndarray | None = None
    high: np.ndarray | None = None


@dataclasses.dataclass(frozen=True)
class Series:
    """A curve, with its points on each axis.

    Attributes:
      label: Shown in the legend; empty for none.
      owner: Label of its run or group.
      color: Index of color and dashes.
    """

    label: str
    owner: str
    color: int
    kind: Kind
    points: Mapping[AxisName, Points]


@dataclasses.dataclass(frozen=True)
class Annotation:
    """An event of a run, drawn on its curve; `places` has (x, y) by axis."""

    kind: str
    owner: str
    text: str
    places: Mapping[AxisName, tuple[float, float]]


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


@dataclasses.dataclass(frozen=True)
class Bars:
    """A horizontal bar per run; `parts` maps a name to its share of each bar."""

    name: str
    title: str
    labels: Sequence[str]
    parts: Mapping[str, Sequence[float]]
    colors: Mapping[str, str]


def color_of(index: int) -> str:
    return PALETTE[index % len(PALETTE)]


def dash_of(index: int) -> str:
    """Returns a run's dash style, which changes when the colors repeat."""
    return DASHES[index // len(PALETTE) % len(DASHES)]
