"""Options of every place, the command line of train.py, external commands."""

import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Annotated, ClassVar, NamedTuple

from MaxText.config.command_line import ProgramOptions
from MaxText.config.config_files import REPOSITORY
from MaxText.config.keys import Natural, Parser, key
from MaxText.config.loading import load
from MaxText.config.sources import Source
from MaxText.errors import UserError

Log = Callable[[str], None]

TRAIN_COMMAND = (sys.executable, str(REPOSITORY / "MaxText" / "train.py"))

# Cloud errors for a temporary lack of capacity. An exhausted quota is not temporary.
_NO_CAPACITY = re.compile(
    r"no more capacity|insufficient capacity|not enough (resources|capacity)|stockout|out of "
    r"capacity|RESOURCE_EXHAUSTED|ZONE_RESOURCE_POOL_EXHAUSTED|currently unavailable|"
    r"internal error|try again later",
    re.IGNORECASE,
)


def _repeated(text: str) -> tuple[str, ...]:
    return (text,)


Repeated = Annotated[tuple[str, ...], Parser(_repeated, "text; may be given several times", True)]


class LaunchOptions(ProgramOptions):
    """Options of all places."""

    RENAMED: ClassVar = {
        "devices": "devices_per_process",
        "grace": "grace_period",
        "job": "job_id",
        "lines": "tail",
        "logs": "log_dir",
        "tries": "max_attempts",
        "type": "accelerator_type",
    }

    dry_run: bool = key(False, "Print the commands.")
    max_restarts: Natural = key(10, "Maximum restarts without a new checkpoint (SLURM: in total).")


class RunArguments(NamedTuple):
    """Arguments of train.py with a fixed run_name, the same for every process."""

    arguments: list[str]
    run_name: str
    folder: str


def resolve_run_args(arguments: Sequence[str]) -> RunArguments:
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


class Commands:
    """Runs commands one at a time; with `dry_run` only prints them."""

    def __init__(self, log: Log, *, dry_run: bool):
        self._log = log
        self.dry_run = dry_run

    def run(self, command: Sequence[str], *, max_attempts: int = 1, delay: float = 0.0) -> None:
        """Runs a command with its output on the terminal.

        Repeats it, `delay` seconds apart, while the cloud reports a lack of capacity. Raises
        UserError if it fails.
        """
        self._log(f"+ {shlex.join(command)}")
        if self.dry_run:
            return
        kept = {"stderr": subprocess.PIPE, "text": True, "errors": "replace"}
        for number in range(1, max_attempts + 1):
            done = self._start(command, **(kept if max_attempts > 1 else {}))
            if errors := done.stderr or "":
                self._log(errors.rstrip())
            if done.returncode == 0:
                return
            is_full = _NO_CAPACITY.search(errors) and "quota" not in errors.lower()
            if not is_full or number == max_attempts:
                many = f" (attempt {number}/{max_attempts})" if is_full else ""
                code = done.returncode
                raise UserError(f"{shlex.join(command)} exited with code {code}{many}; see above.")
            self._log(f"No capacity. Attempt {number + 1}/{max_attempts} in {delay:g} s.")
            time.sleep(delay)

    def output(self, command: Sequence[str], *, in_dry_run: str = "") -> str:
        """Returns the stripped output of a command, or `in_dry_run`."""
        self._log(f"+ {shlex.join(command)}")
        if self.dry_run:
            return in_dry_run
        done = self._start(command, stdout=subprocess.PIPE, encoding="utf-8")
        if done.returncode != 0:
            raise UserError(f"{shlex.join(command)} exited with code {done.returncode}; see above.")
        return done.stdout.strip()

    def _start(self, command: Sequence[str], **options) -> subprocess.CompletedProcess:
        try:
            return subprocess.run(list(command), check=False, **options)
        except FileNotFoundError as error:
            raise UserError(
                f"{command[0]} is not installed or not on PATH. Use --dry-run to print the "
                "commands and run them elsewhere."
            ) from error
