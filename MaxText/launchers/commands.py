"""What all launchers share: options, the command line of train.py, external commands."""

import dataclasses
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from MaxText.config.config_files import REPOSITORY
from MaxText.config.keys import Natural
from MaxText.config.loading import load
from MaxText.config.program_options import option
from MaxText.config.sources import Source
from MaxText.errors import UserError

Log = Callable[[str], None]

TRAIN_COMMAND = (sys.executable, str(REPOSITORY / "MaxText" / "train.py"))

_OF_SLURM = "It comes with SLURM: log in to a node of the cluster. "
# Client of an engine -> how to get it.
_INSTALL = {
    "gcloud": "Install it: https://cloud.google.com/sdk/docs/install. ",
    "kubectl": "Install it: gcloud components install kubectl, or https://kubernetes.io/docs/tasks/"
    "tools. ",
    "sky": "Install it: pip install 'skypilot[gcp]' in an environment of its own ([aws], ...). ",
    "sbatch": _OF_SLURM,
    "scancel": _OF_SLURM,
    "squeue": _OF_SLURM,
}

# Cloud errors for a temporary lack of capacity. An exhausted quota is not temporary.
_NO_CAPACITY = re.compile(
    r"no more capacity|insufficient capacity|not enough (resources|capacity)|stockout|out of "
    r"capacity|RESOURCE_EXHAUSTED|ZONE_RESOURCE_POOL_EXHAUSTED|currently unavailable|"
    r"internal error|try again later",
    re.IGNORECASE,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """Options of all places."""

    dry_run: bool = option(False, "Print the commands.")
    max_restarts: Natural = option(
        10, "Maximum restarts without a new checkpoint (SLURM: in total).", metavar="NUMBER"
    )


class RunArguments(NamedTuple):
    """Arguments of train.py with a fixed run_name, the same for every process.

    `folder` is base_output_directory/run_name.
    """

    arguments: list[str]
    run_name: str
    folder: str

    def log_folder(self, log_dir: str) -> Path:
        """Returns the folder of logs and scripts: `log_dir`, or by default one of the run."""
        return Path(log_dir or f"maxtext_output/logs/{self.run_name}")


def resolve_run_args(arguments: Sequence[str]) -> RunArguments:
    """Checks the configuration as train.py does, and fixes a run_name that contains the time.

    Raises:
      UserError: train.py would refuse the arguments.
    """
    loaded = load(list(arguments), "train.py")
    run = loaded.config.run
    folder = f"{run.base_output_directory}/{run.run_name}"
    train_arguments = list(arguments)
    # A run_name derived from a given path is the same every time.
    origin = loaded.origins["run_name"]
    if origin.source is Source.DERIVED and "time of start" in origin.note:
        train_arguments.append(f"run_name={run.run_name}")
    return RunArguments(train_arguments, run.run_name, folder)


def manifest_yaml(manifest: Mapping[str, Any]) -> str:
    """Returns a file for an engine: in the given order, scripts as literal blocks."""
    return yaml.dump(dict(manifest), Dumper=_ManifestDumper, sort_keys=False, width=1000)


class _ManifestDumper(yaml.SafeDumper):
    """Writes text of several lines as a block that is read as it was written."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_ManifestDumper.add_representer(str, _represent_text)


class Commands:
    """Runs commands one at a time; with `dry_run` only prints them."""

    def __init__(self, log: Log, *, dry_run: bool):
        self._log = log
        self.dry_run = dry_run

    def write(self, path: Path, text: str) -> None:
        """Writes a file that a command reads, with its folder; in a dry run prints it.

        Raises:
          UserError: The file cannot be written.
        """
        if self.dry_run:
            self._log(f"# {path}\n{text}")
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            message = f"cannot write {path}: {error}. Set --log-dir to another folder."
            raise UserError(message) from error

    def run(self, command: Sequence[str], *, max_attempts: int = 1, delay: float = 0.0) -> None:
        """Runs a command with its output on the terminal.

        Args:
          command: The program and its arguments.
          max_attempts: How often to try while the cloud reports a lack of capacity.
          delay: Seconds between attempts.

        Raises:
          UserError: The command fails.
        """
        self._log(f"+ {shlex.join(command)}")
        if self.dry_run:
            return
        # Without further attempts nobody reads the errors, so they go to the terminal at once.
        capture: dict[str, Any] = {}
        if max_attempts > 1:
            capture = {"stderr": subprocess.PIPE, "text": True, "errors": "replace"}
        for attempt in range(1, max_attempts + 1):
            completed = self._start(command, **capture)
            error_output = completed.stderr or ""
            if error_output:
                self._log(error_output.rstrip())
            if completed.returncode == 0:
                return
            no_capacity = _NO_CAPACITY.search(error_output) and "quota" not in error_output.lower()
            if not no_capacity or attempt == max_attempts:
                attempt_text = f" (attempt {attempt}/{max_attempts})" if no_capacity else ""
                code = completed.returncode
                raise UserError(
                    f"{shlex.join(command)} exited with code {code}{attempt_text}; see above."
                )
            self._log(f"No capacity. Attempt {attempt + 1}/{max_attempts} in {delay:g} s.")
            time.sleep(delay)

    def output(self, command: Sequence[str], *, in_dry_run: str = "") -> str:
        """Returns the stripped output of a command, or `in_dry_run` in a dry run.

        Raises:
          UserError: The command fails.
        """
        self._log(f"+ {shlex.join(command)}")
        if self.dry_run:
            return in_dry_run
        completed = self._start(command, stdout=subprocess.PIPE, encoding="utf-8")
        if completed.returncode != 0:
            raise UserError(
                f"{shlex.join(command)} exited with code {completed.returncode}; see above."
            )
        return completed.stdout.strip()

    def _start(self, command: Sequence[str], **options) -> subprocess.CompletedProcess:
        try:
            return subprocess.run(list(command), check=False, **options)
        except FileNotFoundError as error:
            remedy = _INSTALL.get(command[0], "")
            raise UserError(
                f"{command[0]} is not installed or not on PATH. {remedy}Use --dry-run to print the "
                "commands and run them elsewhere."
            ) from error
