"""Starts a run of several processes."""

import dataclasses
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from MaxText import program_start

program_start.install(__name__)  # before the slow imports

from MaxText.config import command_line
from MaxText.config.loading import load
from MaxText.config.problems import ConfigIssue, ConfigurationError
from MaxText.config.program_options import read_options
from MaxText.errors import UserError
from MaxText.launchers import jobset, skypilot, slurm, supervision
from MaxText.launchers.commands import (
    TRAIN_COMMAND,
    Commands,
    LaunchOptions,
    resolve_run_args,
)
from MaxText.launchers.jobset import JobSetOptions
from MaxText.launchers.skypilot import SkyPilotOptions
from MaxText.launchers.slurm import SlurmOptions
from MaxText.launchers.supervision import LocalOptions
from MaxText.launchers.tpu_vm import GcloudOptions, TpuVm, check_options

USAGE = """Starts train.py as several processes: here, on a Cloud TPU VM, or by SLURM, Kubernetes or
SkyPilot.

  python MaxText/launch.py local 2 --supervise -- configs/quickstart.yml steps=1000
  python MaxText/launch.py gcloud create copy setup run --name=pod --zone=us-east5-a \\
      --accelerator-type=v5p-32 --version=v2-alpha-tpuv5 -- configs/gpt2.yml base_output_directory=gs://b/out
  python MaxText/launch.py slurm submit --nodes=4 --gpus-per-node=8 -- configs/gpt2.yml
  python MaxText/launch.py jobset submit --image=IMAGE --tpu=tpu-v5p-slice --topology=2x2x4 -- \\
      configs/gpt2.yml base_output_directory=gs://b/out
  python MaxText/launch.py sky submit --accelerators=H100:8 --nodes=2 -- configs/gpt2.yml \\
      base_output_directory=gs://b/out

What follows -- are the arguments of train.py. --dry-run prints the commands and runs nothing.
Exit codes: that of the run, 2 for a mistake, 128 + n for signal n; see
docs/reference/exit_codes.md."""

LAUNCHERS = {
    "local": LocalOptions,
    "gcloud": GcloudOptions,
    "slurm": SlurmOptions,
    "jobset": JobSetOptions,
    "sky": SkyPilotOptions,
}
ACTIONS = tuple(name.replace("_", "-") for name in vars(TpuVm) if not name.startswith("_"))
_ANY_ACTION = "|".join(ACTIONS)
# Launcher -> its operands, for messages and as a pattern.
OPERANDS = {
    "local": ("the number of processes", r"[1-9]\d*"),
    "gcloud": (f"one or more of {', '.join(ACTIONS)}", rf"({_ANY_ACTION})(\n({_ANY_ACTION}))*"),
    "slurm": ("one of submit, status, stop", "submit|status|stop"),
    "jobset": ("one of submit, status, logs, stop", "submit|status|logs|stop"),
    "sky": ("one of submit, status, logs, stop", "submit|status|logs|stop"),
}


class LaunchRequest(NamedTuple):
    """What launch.py is to do: the launcher, its options, and its operands."""

    launcher: str
    options: LaunchOptions
    operands: list[str]


def read_launch(arguments: Sequence[str]) -> LaunchRequest:
    """Returns what a command line, up to --, asks for.

    Raises:
      ConfigurationError: The command line is invalid.
    """
    launcher = arguments[0] if arguments else ""
    if launcher not in LAUNCHERS:
        message = f"the first word is {launcher!r} and not one of {', '.join(LAUNCHERS)}"
        raise ConfigurationError([ConfigIssue(message)])
    parsed = read_options(LAUNCHERS[launcher], arguments[1:], takes_keys=False)
    operands = [*parsed.operands, *parsed.config_files]
    expected, pattern = OPERANDS[launcher]
    if not re.fullmatch(pattern, "\n".join(operands)):
        message = (
            f"launch.py {launcher} takes {expected}, not {' '.join(operands) or 'nothing'}. "
            "Arguments of train.py follow --, as in launch.py local 2 -- configs/quickstart.yml "
            "steps=1000"
        )
        parsed.problems.append(ConfigIssue(message))
    parsed.check()
    return LaunchRequest(launcher, parsed.options, operands)


def main() -> int:
    """Returns the exit code."""
    arguments = sys.argv[1:]
    train_args: list[str] = []
    if "--" in arguments:
        position = arguments.index("--")
        train_args = arguments[position + 1 :]
        arguments = arguments[:position]
    kinds = LAUNCHERS.values()
    if arguments and arguments[0] in LAUNCHERS:
        kinds = [LAUNCHERS[arguments[0]]]
    command_line.answer_about_options(arguments, USAGE, *kinds)
    with command_line.exit_on_user_error():
        request = read_launch(arguments)
        code = _launch(request.options, request.operands, train_args)
    return code


def _launch(options: LaunchOptions, operands: Sequence[str], train_args: Sequence[str]) -> int:
    if isinstance(options, LocalOptions):
        return _launch_local(options, operands, train_args)
    if isinstance(options, GcloudOptions):
        return _launch_gcloud(options, operands, train_args)
    if isinstance(options, SlurmOptions):
        return _launch_slurm(options, operands, train_args)
    (action,) = operands
    commands = Commands(print, dry_run=options.dry_run)
    if isinstance(options, JobSetOptions):
        if action == "submit":
            jobset.submit(options, resolve_run_args(train_args), commands, print)
        else:
            jobset.act(action, options, commands)
        return 0
    assert isinstance(options, SkyPilotOptions)
    if action == "submit":
        skypilot.submit(options, resolve_run_args(train_args), commands, print)
    else:
        skypilot.act(action, options, commands)
    return 0


def _launch_local(options: LocalOptions, operands: Sequence[str], train_args: Sequence[str]) -> int:
    run = resolve_run_args(train_args)
    num_processes = int(operands[0])
    command = [*TRAIN_COMMAND, *run.arguments]
    smaller_counts = _smaller_counts(options, num_processes, run.arguments)
    if options.dry_run:
        commands = Commands(print, dry_run=True)
        port = supervision.free_port()
        for process in range(num_processes):
            devices = options.devices_per_process
            environment = supervision.process_env({}, num_processes, process, port, devices)
            settings = [f"{name}={value}" for name, value in environment.items()]
            prefix = ["env", *settings] if settings else []
            commands.run([*prefix, *command])
        return 0
    logs = str(run.log_folder(options.log_dir))
    options = dataclasses.replace(options, log_dir=logs)
    processes = "1 process" if num_processes == 1 else f"{num_processes} processes"
    print(f"launch: {processes}; logs are in {logs}")
    try:
        return supervision.supervise(
            command, num_processes, options, run.folder, print, smaller_counts=smaller_counts
        )
    except OSError as error:
        raise UserError(f"cannot start the processes: {error}") from error


def _smaller_counts(
    options: LocalOptions, num_processes: int, train_args: Sequence[str]
) -> list[int]:
    """Returns the numbers of processes that an elastic run can go on with; none for others."""
    if options.min_processes is None:
        return []
    if not options.supervise:
        raise UserError("--min-processes goes with --supervise, which restarts the processes.")
    import jax

    from MaxText.cost.elastic import usable_process_counts

    jax.config.update("jax_platforms", "cpu")  # the devices are for the processes
    return usable_process_counts(
        load(list(train_args), "train.py").config,
        num_processes,
        options.min_processes,
        options.devices_per_process or 1,
        lambda line: print(f"launch: {line}"),
    )


def _launch_gcloud(
    options: GcloudOptions, operands: Sequence[str], train_args: Sequence[str]
) -> int:
    if "run" in operands and not train_args:
        raise UserError("run requires the arguments of train.py, after --.")
    if train_args and "run" not in operands:
        raise UserError("arguments of train.py, after --, are only for the action run.")
    check_options(options, operands)
    arguments = resolve_run_args(train_args).arguments if train_args else []
    vm = TpuVm(options, Commands(print, dry_run=options.dry_run))
    for action in operands:
        if action == "run":
            vm.run(arguments)
        else:
            getattr(vm, action.replace("-", "_"))()
    return 0


def _launch_slurm(options: SlurmOptions, operands: Sequence[str], train_args: Sequence[str]) -> int:
    commands = Commands(print, dry_run=options.dry_run)
    if operands[0] == "submit":
        run = resolve_run_args(train_args)
        logs = run.log_folder(options.log_dir).absolute()
        job = dataclasses.replace(options, name=options.name or run.run_name, log_dir=str(logs))
        slurm.submit(job, run.arguments, commands, print)
        return 0
    if not options.job_id:
        raise UserError(f"{operands[0]} requires --job-id=NUMBER (printed by submit).")
    if operands[0] == "status":
        commands.run(["squeue", f"--jobs={options.job_id}"])
    else:
        # To the processes, which save and stop; the script then ends without asking for more.
        commands.run(["scancel", options.job_id])
    return 0


if __name__ == "__main__":
    sys.exit(main())
