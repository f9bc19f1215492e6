"""Errors for unreadable files and damaged records."""

from MaxText.errors import UserError


class UnreadableFile(UserError):
    """A file that cannot be read now: missing, not permitted, or on failing storage."""

    def __init__(self, message: str, path: str = ""):
        super().__init__(message)
        self.path = path


class BadRecord(UserError):
    """A damaged record, skipped with on_bad_record=skip and otherwise fatal.

    `offset` counts `unit`s (byte, record or row) in the file; `is_last`: all later records are
    lost.
    """

    def __init__(self, path: str, offset: int, reason: str, unit: str = "byte"):
        super().__init__(f"{path} at {unit} {offset}: {reason}")
        self.path, self.offset, self.reason, self.unit = path, offset, reason, unit
        self.is_last = False

    def __reduce__(self):
        return type(self), (self.path, self.offset, self.reason, self.unit)
