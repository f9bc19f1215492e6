"""Runs of an experiment as an array of SLURM, Kubernetes or SkyPilot.

A task of the array is a run, or the runs of a growing model one after the other. The launchers of
launch.py submit it. All tasks and this machine share the experiment's folder: SLURM's nodes have a
common file system, pods a persistent volume claim, and SkyPilot's machines a mounted bucket. What
was submitted is recorded there, so that the next submission leaves out what the engine still has.
"""

import dataclasses
import hashlib
import shlex
import shutil
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Literal

from pydantic import BaseModel

from MaxText.config.problems import ConfigIssue
from MaxText.config.program_options import read_options
from MaxText.errors import UserError
from MaxText.launchers import jobset, skypilot, slurm
from MaxText.launchers.commands import Commands, LaunchOptions, Log
from MaxText.launchers.job_array import JobArray
from MaxText.launchers.jobset import JobSetOptions
from MaxText.launchers.skypilot import SkyPilotOptions
from MaxText.launchers.slurm import SlurmOptions
from MaxText.storage.atomic import atomic_write_text

Engine = Literal["slurm", "jobset", "sky"]
ENGINES: dict[str, type[LaunchOptions]] = {
    "slurm": SlurmOptions,
    "jobset": JobSetOptions,
    "sky": SkyPilotOptions,
}
# Set for each array.
_SET_PER_ARRAY = ("name", "log_dir", "job_id")
_SUBMITTED = "submitted"  # folder of submissions, by number
_SUBMISSION = "submission.json"


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
    set_per_array = [
        f"--{name.replace('_', '-')}" for name in _SET_PER_ARRAY if name in parsed.given
    ]
    if unexpected or set_per_array:
        message = (
            f"launch_options: {' '.join(unexpected + set_per_array)} cannot be given: these are "
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


class Submission(BaseModel):
    """What was submitted, as its file has it.

    Attributes:
      job: The array's number for SLURM, its name for other engines.
      namespace: Of Kubernetes.
      tasks: For each task of the array, the folder of its last run.
    """

    engine: Engine
    job: str
    namespace: str = ""
    tasks: list[str]


@dataclasses.dataclass(frozen=True)
class SubmittedTask:
    """A task to submit: runs that follow each other.

    Attributes:
      run_folder: Folder of the last run, by which the task is known.
      runs: Arguments of train.py of each run, in order.
    """

    run_folder: Path
    runs: Sequence[Sequence[str]]


def active_run_folders(folder: Path, unfinished: Collection[str], commands: Commands) -> set[str]:
    """Returns the folders of tasks submitted earlier that are queued or running.

    Args:
      folder: Of the experiment.
      unfinished: Folders of runs that are not over; engines are asked only about these.
      commands: Runs the clients of the engines.

    Raises:
      UserError: A client is missing or fails, or a file of a submission is damaged.
    """
    folders: set[str] = set()
    for path in (folder / _SUBMITTED).glob(f"*/{_SUBMISSION}"):
        try:
            submission = Submission.model_validate_json(path.read_bytes())
        except ValueError as error:
            raise UserError(
                f"{path} is damaged ({error.__class__.__name__}). Delete {path.parent} once its "
                "jobs have ended."
            ) from error
        if not set(unfinished).isdisjoint(submission.tasks):
            folders |= {submission.tasks[number] for number in _active_tasks(submission, commands)}
    return folders


def _active_tasks(submission: Submission, commands: Commands) -> set[int]:
    if submission.engine == "slurm":
        return slurm.active_tasks(submission.job, commands)
    if submission.engine == "jobset":
        num_tasks = len(submission.tasks)
        return jobset.active_tasks(submission.namespace, submission.job, num_tasks, commands)
    return skypilot.active_tasks(submission.job, commands)


def submit_tasks(
    options: LaunchOptions,
    tasks: Sequence[SubmittedTask],
    folder: Path,
    *,
    max_parallel: int | None,
    commands: Commands,
    log: Log,
) -> None:
    """Submits tasks as an array, in a new folder of the experiment.

    Args:
      options: Of launch.py, for each task.
      tasks: At least one.
      folder: Of the experiment.
      max_parallel: Tasks at a time; None for no limit.
      commands: Runs the client of the engine.
      log: Gets each line.

    Raises:
      UserError: The client is missing or fails, or the engine has no such array.
    """
    # Queued tasks of an earlier array still read its commands.
    numbers = [int(path.name) for path in (folder / _SUBMITTED).glob("*") if path.name.isdigit()]
    number = 1 + max(numbers, default=0)
    array_folder = (folder / _SUBMITTED / str(number)).absolute()
    # Another experiment's folder may have the same name, and an engine has one job of a name.
    digest = hashlib.sha256(str(array_folder).encode()).hexdigest()[:8]
    array = JobArray(
        name=jobset.jobset_name(f"runs-{folder.name[:24]}-{digest}"),
        tasks=[task.runs for task in tasks],
        folder=array_folder,
        max_parallel=max_parallel,
    )
    folders = [str(task.run_folder.absolute()) for task in tasks]

    def record(engine: Engine, job: str, namespace: str = "") -> None:
        if not commands.dry_run:
            submission = Submission(engine=engine, job=job, namespace=namespace, tasks=folders)
            array_folder.mkdir(parents=True, exist_ok=True)
            text = submission.model_dump_json(indent=1)
            atomic_write_text(array_folder / _SUBMISSION, f"{text}\n")

    if isinstance(options, SlurmOptions):
        record("slurm", slurm.submit_array(options, array, commands, log))
        return
    # Jobs of the others have names, and are recorded first: an engine may fail after it took some.
    # Without its client nothing is submitted, and nothing could be asked later.
    if isinstance(options, JobSetOptions):
        if shutil.which("kubectl"):
            record("jobset", array.name, options.namespace)
        jobset.submit_array(options, array, commands, log)
    else:
        assert isinstance(options, SkyPilotOptions)
        if shutil.which("sky"):
            record("sky", array.name)
        skypilot.submit_array(options, array, commands, log)
