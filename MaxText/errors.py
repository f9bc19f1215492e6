"""Exceptions with a message instead of a traceback."""


class UserError(ValueError):
    """A user error: a bad key, a missing file, unusable data. Exit code 2.

    Says what is wrong, where it was set, and what to do.
    """

    exit_code = 2


def first_line(error: BaseException, default: str = "") -> str:
    """Returns the first line of an error's message, or its type without one."""
    return (str(error).strip() or default or type(error).__name__).splitlines()[0]


class TrainingDivergedError(Exception):
    """Training diverged, and the configuration has no remedy. Exit code 1."""


class WaitCancelledError(Exception):
    """Raised in a blocking wait when shutdown was requested."""
