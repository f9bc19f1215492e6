"""Errors of files and object stores, and whether a retry may help.

Files are read and written through the operating system, fsspec and gcsfs, and TensorStore (by
Orbax). Each reports failures in its own way; these functions classify them.
"""

import errno
import re
from collections.abc import Iterator

from MaxText.errors import UserError

# TensorStore's messages when its own retries (some minutes) failed: codes of absl::Status, which
# also stand for HTTP status codes.
_FAILED = re.compile(
    r"\b(UNAVAILABLE|DEADLINE_EXCEEDED|RESOURCE_EXHAUSTED|ABORTED)\b"
    r"|http_response_code='(408|429|5|40[13]')"
)
_PERMISSION_DENIED = re.compile(r"http_response_code='40[13]'")
# TensorStore's message about a local file.
_OS_ERROR = re.compile(r"\[OS error (\d+)")
# These errors say that the file is missing or of another type: damage, not a storage failure.
_DAMAGE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR)

# Answers of storage that works: missing, not permitted, or of another type.
_ANSWERS = (
    FileNotFoundError,
    NotADirectoryError,
    IsADirectoryError,
    PermissionError,
    FileExistsError,
)
_PERMANENT = {
    errno.EDQUOT,
    errno.EFBIG,
    errno.EINVAL,
    errno.ELOOP,
    errno.ENAMETOOLONG,
    errno.ENOSPC,
    errno.ENOSYS,
    errno.EOPNOTSUPP,
    errno.EROFS,
}


class ObjectStoreError(OSError, UserError):
    """A request to a bucket failed after retries.

    `errno` is EIO for an outage and EINVAL for a refused request; `strerror` is the message.
    """

    def __str__(self) -> str:
        return str(self.strerror)


class FileReadError(UserError):
    """A file cannot be read: it is missing, not permitted, truncated, or storage failed."""


class BadRecordError(UserError):
    """A damaged record of a dataset, fatal unless bad_records.action=skip."""

    def __init__(self, path: str, offset: int, reason: str, unit: str = "byte"):
        """Describes a damaged record.

        Args:
          path: The file.
          offset: Where the record begins, in `unit`s from the start of the file.
          reason: What is wrong with it.
          unit: What `offset` counts: "byte", "record" or "row".
        """
        super().__init__(f"{path} at {unit} {offset}: {reason}")
        self.path = path
        self.offset = offset
        self.reason = reason
        self.unit = unit

    def __reduce__(self):
        return type(self), (self.path, self.offset, self.reason, self.unit)


def causes(error: BaseException | None, *, with_context: bool = False) -> Iterator[BaseException]:
    """Yields an error and its causes, the innermost last.

    Args:
      error: The exception.
      with_context: Whether to follow implicit contexts (`__context__`) where no cause is given.
    """
    while error is not None:
        yield error
        error = error.__cause__ or (error.__context__ if with_context else None)


def is_permission_denied(error: BaseException) -> bool:
    """Returns whether an error or one of its causes is a denied access to a bucket."""
    for cause in causes(error):
        if isinstance(cause, ObjectStoreError):
            return cause.errno == errno.EINVAL
        if _is_from_tensorstore(cause, _PERMISSION_DENIED):
            return True
    return False


def is_storage_error(error: BaseException) -> bool:
    """Returns whether an error means that storage failed (EIO, EACCES, ...).

    A missing file, or a folder in its place, means damage and is not a failure of storage.
    """
    for cause in causes(error, with_context=True):
        if isinstance(cause, ObjectStoreError):
            return True
        if isinstance(cause, OSError) and cause.errno is not None:
            return cause.errno not in _DAMAGE
        os_error = _OS_ERROR.search(str(cause))
        if os_error is not None:
            return int(os_error[1]) not in _DAMAGE
    return any(_is_from_tensorstore(cause, _FAILED) for cause in causes(error))


def is_transient(error: BaseException, remote: bool) -> bool:
    """Returns whether a retry may help against an error or one of its causes.

    Args:
      error: The exception.
      remote: Whether the storage is remote. Its clients raise OSErrors without errno, which on a
        local disk mean damaged contents.
    """
    for cause in causes(error):
        if _is_transient(cause, remote):
            return True
        if isinstance(cause, ObjectStoreError):  # its client has retried already
            return False
    return False


def is_client_error(error: Exception) -> bool:
    """Returns whether an error of a remote client blames the request, as HTTP 4xx does."""
    # gcsfs has `code`, aiohttp `status`; google.auth has neither if credentials are missing.
    status = getattr(error, "code", None) or getattr(error, "status", None)
    if isinstance(status, int) and 400 <= status < 500:
        return status not in (408, 429)  # timeout, too many requests
    return type(error).__name__ == "DefaultCredentialsError"


def _is_from_tensorstore(error: BaseException, pattern: re.Pattern[str]) -> bool:
    # TensorStore raises ValueError, and Orbax wraps it.
    return isinstance(error, ValueError | RuntimeError) and bool(pattern.search(str(error)))


def _is_transient(error: BaseException, remote: bool) -> bool:
    if isinstance(error, _ANSWERS):
        return False
    if isinstance(error, (ConnectionError, TimeoutError)):
        return True
    if isinstance(error, OSError):
        if error.errno is None:
            return remote and type(error) is OSError
        return error.errno not in _PERMANENT
    module = type(error).__module__.partition(".")[0]
    if not remote or not isinstance(error, Exception) or module in ("builtins", "MaxText"):
        return False
    return not is_client_error(error)
