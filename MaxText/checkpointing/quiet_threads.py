"""Suppresses duplicate errors from Orbax and TensorStore threads."""

import logging
import sys


def install() -> None:
    """Silences errors printed by background threads that the main thread also raises.

    Orbax logs the traceback of each thread and raises the error again in the wait for the save. It
    then closes its event loop, so TensorStore's callbacks complain, and drops the tasks of the
    other arrays, whose errors asyncio logs when they are garbage-collected.
    """
    for name in ("absl", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    if not isinstance(sys.unraisablehook, _Hook):
        sys.unraisablehook = _Hook(sys.unraisablehook)


class _Hook:
    """A sys.unraisablehook for errors that no code can catch."""

    def __init__(self, before):
        self._before = before

    def __call__(self, unraisable) -> None:
        error = unraisable.exc_value
        if not (isinstance(error, RuntimeError) and "Event loop is closed" in str(error)):
            self._before(unraisable)
