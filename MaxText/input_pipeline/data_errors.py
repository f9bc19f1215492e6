"""What cannot be read: a record, or a file."""

from MaxText.errors import UserError


class UnreadableFile(UserError):
    """A file that cannot be read now: it is missing, not permitted, or its storage fails.

    Attributes:
      path: the file.
    """

    def __init__(self, message: str, path: str = ""):
        super().__init__(message)
        self.path = path


class BadRecord(UserError):
    """One record is damaged: the message names file, place and reason.

    With on_bad_record=skip it is left out; otherwise it ends the run as any UserError does.

    Attributes:
      path: the file.
      offset: place of the record in the file, counted from 0.
      reason: what is wrong with it.
      unit: what `offset` counts: byte, record or row.
      is_last: whether all records of the file from here on are lost.
    """

    def __init__(self, path: str, offset: int, reason: str, unit: str = "byte"):
        super().__init__(f"{path} at {unit} {offset}: {reason}")
        self.path, self.offset, self.reason, self.unit = path, offset, reason, unit
        self.is_last = False

    def __reduce__(self):
        return type(self), (self.path, self.offset, self.reason, self.unit)
