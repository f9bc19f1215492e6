"""The gs:// file system of etils.epath and of fsspec."""

import errno
import logging
import os
import re
import urllib.parse
from typing import Any

from gcsfs.core import GCSFileSystem  # pyright: ignore[reportMissingImports]

from MaxText.storage.errors import ObjectStoreError, is_client_error
from MaxText.storage.paths import COMMIT_MARK

_FORBIDDEN = "Forbidden"  # gcsfs's message for 403, which it also looks for in exceptions
# Bucket and object name in a URL of the JSON API.
_ADDRESS = re.compile(r"/b/([^/]+)/o(?:/|\?name=)([^?&]+)")

if "GCSFS_DEBUG" not in os.environ:
    # It logs a traceback for each request it gives up; the caller reports the error anyway.
    logging.getLogger("gcsfs").setLevel(logging.CRITICAL)


class RetryingGCSFileSystem(GCSFileSystem):
    """gcsfs with retries for half a minute, then an OSError.

    Listings are not cached, because other processes, TensorStore and other machines write to the
    same folders. An outage is never taken for a missing file: a run whose checkpoints cannot be
    listed would start from scratch. gcsfs's default class also supports hierarchical buckets, but
    asks each bucket for its type over gRPC, for minutes if that does not answer.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        kwargs.setdefault("use_listings_cache", False)
        super().__init__(*args, **kwargs)

    async def _expand_path(
        self, path: str | list[str], recursive: bool = False, maxdepth: int | None = None, **_: Any
    ) -> list[str]:
        # Takes names literally: deleting `run?` must not delete run1 and run2.
        paths = [path] if isinstance(path, str) else path
        return await super()._expand_path(paths, recursive, maxdepth, assume_literal=True)

    async def _rm(self, path: str | list[str], recursive: bool = False, **options: Any) -> Any:
        if recursive and isinstance(path, str):
            # Objects are deleted one by one; half a checkpoint must not count as complete
            # meanwhile.
            mark = f"{path.rstrip('/')}/{COMMIT_MARK}"
            if await self._isfile(mark):
                await super()._rm(mark)
        return await super()._rm(path, recursive=recursive, **options)

    async def _isdir(self, path: str) -> bool:
        return await self._has_type(path, "directory")

    async def _isfile(self, path: str) -> bool:
        return await self._has_type(path, "file")

    async def _has_type(self, path: str, kind: str) -> bool:
        try:
            info: Any = await self._info(path)
            return info["type"] == kind
        except FileNotFoundError:
            return False

    async def _call(self, method: str, path: str, *args: Any, **kwargs: Any) -> Any:
        try:
            return await super()._call(method, path, *args, **kwargs)
        except OSError as error:
            if error.errno is not None or isinstance(error, FileNotFoundError | FileExistsError):
                raise
            # gcsfs's 403, and lost connections of requests
            raise _failure(path, args, error, str(error).startswith(_FORBIDDEN)) from error
        except Exception as error:
            # gcsfs, aiohttp and google.auth errors have no common base class.
            refused = isinstance(error, ValueError) or is_client_error(error)
            raise _failure(path, args, error, refused) from error


def _failure(path: str, args: tuple[Any, ...], error: Exception, refused: bool) -> ObjectStoreError:
    match = _ADDRESS.search(path)
    object_name = "/".join(match.groups() if match else map(str, args)) or path
    object_name = f"gs://{urllib.parse.unquote(object_name)}"
    reason = str(error) or type(error).__name__
    if reason.startswith(_FORBIDDEN):
        # The URL, followed on its own line by the service's message.
        service_message = reason.partition("\n")[2].strip() or "403"
        return ObjectStoreError(errno.EINVAL, f"{_FORBIDDEN}: {object_name} ({service_message})")
    behavior = "rejected a request" if refused else "does not respond correctly"
    return ObjectStoreError(
        errno.EINVAL if refused else errno.EIO,
        f"the bucket of {object_name} {behavior} ({' '.join(reason.split())})",
    )
