"""Documents of a corpus, and what is left out of it."""

from collections import Counter
from typing import NamedTuple

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
            raise too_many_error(self.limit, self.bad[0]) from error
        self[what] += 1
        self.bad.append(str(error))


def too_many_error(limit: int, first: str) -> UserError:
    """The error for more bad rows and files than may be left out."""
    return UserError(
        f"more than max_bad_records={limit} rows or files cannot be read. The first one: {first}"
    )
