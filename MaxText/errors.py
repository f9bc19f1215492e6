"""Errors that a program reports with one message instead of a traceback."""

import errno
import io
import os
import re
import traceback
from collections.abc import Iterator


class UserError(ValueError):
    """An error that the user can fix: a bad key, a missing file, unusable data. Exit code 2.

    Its message says what is wrong, where it was set, and what to do.
    """

    exit_code = 2

    def __str__(self) -> str:
        return "\n".join(map(shorten, super().__str__().splitlines()))


# What a terminal shows of a line before it is noise; lists of all accepted values are shorter.
_MAX_LINE = 4_000


def shorten(line: str, max_length: int = _MAX_LINE) -> str:
    """Returns a line, without its middle if it has more than `max_length` characters."""
    if len(line) <= max_length:
        return line
    half = max_length // 4
    return f"{line[:half]} ... ({len(line):,} characters) ... {line[-half:]}"


def first_line(error: BaseException, default: str = "") -> str:
    """Returns the first line of an error's message, or its type without one."""
    return (str(error).strip() or default or type(error).__name__).splitlines()[0]


def raising_line(error: BaseException, file: str = "") -> str:
    """Returns the innermost line that led to an error, as "parts.py:12".

    Args:
      error: One that was raised.
      file: Path of a source file, such as the user's. If it took part, the line is one of it.
    """
    frames = traceback.extract_tb(error.__traceback__)
    frames_of_file = [frame for frame in frames if frame.filename == file]
    frame = (frames_of_file or frames)[-1]
    return f"{os.path.basename(frame.filename)}:{frame.lineno}"


def storage_failure(error: BaseException) -> str | None:
    """Returns one line about the failed file operation behind an error; None for other errors.

    Also finds the operation behind a library's error, if that is its cause or if its message has
    the operating system's error number.
    """
    for cause in _chain(error):
        if isinstance(cause, _NOT_ABOUT_FILES) and cause.filename is None:
            return None
        if isinstance(cause, OSError) and cause.errno is not None:
            # What follows a missing file may be a bug; the missing file itself is no bug.
            if cause is not error and cause.errno in _ANSWERS:
                continue
            reason = cause.strerror or os.strerror(cause.errno)
            file = cause.filename or _innermost_path(cause)
            return f"{file}: {reason} (errno {cause.errno})"
        if _OS_ERROR.search(str(cause)):
            return first_line(cause)
    return None


def storage_error_line(failure: str) -> str:
    """Returns the message for users about what `storage_failure` returned."""
    remedy = "Free space or fix the folder"
    if _NO_RIGHT.search(failure):
        remedy = (
            "Ask the owner of the bucket for that right (the role roles/storage.objectUser has all "
            "that a run needs), or log in with an account that has it: gcloud auth "
            "application-default login"
        )
    return f"error: storage failed at {failure}. {remedy}, then run the same command again."


# What a bucket answers an account without a right, or without any account.
_NO_RIGHT = re.compile(r"forbidden: gs://|anonymous caller|default credentials", re.IGNORECASE)
# Error numbers in messages of TensorStore and of Rust libraries.
_OS_ERROR = re.compile(r"\[OS error \d+|\(os error \d+\)")
# OSErrors of sockets, pipes and processes.
_NOT_ABOUT_FILES = (ConnectionError, BrokenPipeError, ChildProcessError, ProcessLookupError)
# Answers of a file system that works.
_ANSWERS = (errno.ENOENT, errno.EEXIST, errno.ENOTDIR, errno.EISDIR)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _innermost_path(error: BaseException) -> str:
    """Returns the file of a failed write or fsync, whose error does not name it.

    It is the path, or the open file, in the local variables of the innermost frame that has one.
    """
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    for frame in reversed(frames):
        for value in list(frame.f_locals.values()):
            if isinstance(value, os.PathLike):
                return os.fspath(value)
            name = getattr(value, "name", None) if isinstance(value, io.IOBase) else None
            if isinstance(name, str):
                return name
    return "a file"


class TrainingDivergedError(Exception):
    """Training diverged, and the configuration has no remedy. Exit code 1."""


class WaitCancelledError(Exception):
    """Raised in a blocking wait when shutdown was requested."""
