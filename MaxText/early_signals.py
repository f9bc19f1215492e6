"""Signals during imports: Ctrl-C and SIGTERM exit without traceback.

Imports little: what comes before it is not covered.
"""

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Sequence
from types import FrameType

from MaxText.exit_codes import INTERRUPTED, PREEMPTED

_CODES = {signal.SIGINT: INTERRUPTED, signal.SIGTERM: PREEMPTED}


def install(importer: str, *, also_sigterm: bool = False) -> None:
    """Takes over Ctrl-C until `leave_to_python` or another handler.

    Only if the module `importer` was started; `also_sigterm` exits with a preemption's code.
    """
    if not is_program(importer):
        return
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)
    if also_sigterm and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _end)
    release()  # what process_start.reexec_with_malloc_tuning held back


def hold_back() -> None:
    """Keeps both signals waiting until `install` is called, also over an exec."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _CODES)


def release() -> None:
    """Ends `hold_back`."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _CODES)


def leave_to_python() -> None:
    """From here on Ctrl-C is a KeyboardInterrupt."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextlib.contextmanager
def handled(numbers: Sequence[int], handler: Callable[[int, FrameType | None], None]):
    """Installs a signal handler in a block, unless ignored (nohup)."""
    before = {
        number: signal.signal(number, handler)
        for number in numbers
        if signal.getsignal(number) is not signal.SIG_IGN
    }
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def is_program(importer: str) -> bool:
    """Returns whether the module of this __name__ was started, not imported."""
    command = f"maxtext-{importer.rpartition('.')[2].replace('_', '-')}"
    return importer == "__main__" or os.path.basename(sys.argv[0]) == command


def _end(number: int, _frame: FrameType | None) -> None:
    os._exit(_CODES[signal.Signals(number)])
