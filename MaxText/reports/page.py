"""Renders report.html, a single self-contained file."""

import base64
import dataclasses
import hashlib
import html
import json
import string
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from typing import Literal

import plotly.graph_objects as go
import plotly.offline

from MaxText.reports.chart import PALETTE, SYMBOLS, Axis, Chart, color_of, dash_of
from MaxText.reports.entries import Entry, all_runs
from MaxText.reports.formatting import ABSENT

_LONG = 44  # minimum length of table cells that wrap
_PAPER = 700  # pixels of a printed page's width
_FILTERED = 8  # tables with more rows have a filter
_BORDERS = {"solid": "solid", "dash": "dashed", "dot": "dotted", "dashdot": "double"}
_CROWDED = 4  # with more runs, raw values and checkpoints are hidden at first


@dataclasses.dataclass(frozen=True)
class PageTable:
    header: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclasses.dataclass(frozen=True)
class Verbatim:
    """Preformatted text, folded under `caption` if there is one."""

    text: str
    caption: str = ""
    is_open: bool = True


@dataclasses.dataclass(frozen=True)
class Plot:
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

    A table of a single run is shown as facts, like `facts`.
    """

    title: str
    paragraphs: Sequence[str] = ()
    table: PageTable | None = None
    texts: Sequence[Verbatim] = ()
    facts: Mapping[str, str] = dataclasses.field(default_factory=dict)
    plots: Sequence[Plot] = ()


@dataclasses.dataclass(frozen=True)
class Page:
    """Contents of the page."""

    title: str
    made: str  # how and when
    warnings: Sequence[str]
    sections: Sequence[PageSection]
    controls: str  # HTML of `controls`, above the first plots
    colors: Mapping[str, int]  # label of a run or group in tables -> index of its color
    links: Mapping[str, str]  # addresses of the runs' own reports
    refresh: int = 0  # seconds until the page reloads; 0 for never


def render(page: Page) -> str:
    """Returns the page as HTML."""
    style, program = _own("page.css"), _own("page.js")
    library = plotly.offline.get_plotlyjs()
    # Only these scripts may run and nothing may be loaded, whatever a sample contains.
    policy = (
        f"default-src 'none'; script-src {_hash(library)} {_hash(program)}; "
        "style-src 'unsafe-inline'; img-src data: blob:"
    )
    refresh = f'<meta http-equiv="refresh" content="{page.refresh}">\n' if page.refresh else ""
    figures = ",".join(
        f"{json.dumps(plot.name)}:{plot.figure.to_json()}"
        for section in page.sections
        for plot in section.plots
    ).replace("<", "\\u003c")  # so that nothing can end the script element
    warnings = [f'<p class="warning" role="alert">{_text(words)}</p>' for words in page.warnings]
    first = next(section for section in page.sections if section.plots)
    sections = (
        _section(section, page, page.controls if section is first else "")
        for section in page.sections
    )
    return string.Template(_own("page.html")).substitute(
        policy=policy,
        refresh=refresh,
        title=_text(page.title),
        style=style,
        body="\n".join([*warnings, *sections]),
        made=_text(page.made),
        figures=figures,
        library=library,
        program=program,
    )


def controls(entries: Sequence[Entry], axes: Iterable[Axis], charts: Sequence[Chart]) -> str:
    """Returns the choices above the charts as HTML."""
    is_crowded = len(entries) > _CROWDED
    has_validation = any(run.evaluations for run in all_runs(entries).values())
    marks = {mark.kind for chart in charts for mark in chart.marks}
    seeds = [f" (mean of {n} seeds)" if (n := len(each.runs)) > 1 else "" for each in entries]

    def box(name: str, value: str, text: str, is_on: bool, before: str = "") -> str:
        state = " checked" if is_on else ""
        return (
            f'<label><input type="checkbox" name="{name}" value="{_text(value)}"{state}>'
            f"{before}{_text(text)}</label>"
        )

    only = "".join(f"<option>{_text(entry.label)}</option>" for entry in entries)
    groups = {
        "x": [
            f'<label><input type="radio" name="axis" value="{index}"{"" if index else " checked"} '
            f'data-title="{_text(axis.title)}">{_text(axis.choice)}</label>'
            for index, axis in enumerate(axes)
        ],
        # With many runs their losses are what matters.
        "show": [
            box("show", "training", "training", len(entries) <= len(PALETTE) or not has_validation),
            box("show", "validation", "validation", True),
            box("show", "raw", "raw (unsmoothed)", not is_crowded),
            *(
                box("show", f"mark {kind}", kind, not (is_crowded and kind == "checkpoint"))
                for kind in SYMBOLS
                if kind in marks
            ),
        ],
        "scale": [
            *(box(name, "on", name, False) for name in ("log x", "log loss", "full range")),
            '<label>smoothing<input type="range" name="smooth" min="0" max="10" value="1"></label>',
        ],
        "runs": [
            *(
                box("show", f"run {each.label}", each.label + note, True, _chip(each.color))
                for each, note in zip(entries, seeds, strict=True)
            ),
            f'<label>only <select name="only"><option></option>{only}</select></label>',
        ],
    }
    hidden = {"runs"} if len(entries) == 1 else ()
    fields = "\n".join(
        f'<fieldset class="{name}"{" hidden" if name in hidden else ""}><legend>{name}</legend>'
        f"{''.join(inputs)}</fieldset>"
        for name, inputs in groups.items()
    )
    return f'<form id="controls">\n{fields}\n</form>\n'


def _plot(plot: Plot) -> str:
    name, title = _text(plot.name), f"{_text(plot.title)} <small>{_text(plot.subtitle)}</small>"
    area = (
        f'<div class="plot" data-name="{name}" role="img" '
        f'aria-label="{_text(plot.description or plot.title)}"></div>\n'
    )
    buttons = "".join(
        f'<button type="button" data-save="{kind}" data-of="{name}" '
        f'aria-label="Download {kind.upper()} of {_text(plot.title)}">{kind.upper()}</button>'
        for kind in ("svg", "csv")
    )
    style = f' style="--height:{plot.height}px"' if plot.height else ""
    is_open = "" if plot.size == "folded" else " open"
    return (
        f'<details class="chart {plot.size}" id="{name}"{style}{is_open}><summary>{title}</summary>'
        f'<div class="save">{buttons}</div>{area}</details>\n'
    )


def _section(section: PageSection, page: Page, controls: str) -> str:
    facts, table = section.facts, section.table
    if table is not None and table.header[0] == "run" and len(table.rows) == 1:
        facts, table = dict(zip(table.header[1:], table.rows[0][1:], strict=True)), None
    parts = [f"<section><h2>{_text(section.title)}</h2>", controls]
    parts += [f"<p>{_text(paragraph)}</p>" for paragraph in section.paragraphs]
    if section.plots:
        parts.append(f'<div class="charts">{"".join(map(_plot, section.plots))}</div>')
    if facts:
        items = "\n".join(
            f"<div><dt>{_text(name)}</dt><dd>{_text(value)}</dd></div>"
            for name, value in facts.items()
        )
        parts.append(f'<dl class="facts">\n{items}\n</dl>')
    if table is not None:
        parts.append(_table(table, page))
    for text in section.texts:
        block = f"<pre>{_text(text.text)}</pre>"
        if text.caption:
            state = " open" if text.is_open else ""
            block = f"<details{state}><summary>{_text(text.caption)}</summary>{block}</details>"
        parts.append(block)
    return "\n".join([*parts, "</section>"])


def _table(table: PageTable, page: Page) -> str:
    kinds = [_kind([row[column] for row in table.rows]) for column in range(len(table.header))]

    def cell(tag: str, kind: str, text: str, content: str, is_run: bool) -> str:
        # Run names are in the header or first column; other values may equal one.
        chip = _chip(page.colors[text]) if is_run and text in page.colors else ""
        return f"<{tag}{kind}>{chip}{content}</{tag.split()[0]}>"

    keys = [_text(text).replace("_", "_<wbr>") for text in table.header]  # may break there
    header = "".join(
        cell('th scope="col"', kind, text, f"<button type=button>{key}</button>", True)
        for text, key, kind in zip(table.header, keys, kinds, strict=True)
    )
    rows = []
    for row in table.rows:
        contents = list(map(_text, row))
        if row[0] in page.links:
            contents[0] = f'<a href="{_text(page.links[row[0]])}">{contents[0]}</a>'
        cells = zip(kinds, row, contents, strict=True)
        rows.append("".join(cell("td", *each, not i) for i, each in enumerate(cells)))
    body = "</tr>\n<tr>".join(rows)
    wider = ' class="wider"' if _printed_width(table, kinds) > _PAPER else ""
    search = '<input type="search" placeholder="Filter rows" aria-label="Filter rows">'
    return (
        f'{search if len(rows) > _FILTERED else ""}<div class="table" tabindex="0" role="region" '
        f'aria-label="Table with {_text(", ".join(table.header[:3]))}"><table{wider}>'
        f"<thead><tr>{header}</tr></thead>\n<tbody>\n<tr>{body}</tr>\n</tbody></table></div>"
    )


def _printed_width(table: PageTable, kinds: Sequence[str]) -> int:
    """Returns the least width in pixels with whole words, roughly."""
    header = [text.replace("_", "_ ") for text in table.header]
    columns = zip(kinds, header, *table.rows, strict=True)
    wholes = ([] if "long" in kind else " ".join(texts).split() for kind, *texts in columns)
    return sum(8 + 5 * max(map(len, words), default=0) for words in wholes)


def _chip(color: int) -> str:
    style = _BORDERS[dash_of(color)]
    return f'<span class="chip" style="border-top:4px {style} {color_of(color)}"></span>'


def _kind(cells: Sequence[str]) -> str:
    """Returns the class of a column's cells by their alignment."""
    filled = [text for text in cells if text]
    if filled and all(text.lstrip("+-")[:1].isdigit() or text == ABSENT for text in filled):
        return ' class="number"'
    return ' class="long"' if any(len(text) > _LONG for text in filled) else ""


def _text(text: str) -> str:
    return html.escape(text, quote=True)


def _own(name: str) -> str:
    return resources.files("MaxText.reports").joinpath(name).read_text(encoding="utf-8")


def _hash(script: str) -> str:
    """Returns a script's hash for the content security policy."""
    # Browsers normalize line ends to line feeds before hashing.
    plain = script.replace("\r\n", "\n").replace("\r", "\n")
    return f"'sha256-{base64.b64encode(hashlib.sha256(plain.encode()).digest()).decode()}'"
