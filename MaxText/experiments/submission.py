"""Runs of a comparison as jobs of SLURM, Kubernetes or SkyPilot: one job for each run.

The launchers of launch.py submit them. All runs and this machine share the comparison's folder:
SLURM's nodes have a common file system, pods a persistent volume claim, and SkyPilot's machines a
mounted bucket.
"""

import dataclasses
import hashlib
import shlex
from pathlib import Path
from typing import Literal

from MaxText.config.problems import ConfigIssue
from MaxText.config.program_options import read_options
from MaxText.errors import UserError
from MaxText.launchers import jobset, skypilot, slurm
from MaxText.launchers.commands import Commands, LaunchOptions, Log, RunArguments
from MaxText.launchers.jobset import JobSetOptions
from MaxText.launchers.skypilot import SkyPilotOptions
from MaxText.launchers.slurm import SlurmOptions

Engine = Literal["slurm", "jobset", "sky"]
ENGINES: dict[str, type[LaunchOptions]] = {
    "slurm": SlurmOptions,
    "jobset": JobSetOptions,
    "sky": SkyPilotOptions,
}
# Set for each run.
_SET_PER_RUN = ("name", "log_dir", "job_id")


def read_launch_options(launch: str, text: str) -> tuple[LaunchOptions | None, list[ConfigIssue]]:
    """Returns the options of launch.py for an engine, and their problems.

    Args:
      launch: As of compare.py; another value than those of ENGINES has no options.
      text: The options as typed for launch.py.
    """
    location = (f"command line, launch_options={text}",)
    if launch not in ENGINES:
        if not text:
            return None, []
        message = f"launch_options are of launch={', '.join(ENGINES)}, and launch={launch}"
        return None, [ConfigIssue(message, location)]
    try:
        words = shlex.split(text)
    except ValueError as error:
        return None, [ConfigIssue(f"launch_options: {error}", location)]
    parsed = read_options(ENGINES[launch], words, takes_keys=False)
    problems = [*parsed.problems]
    unexpected = [*parsed.operands, *parsed.config_files]
    set_per_run = [f"--{name.replace('_', '-')}" for name in _SET_PER_RUN if name in parsed.given]
    if unexpected or set_per_run:
        message = (
            f"launch_options: {' '.join(unexpected + set_per_run)} cannot be given: these are "
            "options of launch.py that all runs share"
        )
        problems.append(ConfigIssue(message, location))
    return parsed.options, problems


def check_folder(options: LaunchOptions, folder: Path) -> None:
    """Checks that the jobs and this machine share the comparison's folder.

    Args:
      options: Of launch.py.
      folder: Of the comparison.

    Raises:
      UserError: The folder is in no claim or mount, or the options are refused.
    """
    if isinstance(options, JobSetOptions):
        jobset.check_options(options)
        _check_within(folder, "--claim=CLAIM:PATH", options.claim)
    elif isinstance(options, SkyPilotOptions):
        _check_within(folder, "--mount=BUCKET:PATH", options.mount)


def _check_within(folder: Path, form: str, places: tuple[str, ...]) -> None:
    paths = [place.rpartition(":")[2] for place in places]
    if not any(folder.absolute().is_relative_to(path) for path in paths):
        shared_paths = ", ".join(paths) or "none"
        raise UserError(
            f"output={folder} is in no folder that the jobs share with this machine (there: "
            f"{shared_paths}). Set output= to a folder below PATH of launch_options='{form}', "
            "which has to be the same folder here."
        )


def submit_run(
    options: LaunchOptions,
    *,
    label: str,
    arguments: list[str],
    folder: Path,
    previous: str,
    commands: Commands,
    log: Log,
) -> str:
    """Submits a run.

    Args:
      options: Of launch.py, without those of a single run.
      label: Of the run, for the name of its job.
      arguments: Of train.py.
      folder: Of the run, for logs and manifests.
      previous: Id of the job to wait for; "" for none.
      commands: Runs the client of the engine.
      log: Gets each line.

    Returns:
      The id of the job: SLURM's number, or its name.

    Raises:
      UserError: The client is missing or fails, or a job cannot wait for another one.
    """
    if isinstance(options, SlurmOptions):
        dependency = (f"--dependency=afterok:{previous}",) if previous else ()
        job = dataclasses.replace(
            options,
            name=label,
            log_dir=str(folder),
            sbatch=(*options.sbatch, *dependency),
        )
        return slurm.submit(job, arguments, commands, log)
    if previous:
        raise UserError(
            f"{label} continues another run, for which only SLURM's jobs can wait. Use "
            "launch=slurm, or launch=print and run the commands one after the other."
        )
    # Comparisons have runs of the same label, and an engine has one job of a name.
    digest = hashlib.sha256(str(folder.absolute()).encode()).hexdigest()[:8]
    name = jobset.jobset_name(f"run-{label[:24]}-{digest}")
    run = RunArguments(arguments, name, str(folder.absolute()))
    if isinstance(options, JobSetOptions):
        job = dataclasses.replace(options, name=name, log_dir=str(folder))
        jobset.submit(job, run, commands, log)
    else:
        assert isinstance(options, SkyPilotOptions)
        job = dataclasses.replace(options, name=name, log_dir=str(folder))
        skypilot.submit(job, run, commands, log)
    return name
