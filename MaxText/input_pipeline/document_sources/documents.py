"""Documents of a corpus, and skipped ones."""

from collections import Counter
from typing import NamedTuple

from MaxText.errors import UserError


class Document(NamedTuple):
    """A text.

    Attributes:
      text: With at least one character that is not white space.
      file: Name of its file, without folders of a machine.
      row: Its number in that file from 0; skipped documents count.
    """

    text: str
    file: str
    row: int


class Skipped(Counter[str]):
    """Skipped documents by reason, and descriptions of malformed ones.

    Attributes:
      limit: Maximum number of malformed ones.
      bad: Their errors, in order.
    """

    def __init__(self, limit: int = 0):
        super().__init__()
        self.limit = limit
        self.bad: list[str] = []

    def leave_out(self, what: str, error: UserError) -> None:
        """Counts a malformed row or unreadable file under the reason `what`.

        Raises:
          UserError: There are more than the limit.
        """
        if len(self.bad) >= self.limit:
            raise too_many_error(self.limit, self.bad[0]) from error
        self[what] += 1
        self.bad.append(str(error))


def too_many_error(limit: int, first: str) -> UserError:
    """Returns the error for more malformed rows and unreadable files than may be skipped."""
    return UserError(
        f"more than max_bad_records={limit} rows or files cannot be read. The first one: {first}"
    )
