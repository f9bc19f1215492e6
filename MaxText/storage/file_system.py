"""fsspec's file system of gs://, as etils.epath and the data pipeline ask for it."""

import logging
import os
import re
import urllib.parse
from typing import Any

from gcsfs.core import GCSFileSystem  # pyright: ignore[reportMissingImports]

from MaxText.storage.bucket_errors import BucketFailure
from MaxText.storage.paths import COMMIT_MARK

# Of HTTP: the others between 400 and 499 are mistakes of who asks.
_TIMEOUT, _TOO_MANY = 408, 429
# What gcsfs says for 403, and looks for in what was raised.
_FORBIDDEN = "Forbidden"
# Bucket and name in an address of the JSON API.
_ADDRESS = re.compile(r"/b/([^/]+)/o(?:/|\?name=)([^?&]+)")

if "GCSFS_DEBUG" not in os.environ:
    # It logs a traceback for each request that it gives up; whoever asked tells of it.
    logging.getLogger("gcsfs").setLevel(logging.CRITICAL)


class BucketFileSystem(GCSFileSystem):
    """gcsfs, which tries a request again for half a minute; what it raises then is an OSError.

    Listings are not kept: other processes of the run, TensorStore and other machines write to the
    same folders. And a bucket that does not answer is never taken for one without a file: a run
    would begin anew where its checkpoints could not be listed for a moment.

    gcsfs's own choice, a class for hierarchical buckets as well, asks each bucket for its kind by
    gRPC, for minutes where that does not answer.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        """As gcsfs takes them."""
        kwargs.setdefault("use_listings_cache", False)
        super().__init__(*args, **kwargs)

    async def _expand_path(
        self, path: Any, recursive: bool = False, maxdepth: int | None = None, **_: Any
    ) -> list[str]:
        # Names are taken to the letter: to delete `run?` must not delete run1 and run2.
        paths = [path] if isinstance(path, str) else path
        return await super()._expand_path(paths, recursive, maxdepth, assume_literal=True)

    async def _rm(self, path: Any, recursive: bool = False, **options: Any) -> Any:
        if recursive and isinstance(path, str):
            # Objects go one by one, and half a checkpoint must not count as whole meanwhile.
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
            # 403 of gcsfs, and the lost connections of requests.
            raise _failure(path, args, error, str(error).startswith(_FORBIDDEN)) from error
        except Exception as error:
            # gcsfs, aiohttp and google.auth raise errors that have no base in common.
            status = getattr(error, "code", None) or getattr(error, "status", None)
            refused = isinstance(error, ValueError) or (
                isinstance(status, int)
                and 400 <= status < 500
                and status not in (_TIMEOUT, _TOO_MANY)
            )
            refused |= type(error).__name__ == "DefaultCredentialsError"
            raise _failure(path, args, error, refused) from error


def _failure(path: str, args: tuple[Any, ...], error: Exception, refused: bool) -> BucketFailure:
    place = _ADDRESS.search(path)
    named = "/".join(place.groups() if place else map(str, args)) or path
    named = f"gs://{urllib.parse.unquote(named)}"
    reason = str(error) or type(error).__name__
    if reason.startswith(_FORBIDDEN):
        # An address, then in a line of its own what the service says.
        said = reason.partition("\n")[2].strip() or "403"
        return BucketFailure(f"{_FORBIDDEN}: {named} ({said})", may_pass=False)
    how = "refuses a request" if refused else "does not answer as it should"
    return BucketFailure(
        f"the bucket of {named} {how} ({' '.join(reason.split())})", may_pass=not refused
    )
