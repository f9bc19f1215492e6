"""Exit of one process of several, so that the others do not wait for it."""

import contextlib
import os
import re
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn

from MaxText import exit_codes
from MaxText.errors import UserError
from MaxText.runtime.watchdog import Watchdog

# What gloo, the coordination service and barriers say when another process is gone.
_PEER_LOST = re.compile(
    r"gloo|closed by peer|heartbeat|coordination (service|agent)|barrier|another task",
    re.IGNORECASE,
)
# What the same layers say without naming themselves. Storage says it, too, in errors of its own.
_PEER_SILENT = re.compile(r"UNAVAILABLE|DEADLINE_EXCEEDED|ABORTED|CANCELLED")

_count = 1
_leaves_threads = False


def begin(num_processes: int) -> None:
    """Notes that jax is connected; called by start_up.connect."""
    global _count
    _count = num_processes


def count() -> int:
    """Returns the processes of the run, 1 before they are connected and after `leave`."""
    return _count


def exit_now(code: int) -> NoReturn:
    """Ends this process without waiting for threads or other processes.

    The usual exit waits in jax's shutdown barrier, 5 minutes if another process never gets there.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def leave_behind() -> None:
    """Notes that a thread hangs in something that the usual exit would wait for; see `run`."""
    global _leaves_threads
    _leaves_threads = True


def run(main: Callable[[], int]) -> NoReturn:
    """Ends the process with the result of `main`; waits for no abandoned thread."""
    try:
        sys.exit(main())
    except BaseException as error:
        if not _leaves_threads:
            raise
        if not isinstance(error, SystemExit):
            traceback.print_exception(error)
        exit_now(_code_of(error))


def fail(error: BaseException, watchdog: Watchdog | None = None) -> None:
    """Ends this process of several after an exception; returns in a run of one process.

    Prints the message of a UserError, else the traceback. If another process is gone, prints where
    each process stands, after a wait in which the dead one's silence shows. Use before anything
    that may wait for others:

        except BaseException as error:
            processes.fail(error, watchdog)
            raise

    Exit codes: 2 for a UserError, 76 if another process is gone, 130 for Ctrl-C, that of a
    SystemExit, else 1.
    """
    if _count == 1:
        return
    lost = is_peer_lost(error)
    code = exit_codes.STUCK if lost else _code_of(error)
    if watchdog is not None and not isinstance(error, SystemExit):
        watchdog.fail(None if lost else error)
    if isinstance(error, UserError) and not lost:
        sys.stderr.write(f"error: {error}\n")
    elif isinstance(error, Exception):
        traceback.print_exception(error)
    sys.stderr.flush()
    if lost:
        table = watchdog.describe_all(wait=True) if watchdog is not None else ""
        sys.stderr.write(
            f"error: another process of the run is gone, so this one stops.\n{table}\n"
            "  What to do: look at the end of that one's output; the same command goes on from the "
            "newest checkpoint.\n"
        )
    exit_now(code)


def leave() -> None:
    """Waits for all processes, which then no longer wait for each other.

    Call it at the end of a run that went well, after the last collective work (the last checkpoint,
    the sample) and before what only one process does (trackers, curves, uploads). No effect in a
    run of one.
    """
    global _count
    if _count > 1:
        import jax

        jax.distributed.shutdown()
        _count = 1


def is_peer_lost(error: BaseException) -> bool:
    """Returns whether an error, or its cause, says that another process is gone."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        # gloo's come as ValueError, those of a device as JaxRuntimeError. An OSError is of storage.
        if type(current) is ValueError or isinstance(current, RuntimeError):
            text = str(current)
            if _PEER_LOST.search(text):
                return True
            if type(current).__name__ == "JaxRuntimeError" and _PEER_SILENT.search(text):
                return True
        current = current.__cause__ or current.__context__
    return False


def _code_of(error: BaseException) -> int:
    if isinstance(error, UserError):
        return error.exit_code
    if isinstance(error, KeyboardInterrupt):
        return exit_codes.INTERRUPTED
    if isinstance(error, SystemExit):
        if error.code is None:
            return exit_codes.DONE
        return error.code if isinstance(error.code, int) else 1
    return 1
