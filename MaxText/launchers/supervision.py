"""Starts the processes of a run on this machine, and restarts them after failures.

All processes of a run depend on each other: after one fails, the others are stopped and all are
started again, from the newest checkpoint. An elastic run goes on without the one that was lost, as
long as there is a smaller number of processes with the same global batch.
"""

import contextlib
import dataclasses
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from MaxText import exit_codes
from MaxText.checkpointing import checkpoint_files
from MaxText.config.keys import Count, Natural, NonNegative
from MaxText.config.program_options import option
from MaxText.launchers.commands import LaunchOptions, Log
from MaxText.program_start import NOTICES, STOP_SIGNALS, handled
from MaxText.runtime.start_up import NUM_DEVICES_VARIABLE
from MaxText.storage.paths import parse_path

_LONGEST_WAIT = 60.0
_POLL_SECONDS = 0.1
# Limits of the grace period once a process was killed, before and after SIGTERM. The others wait
# for it in a collective operation and cannot save, so more time would only delay the restart. A
# process that notices by itself says which peer is silent, after about 10 seconds.
SECONDS_AFTER_A_KILL = 5.0
SECONDS_TO_REPORT = 25.0
# Time limit for copying output after a process has exited: a child may have inherited the pipe.
_DRAIN_SECONDS = 5.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class LocalOptions(LaunchOptions):
    """local N: processes of this machine."""

    devices_per_process: Count | None = option(
        None, "Devices (CPU or GPU) per process.", metavar="NUMBER"
    )
    supervise: bool = option(False, "Restart after a failure.")
    max_restarts: Natural = option(
        10, "Maximum restarts without a new checkpoint.", metavar="NUMBER"
    )
    min_processes: Count | None = option(
        None,
        "With --supervise: go on without lost processes, with this many at least.",
        metavar="NUMBER",
    )
    backoff: NonNegative = option(1.0, "Delay before a restart.", metavar="SECONDS")
    grace_period: NonNegative = option(
        60.0, "Grace period for processes to exit.", metavar="SECONDS"
    )
    log_dir: str = option("", "Log folder.", metavar="DIR")


def supervise(
    command: Sequence[str],
    num_processes: int,
    options: LocalOptions,
    run_folder: str,
    log: Log,
    *,
    smaller_counts: Sequence[int] = (),
) -> int:
    """Runs the processes of a run to completion, restarting after a failure.

    The delay before a restart doubles with each, up to 60 s. A new checkpoint resets the count of
    restarts. SIGTERM, SIGINT, SIGHUP, SIGUSR1 and SIGUSR2 are forwarded to the processes and end
    restarting; a second SIGTERM or SIGINT kills them.

    Args:
      command: The command of each process.
      num_processes: Number of processes.
      options: Options of launch.py local; `log_dir` is set.
      run_folder: Folder of the run, whose checkpoints count as progress.
      log: Prints a line.
      smaller_counts: Numbers of processes to go on with once some are lost, the largest first. If
        fewer are left than the last of them, or it is empty, all are started again.

    Returns:
      The exit code of the last attempt, or 128 + n for signal n.
    """
    max_restarts = options.max_restarts if options.supervise else 0
    restarts = 0
    received: list[int] = []
    attempt: LocalProcesses | None = None
    slots = list(range(num_processes))  # of the processes in use, each with devices of its own

    def forward(signal_number: int, _frame: object) -> None:
        received.append(signal_number)
        # A notice may come twice, and SIGTERM follows it: none of these cuts a save short.
        stop_demands = [number for number in received if number not in NOTICES]
        is_second = signal_number not in NOTICES and len(stop_demands) > 1
        if attempt is not None:
            attempt.send(signal.SIGKILL if is_second else signal_number)

    with handled((*STOP_SIGNALS, signal.SIGINT), forward):
        while True:
            checkpoint_before = newest_checkpoint(run_folder)
            port = free_port()  # the last port may still be in TIME_WAIT
            environments = [
                process_env(
                    os.environ, len(slots), process, port, options.devices_per_process, slot=slot
                )
                for process, slot in enumerate(slots)
            ]
            attempt = LocalProcesses(command, environments, Path(options.log_dir))
            log(f"launch: process ids of the operating system: {attempt.pids}")
            if received:  # the signal came while they were being started
                attempt.send(received[0])
            codes = attempt.wait(options.grace_period)
            code = combined_exit_code(codes)
            if received or not is_restartable(code) or max_restarts == 0:
                break
            checkpoint = newest_checkpoint(run_folder)
            if checkpoint > checkpoint_before:
                restarts = 0
            if restarts >= max_restarts:
                log(
                    f"launch: {_describe_exit(code)}. Giving up after {restarts} restarts "
                    "without a new checkpoint (--max-restarts). Logs of each process are in "
                    f"{shlex.quote(options.log_dir)}"
                )
                break
            seconds = min(_LONGEST_WAIT, options.backoff * 2**restarts)
            restarts += 1
            slots, plan = _after_failure(slots, codes, num_processes, smaller_counts)
            since = "the start" if checkpoint < 0 else f"the checkpoint of step {checkpoint}"
            log(
                f"launch: {_describe_exit(code)}. {plan} in {seconds:g} s from {since} "
                f"(restart {restarts}/{max_restarts} since the last checkpoint)."
            )
            deadline = time.monotonic() + seconds
            while time.monotonic() < deadline and not received:
                time.sleep(_POLL_SECONDS)
            if received:
                code = -received[0]
                break
    return 128 - code if code < 0 else code


def _after_failure(
    slots: Sequence[int],
    codes: Sequence[int | None],
    num_processes: int,
    smaller_counts: Sequence[int],
) -> tuple[list[int], str]:
    """Returns the slots to go on with after a failure, and what to tell of them.

    Args:
      slots: Slots of the processes that ended.
      codes: Exit code of each.
      num_processes: Processes that the run was started with.
      smaller_counts: As in `supervise`.
    """
    if not smaller_counts:
        return list(slots), f"Restarting all {num_processes} processes"
    lost = lost_processes(codes)
    left = [slot for process, slot in enumerate(slots) if process not in lost]
    if not lost:
        return left, f"Restarting all {len(left)} processes with the same global batch"
    names = f"Lost process {', '.join(map(str, lost))} of {len(slots)}"
    count = next((count for count in smaller_counts if count <= len(left)), None)
    if count is None:
        return list(range(num_processes)), (
            f"{names}, and no number of processes up to {len(left)} can go on (--min-processes, "
            f"global_batch_size): waiting for the lost ones. Restarting all {num_processes}"
        )
    unused = ""
    if count < len(left):
        unused = f" ({len(left)} do not divide it)"
    return left[:count], (
        f"{names}. Going on with {count} processes and the same global batch{unused}"
    )


def lost_processes(codes: Sequence[int | None]) -> list[int]:
    """Returns the processes that are to blame for a failure, by their exit codes; none if all are.

    Those that a signal killed, or else those that had to be stopped. SIGABRT alone says little:
    jax aborts processes whose coordinator is gone.
    """
    aborted = -signal.SIGABRT
    killed = [i for i, code in enumerate(codes) if code is not None and code < 0]
    candidates = [
        [process for process in killed if codes[process] != aborted],
        [process for process, code in enumerate(codes) if code is None],
        killed,
    ]
    lost = next(filter(None, candidates), [])
    return [] if len(lost) == len(codes) else lost


def newest_checkpoint(run_folder: str) -> int:
    """Returns the step of the newest complete checkpoint; -1 if there is none or storage fails."""
    with contextlib.suppress(Exception):  # storage is unavailable
        folder = parse_path(run_folder, "base_output_directory") / checkpoint_files.CHECKPOINTS
        return max(checkpoint_files.finalized_steps(folder), default=-1)
    return -1


def combined_exit_code(codes: Sequence[int | None]) -> int:
    """Returns the exit code of a run from those of its processes; negative for a signal.

    Errors that a restart cannot fix take precedence: 2, then 1, then other error codes; then
    signals, 76, SIGABRT, 75 and 0. SIGABRT ranks below 76 because jax aborts processes whose
    coordinator exited first.

    Args:
      codes: Exit code of each process; None for one that had to be stopped, which is ignored.
    """
    ranks = [
        exit_codes.USER_ERROR,
        exit_codes.DIVERGED,
        "error",
        "signal",
        exit_codes.STALLED,
        -signal.SIGABRT,
        exit_codes.PREEMPTED,
        exit_codes.SUCCESS,
    ]

    def rank(code: int) -> int:
        if code in ranks:
            return ranks.index(code)
        return ranks.index("error" if code > 0 else "signal")

    own_exit_codes = (code for code in codes if code is not None)
    return min(own_exit_codes, key=rank, default=exit_codes.STALLED)


def is_restartable(code: int) -> bool:
    """Returns whether the same command may succeed: after 75, 76 and signals."""
    return code < 0 or code in exit_codes.RESTARTABLE


def _describe_exit(code: int) -> str:
    if code < 0:
        return f"a process was killed by {signal.Signals(-code).name}"
    reasons = {
        exit_codes.PREEMPTED: "stopped by SIGTERM or a preemption notice",
        exit_codes.STALLED: "stalled, or a peer process died",
    }
    return f"exit code {code}: {reasons.get(code, 'failed')}"


def free_port() -> int:
    """Returns a free TCP port of this machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def process_env(
    base: Mapping[str, str],
    number: int,
    process: int,
    port: int,
    devices: int | None,
    *,
    slot: int | None = None,
) -> dict[str, str]:
    """Returns the environment of one process of a run.

    Args:
      base: Environment to extend.
      number: Processes of the run.
      process: Id of this one, from 0.
      port: Port of the coordinator, which is process 0.
      devices: CPU devices, or GPUs of its own, per process; None leaves jax's default.
      slot: Which GPUs of the machine are its own, counted as processes; None is `process`.
    """
    slot = process if slot is None else slot
    environment = dict(base)
    if number > 1:
        environment["JAX_COORDINATOR_ADDRESS"] = f"127.0.0.1:{port}"
        environment["JAX_NUM_PROCESSES"] = str(number)
        environment["JAX_PROCESS_ID"] = str(process)
    if devices is not None:
        environment["JAX_NUM_CPU_DEVICES"] = str(devices)
        environment[NUM_DEVICES_VARIABLE] = str(number * devices)
        ids = ",".join(map(str, range(slot * devices, (slot + 1) * devices)))
        if number > 1:
            environment["JAX_LOCAL_DEVICE_IDS"] = ids
        else:
            environment["JAX_CUDA_VISIBLE_DEVICES"] = ids  # the other is for jax.distributed only
    return environment


class LocalProcesses:
    """Running processes of one command, whose output goes to the terminal and to log files."""

    def __init__(
        self, command: Sequence[str], environments: Sequence[Mapping[str, str]], logs: Path
    ):
        """Starts one process per environment, appending to logs/<process>.log."""
        self._printing = threading.Lock()
        self._was_signaled = False
        self._processes: list[subprocess.Popen[bytes]] = []
        self._copying: list[threading.Thread] = []
        logs.mkdir(parents=True, exist_ok=True)
        try:
            for number, environment in enumerate(environments):
                process = subprocess.Popen(
                    command,
                    env={"PYTHONUNBUFFERED": "1", **environment},
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    # In its own process group, Ctrl-C reaches it exactly once, through us.
                    process_group=0,
                )
                self._processes.append(process)
                prefix = f"[{number}] " if len(environments) > 1 else ""
                copied = (process, logs / f"{number}.log", prefix)
                self._copying.append(threading.Thread(target=self._copy, args=copied, daemon=True))
                self._copying[-1].start()
        except BaseException:
            self._kill()
            raise

    def _copy(self, process: subprocess.Popen[bytes], log: Path, prefix: str) -> None:
        assert process.stdout is not None
        with process.stdout, log.open("ab") as file:
            for line in process.stdout:
                with contextlib.suppress(OSError):  # a full disk must not stop a run
                    file.write(line)
                    file.flush()
                with self._printing, contextlib.suppress(OSError, ValueError):
                    sys.stdout.write(f"{prefix}{line.decode(errors='replace').rstrip()}\n")
                    sys.stdout.flush()

    @property
    def pids(self) -> str:
        """Process ids of the operating system, in the order of the processes."""
        return " ".join(str(process.pid) for process in self._processes)

    def wait(self, grace_seconds: float) -> list[int | None]:
        """Waits for all processes; stops the others after one has failed.

        Args:
          grace_seconds: Time for the others to exit by themselves, and again after SIGTERM. Only a
            few seconds of it count if the failed process was killed by a signal from elsewhere.

        Returns:
          The exit code of each process: negative for a signal, None if it had to be stopped.
        """
        try:
            while self._running() and not any(process.returncode for process in self._processes):
                time.sleep(_POLL_SECONDS)
            first_wait = second_wait = grace_seconds
            was_killed = any((process.returncode or 0) < 0 for process in self._processes)
            if was_killed and not self._was_signaled:
                first_wait = min(grace_seconds, SECONDS_AFTER_A_KILL)
                second_wait = min(grace_seconds, SECONDS_TO_REPORT)
            self._wait_to_end(first_wait)
            stopped_processes = self._running()
            self.send(signal.SIGTERM)
            self._wait_to_end(second_wait)
        finally:
            self._kill()
        return [
            None if process in stopped_processes else process.returncode
            for process in self._processes
        ]

    def _running(self) -> list[subprocess.Popen[bytes]]:
        return [process for process in self._processes if process.poll() is None]

    def _wait_to_end(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self._running() and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)

    def send(self, number: int) -> None:
        """Sends a signal to the process group of every running process."""
        self._was_signaled = True
        for process in self._running():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, number)

    def _kill(self) -> None:
        self.send(signal.SIGKILL)
        for process in self._processes:
            process.wait()
        end = time.monotonic() + _DRAIN_SECONDS
        for thread in self._copying:
            thread.join(max(0.0, end - time.monotonic()))
