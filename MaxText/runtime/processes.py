"""Exit of one process of several, without blocking the others."""

import contextlib
import os
import re
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn, TypeVar

from MaxText import exit_codes, program_start
from MaxText.errors import UserError, storage_error_line, storage_failure
from MaxText.runtime.watchdog import Watchdog
from MaxText.storage.errors import causes
from MaxText.storage.run_folder import unlock_run_folder

# Messages of gloo, the coordination service and barriers when another process died.
_PEER_LOST = re.compile(
    r"gloo|closed by peer|heartbeat|coordination (service|agent)|barrier|another task",
    re.IGNORECASE,
)
# Messages of the same layers without a name; storage errors contain them, too.
_PEER_SILENT = re.compile(r"UNAVAILABLE|DEADLINE_EXCEEDED|ABORTED|CANCELLED")

Result = TypeVar("Result")

_count = 1
_leaves_threads = False


def mark_initialized(num_processes: int) -> None:
    """Records the number of connected processes."""
    global _count
    _count = num_processes


def count() -> int:
    """Returns the number of processes; 1 before connecting."""
    return _count


def exit_now(code: int) -> NoReturn:
    """Exits without waiting for threads or JAX's shutdown barrier."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def mark_thread_hung() -> None:
    """Records a thread as blocking a normal exit."""
    global _leaves_threads
    _leaves_threads = True


def run(main: Callable[[], int]) -> NoReturn:
    """Exits with the result of `main`, within seconds, whatever threads wait for."""
    try:
        sys.exit(main())
    except BaseException as error:
        if not _leaves_threads:
            program_start.limit_exit(_code_of(error), unlock_run_folder)
            raise
        if not isinstance(error, SystemExit):
            traceback.print_exception(error)
        exit_now(_code_of(error))


def fail(error: BaseException, watchdog: Watchdog | None = None) -> None:
    """Exits after an exception in a run of several processes.

    Prints the message of a UserError, else the traceback, and the state of every process if another
    one died. Call it before anything collective.
    """
    if _count == 1:
        return
    lost = is_peer_failure(error)
    code = exit_codes.STALLED if lost else _code_of(error)
    if watchdog is not None and not isinstance(error, SystemExit):
        watchdog.fail(None if lost else error)
    failure = None if lost else storage_failure(error)
    if isinstance(error, UserError) and not lost:
        sys.stderr.write(f"error: {error}\n")
    elif failure is not None and isinstance(error, Exception):
        sys.stderr.write(f"{storage_error_line(failure)}\n")
    elif isinstance(error, Exception):
        traceback.print_exception(error)
    sys.stderr.flush()
    if lost:
        table = watchdog.describe_all(wait=True) if watchdog is not None else ""
        sys.stderr.write(
            f"error: another process of the run died, exiting.\n{table}\n"
            "  What to do: check the end of its log, then rerun the command to resume from the "
            "newest checkpoint.\n"
        )
    exit_now(code)


def shutdown() -> None:
    """Waits for all processes, after the last collective work."""
    global _count
    if _count > 1:
        import jax

        jax.distributed.shutdown()
        _count = 1


def is_peer_failure(error: BaseException) -> bool:
    """Returns whether an error or its cause reports a dead process."""
    for cause in causes(error, with_context=True):
        # gloo raises ValueError, devices JaxRuntimeError; an OSError is from storage.
        if type(cause) is ValueError or isinstance(cause, RuntimeError):
            is_jax = type(cause).__name__ == "JaxRuntimeError"
            if _PEER_LOST.search(str(cause)) or (is_jax and _PEER_SILENT.search(str(cause))):
                return True
    return False


def _code_of(error: BaseException) -> int:
    if isinstance(error, UserError):
        return error.exit_code
    if isinstance(error, KeyboardInterrupt):
        return exit_codes.INTERRUPTED
    if isinstance(error, Exception) and storage_failure(error):
        return exit_codes.USER_ERROR
    if isinstance(error, SystemExit):
        if error.code is None:
            return exit_codes.SUCCESS
        return error.code if isinstance(error.code, int) else 1
    return 1


def all_processes_agree(done: bool) -> bool:
    """Returns whether `done` holds on every process. Collective."""
    import jax
    import numpy as np

    if jax.process_count() == 1:
        return done
    from jax.experimental import multihost_utils

    return bool(np.all(multihost_utils.process_allgather(np.array(done))))


def all_succeed(what: str, work: Callable[[], Result]) -> Result:
    """Runs `work` on every process; OSError if it fails on another one."""
    try:
        result = work()
    except Exception:
        all_processes_agree(False)
        raise
    if not all_processes_agree(True):
        raise OSError(f"{what} failed on another process; see its log for the reason")
    return result
