"""Small Python programs that run during a test, and cannot outlive it."""

import contextlib
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence

from tests import programs
from tests.house.sources import REPOSITORY

LONGEST_SECONDS = 100.0


@contextlib.contextmanager
def started(
    program: str,
    *arguments: str,
    environment: Mapping[str, str] | None = None,
    options: Sequence[str] = (),
) -> Iterator[subprocess.Popen]:
    """A program's process, output and errors in one text pipe; killed at the end of the block.

    With options of Python it is a new interpreter, which can start itself again.
    """
    process = programs.popen(
        [sys.executable, *options, "-c", textwrap.dedent(program), *arguments],
        cwd=REPOSITORY, text=True, env={**os.environ, **(environment or {})},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        with process:
            pass


def wait_for(process: subprocess.Popen, text: str) -> str:
    """Reads lines until one has `text`; gives all of them."""
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if text in line:
            return "".join(lines)
    raise AssertionError(f"{text!r} does not come: {''.join(lines)}")


def ended(process: subprocess.Popen) -> tuple[int, str]:
    """(exit code, the rest of the output) of a process that ends by itself."""
    output, _ = process.communicate(timeout=LONGEST_SECONDS)
    return process.returncode, output
