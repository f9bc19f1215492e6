"""Restarts the processes of a run after restartable failures."""

import contextlib
import os
import shlex
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from MaxText import exit_codes
from MaxText.checkpointing import checkpoint_files
from MaxText.early_signals import handled
from MaxText.launchers.commands import Log
from MaxText.launchers.local_processes import LocalProcesses, free_port, process_env
from MaxText.launchers.options import LocalOptions
from MaxText.storage.paths import parse_path

_LONGEST_WAIT = 60.0
_POLL_SECONDS = 0.1


def combined_exit_code(codes: Sequence[int | None]) -> int:
    """Combines the exit codes of all processes; negative for a signal.

    Errors that a restart cannot fix take precedence: 2, then 1, then other error codes; then
    signals, 76, SIGABRT, 75 and 0. SIGABRT ranks below 76 because jax aborts processes whose
    coordinator exited first. Processes that had to be stopped (None) are ignored.
    """
    first = [exit_codes.USER_ERROR, exit_codes.DIVERGED]
    last = [exit_codes.STALLED, -signal.SIGABRT, exit_codes.PREEMPTED, exit_codes.SUCCESS]
    known = {code: rank for rank, code in enumerate([*first, "error", "signal", *last])}
    own = [code for code in codes if code is not None]

    def order(code: int) -> int:
        return known.get(code, known["error" if code > 0 else "signal"])

    return min(own, key=order, default=exit_codes.STALLED)


def is_restartable(code: int) -> bool:
    """Returns whether the same command may succeed: after 75, 76 and signals."""
    return code < 0 or code in exit_codes.RESTARTABLE


def newest_checkpoint(run_folder: str | None) -> int:
    """Returns the newest complete step; -1 if none or storage fails."""
    if run_folder is None:
        return -1
    steps: list[int] = []
    with contextlib.suppress(Exception):  # storage is unavailable
        folder = parse_path(str(run_folder), "base_output_directory")
        steps = checkpoint_files.finalized_steps(folder / checkpoint_files.CHECKPOINTS)
    return max(steps, default=-1)


def supervise(
    command: Sequence[str], number: int, options: LocalOptions, run_folder: str | None, log: Log
) -> int:
    """Runs `number` processes to completion, restarting all after a failure.

    The backoff doubles with each restart, up to 60 s; checkpoints in `run_folder` reset the count.
    SIGTERM, SIGINT and SIGHUP are forwarded and end restarting; a second signal kills. Returns the
    last attempt's exit code, or 128 + n for signal n.
    """
    most, restarts = options.max_restarts if options.supervise else 0, 0
    signals = _SignalForwarder()
    with handled((signal.SIGTERM, signal.SIGINT, signal.SIGHUP), signals.forward):
        while True:
            before = newest_checkpoint(run_folder)
            code = _run_once(command, number, options, signals)
            if signals.number or not is_restartable(code) or most == 0:
                return _as_shell(code)
            if newest_checkpoint(run_folder) > before:
                restarts = 0
            if restarts >= most:
                log(
                    f"launch: {_words(code)}. Giving up after {restarts} restarts without a new "
                    "checkpoint (--max-restarts). Logs of each process are in "
                    f"{shlex.quote(options.log_dir)}"
                )
                return _as_shell(code)
            seconds = min(_LONGEST_WAIT, options.backoff * 2**restarts)
            restarts += 1
            log(
                f"launch: {_words(code)}. Restarting all {number} processes in {seconds:g} s "
                f"(restart {restarts}/{most} since the last checkpoint)."
            )
            end = time.monotonic() + seconds
            while time.monotonic() < end and not signals.number:
                time.sleep(_POLL_SECONDS)
            if signals.number:
                return 128 + signals.number


def _run_once(
    command: Sequence[str], number: int, options: LocalOptions, signals: "_SignalForwarder"
) -> int:
    port = free_port()  # the last port may still be in TIME_WAIT
    environments = [
        process_env(os.environ, number, process, port, options.devices_per_process)
        for process in range(number)
    ]
    processes = LocalProcesses(
        command, environments, Path(options.log_dir), grace_seconds=options.grace_period
    )
    try:
        signals.forward_to(processes)
        return combined_exit_code(processes.wait())
    except BaseException:
        processes.kill()
        raise


class _SignalForwarder:
    """Forwards termination signals to the processes of the current attempt."""

    def __init__(self):
        self.number = 0  # signal number; 0 before any signal
        self._processes: LocalProcesses | None = None

    def forward_to(self, processes: LocalProcesses) -> None:
        self._processes = processes
        if self.number:  # the signal came while they were being started
            processes.send(self.number)

    def forward(self, number: int, _frame: object) -> None:
        again, self.number = self.number != 0, number
        if self._processes is not None:
            self._processes.send(signal.SIGKILL if again else number)


def _words(code: int) -> str:
    if code < 0:
        return f"a process was killed by {signal.Signals(-code).name}"
    reasons = {
        exit_codes.PREEMPTED: "stopped by SIGTERM or a preemption notice",
        exit_codes.STALLED: "stalled, or a peer process died",
    }
    return f"exit code {code}: {reasons.get(code, 'failed')}"


def _as_shell(code: int) -> int:
    return 128 - code if code < 0 else code
