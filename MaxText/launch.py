"""Starts a run of several processes: python MaxText/launch.py local 2 -- CONFIG.yml key=value"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

# The script's own folder comes first on the path; its parent gives every module one name.
if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from MaxText import early_signals

early_signals.install(__name__)  # before the slow imports

from MaxText.config import command_line
from MaxText.errors import UserError
from MaxText.launchers import slurm, supervision
from MaxText.launchers.commands import Commands, RetryPolicy, resolve_run_args, train_command
from MaxText.launchers.local_processes import free_port, process_env
from MaxText.launchers.tpu_vm import TpuVm, TpuVmLaunch

USAGE = """Starts train.py as several processes, here, on a Cloud TPU VM or by SLURM.

  python MaxText/launch.py local 2 --supervise -- configs/quickstart.yml steps=1000
  python MaxText/launch.py gcloud create copy setup run --name=pod --zone=us-east5-a \\
      --type=v5p-32 --version=v2-alpha-tpuv5 -- configs/gpt2.yml base_output_directory=gs://b/out
  python MaxText/launch.py slurm submit --nodes=4 --gpus-per-node=8 -- configs/gpt2.yml

What follows -- are the arguments of train.py. --dry-run prints the commands and runs nothing.
Exit codes: that of the run, 2 for a mistake, 128 + n for signal n; see
docs/reference/exit_codes.md."""

ACTIONS = ("create", "queue", "copy", "setup", "run", "logs", "status", "stop", "delete",
           "delete-queued")  # fmt: skip


def show(line: str) -> None:
    """Prints a line at once: other programs print between them."""
    print(line, flush=True)


def main() -> int:
    """Returns the exit code."""
    arguments = sys.argv[1:]
    train_args: list[str] = []
    if "--" in arguments:
        position = arguments.index("--")
        arguments, train_args = arguments[:position], arguments[position + 1 :]
    parser = _parser()
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        parser.error(
            f"unrecognized arguments: {' '.join(unknown)}. Arguments of train.py follow --, as in "
            "launch.py local 2 -- configs/quickstart.yml steps=1000"
        )
    start = {"local": _local, "gcloud": _gcloud, "slurm": _slurm}[options.where]
    with command_line.exit_on_user_error():
        code = start(options, train_args)
    return code


def _local(options: argparse.Namespace, train_args: Sequence[str]) -> int:
    run = resolve_run_args(train_args)
    logs = Path(options.logs or f"maxtext_output/logs/{run.run_name}")
    job = supervision.SupervisedJob(
        [*train_command(), *run.arguments], options.number, options.devices, logs, run.folder
    )
    if options.dry_run:
        commands = Commands(show, dry_run=True)
        port = free_port()
        for process in range(job.number):
            environment = process_env({}, job.number, process, port, job.devices)
            settings = [f"{name}={value}" for name, value in environment.items()]
            commands.run([*(["env", *settings] if settings else []), *job.command])
        return 0
    policy = supervision.RestartPolicy(
        options.max_restarts if options.supervise else 0, options.backoff, options.grace
    )
    what = "1 process" if job.number == 1 else f"{job.number} processes"
    show(f"launch: {what}; logs are in {logs}")
    try:
        return supervision.supervise(job, policy, show)
    except OSError as error:
        raise UserError(f"cannot start the processes: {error}") from error


def _gcloud(options: argparse.Namespace, train_args: Sequence[str]) -> int:
    commands = Commands(show, dry_run=options.dry_run)
    tpu = TpuVm(
        options.name, options.zone, options.project, options.type, options.version, options.spot,
        RetryPolicy(options.tries, options.retry_seconds), tuple(options.gcloud),
    )  # fmt: skip
    launch = TpuVmLaunch(tpu, commands)
    if "run" in options.actions and not train_args:
        raise UserError("run requires the arguments of train.py, after --.")
    if train_args and "run" not in options.actions:
        raise UserError("arguments of train.py, after --, are only for the action run.")
    arguments = resolve_run_args(train_args).arguments if train_args else []
    for action in options.actions:
        if action == "run":
            launch.run(arguments, options.max_restarts)
        elif action == "logs":
            launch.logs(options.lines, options.follow, options.worker)
        else:
            getattr(launch, action.replace("-", "_"))()
    return 0


def _slurm(options: argparse.Namespace, train_args: Sequence[str]) -> int:
    commands = Commands(show, dry_run=options.dry_run)
    if options.action == "submit":
        run = resolve_run_args(train_args)
        job = slurm.SlurmJob(
            options.name or run.run_name, options.nodes, options.processes_per_node,
            options.gpus_per_node, options.sbatch, options.max_restarts,
            Path(options.logs or f"maxtext_output/logs/{run.run_name}").absolute(),
        )  # fmt: skip
        slurm.submit(job, run.arguments, commands, show)
        return 0
    if not options.job:
        raise UserError(f"{options.action} requires --job=NUMBER (printed by submit).")
    if options.action == "status":
        commands.run(["squeue", f"--jobs={options.job}"])
    else:
        # To the processes, which save and stop; the script then ends without asking for more.
        commands.run(["scancel", options.job])
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "launch.py", description=USAGE, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    places = parser.add_subparsers(dest="where", required=True, metavar="local|gcloud|slurm")
    local = places.add_parser("local", help="processes of this machine")
    local.add_argument("number", type=_positive_int, metavar="N", help="number of processes")
    local.add_argument(
        "--devices", type=_positive_int, metavar="K", help="devices (CPU or GPU) per process"
    )
    local.add_argument("--supervise", action="store_true", help="restart after a failure")
    local.add_argument("--backoff", type=float, default=1.0, help="seconds before a restart")
    local.add_argument(
        "--grace", type=float, default=60.0, help="grace period in seconds for processes to exit"
    )
    gcloud = places.add_parser("gcloud", help="Cloud TPU VMs")
    gcloud.add_argument(
        "actions", nargs="+", choices=ACTIONS, metavar="ACTION", help=", ".join(ACTIONS)
    )
    gcloud.add_argument("--name", required=True, help="TPU VM name")
    gcloud.add_argument("--zone", required=True)
    gcloud.add_argument("--project", default=os.environ.get("CLOUDSDK_CORE_PROJECT", ""))
    gcloud.add_argument("--type", default="", help="accelerator type, e.g. v5p-32")
    gcloud.add_argument("--version", default="", help="runtime version")
    gcloud.add_argument("--spot", action="store_true", help="preemptible, cheaper")
    gcloud.add_argument(
        "--gcloud", action="append", default=[], metavar="FLAG",
        help="extra flag of create and queue, e.g. --gcloud=--service-account=NAME",
    )  # fmt: skip
    gcloud.add_argument(
        "--tries", type=_positive_int, default=100, help="attempts while no capacity is available"
    )
    gcloud.add_argument("--retry-seconds", type=float, default=60.0)
    gcloud.add_argument("--lines", type=_positive_int, default=50, help="number of log lines")
    gcloud.add_argument("--follow", action="store_true", help="stream new log lines")
    gcloud.add_argument("--worker", default="all", help="worker to read logs from")
    by_slurm = places.add_parser("slurm", help="a SLURM job")
    by_slurm.add_argument("action", choices=("submit", "status", "stop"))
    by_slurm.add_argument("--name", default="", help="job name, by default run_name")
    by_slurm.add_argument("--nodes", type=_positive_int, default=1)
    by_slurm.add_argument("--processes-per-node", type=_positive_int, default=1)
    by_slurm.add_argument("--gpus-per-node", type=int, default=0)
    by_slurm.add_argument(
        "--sbatch", action="append", default=[], metavar="OPTION",
        help="extra #SBATCH line, e.g. --sbatch=--partition=long",
    )  # fmt: skip
    by_slurm.add_argument("--job", default="", help="job id, for status and stop")
    for place in (local, gcloud, by_slurm):
        place.add_argument("--dry-run", action="store_true", help="print the commands")
        place.add_argument(
            "--max-restarts", type=_nonnegative_int, default=10,
            help="maximum restarts without a new checkpoint (SLURM: in total)",
        )  # fmt: skip
    for place in (local, by_slurm):
        place.add_argument("--logs", default="", help="log folder")
    return parser


def _positive_int(text: str) -> int:
    return _at_least(1, text)


def _nonnegative_int(text: str) -> int:
    return _at_least(0, text)


def _at_least(least: int, text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = None
    if number is None or number < least:
        raise argparse.ArgumentTypeError(f"must be an integer of at least {least}, not {text}")
    return number


if __name__ == "__main__":
    sys.exit(main())
