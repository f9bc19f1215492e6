"""Exceptions with a message instead of a traceback."""


class UserError(ValueError):
    """A user error: a bad key, a missing file, unusable data. Exit code 2.

    Says what is wrong, where it was set, and what to do.
    """

    exit_code = 2


class Diverged(Exception):
    """Training diverged, and the configuration has no remedy. Exit code 1."""


class StopWaiting(Exception):
    """Raised in a blocking wait when shutdown was requested."""
