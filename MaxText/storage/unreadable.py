"""Errors for unreadable files and damaged records."""

from MaxText.errors import UserError


class UnreadableFile(UserError):
    """A file that cannot be read now: missing, not permitted, or on failing storage."""

    def __init__(self, message: str, path: str = ""):
        super().__init__(message)
        self.path = path


class BadRecord(UserError):
    """A damaged record: the message names file, position and reason.

    on_bad_record=skip skips it; otherwise it ends the run as any UserError does.

    Attributes:
      offset: Position of the record in the file, from 0, in `unit`s (byte, record or row).
      is_last: All records of the file from here on are lost.
    """

    def __init__(self, path: str, offset: int, reason: str, unit: str = "byte"):
        super().__init__(f"{path} at {unit} {offset}: {reason}")
        self.path, self.offset, self.reason, self.unit = path, offset, reason, unit
        self.is_last = False

    def __reduce__(self):
        return type(self), (self.path, self.offset, self.reason, self.unit)
