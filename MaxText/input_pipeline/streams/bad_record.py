"""A record that cannot be read."""

from MaxText.errors import UserError


class BadRecord(UserError):
    """One record is damaged or gone: the message names file, offset and reason.

    With on_bad_record=skip it costs its row; otherwise it ends the run as any UserError does.

    Attributes:
      path: the file.
      offset: byte offset of the record in the file; for ArrayRecord the number of the record.
      reason: what is wrong with it.
    """

    def __init__(self, path: str, offset: int, reason: str):
        super().__init__(f"{path} at offset {offset}: {reason}")
        self.path, self.offset, self.reason = path, offset, reason

    def __reduce__(self):
        return type(self), (self.path, self.offset, self.reason)
