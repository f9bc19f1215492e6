"""Exit codes and exit paths of a run's processes.

In a run of several processes, one that fails must neither wait for the others (JAX's shutdown
barrier, a hung collective) nor leave them without a message. The number of connected processes is
recorded here by `start_up.initialize_distributed`, because asking JAX would initialize devices.
"""

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
_watchdog: Watchdog | None = None


def mark_initialized(num_processes: int) -> None:
    """Records the number of connected processes."""
    global _count
    _count = num_processes


def count() -> int:
    """Returns the number of connected processes; 1 before they are connected."""
    return _count


def exit_now(code: int) -> NoReturn:
    """Exits with `code` without waiting for threads or for JAX's shutdown barrier."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def mark_thread_hung() -> None:
    """Records that a thread is stuck in storage, so that `run` does not join threads at exit."""
    global _leaves_threads
    _leaves_threads = True


def run(main: Callable[[], int]) -> NoReturn:
    """Calls `main` and exits with the code that it returns, or with the code of its exception.

    The exit takes seconds at most, whatever other threads wait for.
    """
    try:
        sys.exit(main())
    except BaseException as error:
        if not _leaves_threads:
            program_start.limit_exit(_code_of(error), unlock_run_folder)
            raise
        if not isinstance(error, SystemExit):
            traceback.print_exception(error)
        exit_now(_code_of(error))


def set_watchdog(watchdog: Watchdog) -> None:
    """Sets what tells the other processes of a failure of this one, in `fail`."""
    global _watchdog
    _watchdog = watchdog


def fail(error: BaseException) -> None:
    """Exits after an exception, if the run has several processes; returns if it has one.

    Prints the message of a UserError or a storage error, else the traceback. If the exception says
    that another process died, prints the state of every process and exits with STALLED. Call it
    before anything collective.

    Args:
      error: The exception that ends this process. The watchdog, if one was set, publishes it to the
        other processes.
    """
    if _count == 1:
        return
    watchdog = _watchdog
    peer_died = is_peer_failure(error)
    if watchdog is not None and not isinstance(error, SystemExit):
        watchdog.fail(None if peer_died else error)
    if peer_died:
        if isinstance(error, Exception):
            traceback.print_exception(error)
        sys.stderr.flush()
        table = watchdog.describe_all(wait=True) if watchdog is not None else ""
        sys.stderr.write(
            f"error: another process of the run died, exiting.\n{table}\n"
            "  What to do: check the end of its log, then rerun the command to resume from the "
            "newest checkpoint.\n"
        )
    else:
        _print_error(error)
    if watchdog is not None and isinstance(error, Exception):
        watchdog.let_peers_report()
    exit_now(exit_codes.STALLED if peer_died else _code_of(error))


def _print_error(error: BaseException) -> None:
    failure = storage_failure(error)
    if isinstance(error, UserError):
        sys.stderr.write(f"error: {error}\n")
    elif failure is not None and isinstance(error, Exception):
        sys.stderr.write(f"{storage_error_line(failure)}\n")
    elif isinstance(error, Exception):
        traceback.print_exception(error)
    sys.stderr.flush()


def shutdown() -> None:
    """Disconnects from the other processes once all have reached this point.

    Call it after the last collective work.
    """
    global _count
    if _count > 1:
        import jax

        jax.distributed.shutdown()
        _count = 1


def is_peer_failure(error: BaseException) -> bool:
    """Returns whether an error or one of its causes reports that another process died."""
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


def all_succeed(description: str, work: Callable[[], Result]) -> Result:
    """Returns the result of `work`, which every process runs. Collective.

    Args:
      description: What `work` does, for the message of another process's failure.
      work: Function to run on this process.

    Raises:
      OSError: `work` failed on another process.
      Exception: What `work` raised on this process.
    """
    try:
        result = work()
    except Exception:
        all_processes_agree(False)
        raise
    if not all_processes_agree(True):
        raise OSError(f"{description} failed on another process; see its log for the reason")
    return result
