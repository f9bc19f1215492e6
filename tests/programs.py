"""Starts the programs as users do."""

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.house.sources import REPOSITORY


def start(
    program: str,
    arguments: Sequence[str],
    cwd: Path,
    environment: Mapping[str, str],
    *,
    options: Sequence[str] = (),
) -> subprocess.CompletedProcess:
    """A program of MaxText/ on the CPU, to its end.

    Args:
      program: for example "decode.py".
      environment: the fixture users_environment.
      options: of Python itself.
    """
    return subprocess.run(
        [sys.executable, *options, str(REPOSITORY / "MaxText" / program), *arguments],
        cwd=cwd,
        env={**environment, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
