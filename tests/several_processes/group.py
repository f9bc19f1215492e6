"""Programs as several processes of this machine, connected by jax; none outlives a test."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from tests import programs
from tests.house.sources import REPOSITORY

LONGEST_SECONDS = 400.0
# A run of a tiny model.
CONFIG = """
base_config: quickstart.yml
vocab_size: 300
tokenizer_vocab_size: 300
base_emb_dim: 16
base_num_query_heads: 2
base_num_kv_heads: 2
head_dim: 8
base_mlp_dim: 32
base_num_decoder_layers: 1
max_target_length: 32
per_device_batch_size: 2
step_log_period: 1
eval_steps: 2
healthy_after_steps: 2
log_config: false
"""


def as_users_do() -> dict[str, str]:
    """The environment without the flags of the tests' own process."""
    inherited = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS" and not k.startswith("M_")}
    # Or programs start themselves again.
    return inherited | {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=0"}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def rows(text: str) -> list[dict]:
    return [json.loads(line) for line in text.splitlines()]


class Launcher:
    """Starts runs of launch.py with four devices, over as many processes as a test says."""

    def __init__(self, folder: Path, environment: Mapping[str, str]):
        self.folder, self.environment, self._started = folder, environment, []

    def start(self, number: int, *arguments: str, options: Sequence[str] = ()):
        """A run that goes on behind the test's back, and the file of its output."""
        path = self.folder / f"{len(self._started)}.out"
        launching = [
            "local",
            str(number),
            f"--devices-per-process={4 // number}",
            "--grace-period=40",
            f"--log-dir={self.folder}/logs",
            *options,
            "--",
            *arguments,
        ]
        with path.open("w") as log:
            process = programs.start(
                "launch.py",
                launching,
                self.folder,
                self.environment,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self._started.append(process)
        return process, path

    def run(self, number: int, *arguments: str, code: int = 0, options: Sequence[str] = ()) -> str:
        return ended(*self.start(number, *arguments, options=options), code)

    def end(self) -> None:
        """Ends runs that still go on, with all their processes."""
        for run in self._started:
            if run.poll() is None:
                run.send_signal(signal.SIGTERM)
                time.sleep(0.5)
                run.send_signal(signal.SIGTERM)  # kills
            with run:
                run.wait(60)


def ended(process: subprocess.Popen, path: Path, code: int = 0) -> str:
    """The output of a run, once it has ended with a code."""
    assert process.wait(LONGEST_SECONDS) == code, path.read_text()
    return path.read_text()


def wait_until(condition: Callable[[], bool], process: subprocess.Popen, path: Path) -> None:
    end = time.monotonic() + LONGEST_SECONDS
    while not condition():
        assert process.poll() is None, path.read_text()
        assert time.monotonic() < end, path.read_text()
        time.sleep(0.02)


class Group:
    """Processes of one program, in the order of their numbers, with a file of output each."""

    def __init__(self, processes: Sequence[subprocess.Popen], outputs: Sequence[Path]):
        self.processes = processes
        self._outputs = outputs

    def output(self, number: int) -> str:
        return self._outputs[number].read_text()

    def wait_for(self, number: int, text: str) -> None:
        said = lambda: text in self.output(number)  # noqa: E731
        wait_until(said, self.processes[number], self._outputs[number])

    def codes(self) -> list[int]:
        end = time.monotonic() + LONGEST_SECONDS
        return [process.wait(max(0.1, end - time.monotonic())) for process in self.processes]


def variables(launcher: str, number: int, process: int, port: int) -> dict[str, str]:
    """What a launcher ("jax", "nodes" or "slurm") tells one of its processes."""
    told = {
        "jax": {"JAX_NUM_PROCESSES": number, "JAX_PROCESS_ID": process},
        "nodes": {"NNODES": number, "NODE_RANK": process},
        "slurm": {
            "SLURM_JOB_ID": 1,
            "SLURM_STEP_NODELIST": "localhost",
            "SLURM_NTASKS": number,
            "SLURM_PROCID": process,
            "SLURM_LOCALID": process,
            "SLURM_STEP_TASKS_PER_NODE": number,
        },
    }[launcher]
    told["JAX_COORDINATOR_PORT"] = port
    if launcher != "slurm":
        told["JAX_COORDINATOR_IP"] = "127.0.0.1"
    return {name: str(value) for name, value in told.items()}


@contextlib.contextmanager
def started(command: Sequence[str], folder: Path, launcher: str = "jax") -> Iterator[Group]:
    """Starts two processes of a command of Python; the folder receives <process>.log."""
    port, processes, outputs = free_port(), [], []
    try:
        for process in range(2):
            outputs.append(folder / f"{process}.log")
            with outputs[-1].open("w") as log:
                environment = as_users_do() | variables(launcher, 2, process, port)
                processes.append(
                    programs.popen(
                        [sys.executable, *command],
                        cwd=REPOSITORY,
                        env=environment,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                    )
                )
        yield Group(processes, outputs)
    finally:
        for process in processes:
            process.kill()
            with process:
                pass


def pid_of(output, process):
    """The process id that the launcher printed."""
    (line,) = (line for line in output.read_text().splitlines() if "process ids" in line)
    return int(line.split(": ")[-1].split()[process])
