"""Contents of a page besides charts: plain text, never read as HTML."""

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Table:
    header: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclasses.dataclass(frozen=True)
class Verbatim:
    """Preformatted text.

    Attributes:
      caption: A click on it folds the text. Without one it is always shown.
      is_open: Initially unfolded.
    """

    text: str
    caption: str = ""
    is_open: bool = True


@dataclasses.dataclass(frozen=True)
class Section:
    """A part of the page: title, paragraphs, table, texts."""

    title: str
    paragraphs: Sequence[str] = ()
    table: Table | None = None
    texts: Sequence[Verbatim] = ()
