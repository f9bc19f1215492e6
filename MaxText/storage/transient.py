"""Classification of storage failures as transient or permanent."""

import errno

# Nothing is there, it may not be read, or something else is: the answer of storage that works.
_ANSWERS = (
    FileNotFoundError,
    NotADirectoryError,
    IsADirectoryError,
    PermissionError,
    FileExistsError,
)
_PERMANENT = {
    errno.EDQUOT, errno.EFBIG, errno.EINVAL, errno.ELOOP, errno.ENAMETOOLONG, errno.ENOSPC,
    errno.ENOSYS, errno.EOPNOTSUPP, errno.EROFS,
}  # fmt: skip
# Of HTTP: the others between 400 and 499 are mistakes of who asks.
_TIMEOUT, _TOO_MANY = 408, 429


def is_transient(error: BaseException, remote: bool) -> bool:
    """Returns whether a failure, or its cause, may be gone at the next try.

    Args:
      error: A UserError is judged by its cause.
      remote: The data may be behind a URL. Libraries there raise errors without a number, which on
        a local disk mean damaged contents.
    """
    cause: BaseException | None = error
    while cause is not None:
        if _is_transient(cause, remote):
            return True
        cause = cause.__cause__
    return False


def _is_transient(error: BaseException, remote: bool) -> bool:
    if isinstance(error, _ANSWERS):
        return False
    if isinstance(error, (ConnectionError, TimeoutError)):
        return True
    if isinstance(error, OSError) and (error.errno is not None or type(error) is not OSError):
        return error.errno is not None and error.errno not in _PERMANENT
    if isinstance(error, OSError):
        return remote
    module = type(error).__module__.partition(".")[0]
    if not remote or not isinstance(error, Exception) or module in ("builtins", "MaxText"):
        return False
    # gcsfs has `code`, aiohttp `status`; google.auth says where it was not told who we are.
    status = getattr(error, "code", None) or getattr(error, "status", None)
    if isinstance(status, int) and 400 <= status < 500:
        return status in (_TIMEOUT, _TOO_MANY)
    return type(error).__name__ != "DefaultCredentialsError"
