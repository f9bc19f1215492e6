"""Page contents besides charts: plain text, never interpreted as HTML."""

import dataclasses
from collections.abc import Sequence


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
    """A section of the page."""

    title: str
    paragraphs: Sequence[str] = ()
    table: Table | None = None
    texts: Sequence[Verbatim] = ()
