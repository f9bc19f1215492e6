"""loss_curve.png: what a person looks at first after a run."""

import io
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from etils import epath

from MaxText.monitoring.events import EVENTS_FILE
from MaxText.monitoring.json_lines import read_rows

FILE_NAME = "loss_curve.png"

_KINDS = {"train": ("step",), "validation": ("evaluation",), "start": ("start", "resume")}
_TRAIN, _VALIDATION, _REFERENCE, _INK = "#2a6fbb", "#d1495b", "#7a7a7a", "#333333"


def draw_loss_curve(run_folder: str | epath.Path) -> epath.Path | None:
    """Draws loss over steps and tokens from the run's events.

    Args:
      run_folder: where events.jsonl lies, and where the picture goes.

    Returns:
      The picture's path, or None if there is nothing to draw.
    """
    folder = epath.Path(run_folder)
    rows = read_rows(folder / EVENTS_FILE)
    by_kind = {
        kind: [row for row in rows if row.get("event") in kinds] for kind, kinds in _KINDS.items()
    }
    train = _points(by_kind["train"], "learning/lm_loss")
    validation = _points(by_kind["validation"], "eval/avg_loss")
    if not train and not validation:
        return None
    newest = by_kind["start"][-1]
    last = (by_kind["train"] or by_kind["validation"])[-1]
    picture = _render(
        train,
        validation,
        tokens_per_step=last["progress/tokens"] / (last["step"] + 1),
        title=newest["run_name"],
        unigram_entropy=newest["unigram_entropy"],
    )
    path = folder / FILE_NAME
    path.write_bytes(picture)
    return path


def _points(rows: Sequence[Mapping[str, Any]], tag: str) -> list[tuple[int, float]]:
    """(step, value) in order of steps; what is no number is left out."""
    points = {row["step"]: row[tag] for row in rows if row.get(tag) is not None and "step" in row}
    return sorted(points.items())


def running_median(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """A smooth curve through noisy points: medians over a window of 1/25 of them.

    A median, since a spike of one step should not bend the curve; a centred window, since an
    average of the past lags behind a falling loss. At most 600 points are returned.
    """
    count = len(points)
    half = count // 50
    spacing = max(count / 600, 1.0)
    curve = []
    for i in range(math.ceil(count / spacing)):
        centre = min(int(i * spacing), count - 1)
        # At the steep beginning the window shrinks on both sides, at the flat end on one.
        before = min(half, centre)
        window = points[centre - before : centre + (before) + 1]
        curve.append((points[centre][0], statistics.median(value for _, value in window)))
    return curve


def _render(train, validation, *, tokens_per_step, title, unigram_entropy) -> bytes:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # Not pyplot: it keeps figures alive and may ask for a display.
    figure = Figure(figsize=(9, 5.5), dpi=130, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    axes = figure.subplots()
    shown: list[float] = [value for _, value in validation]
    if train:
        smooth = running_median(train)
        axes.plot(*_xy(train), color=_TRAIN, alpha=0.25, linewidth=0.8, label="train, each step")
        axes.plot(*_xy(smooth), color=_TRAIN, linewidth=1.8, label="train, running median")
        shown += [value for _, value in smooth]
    if validation:
        axes.plot(
            *_xy(validation),
            color=_VALIDATION,
            marker="o",
            markersize=4.5,
            linewidth=1.2,
            label="validation",
        )
        step, loss = validation[-1]
        axes.annotate(
            f"{loss:.3f}",
            (step, loss),
            xytext=(0, 7),
            textcoords="offset points",
            ha="right",
            color=_VALIDATION,
            fontsize=9,
        )
    if unigram_entropy is not None:
        label = f"unigram entropy, {unigram_entropy:.2f}"
        axes.axhline(unigram_entropy, color=_REFERENCE, linestyle="--", linewidth=1, label=label)
        shown.append(unigram_entropy)
    finite = [value for value in shown if math.isfinite(value)]
    if finite:
        # A spike of the raw curve must not flatten everything else.
        low, high = min(finite), max(finite)
        margin = 0.06 * max(high - low, 0.1)
        axes.set_ylim(low - margin, high + margin)
    axes.set_xlabel("step", color=_INK)
    axes.set_ylabel("loss (nats per token)", color=_INK)
    axes.set_title(title, loc="left", fontsize=11, color=_INK)
    axes.grid(True, color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["right"]].set_visible(False)
    axes.margins(x=0.02)
    axes.legend(frameon=False, fontsize=9)
    second = axes.secondary_xaxis(
        "top", functions=(lambda x: x * tokens_per_step, lambda x: x / tokens_per_step)
    )
    second.set_xlabel("tokens", color=_INK)
    second.xaxis.set_major_formatter(short_count)
    buffer = io.BytesIO()
    canvas.print_png(buffer)
    return buffer.getvalue()


def _xy(points: Sequence[tuple[int, float]]) -> tuple[list[int], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def short_count(number: float, _position: float | None = None) -> str:
    """2500000 as "2.5M"; the signature is that of a matplotlib formatter."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if abs(number) >= size:
            return f"{number / size:.3g}{letter}"
    return f"{number:.3g}"
