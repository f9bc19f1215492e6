"""Renders report.html, a single self-contained file."""

import base64
import dataclasses
import functools
import hashlib
import html
from collections.abc import Mapping, Sequence
from importlib import resources

from MaxText.reports.chart import Bars
from MaxText.reports.formatting import ABSENT

_LONG = 44  # minimum length of table cells that wrap


@dataclasses.dataclass(frozen=True)
class Table:
    header: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclasses.dataclass(frozen=True)
class Verbatim:
    """Preformatted text, folded under `caption` if there is one."""

    text: str
    caption: str = ""
    is_open: bool = True


@dataclasses.dataclass(frozen=True)
class Section:
    """A section of the page: plain text, never interpreted as HTML."""

    title: str
    paragraphs: Sequence[str] = ()
    table: Table | None = None
    texts: Sequence[Verbatim] = ()


@dataclasses.dataclass(frozen=True)
class Page:
    """Contents of the page, from top to bottom.

    Attributes:
      made: How and when it was generated.
      before_runs: Sections of the caller.
      charts_json: Input of page.js; empty if there is nothing to draw.
      goodput: The numbers of `bars`.
      colors: Color of each run's or group's label in tables.
      refresh: Seconds until the page reloads; 0 for never.
    """

    title: str
    made: str
    warnings: Sequence[str]
    overview: Table
    before_runs: Sequence[Section]
    charts_json: str
    bars: Bars
    goodput: Table
    sections: Sequence[Section]
    colors: Mapping[str, str]
    refresh: int = 0


def render(page: Page) -> str:
    """Returns the page as HTML."""
    style, program = _own("page.css"), _own("page.js")
    library = _plotly()
    # Only these scripts may run and nothing may be loaded, whatever a sample contains.
    policy = (
        f"default-src 'none'; script-src {_hash(library)} {_hash(program)}; "
        "style-src 'unsafe-inline'; img-src data: blob:"
    )
    refresh = f'<meta http-equiv="refresh" content="{page.refresh}">\n' if page.refresh else ""
    charts = _charts(page.charts_json, library, program) if page.charts_json else _NO_CHARTS
    body = "\n".join(
        [
            f"<header><h1>{_text(page.title)}</h1></header>",
            *(f'<p class="warning" role="alert">{_text(words)}</p>' for words in page.warnings),
            *(_section(section, page.colors) for section in page.before_runs),
            _overview(page.overview, page.colors),
            charts,
            _goodput(page),
            *(_section(section, page.colors) for section in page.sections),
            f"<footer>{_text(page.made)}</footer>",
        ]
    )
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n{refresh}'
        f"<title>{_text(page.title)}</title>\n<style>\n{style}</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


_NO_CHARTS = "<section><h2>Curves</h2><p>No step is recorded yet.</p></section>"


def _charts(charts_json: str, library: str, program: str) -> str:
    return (
        '<section id="curves"><h2>Curves</h2>\n'
        "<noscript><p>The curves need JavaScript. The PNG files beside this page show them "
        "without it.</p></noscript>\n"
        '<div id="controls"></div>\n<div id="charts"></div>\n'
        '<p class="hint">Drag to zoom in, double-click to reset. Click a name to hide its '
        "curve.</p>\n"
        f'<script type="application/json" id="data">{charts_json}</script>\n'
        f"<script>{library}</script>\n<script>{program}</script>\n</section>"
    )


def _overview(table: Table, colors: Mapping[str, str]) -> str:
    if len(table.rows) > 1:
        return f"<section><h2>Runs</h2>\n{_table(table, colors)}</section>"
    (row,) = table.rows
    facts = "\n".join(
        f"<div><dt>{_text(name)}</dt><dd>{_text(value)}</dd></div>"
        for name, value in list(zip(table.header, row, strict=True))[1:]
    )
    return f'<section><dl class="facts">\n{facts}\n</dl></section>'


def _goodput(page: Page) -> str:
    bars = page.bars
    keys = [
        f'<li><span class="chip" style="background:{bars.colors[part]}"></span>{_text(part)}</li>'
        for part in bars.parts
    ]
    rows = []
    for index, label in enumerate(bars.labels):
        pieces = "".join(
            f'<span style="width:{100 * shares[index]:.3f}%;background:{bars.colors[part]}" '
            f'title="{_text(part)}: {100 * shares[index]:.1f} %"></span>'
            for part, shares in bars.parts.items()
            if shares[index] > 0
        )
        name = f'<div class="bar-label">{_text(label)}</div>' if len(bars.labels) > 1 else ""
        rows.append(f'{name}<div class="bar">{pieces}</div>')
    return (
        f"<section><h2>{_text(bars.title)}</h2>\n"
        f'<ul class="keys">{"".join(keys)}</ul>\n<div class="bars">{"".join(rows)}</div>\n'
        f"{_table(page.goodput, page.colors)}</section>"
    )


def _section(section: Section, colors: Mapping[str, str]) -> str:
    parts = [f"<section><h2>{_text(section.title)}</h2>"]
    parts += [f"<p>{_text(paragraph)}</p>" for paragraph in section.paragraphs]
    if section.table is not None:
        parts.append(_table(section.table, colors))
    for text in section.texts:
        block = f"<pre>{_text(text.text)}</pre>"
        if text.caption:
            state = " open" if text.is_open else ""
            block = f"<details{state}><summary>{_text(text.caption)}</summary>{block}</details>"
        parts.append(block)
    return "\n".join([*parts, "</section>"])


def _table(table: Table, colors: Mapping[str, str]) -> str:
    kinds = [_kind([row[column] for row in table.rows]) for column in range(len(table.header))]

    def line(cells: Sequence[str], tag: str) -> str:
        parts = []
        for column, (text, kind) in enumerate(zip(cells, kinds, strict=True)):
            chip = ""
            # Run names are in the header or first column; other values may equal one.
            if text in colors and (tag == "th" or column == 0):
                chip = f'<span class="chip" style="background:{colors[text]}"></span>'
            parts.append(f"<{tag}{kind}>{chip}{_text(text)}</{tag}>")
        return f"<tr>{''.join(parts)}</tr>"

    header = line(table.header, "th")
    rows = "\n".join(line(row, "td") for row in table.rows)
    return (
        f'<div class="table" tabindex="0"><table><thead>{header}</thead>\n'
        f"<tbody>\n{rows}\n</tbody></table></div>"
    )


def _kind(cells: Sequence[str]) -> str:
    """Returns the class of a column's cells: numbers align right, long texts wrap."""
    filled = [text for text in cells if text]
    if filled and all(text.lstrip("+-")[:1].isdigit() or text == ABSENT for text in filled):
        return ' class="number"'
    return ' class="long"' if any(len(text) > _LONG for text in filled) else ""


def _text(text: str) -> str:
    return html.escape(text, quote=True)


def _own(name: str) -> str:
    return resources.files("MaxText.reports").joinpath(name).read_text(encoding="utf-8")


@functools.cache
def _plotly() -> str:
    from plotly.offline import get_plotlyjs

    return get_plotlyjs()


def _hash(script: str) -> str:
    """Returns a script's hash for the content security policy."""
    # Browsers normalize line ends to line feeds before hashing.
    plain = script.replace("\r\n", "\n").replace("\r", "\n")
    return f"'sha256-{base64.b64encode(hashlib.sha256(plain.encode()).digest()).decode()}'"
