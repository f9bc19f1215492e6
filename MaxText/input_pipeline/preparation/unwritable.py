"""What is said where a folder of results cannot be written: `cannot_write`. Imports no jax."""

import errno
import os

from MaxText.errors import UserError

_FULL = (errno.ENOSPC, errno.EDQUOT)
_REFUSED = (errno.EACCES, errno.EPERM, errno.EROFS)


def cannot_write(place: object, error: OSError) -> UserError:
    """The error for a place that cannot be written, with the system's reason and what mends it.

    Args:
      place: the folder; the file that the error names is shown instead where it names one.
      error: of the system, or of a library that gives its words only.
    """
    if isinstance(error, BrokenPipeError):
        raise error  # of the terminal's reader, such as `head`, and not of the place
    reason = error.strerror or str(error)
    if error.errno in _FULL or any(os.strerror(number) in reason for number in _FULL):
        remedy = "Make room or choose another dataset_path"
    elif error.errno in _REFUSED:
        remedy = "Get the right to write there or choose another dataset_path"
    else:
        remedy = "Mend that or choose another dataset_path"
    return UserError(
        f"{error.filename or place} cannot be written ({reason}). {remedy}, and run the same "
        "command again: what was finished is kept."
    )
