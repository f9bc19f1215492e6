"""Start of a program: signals, output, memory, launch time.

Every script calls `install` before its slow imports: jax and the modules that import it take
seconds, and an interrupt during that time would print a traceback. Until `leave_to_python`, Ctrl-C,
SIGTERM and the notices of a scheduler exit without one. This module imports little, because what
comes before it is not covered.

Before a script can import it, the script puts its parent folder on sys.path in place of its own, so
that every module has one name.
"""

from MaxText import installation

installation.check()  # below are annotations that an older Python cannot evaluate

import codecs
import contextlib
import gc
import io
import locale
import os
import platform
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from types import FrameType, TracebackType

from MaxText.errors import UserError
from MaxText.exit_codes import INTERRUPTED, PREEMPTED, USER_ERROR
from MaxText.package_versions import check_versions

# Notices that the process is about to be ended: SIGHUP when a terminal or an SSH session closes,
# SIGUSR1 and SIGUSR2 from schedulers (sbatch --signal=USR1@60, submitit, Grid Engine's -notify).
NOTICES = (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
# Signals that ask a program to save and exit, besides Ctrl-C.
STOP_SIGNALS = (signal.SIGTERM, *NOTICES)

_CODES = {signal.SIGINT: INTERRUPTED, **dict.fromkeys(STOP_SIGNALS, PREEMPTED)}

# By default glibc returns large temporaries to the system after each step, and the next step faults
# them in again in 4 KiB pages: a third of a small CPU step. So heaps are never trimmed. Blocks of
# 1 GiB stay out of them, because small allocations would fragment the holes between steps; those
# are mapped in 2 MiB pages instead (figures in docs/explanation/design_decisions.md). With a single
# heap (arena_max=1) steps of GPT-2 small take 3 % less time, but the threads of compilers and
# tokenizers wait for each other: the quickstart's first step comes 5 s later.
_TUNABLES = {"glibc.malloc.trim_threshold": str(2**46)}
_LARGE_BLOCKS = {
    "glibc.malloc.mmap_threshold": str(2**30),  # smaller ones come from the heap
    "glibc.malloc.hugetlb": "1",  # 2 MiB pages
}
# glibc before 2.35 has no such pages and no threshold above 32 MiB: all goes to the heap.
_LARGE_BLOCKS_BEFORE_235 = {"glibc.malloc.mmap_max": "0"}

# Values that JAX has by default, and that the programs rely on.
_JAX_SETTINGS = {
    "JAX_NUMPY_RANK_PROMOTION": "allow",
    "JAX_NUMPY_DTYPE_PROMOTION": "standard",
    "JAX_DISABLE_JIT": "false",
    "JAX_LEGACY_PRNG_KEY": "allow",
    "JAX_TRANSFER_GUARD": "allow",
    "JAX_TRANSFER_GUARD_HOST_TO_DEVICE": "allow",
    "JAX_TRANSFER_GUARD_DEVICE_TO_DEVICE": "allow",
    "JAX_TRANSFER_GUARD_DEVICE_TO_HOST": "allow",
}
_HARMLESS_SETTINGS = ("", "0", "warn", "log", "log_explicit")
_UTF8 = "MAXTEXT_UTF8"  # set in a process that was restarted for UTF-8, which happens once

# Limit on the interpreter's shutdown, which takes about a second.
_SECONDS_TO_EXIT = 5.0
_is_program = False  # whether this process was started for a program

_LAUNCHED = "MAXTEXT_LAUNCHED"  # passes the launch time to the restarted process
_launch_time = float(os.environ.pop(_LAUNCHED, time.time()))


class StopRequestedError(KeyboardInterrupt):
    """Raised by SIGTERM, SIGHUP, SIGUSR1 and SIGUSR2; handled like Ctrl-C."""


def install(importer: str, *, tune_malloc: bool = False) -> None:
    """Sets up a program: output, memory, and signals until `leave_to_python`.

    Does nothing if the program's module was imported and not started. Ctrl-C exits with its own
    code, the signals in STOP_SIGNALS with that of a preemption. Signals that the parent process
    ignores (nohup) stay ignored. May restart the process, for UTF-8 or malloc settings.

    Args:
      importer: __name__ of the program's module.
      tune_malloc: Whether to set glibc's malloc for large arrays on the host; see
        `reexec_with_malloc_tuning`.
    """
    command = f"maxtext-{importer.rpartition('.')[2].replace('_', '-')}"
    if importer != "__main__" and os.path.basename(sys.argv[0]) != command:
        return
    global _is_program
    _is_program = True
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)
    for number in STOP_SIGNALS:
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _end)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _CODES)  # blocked by the process before an exec
    reexec_in_utf8()
    relax_jax_settings()
    sys.excepthook = _report_invalid_jax_setting
    if tune_malloc:
        reexec_with_malloc_tuning()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # a log file shows each line at once
    # Imports and tracing make a million objects and little garbage: with Python's threshold of 700,
    # collections take a tenth of the start.
    gc.set_threshold(50_000)
    try:
        check_versions()
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(error.exit_code)


def relax_jax_settings() -> None:
    """Undoes strict settings of JAX in the environment, with a note; before jax is imported.

    They make errors of what this package and its libraries do on purpose: broadcasting, products of
    Python numbers and arrays, and steps that are compiled ahead of time.
    """
    for name, value in _JAX_SETTINGS.items():
        setting = os.environ.get(name, value)
        if setting.lower() not in (value, *_HARMLESS_SETTINGS):
            os.environ[name] = value
            sys.stderr.write(f"note: {name}={setting} has no effect here: it is {value}\n")


def _report_invalid_jax_setting(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Reports a value that jax refuses when it is imported; leaves other errors to Python."""
    frames = traceback.extract_tb(trace)
    is_setting = isinstance(error, ValueError) and any(
        name.startswith("JAX_") for name in os.environ
    )
    if (
        is_setting
        and frames
        and frames[-1].filename.endswith(os.path.join("jax", "_src", "config.py"))
    ):
        sys.stderr.write(f"error: jax refuses a JAX_... variable of the environment: {error}\n")
        sys.stderr.flush()
        os._exit(USER_ERROR)
    sys.__excepthook__(kind, error, trace)


def reexec_in_utf8() -> None:
    """Restarts this process in Python's UTF-8 mode, if the locale has another encoding.

    Files are written in UTF-8 everywhere; so are names of files, which a locale such as ISO-8859-1
    or an ASCII one cannot express. The terminal keeps its encoding.
    """
    was_restarted = os.environ.pop(_UTF8, "")
    encoding = locale.getpreferredencoding(False)
    encodings = (encoding, sys.getfilesystemencoding())
    if was_restarted or {codecs.lookup(name).name for name in encodings} == {"utf-8"}:
        return
    environment = os.environ | {"PYTHONUTF8": "1", _UTF8: "1", _LAUNCHED: str(_launch_time)}
    terminal_encoding = getattr(sys.stdout, "encoding", None) or encoding
    environment.setdefault("PYTHONIOENCODING", f"{terminal_encoding}:backslashreplace")
    _reexec([_utf8_argument(argument) for argument in sys.orig_argv[1:]], environment)


def _utf8_argument(argument: str) -> bytes:
    """Returns an argument as UTF-8: its bytes, if they are, or what the locale takes them for."""
    raw = os.fsencode(argument)
    try:
        raw.decode()
    except UnicodeDecodeError:
        return argument.encode(errors="surrogateescape")
    return raw


def _reexec(arguments: Sequence[str | bytes], environment: Mapping[str, str]) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, _CODES)  # they wait for the next `install`
    try:
        os.execve(sys.executable, [sys.executable, *arguments], environment)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _CODES)


def reexec_with_malloc_tuning() -> None:
    """Restarts this process with malloc settings for glibc, if unset.

    Call it before the slow imports, which would be made twice.
    """
    present = os.environ.get("GLIBC_TUNABLES", "")
    if "glibc.malloc." in present:
        return
    library, version = platform.libc_ver()
    if library != "glibc":
        return
    is_old = tuple(map(int, version.split(".")[:2])) < (2, 35)
    chosen = _TUNABLES | (_LARGE_BLOCKS_BEFORE_235 if is_old else _LARGE_BLOCKS)
    tunables = [present] if present else []
    tunables += [f"{name}={value}" for name, value in chosen.items()]
    environment = os.environ | {"GLIBC_TUNABLES": ":".join(tunables), _LAUNCHED: str(_launch_time)}
    _reexec(sys.orig_argv[1:], environment)


def limit_exit(code: int, release: Callable[[], None] = lambda: None) -> None:
    """Ends this program within seconds, whatever its threads wait for.

    Call it when only the interpreter's own shutdown is left. That joins every thread, and after a
    failed save Orbax's threads wait for each other for minutes. Does nothing in a process that only
    imported the program.

    Args:
      code: Exit code.
      release: Called before a forced exit, which skips atexit handlers.
    """

    def end() -> None:
        with contextlib.suppress(Exception):  # storage may be what the threads wait for
            release()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)

    if _is_program:
        timer = threading.Timer(_SECONDS_TO_EXIT, end)
        timer.daemon = True
        timer.start()


def launch_time() -> float:
    """Returns the Unix time of the program start, or of this module's import."""
    return _launch_time


def leave_to_python() -> None:
    """From here on Ctrl-C raises KeyboardInterrupt, STOP_SIGNALS StopRequestedError."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in STOP_SIGNALS:
        if signal.getsignal(number) is _end:
            signal.signal(number, _request_stop)


@contextlib.contextmanager
def handled(signals: Sequence[int], handler: Callable[[int, FrameType | None], None]):
    """Installs a signal handler while a block runs.

    Args:
      signals: Signals to handle; those that are ignored (nohup) stay ignored.
      handler: As for `signal.signal`.
    """
    previous_handlers = {
        number: signal.signal(number, handler)
        for number in signals
        if signal.getsignal(number) is not signal.SIG_IGN
    }
    try:
        yield
    finally:
        for number, previous_handler in previous_handlers.items():
            signal.signal(number, previous_handler)


@contextlib.contextmanager
def notices_blocked(*others: signal.Signals):
    """Lets processes that this thread starts in a block ignore NOTICES and `others`.

    Schedulers and terminals send notices to all processes of a job. A notice to a worker, or to
    Python's resource tracker, must not end it before the program has saved its work.
    """
    previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, {*NOTICES, *others})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)


def _request_stop(number: int, _frame: FrameType | None) -> None:
    # A second SIGTERM ends a program that does not come to its handlers. A closing terminal sends
    # SIGHUP twice, and that must not cut the cleanup short.
    signal.signal(number, signal.SIG_IGN if number in NOTICES else signal.SIG_DFL)
    raise StopRequestedError


def _end(number: int, _frame: FrameType | None) -> None:
    os._exit(_CODES[signal.Signals(number)])
