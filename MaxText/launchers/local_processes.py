"""Starts and stops the processes of one run on this machine together."""

import contextlib
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from MaxText.runtime.cluster import NUM_DEVICES_VARIABLE

_POLL_SECONDS = 0.1
# Time limit for copying output after a process has exited: a child may have inherited the pipe.
_DRAIN_SECONDS = 5.0


def process_env(
    base: Mapping[str, str], number: int, process: int, port: int, devices: int | None
) -> dict[str, str]:
    """Returns the environment of one of `number` processes.

    With `devices`, each process gets that many CPU devices, or that many GPUs of its own. None
    leaves jax's default. `port` is the coordinator's.
    """
    environment = dict(base)
    if number > 1:
        environment |= {
            "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
            "JAX_NUM_PROCESSES": str(number),
            "JAX_PROCESS_ID": str(process),
        }
    if devices is not None:
        first = process * devices
        environment |= {
            "JAX_NUM_CPU_DEVICES": str(devices),
            NUM_DEVICES_VARIABLE: str(number * devices),
        }
        if number > 1:
            ids = range(first, first + devices)
            environment["JAX_LOCAL_DEVICE_IDS"] = ",".join(map(str, ids))
    return environment


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class LocalProcesses:
    """Processes of one command, with output on the terminal and in files."""

    def __init__(
        self,
        command: Sequence[str],
        environments: Sequence[Mapping[str, str]],
        logs: Path,
        *,
        grace_seconds: float,
    ):
        """Starts one process per environment, appending to logs/<process>.log.

        After a failure the others have `grace_seconds` to exit, and again after SIGTERM.
        """
        self._grace = grace_seconds
        self._printing = threading.Lock()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._copying: list[threading.Thread] = []
        self._has_prefix = len(environments) > 1
        logs.mkdir(parents=True, exist_ok=True)
        try:
            for number, environment in enumerate(environments):
                self._start(command, environment, number, logs / f"{number}.log")
        except BaseException:
            self.kill()
            raise

    def _start(
        self, command: Sequence[str], environment: Mapping[str, str], number: int, log: Path
    ) -> None:
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
        thread = threading.Thread(target=self._copy, args=(process, number, log), daemon=True)
        thread.start()
        self._copying.append(thread)

    def _copy(self, process: subprocess.Popen[bytes], number: int, log: Path) -> None:
        prefix = f"[{number}] " if self._has_prefix else ""
        assert process.stdout is not None
        with process.stdout, log.open("ab") as file:
            for line in process.stdout:
                with contextlib.suppress(OSError):  # a full disk must not stop a run
                    file.write(line)
                    file.flush()
                with self._printing, contextlib.suppress(OSError, ValueError):
                    sys.stdout.write(f"{prefix}{line.decode(errors='replace').rstrip()}\n")
                    sys.stdout.flush()

    def wait(self) -> list[int | None]:
        """Waits for all processes; stops the others after one has failed.

        Returns exit codes: negative for signals, None for processes that had to be stopped.
        """
        while self._running() and not any(process.returncode for process in self._processes):
            time.sleep(_POLL_SECONDS)
        self._wait_to_end(self._grace)
        ended_by_us = self._running()
        self.send(signal.SIGTERM)
        self._wait_to_end(self._grace)
        self.send(signal.SIGKILL)
        self._wait_to_end(math.inf)
        self._drain()
        return [
            None if number in ended_by_us else process.returncode
            for number, process in enumerate(self._processes)
        ]

    def _running(self) -> set[int]:
        return {number for number, process in enumerate(self._processes) if process.poll() is None}

    def _wait_to_end(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self._running() and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)

    def kill(self) -> None:
        self.send(signal.SIGKILL)
        for process in self._processes:
            process.wait()
        self._drain()

    def send(self, number: int) -> None:
        """Sends a signal to the process group of every running process."""
        for process in self._processes:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, number)

    def _drain(self) -> None:
        end = time.monotonic() + _DRAIN_SECONDS
        for thread in self._copying:
            thread.join(max(0.0, end - time.monotonic()))
