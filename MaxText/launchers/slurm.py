"""Submits a run as a SLURM job, and independent runs as an array of jobs.

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
from MaxText.launchers.commands import (
    TRAIN_COMMAND,
    CommandError,
    Commands,
    LaunchOptions,
    Log,
)
from MaxText.launchers.job_array import JobArray
from MaxText.runtime.start_up import NUM_DEVICES_VARIABLE

_SECONDS_BEFORE_END = 180  # for saving, before the job's time limit


@dataclasses.dataclass(frozen=True, kw_only=True)
class SlurmOptions(LaunchOptions):
    """slurm submit, status or stop: a SLURM job."""

    name: str = option("", "Job name, by default run_name.", metavar="NAME")
    nodes: Count = option(1, "Nodes of the job.", metavar="NUMBER")
    processes_per_node: Count = option(1, "Processes per node.", metavar="NUMBER")
    gpus_per_node: Natural = option(0, "GPUs per node.", metavar="NUMBER")
    max_restarts: Natural = option(10, "Times that a job is requeued.", metavar="NUMBER")
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
    run = f"run {shlex.join([*TRAIN_COMMAND, *arguments])}"
    return _render(job, [], [run], log_name="%j", job_id="$SLURM_JOB_ID")


def render_array_script(job: SlurmOptions, array: JobArray) -> str:
    """Returns the batch script of an array, which each of its tasks runs.

    Every task is requeued by itself, as the script of `render_batch_script` is.

    Args:
      job: Options of a task; `name` and `log_dir` are set.
      array: The tasks.
    """
    indices = f"0-{len(array.tasks) - 1}"
    if array.max_parallel is not None:
        indices += f"%{array.max_parallel}"
    runs = [
        array.read_commands("SLURM_ARRAY_TASK_ID"),
        "while read -r command <&3; do",
        '  eval "run $command"',
        '  [ "$code" -eq 0 ] || break',
        'done 3<<< "$commands"',
    ]
    # SLURM_JOB_ID of one of the tasks is the id of the whole array.
    job_id = "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"
    return _render(job, [f"--array={indices}"], runs, log_name="%A_%a", job_id=job_id)


def _render(
    job: SlurmOptions, flags: Sequence[str], runs: Sequence[str], *, log_name: str, job_id: str
) -> str:
    """Returns a batch script.

    Args:
      job: Options of the job.
      flags: More flags of sbatch.
      runs: Lines that call the function `run`, which leaves its exit code in `code`.
      log_name: Name of logs, in sbatch's and srun's patterns.
      job_id: Id to requeue, as a shell word.
    """
    logs = shlex.quote(job.log_dir)
    lines = [
        f"--job-name={job.name}",
        *flags,
        f"--nodes={job.nodes}",
        f"--ntasks-per-node={job.processes_per_node}",
        *([f"--gpus-per-node={job.gpus_per_node}"] if job.gpus_per_node else []),
        "--exclusive",
        # Signals the processes, not this script: they save and exit with 75.
        f"--signal=TERM@{_SECONDS_BEFORE_END}",
        "--requeue",
        "--open-mode=append",
        f"--output={job.log_dir}/{log_name}.log",
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
            "run() {  # one run on all nodes",
            # After one exits, the others exit by themselves and report what they waited for.
            "  srun --kill-on-bad-exit=0 --wait=300 \\",
            f'    --output={logs}/{log_name}-%t.log --open-mode=append "$@" &',
            "  steps=$!",
            '  [ -z "$signaled" ] || pass_on  # it came before that',
            '  while signaled= && wait $steps; code=$?; [ "$signaled" ]; do',
            "    :  # a trap ended the wait: wait again",
            "  done",
            "  steps=",
            "}",
            *runs,
            "case $code in",
            f"  {codes}|12[89]|1[3-9][0-9])  # asked to stop, a process lost, a signal",
            '    restarts="${SLURM_RESTART_COUNT:-0}"',
            f'    if [ -z "$canceled" ] && [ "$restarts" -lt {job.max_restarts} ]; then',
            f'      scontrol requeue "{job_id}"',
            "    fi ;;",
            "esac",
            "exit $code",
            "",
        ]
    )


def submit(job: SlurmOptions, arguments: Sequence[str], commands: Commands, log: Log) -> None:
    """Writes the batch script to the log folder, submits it, and prints the job id.

    Args:
      job: Options of the job; `name` and `log_dir` are set.
      arguments: Arguments of train.py.
      commands: Runs sbatch, or prints it in a dry run.
      log: Prints a line.

    Raises:
      UserError: The script cannot be written, or sbatch fails.
    """
    script = render_batch_script(job, arguments)
    job_id = _submit(Path(job.log_dir, f"{job.name}.sh"), script, commands)
    if not commands.dry_run:
        log(f"job {job_id}; output in {job.log_dir}/{job_id}-<process>.log")


def submit_array(options: SlurmOptions, array: JobArray, commands: Commands, log: Log) -> str:
    """Writes the commands and the batch script of an array, and submits it.

    Args:
      options: Options of a task.
      array: The tasks.
      commands: Runs sbatch, or prints it in a dry run.
      log: Prints a line.

    Returns:
      The id of the array; empty in a dry run.

    Raises:
      UserError: A file cannot be written, or sbatch fails.
    """
    job = dataclasses.replace(options, name=array.name, log_dir=str(array.folder))
    commands.write(array.command_file, array.commands(TRAIN_COMMAND))
    path = array.folder / "array.sh"
    job_id = _submit(path, render_array_script(job, array), commands)
    if not commands.dry_run:
        log(f"array {job_id} of {len(array.tasks)} tasks; output in {array.folder}")
    return job_id


def _submit(path: Path, script: str, commands: Commands) -> str:
    commands.write(path, script)
    answer = commands.output(["sbatch", "--parsable", str(path)])
    job_id = answer.partition(";")[0]
    if not commands.dry_run and not re.fullmatch(r"\d+", job_id):
        raise UserError(f"sbatch printed {answer!r} instead of a job id.")
    return job_id


def active_tasks(job_id: str, commands: Commands) -> set[int]:
    """Returns the tasks of an array that are queued or running.

    Raises:
      UserError: squeue is missing or fails.
    """
    command = ["squeue", f"--jobs={job_id}", "--array", "--noheader", "--format=%K"]
    try:
        answer = commands.output(command)
    except CommandError as error:
        if "invalid job id" in error.errors.lower():  # SLURM has forgotten it
            return set()
        raise
    return {int(word) for word in answer.split()}
