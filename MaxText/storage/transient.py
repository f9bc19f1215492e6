"""Classification of storage failures as transient or permanent."""

import errno

# Answers of storage that works: missing, not permitted, or of another type.
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
# HTTP status codes; other 4xx codes are client errors.
_TIMEOUT, _TOO_MANY = 408, 429


def is_transient(error: BaseException, remote: bool) -> bool:
    """Returns whether a failure or one of its causes may be gone on retry.

    Remote clients raise OSErrors without errno, which on a local disk mean damaged contents.
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
    # gcsfs has `code`, aiohttp `status`; google.auth has neither if credentials are missing.
    status = getattr(error, "code", None) or getattr(error, "status", None)
    if isinstance(status, int) and 400 <= status < 500:
        return status in (_TIMEOUT, _TOO_MANY)
    return type(error).__name__ != "DefaultCredentialsError"
