"""Renders report.html, a single self-contained file."""

import base64
import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any, Literal, NamedTuple

import jinja2
import plotly.graph_objects as go
import plotly.offline
from markupsafe import Markup, escape

from MaxText.formatting import ABSENT
from MaxText.reports.chart import PALETTE, SYMBOLS, Chart, color_of, dash_of
from MaxText.reports.entries import Entry, all_runs

_LONG = 44  # minimum length of table cells that wrap
_PAPER = 700  # pixels of a printed page's width
_BORDERS = {"solid": "solid", "dash": "dashed", "dot": "dotted", "dashdot": "double"}


class PageTable(NamedTuple):
    """A table of plain texts; all rows have as many cells as the header."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]

    @property
    def kinds(self) -> list[str]:
        """Classes of the columns' cells, by their alignment."""
        return [_kind([row[column] for row in self.rows]) for column in range(len(self.header))]

    @property
    def is_wide(self) -> bool:
        """Whether the table has no room on paper with whole words, roughly."""
        header = [text.replace("_", "_ ") for text in self.header]
        columns = zip(self.kinds, header, *self.rows, strict=True)
        width = 0  # in pixels
        for kind, *cells in columns:
            # Cells of long texts may break anywhere between words; others only where they must.
            unbreakable = [] if kind == "long" else " ".join(cells).split()
            width += 8 + 5 * max(map(len, unbreakable), default=0)
        return width > _PAPER


class Verbatim(NamedTuple):
    """Preformatted text, folded under `caption` if there is one."""

    text: str
    caption: str = ""
    is_open: bool = True


class Plot(NamedTuple):
    """A plotly figure with its text alternative."""

    name: str  # its id on the page and name of its downloads
    title: str
    figure: go.Figure
    description: str = ""
    subtitle: str = ""
    # Of half of the page's width ("") or all; "folded" figures are drawn on request.
    size: Literal["", "wide", "folded"] = ""
    height: int = 0  # in pixels; 0 for the usual one


@dataclasses.dataclass(frozen=True)
class PageSection:
    """A section of the page: plain text, never interpreted as HTML.

    A table of a single run is shown as facts, like `facts`. The controls of all curves are in the
    first section that `has_controls`, or else in the first one with plots.
    """

    title: str
    paragraphs: Sequence[str] = ()
    table: PageTable | None = None
    texts: Sequence[Verbatim] = ()
    facts: Mapping[str, str] = dataclasses.field(default_factory=dict)
    plots: Sequence[Plot] = ()
    has_controls: bool = False


def render(
    sections: Sequence[PageSection],
    entries: Sequence[Entry],
    charts: Sequence[Chart],
    **template_values: Any,
) -> str:
    """Returns the page as HTML.

    Args:
        sections: of the page, in order.
        entries: runs and groups, for their colors.
        charts: whose marks are explained.
        **template_values: of page.html: title, made, warnings, axes, links (addresses of the runs'
            own reports) and refresh (seconds until the page reloads; 0 for never).
    """
    program = _resource("page.js")
    library = plotly.offline.get_plotlyjs()
    figures = ",".join(
        f"{json.dumps(plot.name)}:{plot.figure.to_json()}"
        for section in sections
        for plot in section.plots
    ).replace("<", "\\u003c")  # so that nothing can end the script element
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.globals |= {"color_of": color_of, "dash_of": dash_of}
    environment.filters["breakable"] = _breakable
    runs = all_runs(entries)
    present = {mark.kind for chart in charts for mark in chart.marks}
    colors = {name: entry.color for entry in entries for name in (*entry.runs, entry.label)}
    return environment.from_string(_resource("page.html")).render(
        template_values,
        sections=sections,
        entries=entries,
        colors=colors if len(runs) > 1 else {},  # by label of a run or group
        palette=PALETTE,
        borders=_BORDERS,
        marks=[kind for kind in SYMBOLS if kind in present],
        has_validation=any(run.evaluations for run in runs.values()),
        style=_resource("page.css"),
        program=program,
        library=library,
        figures=f"{{{figures}}}",
        # Only these scripts may run and nothing may be loaded, whatever a sample contains.
        policy=f"default-src 'none'; script-src {_hash(library)} {_hash(program)}; "
        "style-src 'unsafe-inline'; img-src data: blob:",
    )


def _kind(cells: Sequence[str]) -> str:
    """Returns the class of a column: "number", "long" for texts that wrap, or ""."""
    filled = [text for text in cells if text]
    if filled and all(text.lstrip("+-")[:1].isdigit() or text == ABSENT for text in filled):
        return "number"
    return "long" if any(len(text) > _LONG for text in filled) else ""


def _breakable(text: str) -> Markup:
    """Escapes a text that may wrap behind the punctuation of names and paths, not inside words."""
    return Markup(re.sub(r"([_/,=@]+)(?=\w)", r"\1<wbr>", str(escape(text))))


def _resource(name: str) -> str:
    """Returns the text of a file of this package."""
    return resources.files("MaxText.reports").joinpath(name).read_text(encoding="utf-8")


def _hash(script: str) -> str:
    """Returns a script's hash for the content security policy."""
    # Browsers normalize line ends to line feeds before hashing.
    plain = script.replace("\r\n", "\n").replace("\r", "\n")
    return f"'sha256-{base64.b64encode(hashlib.sha256(plain.encode()).digest()).decode()}'"
