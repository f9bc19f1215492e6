"""Plans, runs (or prints the runs of) and reports a comparison.

Runs are train.py in subprocesses, also to measure its steps.
"""

import contextlib
import dataclasses
import functools
import os
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import jax
from filelock import FileLock, Timeout

from MaxText.config.config_files import REPOSITORY
from MaxText.config.maxtext_keys import ALIASES
from MaxText.config.registry import registrations
from MaxText.config.schema import Config, all_keys, flatten, settable_names, unflatten
from MaxText.config.serialization import resolved_yaml
from MaxText.config.sources import variable_of
from MaxText.config.values import to_yaml
from MaxText.cost.auto_layout import hardware_of_kind
from MaxText.errors import UserError
from MaxText.experiments import comparison_results
from MaxText.experiments.compare_args import STEPS, CompareArgs
from MaxText.experiments.comparison_plan import (
    ComparisonSpec,
    Plan,
    StageSequence,
    Trial,
    chains_of,
    load_or_create_plan,
    plan_lines,
    plan_rows,
    run_config,
    warmup_problems,
)
from MaxText.experiments.ladder.ladder_args import SWEEP_SEED
from MaxText.experiments.machine_shares import MachineShare, split_machine
from MaxText.experiments.solver import solve_plan, solved_variants, validation_errors
from MaxText.experiments.submission import (
    SubmittedTask,
    active_run_folders,
    check_folder,
    read_launch_options,
    submit_tasks,
)
from MaxText.experiments.tuning import (
    TUNING_FOLDER,
    TunedValue,
    apply_tuned,
    tune,
    tuning_plan_line,
    tuning_section,
    write_tuning_csv,
)
from MaxText.experiments.variants import Variant, confounding_keys, folder_of
from MaxText.formatting import format_loss, format_table, pluralize
from MaxText.hardware.chips import Hardware
from MaxText.launchers.commands import Commands
from MaxText.monitoring.run_record import read_run
from MaxText.monitoring.step_line import format_duration
from MaxText.program_start import STOP_SIGNALS, StopRequestedError, handled
from MaxText.reports.page import PageSection
from MaxText.reports.report_writer import write_report
from MaxText.storage.paths import check_checkpoint_path

Log = Callable[[str], None]

TRAIN = REPOSITORY / "MaxText" / "train.py"
_LOCK = ".running"
_POLL_SECONDS = 0.1  # between looks at concurrent runs
_PATIENCE_SECONDS = 60.0  # for an interrupted run to exit
_ROUNDS = 2  # configurations alternate, so that a slow phase of the machine does not hit only one
_STEPS = 24
_WARMUP_STEPS = 4  # warm-up steps of a process
_FOLDER = "measuring"  # of the short runs, deleted afterwards
# Of a run that measures the time of its steps.
SHORT_RUN_KEYS: dict[str, Any] = {
    "steps": _STEPS,
    "step_log_period": 1,
    "eval_interval": -1,
    "target_eval_loss": 0.0,
    "enable_checkpointing": False,
    "enable_tensorboard": False,
    "loss_curve": False,
    "sample_tokens": 0,
    "profiler": "",
}
_UNSTEADY = 0.1  # relative difference between rounds that is reported

_COUNT_DEVICES = """
import sys
from MaxText.runtime import start_up
start_up.choose_platform(sys.argv[1])
devices = start_up.find_devices(sys.argv[1])
print("devices", len(devices), devices[0].platform, devices[0].device_kind)
"""


class RunsElsewhereError(Exception):
    """Runs were printed or submitted, so that the rest waits for the same command later."""


def run_comparison(
    request: CompareArgs,
    variants: Sequence[Variant],
    solve_for: Mapping[str, str],
    command: Sequence[str],
    log: Log,
    *,
    tuned_at: Sequence[Variant] = (),
) -> None:
    """Plans, tunes, runs (or prints) the remaining runs, and reports the results.

    Args:
        request: the comparison.
        variants: its configurations.
        solve_for: label -> key to solve for.
        command: as typed, for the report and the printed script.
        log: gets each line.
        tuned_at: the configurations at the size of `tune_at`; by default `variants`.

    Raises:
        UserError: the budget cannot be met, or a run failed.
    """
    # Leaves accelerators to the runs: this process only evaluates shapes.
    jax.config.update("jax_platforms", "cpu")

    folder = folder_of(request, variants)
    spec = ComparisonSpec(
        match=request.match,
        budget=cast(float | None, request.budget),
        solve_for=solve_for,
        tolerance=request.tolerance,
        num_devices=count_run_devices(request, variants),
    )

    def log_comment(line: str) -> None:
        log(f"# {line}".rstrip())

    with signals_as_exceptions(), lock_folder(folder):
        # Printed runs make the output a script, so that all else is a comment in it.
        prints_script = request.launch == "print"
        tuned: list[TunedValue] = []
        if request.tune:
            try:
                tuned = _tune(request, tuned_at or variants, spec, command=command, log=log)
            except RunsElsewhereError:
                return
            variants = apply_tuned(variants, tuned)
        plan = load_or_create_plan(folder, variants, spec, request.seeds)
        chains = _planned_chains(plan, variants, log_comment if prints_script else log)
        runs = [run for chain in chains for run in chain]
        unfinished = [run for run in runs if not comparison_results.is_over(run)]
        prints_script = prints_script and bool(unfinished)
        log_line = log_comment if prints_script else log

        confounded = _log_plan(plan, variants, log_line, tuned)
        if unfinished:
            with contextlib.suppress(RunsElsewhereError):  # what is over is reported
                run_chains(
                    chains,
                    folder,
                    request=request,
                    command=command,
                    shares=find_shares(request, variants),
                    log=log,
                    print_script=log,
                )
        else:
            log(f"All {len(runs)} runs in {folder} are already complete.")
        sections = [comparison_results.budget_section(plan, variants, confounded, command)]
        if tuned:
            sections.append(tuning_section(tuned, _tuning_size(request)))
        _report_results(plan, variants, chains, sections=sections, log=log_line)


def _tune(
    request: CompareArgs,
    variants: Sequence[Variant],
    spec: ComparisonSpec,
    *,
    command: Sequence[str],
    log: Log,
) -> list[TunedValue]:
    """Tunes the keys of `tune`, before the comparison.

    Args:
        request: the comparison.
        variants: its configurations, at the size of `tune_at`. There they have equal tokens.
        spec: of the comparison.
        command: as typed.
        log: gets each line.

    Raises:
        RunsElsewhereError: runs were printed or submitted.
        UserError: the budget cannot be met, a run failed, or there is no best learning rate.
    """
    folder = folder_of(request, variants)
    prints_script = request.launch == "print"

    def log_line(line: str) -> None:
        log(f"# {line}".rstrip() if prints_script else line)

    if request.tune_at:
        solve_for = dict.fromkeys(spec.solve_for, STEPS)
        spec = dataclasses.replace(spec, match="tokens", budget=None, solve_for=solve_for)
    plan = load_or_create_plan(folder / TUNING_FOLDER, variants, spec, [SWEEP_SEED])
    plan.folder.mkdir(parents=True, exist_ok=True)
    _planned_chains(plan, variants, log_line)
    log_line(tuning_plan_line(request.tune, len(variants), _tuning_size(request)))
    for line in format_table(*plan_rows(plan), max_width=None).splitlines():
        log_line(line)
    shares = find_shares(request, variants)

    def run(chains: Sequence[StageSequence]) -> None:
        run_chains(
            chains,
            folder,
            request=request,
            command=command,
            shares=shares,
            log=log_line,
            print_script=log,
        )

    tuned = tune(request.tune, variants, plan, run)
    for value in tuned:
        log_line(value.line)
    log_line(f"Tried values: {write_tuning_csv(folder, tuned)}")
    log_line("")
    return tuned


def _tuning_size(request: CompareArgs) -> str:
    """Returns the size at which hyper-parameters are tuned, in words."""
    if not request.tune_at:
        return "at the size and budget of the comparison"
    return f"with {to_yaml(request.tune_at)} and equal tokens"


def run_chains(
    chains: Sequence[StageSequence],
    folder: Path,
    *,
    request: CompareArgs,
    command: Sequence[str],
    shares: Sequence[MachineShare],
    log: Log,
    print_script: Log,
) -> None:
    """Runs what is unfinished of some chains here, or prints or submits it.

    Args:
        chains: of an experiment.
        folder: of the experiment.
        request: where they run, and with which options.
        command: as typed, the last line of a printed script.
        shares: of the machine.
        log: gets each line about the progress.
        print_script: gets the lines of a script.

    Raises:
        RunsElsewhereError: something is left to run elsewhere.
        UserError: a run failed.
    """
    runs = [run for chain in chains for run in chain]
    unfinished = [run for run in runs if not comparison_results.is_over(run)]
    if not unfinished:
        return
    if request.launch == "local":
        run_all(runs, unfinished, folder, log, shares)
        return
    if request.launch == "print":
        print_runs(chains, unfinished, command, print_script)
    else:
        submit_runs(request, chains, unfinished, folder, log)
    raise RunsElsewhereError


def _planned_chains(plan: Plan, variants: Sequence[Variant], log: Log) -> list[StageSequence]:
    """Solves a plan if it is new, saves it, and returns all of its runs.

    Raises:
        UserError: the budget cannot be met, or a solved configuration breaks a rule.
    """
    if not plan.planned:
        if plan.question.match == "time":
            time_steps(plan, variants, log)
        solve_plan(plan, variants)
    chains = chains_of(plan, variants)
    for run in (run for chain in chains for run in chain):
        errors = validation_errors(run.config)
        if errors:
            raise UserError(f"{run.name}: {errors[0]}")
    plan.save()
    return chains


def _log_plan(
    plan: Plan, variants: Sequence[Variant], log: Log, tuned: Sequence[TunedValue]
) -> list[str]:
    """Logs a plan and what limits its verdict; returns the lines of `confounding_keys`."""
    for line in plan_lines(plan, variants):
        log(line)
    tuned_keys = {value.key for value in tuned}
    solved_keys = {label: solved.changed | tuned_keys for label, solved in plan.planned.items()}
    confounded = confounding_keys(solved_variants(plan, variants), solved_keys)
    warnings = [f"the configurations differ in {line}" for line in confounded]
    for problem in warmup_problems(plan, variants):
        warnings.append(f"{problem}, so there will be no verdict")
    for warning in warnings:
        log(f"warning: {warning}")
    if warnings:
        log("")
    return confounded


def _report_results(
    plan: Plan,
    variants: Sequence[Variant],
    chains: Sequence[StageSequence],
    *,
    sections: Sequence[PageSection],
    log: Log,
) -> None:
    """Logs the results of finished chains, and writes the report and its CSV files.

    `sections` of the report say how the runs were made comparable.
    """
    folder = plan.folder
    loaded = [(chain, comparison_results.load_chain(chain)) for chain in chains]
    finished = [(chain, records) for chain, records in loaded if records]
    if not finished:
        return
    results = [comparison_results.summarize(chain, records) for chain, records in finished]
    groups = comparison_results.group_results([variant.label for variant in variants], results)
    for line in ["", *comparison_results.text_lines(groups, plan, variants), ""]:
        log(line)
    comparison_results.write_runs_csv(folder / "runs.csv", results)
    comparison_results.write_summary_csv(
        folder / "summary.csv", groups, has_verdict=not warmup_problems(plan, variants)
    )
    report = write_report(
        [record for _, records in finished for record in records],
        folder,
        title=comparison_results.title_of(plan, groups),
        groups={label: [str(folder / run) for run in runs] for label, runs in plan.groups.items()},
        leading=[comparison_results.result_section(plan, variants, groups)],
        sections=sections,
        compared=[records[-1] for _, records in finished],
    )
    log(f"Report: {report}; numbers: {folder / 'runs.csv'}, {folder / 'summary.csv'}")


def print_runs(
    chains: Sequence[StageSequence],
    unfinished: Sequence[Trial],
    command: Sequence[str],
    log: Log,
) -> None:
    """Writes the configurations of unfinished runs, and logs the script that runs them."""
    for run in unfinished:
        write_config(run)
    paths = [[run.config_path for run in chain if run in unfinished] for chain in chains]
    for line in format_launch_script(list(filter(None, paths)), command):
        log(line)


def submit_runs(
    request: CompareArgs,
    chains: Sequence[StageSequence],
    unfinished: Sequence[Trial],
    folder: Path,
    log: Log,
) -> None:
    """Submits an array with a task for each unfinished chain that the engine does not have yet.

    Partition, time limit and devices of SLURM are those of sbatch's variables, such as
    SBATCH_PARTITION and SBATCH_GPUS_PER_NODE, or of `launch_options`.

    Raises:
      UserError: The client of the engine is missing or fails, or the runs' folder is not shared.
    """
    options, _ = read_launch_options(request.launch, request.launch_options)
    assert options is not None, request.launch
    commands = Commands(log, dry_run=options.dry_run)
    check_folder(options, folder)
    active: set[str] = set()
    if not options.dry_run:  # which needs no client
        folders = [str(run.folder.absolute()) for run in unfinished]
        active = active_run_folders(folder, folders, commands)
    tasks = []
    num_active = 0
    for chain in chains:
        runs = [run for run in chain if run in unfinished]
        if not runs:
            continue
        if str(runs[-1].folder.absolute()) in active:
            num_active += 1
            continue
        for run in runs:
            write_config(run)
            run.folder.mkdir(parents=True, exist_ok=True)
        arguments = [[str(run.config_path.absolute())] for run in runs]
        tasks.append(SubmittedTask(runs[-1].folder, arguments))
    if num_active:
        log(f"Still queued or running: {pluralize(num_active, 'task')} submitted earlier.")
    if tasks:
        submit_tasks(options, tasks, folder, max_parallel=request.jobs, commands=commands, log=log)
    if not options.dry_run:
        log("Run the same command again once the jobs are done.")


def count_run_devices(request: CompareArgs, variants: Sequence[Variant]) -> int:
    """Returns the devices of each run: as asked for elsewhere, else a share of this machine's.

    Raises:
      UserError: The configurations or the request do not fit this machine.
    """
    if request.num_devices is not None and request.launch != "local":
        return request.num_devices
    present = count_devices(_hardware_of(variants))
    shares = find_shares(request, variants)
    count = present // len(shares) if shares and shares[0].environment else present
    if request.num_devices not in (None, count):
        raise UserError(
            f"num_devices={request.num_devices}, but this machine has {count} for each run, so "
            "runs here would miss the budget. Add launch=print to plan for another machine."
        )
    return count


def _hardware_of(variants: Sequence[Variant]) -> str:
    hardware = {variant.config.run.hardware for variant in variants}
    if len(hardware) > 1:
        raise UserError(
            f"hardware: the configurations set {' and '.join(sorted(hardware))}. Set one value for "
            "all of them on the command line."
        )
    return hardware.pop()


def find_local_hardware(request: CompareArgs, variants: Sequence[Variant]) -> Hardware | None:
    """Returns the hardware of a run on this machine; None if runs elsewhere, or it is unknown."""
    if request.launch != "local":
        return None
    devices = find_devices(_hardware_of(variants))
    count = count_run_devices(request, variants)
    try:
        return hardware_of_kind(devices.kind, devices.platform, count)
    except UserError:
        return None


def find_shares(request: CompareArgs, variants: Sequence[Variant]) -> list[MachineShare]:
    """Returns the shares of this machine that `jobs` runs use; none if one has the whole."""
    if request.jobs in (None, 1) or request.launch != "local":
        return []
    present = find_devices(_hardware_of(variants))
    return split_machine(request.jobs, present.platform, present.count)


def format_launch_script(chains: Sequence[Sequence[Path]], command: Sequence[str]) -> list[str]:
    """Returns the shell lines to run each chain in order, and to report."""
    variables = key_variables(os.environ)
    # The shell may have the same variables set; the files already contain their values.
    prefix = ["env"] if variables else []
    for name in variables:
        prefix += ["-u", name]

    current_folder = str(Path.cwd()) + os.sep

    def line(config: Path) -> str:
        arguments = [argument.removeprefix(current_folder) for argument in train_command(config)]
        return shlex.join([*prefix, *arguments])

    lines = [" && ".join(map(line, configs)) for configs in chains]
    return [*lines, shlex.join([sys.executable.removeprefix(current_folder), *command])]


class _Progress:
    """Logs the start and the result of each run, and the time that is left.

    The remaining time is that of the runs so far, in proportion to `Trial.weight`. Resumed runs do
    not count, as they took less than a whole run.

    Args:
      runs: All runs, for their numbers.
      unfinished: Those to start or resume.
      num_jobs: Runs at a time.
      log: Prints a line.
    """

    def __init__(self, runs: Sequence[Trial], unfinished: Sequence[Trial], num_jobs: int, log: Log):
        self._names = {
            run.folder: f"[{number}/{len(runs)}] {run.name}" for number, run in enumerate(runs, 1)
        }
        self._remaining = {run.folder: run.weight for run in unfinished}
        self._num_jobs = num_jobs
        self._log = log
        self._began: dict[Path, float] = {}  # by folder, of runs that are not resumed
        self._resumed: set[Path] = set()
        # Of the whole runs so far.
        self._work = 0.0
        self._seconds = 0.0

    def begin(self, run: Trial) -> bool:
        """Logs that a run starts; returns False if an earlier stage diverged, so that it cannot."""
        name = self._names[run.folder]
        if comparison_results.is_over(run):
            self._log(f"{name}: skipped, because an earlier stage diverged")
            del self._remaining[run.folder]
            return False
        earlier_record = comparison_results.load_record(run)
        if earlier_record is not None and earlier_record.steps:
            self._resumed.add(run.folder)
        self._began[run.folder] = time.monotonic()
        self._log(f"{name}: {'resumed' if run.folder in self._resumed else 'started'}")
        return True

    def end(self, run: Trial, code: int) -> None:
        """Logs the result of a run that exited with `code`.

        Raises:
          UserError: It ended before it was complete.
        """
        name = self._names[run.folder]
        # After exit code 0 the record must be readable: read_run raises otherwise.
        record = comparison_results.load_record(run) if code else read_run(run.folder)
        if record is None or record.state not in comparison_results.FINISHED:
            raise UserError(
                f"{run.name}: train.py exited with code {code} before the run was complete. "
                f"Last lines of {run.log}:\n{tail(run.log)}\n"
                "  Run the same command to resume this run."
            )
        seconds = time.monotonic() - self._began[run.folder]
        del self._remaining[run.folder]
        if record.state == comparison_results.DIVERGED:
            self._log(f"{name}: diverged at step {record.last_step}, {format_duration(seconds)}")
            return
        loss = format_loss(record.final_loss)
        accuracy = record.final_accuracy
        of_labels = "" if accuracy is None else f", accuracy {accuracy:.4f}"
        line = f"{name}: validation loss {loss}{of_labels}, {format_duration(seconds)}"
        if run.folder not in self._resumed:
            self._work += run.weight
            self._seconds += seconds
        remaining_work = sum(self._remaining.values())
        if self._work and remaining_work:
            left = self._seconds / self._work * remaining_work / self._num_jobs
            line += f", about {format_duration(left)} left"
        self._log(line)
        for row in record.events:
            if row["event"] == "warning":
                self._log(f"{name}: WARNING: {row.get('reason')}.")


def run_all(
    runs: Sequence[Trial],
    unfinished: Sequence[Trial],
    folder: Path,
    log: Log,
    shares: Sequence[MachineShare] = (),
) -> None:
    """Runs the unfinished ones of all runs in order, and logs results and the time that is left.

    Args:
      runs: All runs, for their numbers.
      unfinished: Those to start or resume.
      folder: Of the experiment.
      log: Prints a line.
      shares: Of the machine, each for one run at a time; without any, one run has the whole.

    Raises:
      UserError: A run ended before it was complete.
    """
    done = len(runs) - len(unfinished)
    log(f"{len(runs)} runs in {folder}, {done} already complete; each writes train.log")
    progress = _Progress(runs, unfinished, max(len(shares), 1), log)
    if shares:
        _run_concurrently(unfinished, progress, shares)
        return
    for run in runs:
        if run in unfinished and progress.begin(run):
            progress.end(run, train(run))


def _run_concurrently(
    unfinished: Sequence[Trial], progress: _Progress, shares: Sequence[MachineShare]
) -> None:
    """Runs one process on each share of the machine, until all runs are complete."""
    waiting = list(unfinished)
    free = list(shares)
    active: dict[subprocess.Popen, tuple[Trial, MachineShare]] = {}
    try:
        while waiting or active:
            active_runs = [run for run, _ in active.values()]
            # Stages of a chain wait for the previous one.
            ready = [r for r in waiting if r.previous not in (*waiting, *active_runs)]
            for run, share in zip(ready, list(free), strict=False):
                waiting.remove(run)
                if progress.begin(run):
                    free.remove(share)
                    write_config(run)
                    command = train_command(run.config_path)
                    environment = subprocess_env() | dict(share.environment)
                    process = start_training(command, run.log, environment)
                    share.pin(process.pid)
                    active[process] = (run, share)
            for process in [process for process in active if process.poll() is not None]:
                run, share = active.pop(process)
                free.append(share)
                progress.end(run, process.returncode)
            time.sleep(_POLL_SECONDS)
    except BaseException:
        for process in active:
            terminate(process)
        raise


def key_variables(environment: Mapping[str, str]) -> list[str]:
    """Returns environment variables overriding a run's keys."""
    names = set(map(variable_of, (*settable_names(), *ALIASES)))
    return sorted(names.intersection(environment))


def subprocess_env() -> dict[str, str]:
    """Returns the environment without key variables: keys are resolved."""
    excluded = key_variables(os.environ)
    return {name: value for name, value in os.environ.items() if name not in excluded}


def train_command(config: Path) -> list[str]:
    """Returns the command that trains a configuration file."""
    # A relative path with "=" (labels contain it) would parse as key=value.
    is_like_key = "=" in str(config) and not config.is_absolute()
    return [sys.executable, str(TRAIN), f"./{config}" if is_like_key else str(config)]


def run_python(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs Python in the repository, without variables that set keys; captures its output."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=REPOSITORY,
        env=subprocess_env(),
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        check=False,
    )


class DeviceCount(NamedTuple):
    """Devices of this machine, as a subprocess found them."""

    count: int
    platform: str  # "cpu", "gpu" or "tpu"
    kind: str  # `device_kind`, such as "NVIDIA H100 80GB HBM3"


@functools.cache
def find_devices(hardware: str) -> DeviceCount:
    """Returns the devices of this machine; raises UserError if none."""
    process = run_python("-c", _COUNT_DEVICES, hardware)
    words = process.stdout.split()
    if process.returncode or words[:1] != ["devices"]:
        error = (process.stderr.strip().splitlines() or ["no message"])[-1]
        error = error.removeprefix("MaxText.errors.UserError: ")
        raise UserError(f"cannot count the devices of this machine: {error}")
    return DeviceCount(int(words[1]), words[2], " ".join(words[3:]))


def count_devices(hardware: str) -> int:
    """Returns the device count of this machine; raises UserError if none."""
    return find_devices(hardware).count


def tail(log: Path, count: int = 12) -> str:
    """Returns the last lines of a log, indented to be quoted in a message."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.exists() else []
    return "\n".join(f"  | {line}" for line in lines[-count:]) or "  | (nothing)"


def lock_folder(folder: Path) -> contextlib.AbstractContextManager[Any]:
    """Locks a comparison's folder; UserError if taken or not writable.

    A run that outlives a killed command holds the lock of its own run folder.
    """
    check_checkpoint_path(folder.absolute(), "output")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return FileLock(folder / _LOCK, timeout=0).acquire()
    except Timeout:
        raise UserError(
            f"{folder} is locked by another process. Wait for it, stop it, or set "
            "output= to another folder."
        ) from None
    except OSError as error:
        raise UserError(
            f"cannot write to the folder {folder}: {error}. Set output= to another folder."
        ) from error


def signals_as_exceptions() -> contextlib.AbstractContextManager[None]:
    """Raises StopRequestedError on STOP_SIGNALS, so no run outlives the program."""
    stopping = False

    def stop(number: int, _frame: object) -> None:
        nonlocal stopping
        # Only the first: the run at work is saving, and a closing terminal sends SIGHUP twice.
        if not stopping:
            stopping = True
            raise StopRequestedError

    return handled(STOP_SIGNALS, stop)


def train(run: Trial) -> int:
    """Runs train.py to its end; returns the exit code, negative for a signal.

    On KeyboardInterrupt and other exceptions, the run is interrupted and awaited before the
    exception propagates.
    """
    write_config(run)
    process = start_training(train_command(run.config_path), run.log)
    try:
        return process.wait()
    except BaseException:
        terminate(process)
        raise


def start_training(
    command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Starts a program that trains, in a process group of its own.

    So Ctrl-C reaches it exactly once, through `terminate`.

    Args:
      command: The program with its arguments.
      log: Gets its output, after what the file has; its folder is made.
      environment: By default that of this process, without variables that set keys.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as log_file:
        return subprocess.Popen(
            command,
            env=subprocess_env() if environment is None else environment,
            stdin=subprocess.DEVNULL,
            stdout=log_file,
            stderr=subprocess.STDOUT,
            process_group=0,
        )


def write_config(run: Trial) -> None:
    """Writes the run's configuration next to its folder."""
    run.folder.parent.mkdir(parents=True, exist_ok=True)
    # Keys of a module that only other configurations import are unknown to this run.
    values = flatten(run.config)
    keys = all_keys()
    omitted: set[str] = set()
    for registration in registrations():
        if registration.keys and not registration.is_built_in:
            names = registration.keys().values_by_key()
            omitted |= {name for name in names if values[name] == keys[name].default}
    run.config_path.write_text(resolved_yaml(run.config, omitted=omitted), encoding="utf-8")


def terminate(process: subprocess.Popen[bytes]) -> None:
    """Interrupts a run and waits; kills it on a second Ctrl-C or timeout."""
    # Shells ignore SIGINT in a script's background jobs, and the run inherits that.
    is_deaf = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM if is_deaf else signal.SIGINT)
    try:
        process.wait(_PATIENCE_SECONDS)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def time_steps(
    plan: Plan, variants: Sequence[Variant], log: Log, num_rounds: int = _ROUNDS
) -> None:
    """Adds missing measurements to the plan and saves it after each.

    Args:
      plan: Gets the seconds of each step.
      variants: Its configurations, which alternate.
      log: Prints a line.
      num_rounds: Of one short run per configuration.

    Raises:
      UserError: The shape of the batch changes during a run, or a short run fails.
    """
    stages = {name: config for variant in variants for name, config in variant.named_stages}
    for name, config in stages.items():
        batch = config.batch
        if batch.enable_rampup_batch_size or batch.sequence_length_stages:
            raise UserError(
                f"{name}: match=time needs a constant batch shape, but batches change during the "
                "run (enable_rampup_batch_size, sequence_length_stages). Use match=flops or "
                "match=tokens."
            )
    for index in range(num_rounds):
        for name, config in stages.items():
            rounds = plan.measurements.setdefault(name, [])
            if len(rounds) > index:
                continue
            folder = plan.folder / _FOLDER / f"{name}_{index}"
            log(f"measuring {name}, round {index + 1} of {num_rounds}: {_STEPS} steps")
            rounds.append(_step_seconds(name, config, folder))
            plan.save()
    shutil.rmtree(plan.folder / _FOLDER, ignore_errors=True)
    for name, rounds in plan.measurements.items():
        medians = [statistics.median(seconds) for seconds in rounds]
        line = f"  {name}: {plan.seconds_per_step(name):.4g} s per step"
        if max(medians) > min(medians) * (1 + _UNSTEADY):
            seconds = " and ".join(f"{median:.4g}" for median in medians)
            line += f", but rounds took {seconds} s: other programs may use this machine"
        log(line)


def short_config(config: Config, folder: Path) -> Config:
    """Returns the configuration of a short run with training only."""
    keys = flatten(run_config(config, {}, folder, seed=0))
    # Initial weights do not affect the step time, and may not exist yet.
    beginning = {
        name: key.default
        for name, key in all_keys().items()
        if name.startswith(("load_parameters_", "growth."))
    }
    return unflatten(keys | beginning | SHORT_RUN_KEYS)


def _step_seconds(name: str, config: Config, folder: Path) -> list[float]:
    """Returns the seconds of each step of a short run, without its warm-up."""
    shutil.rmtree(folder, ignore_errors=True)
    run = Trial(label=name, seed=0, config=short_config(config, folder), folder=folder, weight=0.0)
    code = train(run)
    if code:
        raise UserError(
            f"{name}: the timing run exited with code {code}. Last lines of {run.log}:\n"
            f"{tail(run.log)}"
        )
    return read_step_seconds(folder, name)


def read_step_seconds(folder: Path, name: str) -> list[float]:
    """Returns the seconds of each step of a short run, without its warm-up.

    Args:
      folder: Of the run.
      name: Of its configuration, for the message.

    Raises:
      UserError: It ended within its warm-up.
    """
    rows = [row for row in read_run(folder).steps if row["step"] >= _WARMUP_STEPS]
    if not rows:
        raise UserError(
            f"{name}: the data end within {_WARMUP_STEPS} steps, too few to time one. Set "
            "num_epoch=-1."
        )
    return [row["seconds"] / row["updates"] for row in rows]
