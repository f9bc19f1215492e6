"""Errors of Orbax and TensorStore: classified, retried, and printed once."""

import contextlib
import errno
import functools
import inspect
import logging
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax

from MaxText.checkpointing.checkpoint_files import CheckpointCorruptedError, unreadable_now
from MaxText.errors import UserError, first_line
from MaxText.storage.errors import ObjectStoreError, causes, is_permission_denied, is_storage_error

_MAX_REASON_CHARS = 300
_RETRY_SECONDS = (1.0, 2.0, 4.0)
_LOOP_CLOSED = "Event loop is closed"

_T = TypeVar("_T")


@functools.cache
def silence_threads() -> None:
    """Silences background threads' errors, raised in the main thread as well.

    Orbax logs the traceback of each thread and raises the error again in the wait for the save. It
    then closes its event loop, so TensorStore's callbacks complain, and drops the tasks of the
    other arrays, whose errors asyncio logs when they are garbage-collected.
    """
    for name in ("absl", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    _filter_unraisable(lambda unraisable: _LOOP_CLOSED in str(unraisable.exc_value))


def _filter_unraisable(is_expected: Callable[[Any], bool]) -> Any:
    """Hides uncatchable errors; returns the previous sys.unraisablehook."""
    previous = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        if not is_expected(unraisable):
            previous(unraisable)

    sys.unraisablehook = hook
    return previous


def retry(read: Callable[[], _T]) -> _T:
    """Retries `read` while storage fails; raises at once if access is denied."""
    for seconds in _RETRY_SECONDS:
        try:
            return read()
        except ObjectStoreError as error:
            if error.errno != errno.EIO:
                raise
        time.sleep(seconds)
    return read()


@contextlib.contextmanager
def translate_errors() -> Iterator[None]:
    """Converts Orbax's errors to CheckpointCorruptedError or storage errors."""
    # When one array fails, Orbax closes its event loop and every array still in flight prints a
    # traceback, which would bury the message below.
    previous = _filter_unraisable(
        lambda x: inspect.iscoroutine(x.object) or str(x.exc_value) == _LOOP_CLOSED
    )
    try:
        yield
    except (CheckpointCorruptedError, UserError):
        raise
    except (MemoryError, jax.errors.JaxRuntimeError, ImportError):
        raise  # says nothing about the files
    except Exception as error:  # Orbax raises plain Exception, and others from damaged JSON
        time.sleep(0.3)  # for arrays in flight
        if is_storage_error(error):
            raise unreadable_now(
                _root_cause(error), is_transient=not is_permission_denied(error)
            ) from error
        raise CheckpointCorruptedError(_root_cause(error)) from error
    finally:
        sys.unraisablehook = previous


def _root_cause(error: BaseException) -> str:
    """Returns the first line of the root cause, without TensorStore settings."""
    *_, root = causes(error)
    return first_line(root)[:_MAX_REASON_CHARS]
