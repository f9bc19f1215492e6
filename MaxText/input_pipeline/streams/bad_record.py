"""A record that cannot be read."""

from MaxText.errors import UserError


class BadRecord(UserError):
    """One record is damaged or gone: the message names file, place and reason.

    With on_bad_record=skip it costs its row; otherwise it ends the run as any UserError does.

    Attributes:
      path: the file.
      offset: place of the record in the file, counted from 0.
      reason: what is wrong with it.
      unit: what `offset` counts: byte, record or row.
    """

    def __init__(self, path: str, offset: int, reason: str, unit: str = "byte"):
        super().__init__(f"{path} at {unit} {offset}: {reason}")
        self.path, self.offset, self.reason, self.unit = path, offset, reason, unit

    def __reduce__(self):
        return type(self), (self.path, self.offset, self.reason, self.unit)
