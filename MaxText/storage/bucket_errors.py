"""What a bucket that fails raises: one error for all of the client's. Imports no jax."""

import errno
import re

from MaxText.errors import UserError

# What TensorStore says when its own tries, some minutes of them, have failed. The codes are those
# of absl::Status, into which it puts the answers of HTTP.
_OUTAGE = re.compile(
    r"\b(UNAVAILABLE|DEADLINE_EXCEEDED|RESOURCE_EXHAUSTED|ABORTED)\b"
    r"|http_response_code='(408|429|5)"
)
_REFUSAL = re.compile(r"http_response_code='40[13]'")
# What TensorStore says of a file on a disk.
_OS_ERROR = re.compile(r"\[OS error (\d+)")
# These say what a file is, or that there is none: proof that it is not what was written.
_OF_DAMAGE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR)


class BucketFailure(OSError, UserError):
    """A bucket does not answer, or answers with an error, after several tries.

    An OSError for all who write and read files, and a UserError for programs that end with it.

    Attributes:
      errno: EIO where it may be over later, EINVAL where the request is refused for good.
    """

    def __init__(self, message: str, may_pass: bool = True):
        super().__init__(errno.EIO if may_pass else errno.EINVAL, message)

    def __str__(self) -> str:
        return str(self.strerror)

    def __reduce__(self):
        return type(self), (self.strerror, self.errno == errno.EIO)


def is_outage(error: BaseException) -> bool:
    """Whether an error, or what caused it, says that a bucket fails now and may answer later."""
    return _says(error, _OUTAGE, errno.EIO)


def is_storage_error(error: BaseException) -> bool:
    """Whether an error says that storage fails (EIO, ESTALE, EACCES, EMFILE, ...).

    That says nothing about the files, unlike damage: a missing file or content that is malformed.
    """
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
    """Whether an error, or what caused it, says that a bucket does not let this user ask."""
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
