"""Submits a run as a managed job of SkyPilot, which finds and replaces its machines.

SkyPilot copies the working tree, calls setup.sh on every node and starts train.py there. It starts
the job again on other machines after a preemption, and after exit codes that say so. An array is
one task file, which `sky jobs launch --num-jobs` starts once for each task, on machines of its own.
"""

import dataclasses
import json
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from MaxText import exit_codes
from MaxText.config.config_files import REPOSITORY
from MaxText.config.keys import Count
from MaxText.config.program_options import option
from MaxText.errors import UserError
from MaxText.launchers.commands import (
    Commands,
    LaunchOptions,
    Log,
    RunArguments,
    manifest_yaml,
)
from MaxText.launchers.job_array import JobArray
from MaxText.runtime.start_up import DEFAULT_PORT

_TRAIN_COMMAND = (".venv/bin/python", "MaxText/train.py")  # in the copied working tree
# Of managed jobs that will not run again; all others begin with FAILED.
_ENDED = ("SUCCEEDED", "CANCELLED")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SkyPilotOptions(LaunchOptions):
    """sky submit, status, logs or stop: a managed job of SkyPilot."""

    name: str = option("", "Name of the job, by default run_name.", metavar="NAME")
    accelerators: str = option("", "Accelerators of a node, e.g. H100:8 or tpu-v5p-32.")
    nodes: Count = option(1, "Nodes; a TPU slice is one.", metavar="NUMBER")
    infra: str = option("", "Where, e.g. gcp/us-east5/us-east5-a, k8s or slurm.", metavar="PLACE")
    version: str = option("", "Runtime version of a TPU VM, e.g. v2-alpha-tpuv5.")
    spot: bool = option(False, "Spot machines: cheaper, preempted at any time.")
    mount: tuple[str, ...] = option(
        (),
        "Bucket and where to mount it, e.g. --mount=gs://bucket:/data; may be given several times.",
        metavar="BUCKET:PATH",
        repeated=True,
    )
    log_dir: str = option("", "Folder of the task file.", metavar="DIR")


def skypilot_task(options: SkyPilotOptions, arguments: Sequence[str]) -> dict[str, Any]:
    """Returns the task of a run.

    Args:
      options: Options of the job; `name` and `accelerators` are set.
      arguments: Arguments of train.py.
    """
    return _task(options, [f"exec {shlex.join([*_TRAIN_COMMAND, *arguments])}"])


def skypilot_array(options: SkyPilotOptions, array: JobArray) -> dict[str, Any]:
    """Returns the task that each job of an array runs.

    Args:
      options: Options of a job; `name` and `accelerators` are set.
      array: The tasks.
    """
    lines = [
        array.read_commands("SKYPILOT_JOB_RANK"),
        "while read -r command <&3; do",
        '  eval "$command" || exit $?',
        'done 3<<< "$commands"',
    ]
    return _task(options, lines)


def _task(options: SkyPilotOptions, run_lines: Sequence[str]) -> dict[str, Any]:
    is_tpu = options.accelerators.startswith("tpu-")
    device = "tpu" if is_tpu else "gpu"
    resources: dict[str, Any] = {"accelerators": options.accelerators}
    if options.infra:
        resources["infra"] = options.infra
    if options.version:
        resources["accelerator_args"] = {"runtime_version": options.version}
    if options.spot:
        resources["use_spot"] = True
    resources["job_recovery"] = {
        "max_restarts_on_errors": 0,
        "recover_on_exit_codes": list(exit_codes.RESTARTABLE),
    }
    lines = []
    if not is_tpu and options.nodes > 1:  # a TPU's hosts find each other by its metadata
        lines = [
            'first_node="$(head -n1 <<<"$SKYPILOT_NODE_IPS")"',
            f'export JAX_COORDINATOR_ADDRESS="$first_node:{DEFAULT_PORT}"',
            'export JAX_NUM_PROCESSES="$SKYPILOT_NUM_NODES" JAX_PROCESS_ID="$SKYPILOT_NODE_RANK"',
        ]
    task: dict[str, Any] = {
        "name": options.name,
        "num_nodes": options.nodes,
        "resources": resources,
        "workdir": str(REPOSITORY),
    }
    if options.mount:
        task["file_mounts"] = {
            path: {"source": bucket, "mode": "MOUNT"} for bucket, path in _mounts(options)
        }
    return task | {
        "setup": f"bash setup.sh DEVICE={device}\n",
        "run": "\n".join([*lines, *run_lines, ""]),
    }


def _mounts(options: SkyPilotOptions) -> list[tuple[str, str]]:
    """Returns the bucket and the path of each mount."""
    mounts = []
    for mount in options.mount:
        bucket, _, path = mount.rpartition(":")
        mounts.append((bucket, path))
    return mounts


def submit(options: SkyPilotOptions, run: RunArguments, commands: Commands, log: Log) -> None:
    """Writes the task file to the log folder and launches it as a managed job.

    Args:
      options: Options of the job.
      run: Arguments of train.py.
      commands: Runs sky, or prints it in a dry run.
      log: Prints a line.

    Raises:
      UserError: The options are refused, the file cannot be written, or sky fails.
    """
    check_options(options, run.folder)
    options = dataclasses.replace(options, name=options.name or run.run_name)
    path = run.log_folder(options.log_dir) / f"{options.name}.sky.yml"
    task = manifest_yaml([skypilot_task(options, run.arguments)])
    commands.write(path, task)
    commands.run(["sky", "jobs", "launch", "--yes", "--detach-run", str(path)])
    if not commands.dry_run:
        log(f"job {options.name}; output: launch.py sky logs --name={options.name}")


def check_options(options: SkyPilotOptions, run_folder: str) -> None:
    """Refuses options of a job that contradict each other or are missing.

    Args:
      options: Options of the job.
      run_folder: Folder that has to outlive the machines.

    Raises:
      UserError: One message with all problems.
    """
    problems = []
    if not options.accelerators:
        problems.append("--accelerators is needed, e.g. --accelerators=H100:8 or tpu-v5p-32")
    if options.version and not options.accelerators.startswith("tpu-"):
        problems.append(f"--version={options.version} is of TPU VMs")
    problems += [
        f"--mount={mount} is not of the form gs://BUCKET:/PATH"
        for mount in options.mount
        if not re.fullmatch(r"\w+://[^:]+:/.*", mount)
    ]
    is_mounted = any(Path(run_folder).is_relative_to(path) for _, path in _mounts(options))
    if "://" not in run_folder and not is_mounted:
        problems.append(
            f"{run_folder} ends with the machine that it is on, so that a recovered job starts "
            "from scratch: set base_output_directory to a bucket, or to a folder of a "
            "--mount"
        )
    if problems:
        raise UserError("; ".join(problems) + ".")


def submit_array(options: SkyPilotOptions, array: JobArray, commands: Commands, log: Log) -> None:
    """Writes the commands and the task file of an array, and launches its jobs.

    Args:
      options: Options of a job.
      array: The tasks.
      commands: Runs sky, or prints it in a dry run.
      log: Prints a line.

    Raises:
      UserError: The options are refused, a file cannot be written, or sky fails.
    """
    check_options(options, str(array.folder))
    if array.max_parallel is not None:
        raise UserError(
            f"jobs={array.max_parallel} limits arrays of SLURM and Kubernetes. SkyPilot starts all "
            "jobs of an array as it finds machines: leave out jobs=."
        )
    options = dataclasses.replace(options, name=array.name)
    commands.write(array.command_file, array.commands(_TRAIN_COMMAND))
    path = array.folder / "array.sky.yml"
    commands.write(path, manifest_yaml([skypilot_array(options, array)]))
    number = f"--num-jobs={len(array.tasks)}"
    commands.run(["sky", "jobs", "launch", "--yes", "--detach-run", number, str(path)])
    if not commands.dry_run:
        log(f"{len(array.tasks)} jobs {array.name}; their numbers: launch.py sky status")


def active_tasks(array_name: str, commands: Commands) -> set[int]:
    """Returns the tasks of an array whose jobs have not ended.

    Raises:
      UserError: sky is missing or fails, or its answer cannot be read.
    """
    answer = commands.output(["sky", "jobs", "queue", "--all", "--output=json"])
    try:
        jobs = [job for job in json.loads(answer) if job["job_name"] == array_name]
        states = [job["status"] for job in sorted(jobs, key=lambda job: job["job_id"])]
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(
            f"sky jobs queue --output=json answered without a list of jobs ({error!r}). Update "
            "SkyPilot to 0.14."
        ) from error
    # Ranks are in the order of ids.
    return {
        rank
        for rank, state in enumerate(states)
        if state not in _ENDED and not state.startswith("FAILED")
    }


def act(action: str, options: SkyPilotOptions, commands: Commands) -> None:
    """Lists managed jobs, follows the log of one, or cancels it.

    Args:
      action: "status", "logs" or "stop".
      options: Options with the job's `name`.
      commands: Runs sky, or prints it in a dry run.

    Raises:
      UserError: No name is set, or sky fails.
    """
    if action == "status":
        commands.run(["sky", "jobs", "queue"])
        return
    if not options.name:
        raise UserError(f"{action} requires --name (printed by submit).")
    command = {"logs": ["logs", "--name"], "stop": ["cancel", "--yes", "--name"]}[action]
    commands.run(["sky", "jobs", *command, options.name])
