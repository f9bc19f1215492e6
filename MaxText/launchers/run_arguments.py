"""Arguments of train.py for processes that share one run."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from MaxText.config.config_files import REPOSITORY
from MaxText.config.loading import load
from MaxText.config.sources import Source


class RunArguments(NamedTuple):
    """Arguments of train.py with a fixed run_name, the same for every process."""

    arguments: list[str]
    run_name: str
    folder: str


def for_one_run(arguments: Sequence[str]) -> RunArguments:
    """Checks the configuration like train.py, and fixes a time-based run_name."""
    loaded = load(list(arguments), "train.py")
    run = loaded.config.run
    folder = f"{run.base_output_directory}/{run.run_name}"
    given = list(arguments)
    # A run_name derived from a given path is the same every time.
    origin = loaded.origins["run_name"]
    if origin.source is Source.DERIVED and "time of start" in origin.note:
        given.append(f"run_name={run.run_name}")
    return RunArguments(given, run.run_name, folder)


def program(name: str = "train.py") -> list[str]:
    """Returns the command line prefix for a program of this package."""
    return [sys.executable, str(Path(REPOSITORY) / "MaxText" / name)]
