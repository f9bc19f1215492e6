"""Documents of a corpus, and counts of skipped ones."""

from collections import Counter
from typing import NamedTuple

from MaxText.errors import UserError


class Document(NamedTuple):
    """A text document that is not blank."""

    text: str
    file: str  # name without machine-specific folders
    row: int  # number in the file from 0, counting skipped documents


class Skipped(Counter[str]):
    """Skipped documents by reason, and errors of malformed ones in `bad`, at most `limit`."""

    def __init__(self, limit: int = 0):
        super().__init__()
        self.limit = limit
        self.bad: list[str] = []

    def leave_out(self, what: str, error: UserError) -> None:
        """Counts a malformed row or unreadable file; raises UserError beyond the limit."""
        if len(self.bad) >= self.limit:
            raise too_many_error(self.limit, self.bad[0]) from error
        self[what] += 1
        self.bad.append(str(error))


def too_many_error(limit: int, first: str) -> UserError:
    return UserError(
        f"more than max_bad_records={limit} rows or files cannot be read. The first one: {first}"
    )
