"""A run as a job of SLURM: the batch script, sbatch, squeue, scancel."""

import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from MaxText import exit_codes
from MaxText.errors import UserError
from MaxText.launchers.commands import Commands
from MaxText.launchers.run_arguments import program
from MaxText.runtime.cluster import NUM_DEVICES_VARIABLE

# What processes have to save in, before the time of the job is over.
_SECONDS_BEFORE_END = 180


class SlurmJob(NamedTuple):
    """What is asked of SLURM.

    Attributes:
      name: of the job.
      nodes: machines.
      processes_per_node: 1 takes all devices of a node; as many as GPUs gives one to each.
      gpus_per_node: 0 for none.
      options: further lines for #SBATCH, such as "--partition=long".
      max_restarts: of the whole job, by requeueing.
      logs: folder for script and output, shared by the nodes.
    """

    name: str
    nodes: int
    processes_per_node: int
    gpus_per_node: int
    options: Sequence[str]
    max_restarts: int
    logs: Path


def script(job: SlurmJob, arguments: Sequence[str]) -> str:
    """The batch script: one srun of all processes; the job is requeued after codes 75 and 76.

    Args:
      arguments: of train.py.
    """
    logs = shlex.quote(str(job.logs))
    lines = [
        f"--job-name={job.name}",
        f"--nodes={job.nodes}",
        f"--ntasks-per-node={job.processes_per_node}",
        *([f"--gpus-per-node={job.gpus_per_node}"] if job.gpus_per_node else []),
        "--exclusive",
        # To the processes, not to this script: they save and end with 75.
        f"--signal=TERM@{_SECONDS_BEFORE_END}",
        "--requeue",
        "--open-mode=append",
        f"--output={job.logs}/%j.log",
        *job.options,
    ]
    devices = job.nodes * job.gpus_per_node
    codes = "|".join(str(code) for code in exit_codes.WORTH_A_RESTART)
    return "\n".join(
        [
            "#!/bin/bash",
            *(f"#SBATCH {line}" for line in lines),
            "",
            *([f"export {NUM_DEVICES_VARIABLE}={devices}"] if devices else []),
            # After one has ended the others end by themselves, and say what they waited for.
            f"srun --kill-on-bad-exit=0 --wait=300 --output={logs}/%j-%t.log --open-mode=append \\",
            f"  {shlex.join([*program(), *arguments])}",
            "code=$?",
            "case $code in",
            f"  {codes}|12[89]|1[3-9][0-9])  # asked to stop, a process lost, a signal",
            f'    if [ "${{SLURM_RESTART_COUNT:-0}}" -lt {job.max_restarts} ]; then',
            '      scontrol requeue "$SLURM_JOB_ID"',
            "    fi ;;",
            "esac",
            "exit $code",
            "",
        ]
    )


def submit(job: SlurmJob, arguments: Sequence[str], commands: Commands, show) -> str:
    """Writes the script and hands it to sbatch.

    Returns:
      The number of the job; empty in a dry run.

    Raises:
      UserError: the script cannot be written, or sbatch fails.
    """
    text = script(job, arguments)
    path = job.logs / f"{job.name}.sh"
    if commands.dry_run:
        show(f"# {path}\n{text}")
    else:
        try:
            job.logs.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise UserError(f"cannot write {path}: {error}. Choose another --logs.") from error
    answer = commands.output(["sbatch", "--parsable", str(path)])
    number = answer.partition(";")[0]
    if not commands.dry_run:
        if not re.fullmatch(r"\d+", number):
            raise UserError(f"sbatch gave {answer!r} and no number of a job.")
        show(f"job {number}; output in {job.logs}/{number}-<process>.log")
    return number
