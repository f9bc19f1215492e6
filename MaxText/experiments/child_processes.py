"""Runs train.py, and counts jax devices, in subprocesses.

The comparing program opens no accelerator itself, so that all are free for the runs.
"""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from MaxText.config.catalog import all_keys
from MaxText.config.config_files import REPOSITORY
from MaxText.config.maxtext_keys import ALIASES
from MaxText.errors import UserError

TRAIN = REPOSITORY / "MaxText" / "train.py"

_COUNT_DEVICES = """
import sys
sys.path.insert(0, sys.argv[1])
from MaxText.errors import UserError
from MaxText.runtime import start_up
start_up.choose_platform(sys.argv[2])
try:
    print("devices", len(start_up.find_devices(sys.argv[2])))
except UserError as error:
    sys.exit(str(error))
"""


def key_variables(environment: Mapping[str, str]) -> list[str]:
    """Returns environment variables that would override a run's keys."""
    names = {f"M_{name.upper()}" for name in (*all_keys(), *ALIASES)}
    return sorted(names.intersection(environment))


def environment_of_runs() -> dict[str, str]:
    """Returns the environment without key variables: keys are resolved."""
    leave_out = key_variables(os.environ)
    return {name: value for name, value in os.environ.items() if name not in leave_out}


def train_command(config: Path) -> list[str]:
    """Returns the command that trains a configuration."""
    # A relative path with "=" (labels contain it) would parse as key=value.
    is_like_key = "=" in str(config) and not config.is_absolute()
    return [sys.executable, str(TRAIN), f"./{config}" if is_like_key else str(config)]


def count_devices(hardware: str) -> int:
    """Returns the device count of this machine; raises UserError if none."""
    command = [sys.executable, "-c", _COUNT_DEVICES, str(REPOSITORY), hardware]
    done = subprocess.run(
        command, env=environment_of_runs(), capture_output=True, text=True, check=False
    )
    words = done.stdout.split()
    if done.returncode or words[:1] != ["devices"]:
        lines = done.stderr.strip().splitlines() or ["no message"]
        raise UserError(f"the devices of this machine cannot be counted: {lines[-1]}")
    return int(words[1])


def last_lines(log: Path, count: int = 12) -> str:
    """Returns the end of a log, indented."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.exists() else []
    return "\n".join(f"  | {line}" for line in lines[-count:]) or "  | (nothing)"
