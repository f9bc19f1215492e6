"""Exceptions with a message instead of a traceback."""


class UserError(ValueError):
    """A user error: a bad key, a missing file, unusable data. Exit code 2.

    Says what is wrong, where it was set, and what to do.
    """

    exit_code = 2

    def __str__(self) -> str:
        return "\n".join(map(shorten, super().__str__().splitlines()))


# What a terminal shows of a line before it is noise; lists of all accepted values are shorter.
_MAX_LINE = 4_000


def shorten(line: str, max_length: int = _MAX_LINE) -> str:
    """Returns a line without its middle if it is longer than anybody would read."""
    if len(line) <= max_length:
        return line
    half = max_length // 4
    return f"{line[:half]} ... ({len(line):,} characters) ... {line[-half:]}"


def first_line(error: BaseException, default: str = "") -> str:
    """Returns the first line of an error's message, or its type without one."""
    return (str(error).strip() or default or type(error).__name__).splitlines()[0]


class TrainingDivergedError(Exception):
    """Training diverged, and the configuration has no remedy. Exit code 1."""


class WaitCancelledError(Exception):
    """Raised in a blocking wait when shutdown was requested."""
