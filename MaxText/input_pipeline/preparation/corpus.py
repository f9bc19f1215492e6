"""Text to prepare: documents, and the units of work that they are read in."""

import dataclasses
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple, Protocol


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


class Unit(Protocol):
    """A part of a corpus that is read on its own: consecutive files, or a part of one file.

    Units depend on names and sizes of files only, never on how many processes share the work, and
    can be pickled. Their documents in order are the documents of the corpus.
    """

    @property
    def num_bytes(self) -> int:
        """Bytes on disk that are read, for progress."""
        ...

    def documents(self, skipped: Counter[str]) -> Iterator[Document]:
        """Reads the unit's documents one at a time; counts what is left out by reason.

        Raises:
          UserError: a file cannot be read or decoded, or a row lacks the text field.
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
