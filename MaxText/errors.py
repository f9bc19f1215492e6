"""What ends a program without a traceback; anything else is a bug of ours."""


class UserError(ValueError):
    """A mistake that a user can mend: bad keys, missing files, unusable data. Exit code 2.

    Says what is wrong, where it was set, and what to do.
    """

    exit_code = 2


class Diverged(Exception):
    """Training has gone wrong and nothing is left that the configuration allows. Exit code 1."""


class StopWaiting(Exception):
    """What is waited for is not wanted any more: the program shall save and stop."""
