"""A picture of how long the documents of a data set are, and where its tokens are."""

import io
from pathlib import Path

import numpy as np

from MaxText.errors import UserError
from MaxText.input_pipeline.inspection.data_statistics import Lengths

_BARS, _WINDOW, _INK, _GRID = "#2a6fbb", "#d1495b", "#333333", "#e6e6e6"

# Bins of a doubling of the length. Narrower ones would be ragged for a few hundred documents.
_BINS_OF_OCTAVE = 4

# Counts that differ by more are drawn on a logarithmic axis.
_MOST_FOR_LINEAR = 100

# Characters of a title that fit over the picture.
_LONGEST_TITLE = 80


def draw_lengths(path: Path, lengths: Lengths, length: int, title: str) -> None:
    """Draws how many documents have which length, and which share of the tokens they hold.

    Args:
      path: the PNG to write.
      lengths: of the documents.
      length: T, tokens of a window, as a line.
      title: over the picture.

    Raises:
      UserError: the file cannot be written.
    """
    picture = _render(lengths, length, title)
    try:
        path.write_bytes(picture)
    except OSError as error:
        raise UserError(
            f"output={path} cannot be written: {error.strerror}. Give a file in a folder that you "
            "may write to, or leave output out."
        ) from error


def bin_edges(longest: int) -> np.ndarray:
    """int64 edges of bins of lengths, from 1 to beyond `longest`, evenly spread in their logarithm.

    Bins of short lengths are wider, so that each holds a whole length.
    """
    octaves = longest.bit_length()
    edges = 2 ** (np.arange(_BINS_OF_OCTAVE * octaves + 1) / _BINS_OF_OCTAVE)
    return np.unique(np.round(edges).astype(np.int64))


def _render(lengths: Lengths, length: int, title: str) -> bytes:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter, MaxNLocator, NullFormatter, PercentFormatter

    edges = bin_edges(max(int(lengths.tokens_L[-1]), 1))
    documents = np.histogram(lengths.tokens_L, edges, weights=lengths.documents_L)[0]
    tokens = np.histogram(lengths.tokens_L, edges, weights=lengths.documents_L * lengths.tokens_L)[
        0
    ]

    # Not pyplot: it keeps figures alive and may ask for a display.
    figure = Figure(figsize=(9, 6), dpi=130, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    upper, lower = figure.subplots(2, 1, sharex=True)
    upper.stairs(documents, edges, fill=True, color=_BARS)
    upper.set_ylabel("documents", color=_INK)
    present = documents[documents > 0]
    # Room for the words about the window.
    if present.size and present.max() > _MOST_FOR_LINEAR * present.min():
        upper.set_yscale("log")
        # One document must show, too.
        upper.set_ylim(0.5, 4 * present.max())
    else:
        upper.set_ylim(0, 1.15 * max(documents.max(), 1))
        upper.yaxis.set_major_locator(MaxNLocator(integer=True))
    upper.yaxis.set_major_formatter(EngFormatter(sep=""))
    lower.stairs(100 * tokens / max(tokens.sum(), 1), edges, fill=True, color=_BARS)
    lower.set_ylim(bottom=0)
    lower.set_ylabel("share of all tokens", color=_INK)
    lower.yaxis.set_major_formatter(PercentFormatter())
    lower.set_xscale("log")
    lower.xaxis.set_major_formatter(EngFormatter(sep=""))
    shortest = int(lengths.tokens_L[lengths.tokens_L > 0].min(initial=length))
    # A decade at least, so that the axis has a label.
    left, right = min(shortest, length) / 3.2, max(int(edges[-1]), length) * 3.2
    lower.set_xlim(left, right)
    lower.xaxis.set_minor_formatter(NullFormatter())
    lower.set_xlabel("length of a document (tokens)", color=_INK)
    for axes in (upper, lower):
        axes.axvline(length, color=_WINDOW, linestyle="--", linewidth=1.2)
        axes.grid(True, color=_GRID, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    on_right = length * length > left * right
    upper.annotate(
        f"window, {length:,} tokens",
        (length, 1),
        xycoords=("data", "axes fraction"),
        xytext=(-4 if on_right else 4, -4),
        textcoords="offset points",
        ha="right" if on_right else "left",
        va="top",
        fontsize=9,
        color=_WINDOW,
    )
    if len(title) > _LONGEST_TITLE:
        title = f"... {title[-_LONGEST_TITLE:]}"
    upper.set_title(title, loc="left", fontsize=11, color=_INK)
    buffer = io.BytesIO()
    canvas.print_png(buffer)
    return buffer.getvalue()
