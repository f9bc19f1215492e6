"""What all launchers share: options, the command line of train.py, external commands."""

import contextlib
import dataclasses
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from MaxText.config.config_files import REPOSITORY
from MaxText.config.loading import load
from MaxText.config.program_options import option
from MaxText.config.sources import Source
from MaxText.errors import UserError

Log = Callable[[str], None]

TRAIN_COMMAND = (sys.executable, str(REPOSITORY / "MaxText" / "train.py"))

_MAX_ERRORS = 10_000  # bytes, the last ones of a client's errors

_OF_SLURM = (
    "Log in to a node of the cluster, or install it and the cluster's configuration here: sudo "
    "apt-get install slurm-client. "
)
# Client of an engine -> how to get it.
_INSTALL = {
    "gcloud": "Install it: curl https://sdk.cloud.google.com | bash. ",
    "kubectl": "Install it: gcloud components install kubectl, or https://kubernetes.io/docs/tasks/"
    "tools. ",
    "sky": "Install it: pip install 'skypilot[gcp]' in an environment of its own ([aws], ...). ",
    "sbatch": _OF_SLURM,
    "scancel": _OF_SLURM,
    "squeue": _OF_SLURM,
}

_ASK_FOR_RIGHT = "Ask for the right that it names, or log in with another account."
# What a client says, without regard to case -> what to do about it.
_REMEDIES = {
    'no matches for kind "jobset"': "The cluster has no JobSet controller: install it as in "
    "https://jobset.sigs.k8s.io/docs/installation.",
    "strict decoding error|unknown field|unsupported value|is invalid|invalid task": "This version "
    "of the engine refuses the file: compare the fields that it names with the documentation of "
    "the engine, or update it.",
    "connection refused|connection to the server|no configuration has been provided": "The client "
    "has no cluster to talk to: log in, or choose one (kubectl config use-context NAME).",
    "active account|reauthentication|default credentials": "Log in: gcloud auth login.",
    "core/project": "Set --project=NAME.",
    "forbidden|permission.?denied|not authorized|unauthorized": _ASK_FOR_RIGHT,
    "does not have .*(permission|access)": _ASK_FOR_RIGHT,
    "quota": "Ask for a larger quota, or request less.",
    "capacity|stockout|resource.?exhausted|zone_resource_pool_exhausted": "There is no capacity "
    "now: use the action queue, which waits for it, or another zone or type.",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """Options of all places."""

    dry_run: bool = option(False, "Print the commands.")


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


def manifest_yaml(manifests: Sequence[Mapping[str, Any]]) -> str:
    """Returns a file of documents for an engine: keys in their order, scripts as literal blocks."""
    return yaml.dump_all(map(dict, manifests), Dumper=_ManifestDumper, sort_keys=False, width=1000)


class _ManifestDumper(yaml.SafeDumper):
    """Writes text of several lines as a block that is read as it was written."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_ManifestDumper.add_representer(str, _represent_text)


class CommandError(UserError):
    """A command of an engine's client failed; `errors` is what it wrote to stderr."""

    def __init__(self, message: str, errors: str):
        super().__init__(message)
        self.errors = errors


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

    def run(self, command: Sequence[str]) -> None:
        """Runs a command with its output on the terminal.

        Raises:
          UserError: The program is missing, or fails.
        """
        self._log(f"+ {shlex.join(command)}")
        if self.dry_run:
            return
        errors = b""
        with _missing_program(command), subprocess.Popen(command, stderr=subprocess.PIPE) as client:
            assert client.stderr is not None
            # In chunks, as a question of the client does not end with a newline.
            while chunk := os.read(client.stderr.fileno(), 4096):
                sys.stderr.write(chunk.decode(errors="replace"))
                sys.stderr.flush()
                errors = (errors + chunk)[-_MAX_ERRORS:]
        _check_exit(command, client.returncode, errors.decode(errors="replace"))

    def output(self, command: Sequence[str], *, in_dry_run: str = "") -> str:
        """Returns the stripped output of a command, or `in_dry_run` in a dry run.

        Raises:
          UserError: The program is missing, or fails.
        """
        self._log(f"+ {shlex.join(command)}")
        if self.dry_run:
            return in_dry_run
        with _missing_program(command):
            completed = subprocess.run(
                command, capture_output=True, encoding="utf-8", errors="replace", check=False
            )
        sys.stderr.write(completed.stderr)
        _check_exit(command, completed.returncode, completed.stderr[-_MAX_ERRORS:])
        return completed.stdout.strip()


@contextlib.contextmanager
def _missing_program(command: Sequence[str]) -> Iterator[None]:
    """Says how to install a program that is missing."""
    try:
        yield
    except FileNotFoundError as error:
        remedy = _INSTALL.get(command[0], "")
        raise UserError(
            f"{command[0]} is not installed or not on PATH. {remedy}Use --dry-run to print the "
            "commands and run them elsewhere."
        ) from error


def _check_exit(command: Sequence[str], code: int, errors: str) -> None:
    """Raises CommandError for a command that failed, with what to do if `errors` tell."""
    if code == 0:
        return
    message = f"{shlex.join(command)} exited with code {code}; see above."
    for pattern, remedy in _REMEDIES.items():
        if re.search(pattern, errors, re.IGNORECASE):
            message += f"\n  What to do: {remedy}"
            break
    raise CommandError(message, errors)
