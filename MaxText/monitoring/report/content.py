"""What a page consists of besides charts: sections of paragraphs, tables and texts.

All of it is plain text: nothing in it is read as HTML.
"""

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows of text.

    Attributes:
      header: of each column.
      rows: cells; each row as long as the header.
    """

    header: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclasses.dataclass(frozen=True)
class Verbatim:
    """A text whose spaces and lines are kept.

    Attributes:
      text: what is shown.
      caption: above it; a click on it folds the text away. Without one it is always shown.
      is_open: whether it is unfolded at first.
    """

    text: str
    caption: str = ""
    is_open: bool = True


@dataclasses.dataclass(frozen=True)
class Section:
    """A part of the page under a heading of its own.

    Attributes:
      title: the heading.
      paragraphs: shown first.
      table: shown after them.
      texts: shown last.
    """

    title: str
    paragraphs: Sequence[str] = ()
    table: Table | None = None
    texts: Sequence[Verbatim] = ()
