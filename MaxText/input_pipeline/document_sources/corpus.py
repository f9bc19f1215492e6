"""Text to prepare: documents, and the units of work that they are read in."""

import dataclasses
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple, Protocol

from MaxText.errors import UserError


class Document(NamedTuple):
    """One text.

    Attributes:
      text: with at least one character that is no white space.
      file: name of the file it comes from, as inspect_data.py shows it (no folders of a machine).
      row: its number in that file from 0; documents that are left out count too.
    """

    text: str
    file: str
    row: int


class Skipped(Counter[str]):
    """Documents left out, by reason; bad rows and files are described, too.

    Attributes:
      limit: bad ones that are left out; one more is an error.
      bad: what is wrong with each, in order.
    """

    def __init__(self, limit: int = 0):
        super().__init__()
        self.limit = limit
        self.bad: list[str] = []

    def leave_out(self, what: str, error: UserError) -> None:
        """Counts a bad row or file.

        Args:
          what: the reason that is counted.
          error: what is wrong with it.

        Raises:
          UserError: there are more than the limit.
        """
        if len(self.bad) >= self.limit:
            raise too_many(self.limit, self.bad[0]) from error
        self[what] += 1
        self.bad.append(str(error))


def too_many(limit: int, first: str) -> UserError:
    """The error for more bad rows and files than may be left out."""
    return UserError(
        f"more than max_bad_records={limit} rows or files cannot be read. The first one: {first}"
    )


class Unit(Protocol):
    """A part of a corpus that is read on its own: consecutive files, or a part of one file.

    Units depend on names and sizes of files only, never on how many processes share the work, and
    can be pickled. Their documents in order are the documents of the corpus.
    """

    @property
    def max_bad_records(self) -> int:
        """Bad rows and files that are left out."""
        ...

    @property
    def num_bytes(self) -> int:
        """Bytes on disk that are read, for progress."""
        ...

    def documents(self, skipped: Counter[str]) -> Iterator[Document]:
        """Reads the unit's documents one at a time; counts what is left out by reason.

        Up to `max_bad_records` files that cannot be read or decoded from the beginning, and rows
        that lack the text field or are malformed, are left out; of a file of rows one must be
        sound.

        Args:
          skipped: a Skipped also gets what is wrong with them.

        Raises:
          UserError: there are more, or a file breaks off.
        """
        ...


@dataclasses.dataclass(frozen=True)
class Corpus:
    """All text of `prepare_source`.

    Attributes:
      description: in words, without places on this machine.
      num_files: files read.
      units: in order.
      splits: for each unit the name of the split that the source itself puts it in ("train",
        "validation" or "test"); empty where the source has no splits.
    """

    description: str
    num_files: int
    units: tuple[Unit, ...]
    splits: tuple[str, ...] = ()
