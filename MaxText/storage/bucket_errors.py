"""Failures of bucket storage, as one error class for all clients."""

import errno
import re

from MaxText.errors import UserError

# TensorStore's messages when its own retries (some minutes) failed: codes of absl::Status, which
# also stand for HTTP status codes.
_OUTAGE = re.compile(
    r"\b(UNAVAILABLE|DEADLINE_EXCEEDED|RESOURCE_EXHAUSTED|ABORTED)\b"
    r"|http_response_code='(408|429|5)"
)
_REFUSAL = re.compile(r"http_response_code='40[13]'")
# TensorStore's message about a local file.
_OS_ERROR = re.compile(r"\[OS error (\d+)")
# These errors say that the file is missing or of another type: damage, not a storage failure.
_OF_DAMAGE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR)


class BucketFailure(OSError, UserError):
    """A bucket that fails after retries: errno EIO if transient, EINVAL if refused for good.

    An OSError for file readers and writers, a UserError for programs that exit with it.
    """

    def __init__(self, message: str, may_pass: bool = True):
        super().__init__(errno.EIO if may_pass else errno.EINVAL, message)

    def __str__(self) -> str:
        return str(self.strerror)

    def __reduce__(self):
        return type(self), (self.strerror, self.errno == errno.EIO)


def is_outage(error: BaseException) -> bool:
    """Returns whether an error or its cause is a bucket outage that may be transient."""
    return _says(error, _OUTAGE, errno.EIO)


def is_storage_error(error: BaseException) -> bool:
    """Returns whether storage failed (EIO, EACCES, ...), unlike damaged or missing files."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, BucketFailure):
            return True
        if isinstance(cause, OSError) and cause.errno is not None:
            return cause.errno not in _OF_DAMAGE
        if found := _OS_ERROR.search(str(cause)):
            return int(found[1]) not in _OF_DAMAGE
        cause = cause.__cause__ or cause.__context__
    return is_outage(error) or is_refusal(error)


def is_refusal(error: BaseException) -> bool:
    """Returns whether an error or its cause is a bucket that denies access."""
    return _says(error, _REFUSAL, errno.EINVAL)


def _says(error: BaseException, words: re.Pattern[str], number: int) -> bool:
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, BucketFailure):
            return cause.errno == number
        # TensorStore raises ValueError, and Orbax wraps it.
        if isinstance(cause, ValueError | RuntimeError) and words.search(str(cause)):
            return True
        cause = cause.__cause__
    return False
