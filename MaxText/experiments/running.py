"""Runs train.py in a subprocess, with a log and step progress."""

import contextlib
import errno
import fcntl
import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

from MaxText.config.serialization import resolved_yaml
from MaxText.errors import UserError
from MaxText.experiments.child_processes import environment_of_runs, train_command
from MaxText.experiments.comparison_plan import Run
from MaxText.metrics.events import EVENTS_FILE

_LOCK = ".running"
_POLL_SECONDS = 0.25
_TAIL_BYTES = 1 << 16  # of an events file, enough for at least one whole row
_PATIENCE_SECONDS = 60.0  # for an interrupted run to exit


@contextlib.contextmanager
def hold(folder: Path) -> Iterator[int]:
    """Locks a folder against other commands; yields the file descriptor.

    Runs inherit it, so one that outlives a killed command still holds the folder. Raises UserError
    if the folder is locked or cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise UserError(
            f"cannot write to the comparison's folder {folder}: {error}. "
            "Choose another one by output=."
        ) from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise UserError(
                    f"another compare.py, or a run that it started, is at work in {folder}. "
                    "Wait for it, end it, or name another folder by output=."
                ) from error
            # The file system has no locks: continue without one.
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def signals_as_exceptions() -> Iterator[None]:
    """Raises SystemExit on SIGTERM and SIGHUP, so no run outlives the program."""

    def stop(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    before = {
        number: signal.signal(number, stop)
        for number in (signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) is not signal.SIG_IGN  # nohup
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def train(run: Run, descriptor: int, on_steps: Callable[[int], None]) -> int:
    """Runs train.py to its end; returns the exit code, negative for a signal.

    `on_steps` periodically receives the number of completed steps. On KeyboardInterrupt and other
    exceptions, the run is interrupted and awaited before the exception propagates.
    """
    write_config(run)
    run.folder.mkdir(exist_ok=True)
    with run.log.open("ab") as log:
        process = subprocess.Popen(
            train_command(run.config_path),
            env=environment_of_runs(),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            pass_fds=(descriptor,),
            # In its own process group, Ctrl-C reaches it exactly once, through us.
            process_group=0,
        )
        try:
            while True:
                try:
                    return process.wait(_POLL_SECONDS)
                except subprocess.TimeoutExpired:
                    on_steps(steps_done(run.folder))
        except BaseException:
            _end(process)
            raise


def write_config(run: Run) -> None:
    """Writes the run's configuration next to its folder."""
    try:
        run.folder.parent.mkdir(parents=True, exist_ok=True)
        run.config_path.write_text(resolved_yaml(run.config), encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write to {run.folder}: {error}. Name another output=.") from error


def _end(process: subprocess.Popen) -> None:
    """Interrupts a run and waits; kills it on a second Ctrl-C or timeout."""
    # Shells ignore SIGINT in a script's background jobs, and the run inherits that.
    is_deaf = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM if is_deaf else signal.SIGINT)
    try:
        process.wait(_PATIENCE_SECONDS)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def steps_done(folder: Path) -> int:
    """Returns the number of steps that a run has recorded so far."""
    try:
        with (folder / EVENTS_FILE).open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(file.tell() - _TAIL_BYTES, 0))
            lines = file.read().split(b"\n")
    except FileNotFoundError:
        return 0
    for line in reversed(lines):
        try:
            row = json.loads(line)
        except ValueError:
            continue  # half written, or cut at the start of the tail
        if isinstance(row, dict) and row.get("event") == "step":
            return int(row["step"]) + 1
    return 0
