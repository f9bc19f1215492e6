"""Submits a run as a SLURM job.

The batch script starts train.py on every node with srun. It requeues itself when the run was
preempted or lost a process, so that the run resumes from its newest checkpoint.
"""

import dataclasses
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from MaxText import exit_codes
from MaxText.config.keys import Count, Natural
from MaxText.config.program_options import option
from MaxText.errors import UserError
from MaxText.launchers.commands import TRAIN_COMMAND, Commands, LaunchOptions, Log
from MaxText.runtime.start_up import NUM_DEVICES_VARIABLE

_SECONDS_BEFORE_END = 180  # for saving, before the job's time limit


@dataclasses.dataclass(frozen=True, kw_only=True)
class SlurmOptions(LaunchOptions):
    """slurm submit, status or stop: a SLURM job."""

    name: str = option("", "Job name, by default run_name.", metavar="NAME")
    nodes: Count = option(1, "Nodes of the job.", metavar="NUMBER")
    processes_per_node: Count = option(1, "Processes per node.", metavar="NUMBER")
    gpus_per_node: Natural = option(0, "GPUs per node.", metavar="NUMBER")
    sbatch: tuple[str, ...] = option(
        (),
        "Extra #SBATCH line, e.g. --sbatch=--partition=long; may be given several times.",
        metavar="FLAG",
        repeated=True,
    )
    job_id: str = option("", "Job id, for status and stop.", metavar="ID")
    log_dir: str = option("", "Log folder.", metavar="DIR")


def render_batch_script(job: SlurmOptions, arguments: Sequence[str]) -> str:
    """Returns the batch script of a job.

    The script requeues itself if the run ends with a restartable exit code or by a signal, at most
    `max_restarts` times. Signals to the script are passed on to the processes, which save and exit.

    Args:
      job: Options of the job; `name` and `log_dir` are set.
      arguments: Arguments of train.py.
    """
    logs = shlex.quote(job.log_dir)
    lines = [
        f"--job-name={job.name}",
        f"--nodes={job.nodes}",
        f"--ntasks-per-node={job.processes_per_node}",
        *([f"--gpus-per-node={job.gpus_per_node}"] if job.gpus_per_node else []),
        "--exclusive",
        # Signals the processes, not this script: they save and exit with 75.
        f"--signal=TERM@{_SECONDS_BEFORE_END}",
        "--requeue",
        "--open-mode=append",
        f"--output={job.log_dir}/%j.log",
        *job.sbatch,
    ]
    devices = job.nodes * job.gpus_per_node
    codes = "|".join(str(code) for code in exit_codes.RESTARTABLE)
    return "\n".join(
        [
            "#!/bin/bash",
            *(f"#SBATCH {line}" for line in lines),
            "",
            *([f"export {NUM_DEVICES_VARIABLE}={devices}"] if devices else []),
            # A signal to this script alone (--signal=B:USR1@60) reaches the processes, too: srun
            # passes SIGUSR1 on, while SIGTERM would make it kill them. scancel sends SIGTERM.
            "steps= signaled= canceled=",
            'pass_on() { signaled=yes; [ -z "$steps" ] || kill -USR1 $steps; }',
            "trap pass_on HUP USR1 USR2",
            "trap 'canceled=yes; pass_on' TERM",
            # After one exits, the others exit by themselves and report what they waited for.
            f"srun --kill-on-bad-exit=0 --wait=300 --output={logs}/%j-%t.log --open-mode=append \\",
            f"  {shlex.join([*TRAIN_COMMAND, *arguments])} &",
            "steps=$!",
            '[ -z "$signaled" ] || pass_on  # it came before that',
            'while signaled= && wait $steps; code=$?; [ "$signaled" ]; do',
            "  :  # a trap ended the wait: wait again",
            "done",
            "case $code in",
            f"  {codes}|12[89]|1[3-9][0-9])  # asked to stop, a process lost, a signal",
            '    restarts="${SLURM_RESTART_COUNT:-0}"',
            f'    if [ -z "$canceled" ] && [ "$restarts" -lt {job.max_restarts} ]; then',
            '      scontrol requeue "$SLURM_JOB_ID"',
            "    fi ;;",
            "esac",
            "exit $code",
            "",
        ]
    )


def submit(job: SlurmOptions, arguments: Sequence[str], commands: Commands, log: Log) -> str:
    """Writes the batch script to the log folder and submits it.

    Args:
      job: Options of the job; `name` and `log_dir` are set.
      arguments: Arguments of train.py.
      commands: Runs sbatch, or prints it in a dry run.
      log: Prints a line.

    Returns:
      The job id; empty in a dry run.

    Raises:
      UserError: The script cannot be written, or sbatch fails.
    """
    script = render_batch_script(job, arguments)
    path = Path(job.log_dir, f"{job.name}.sh")
    commands.write(path, script)
    answer = commands.output(["sbatch", "--parsable", str(path)])
    job_id = answer.partition(";")[0]
    if not commands.dry_run:
        if not re.fullmatch(r"\d+", job_id):
            raise UserError(f"sbatch printed {answer!r} instead of a job id.")
        log(f"job {job_id}; output in {job.log_dir}/{job_id}-<process>.log")
    return job_id
