"""The arguments of train.py for processes that must all mean the same run."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from MaxText.config.config_files import REPOSITORY
from MaxText.config.layering import Layer
from MaxText.config.loading import load


class RunArguments(NamedTuple):
    """Arguments of train.py with a run_name that does not depend on when each process starts.

    Attributes:
      arguments: what follows the program's name.
      run_name: of the run.
      folder: of the run.
    """

    arguments: list[str]
    run_name: str
    folder: str


def for_one_run(arguments: Sequence[str]) -> RunArguments:
    """Checks the configuration; adds the run's name where it was made from the time.

    Raises:
      UserError: as train.py would.
    """
    loaded = load(list(arguments), "train.py")
    run = loaded.config.run
    folder = f"{run.base_output_directory}/{run.run_name}"
    given = list(arguments)
    # A name made of a given path is the same every time.
    origin = loaded.origins["run_name"]
    if origin.layer is Layer.DERIVED and "time of start" in origin.note:
        given.append(f"run_name={run.run_name}")
    return RunArguments(given, run.run_name, folder)


def program(name: str = "train.py") -> list[str]:
    """The command that starts a program of this package with this Python."""
    return [sys.executable, str(Path(REPOSITORY) / "MaxText" / name)]
