"""Starts the programs as users do, and small ones that run next to a test."""

import atexit
import contextlib
import functools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent import futures
from pathlib import Path
from typing import Any

from tests.house.sources import REPOSITORY

LONGEST_SECONDS = 300.0


def run(
    program: str,
    arguments: Sequence[str],
    cwd: Path,
    environment: Mapping[str, str],
    *,
    options: Sequence[str] = (),
    timeout: float = LONGEST_SECONDS,
) -> subprocess.CompletedProcess:
    """A program of MaxText/ on the CPU, to its end.

    Args:
      program: for example "decode.py".
      environment: the fixture users_environment.
      options: of Python itself; with them a new interpreter starts.
    """
    process = start(
        program,
        arguments,
        cwd,
        environment,
        options=options,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    with process:
        try:
            stdout, stderr = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


def start(
    program: str,
    arguments: Sequence[str],
    cwd: Path,
    environment: Mapping[str, str],
    *,
    options: Sequence[str] = (),
    **keywords: Any,
) -> "subprocess.Popen | Forked":
    """A program of MaxText/ on the CPU that goes on behind the test's back.

    Args:
      keywords: stdout and stderr of subprocess.Popen; output is text.
    """
    command = [sys.executable, *options, str(REPOSITORY / "MaxText" / program), *arguments]
    environment = {**environment, "JAX_PLATFORMS": "cpu"}
    return popen(command, cwd=cwd, env=environment, text=True, **keywords)


@contextlib.contextmanager
def started(
    program: str,
    *arguments: str,
    environment: Mapping[str, str] | None = None,
    options: Sequence[str] = (),
) -> "Iterator[subprocess.Popen | Forked]":
    """A text's process, output and errors in one text pipe; killed at the end of the block.

    With options of Python it is a new interpreter, which has imported nothing and can start itself
    again.
    """
    process = popen(
        [sys.executable, *options, "-c", textwrap.dedent(program), *arguments],
        cwd=REPOSITORY,
        text=True,
        env={**os.environ, **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        yield process
    finally:
        process.kill()
        with process:
            pass


def wait_for(process: "subprocess.Popen | Forked", text: str) -> str:
    """Reads lines until one has `text`; gives all of them."""
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if text in line:
            return "".join(lines)
    raise AssertionError(f"{text!r} does not come: {''.join(lines)}")


def ended(process: "subprocess.Popen | Forked") -> tuple[int, str]:
    """(exit code, the rest of the output) of a process that ends by itself."""
    output, _ = process.communicate(timeout=LONGEST_SECONDS)
    return process.returncode, output


def popen(command: Sequence[str], **keywords: Any) -> "subprocess.Popen | Forked":
    """subprocess.Popen, but a program (a file, -c or -m) begins with everything imported.

    It is a new interpreter after all with other options of Python, and with variables that jax
    reads while it is imported.
    """
    environment = keywords.get("env") or os.environ
    first = str(command[1])
    is_program = command[0] == sys.executable and (first.endswith(".py") or first in ("-c", "-m"))
    if is_program and _of_jax(environment) in ({}, _OF_SERVER):
        return Forked(command, **keywords)
    return subprocess.Popen(command, **keywords)


_OF_SERVER = {"JAX_PLATFORMS": "cpu"}
_READ_LATER = ("JAX_COORDINATOR_", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")


def _of_jax(environment: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in environment.items()
        if name.startswith("JAX_") and not name.startswith(_READ_LATER)
    }


class _Server:
    """The server of this test process; it ends, with all its children, when that does."""

    def __init__(self):
        self.socket, child_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with child_end:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.program_server", str(child_end.fileno())],
                cwd=REPOSITORY,
                env={**os.environ, **_OF_SERVER, **_NO_RESTART},
                pass_fds=[child_end.fileno()],
                start_new_session=True,
            )
        atexit.register(self.close)

    def close(self) -> None:
        self.socket.close()
        self.process.wait()


_server = functools.cache(_Server)
# A program that finds the allocator set does not start itself again.
_NO_RESTART = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=0"}


class Forked:
    """A process of the server's, with the interface of subprocess.Popen."""

    def __init__(self, command, *, cwd, env=None, stdout=None, stderr=None, text=True):
        self.args, self.returncode, self.stdout, self.stderr = command, None, None, None
        standard = [os.open(os.devnull, os.O_RDONLY), 1, 2]
        descriptors = [standard[0]]
        for number, target in ((1, stdout), (2, stderr)):
            if target == subprocess.PIPE:
                reading, standard[number] = os.pipe()
                descriptors.append(standard[number])
                stream = os.fdopen(reading, "r" if text else "rb")
                setattr(self, ("stdout", "stderr")[number - 1], stream)
            elif target == subprocess.STDOUT:
                standard[number] = standard[1]
            elif target is not None:
                standard[number] = target if isinstance(target, int) else target.fileno()
        reading, writing = os.pipe()
        self._answers = os.fdopen(reading, "rb", buffering=0)  # select must see what is left
        request = {
            "arguments": list(map(str, command[1:])),
            "cwd": str(cwd),
            "ignores_ctrl_c": signal.getsignal(signal.SIGINT) is signal.SIG_IGN,
            "environment": {**(os.environ if env is None else env), **_OF_SERVER, **_NO_RESTART},
        }
        socket.send_fds(_server().socket, [json.dumps(request).encode()], [*standard, writing])
        for descriptor in [*descriptors, writing]:
            os.close(descriptor)
        self.pid = int(self._answers.readline())

    def wait(self, timeout=None):
        if self.returncode is None:
            if not select.select([self._answers], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout)
            self.returncode = int(self._answers.readline() or -signal.SIGKILL)
        return self.returncode

    def poll(self):
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self):
        self.send_signal(signal.SIGKILL)

    def terminate(self):
        self.send_signal(signal.SIGTERM)

    def communicate(self, timeout=None):
        """All that is left of its output, and waits for its end; it is killed after `timeout`."""
        timer = threading.Timer(timeout or LONGEST_SECONDS, self.kill)
        timer.start()
        with futures.ThreadPoolExecutor(2) as pool:
            stdout, stderr = pool.map(
                lambda stream: stream and stream.read(), (self.stdout, self.stderr)
            )
        self.wait()
        timer.cancel()
        return stdout, stderr

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for stream in (self.stdout, self.stderr):
            if stream is not None:
                stream.close()
        self.wait()
        self._answers.close()
