"""Programs as several processes of this machine, connected by jax; none outlives a test."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from tests.house.sources import REPOSITORY

LONGEST_SECONDS = 240.0


def free_port() -> int:
    """A TCP port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def end(runs: Iterable[subprocess.Popen]) -> None:
    """Ends runs of launch.py that still go on, with all their processes."""
    for run in runs:
        if run.poll() is None:
            run.send_signal(signal.SIGTERM)
            time.sleep(0.5)
            run.send_signal(signal.SIGTERM)  # kills
        with run:
            run.wait(60)


class Group:
    """Processes of one program, in the order of their numbers, with a file of output each."""

    def __init__(self, processes: Sequence[subprocess.Popen], outputs: Sequence[Path]):
        self.processes = processes
        self._outputs = outputs

    def output(self, number: int) -> str:
        """What a process has written so far."""
        return self._outputs[number].read_text()

    def wait_for(self, number: int, text: str) -> None:
        """Waits until a process has written `text`."""
        end = time.monotonic() + LONGEST_SECONDS
        while text not in self.output(number):
            assert self.processes[number].poll() is None, self.output(number)
            assert time.monotonic() < end, f"{text!r} does not come: {self.output(number)}"
            time.sleep(0.02)

    def codes(self) -> list[int]:
        """Exit codes, once all have ended by themselves."""
        end = time.monotonic() + LONGEST_SECONDS
        return [process.wait(max(0.1, end - time.monotonic())) for process in self.processes]


def variables(launcher: str, number: int, process: int, port: int) -> dict[str, str]:
    """What a launcher ("jax", "nodes", "slurm" or "mpi") tells one of its processes."""
    coordinator = {"JAX_COORDINATOR_IP": "127.0.0.1", "JAX_COORDINATOR_PORT": str(port)}
    if launcher == "slurm":
        return {
            "SLURM_JOB_ID": "1",
            "SLURM_STEP_NODELIST": "localhost",
            "SLURM_NTASKS": str(number),
            "SLURM_PROCID": str(process),
            "SLURM_LOCALID": str(process),
            "SLURM_STEP_TASKS_PER_NODE": str(number),
            "JAX_COORDINATOR_PORT": str(port),
        }
    count, rank = {
        "jax": ("JAX_NUM_PROCESSES", "JAX_PROCESS_ID"),
        "nodes": ("NNODES", "NODE_RANK"),
        "mpi": ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    }[launcher]
    return {count: str(number), rank: str(process), **coordinator}


@contextlib.contextmanager
def started(
    command: Sequence[str],
    folder: Path,
    number: int = 2,
    devices: int = 1,
    launcher: str = "jax",
) -> Iterator[Group]:
    """Starts `number` processes of a command, each with `devices` CPU devices.

    Args:
      command: of Python, without the interpreter.
      folder: receives <process>.log.
      launcher: see `variables`.
    """
    port = free_port()
    # The flags of the tests' own process are not these programs'.
    inherited = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS" and not k.startswith("M_")}
    processes, outputs = [], []
    folder.mkdir(parents=True, exist_ok=True)
    try:
        for process in range(number):
            outputs.append(folder / f"{process}.log")
            with outputs[-1].open("w") as output:
                processes.append(
                    subprocess.Popen(
                        [sys.executable, *command],
                        cwd=REPOSITORY,
                        env={
                            **inherited,
                            "JAX_PLATFORMS": "cpu",
                            "JAX_NUM_CPU_DEVICES": str(devices),
                            "GLIBC_TUNABLES": "glibc.malloc.arena_max=1",  # else it starts again
                            **variables(launcher, number, process, port),
                        },
                        stdout=output,
                        stderr=subprocess.STDOUT,
                    )
                )
        yield Group(processes, outputs)
    finally:
        for process in processes:
            process.kill()
            process.wait()
