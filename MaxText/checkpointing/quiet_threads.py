"""Suppression of duplicate errors from threads of Orbax and TensorStore."""

import logging
import sys


def install() -> None:
    """Silences errors printed by those threads that the main thread gets as well.

    Orbax logs the traceback of each of its threads and raises the error again where the save is
    waited for. It then closes its event loop, of which TensorStore's callbacks complain, and drops
    the tasks of the other arrays, whose errors asyncio logs when they are collected.
    """
    for name in ("absl", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    if not isinstance(sys.unraisablehook, _Hook):
        sys.unraisablehook = _Hook(sys.unraisablehook)


class _Hook:
    """sys.unraisablehook for errors that no code can catch."""

    def __init__(self, before):
        self._before = before

    def __call__(self, unraisable) -> None:
        error = unraisable.exc_value
        if not (isinstance(error, RuntimeError) and "Event loop is closed" in str(error)):
            self._before(unraisable)
