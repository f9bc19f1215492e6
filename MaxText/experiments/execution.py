"""Plans, runs (or prints the runs of) and reports a comparison."""

import os
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import cast

import jax

from MaxText.errors import UserError
from MaxText.experiments import comparison_results, train_subprocess
from MaxText.experiments.compare_args import CompareArgs
from MaxText.experiments.comparison_plan import (
    ComparisonSpec,
    Plan,
    StageSequence,
    Trial,
    chains_of,
    load_or_create_plan,
    plan_lines,
)
from MaxText.experiments.solver import solve_plan, solved_variants, validation_errors
from MaxText.experiments.variants import Variant, confounding_keys, folder_of
from MaxText.metrics.run_record import read_run
from MaxText.metrics.step_line import format_duration
from MaxText.reports.formatting import loss
from MaxText.reports.report_writer import write_report

Log = Callable[[str], None]


def run_comparison(
    request: CompareArgs,
    variants: Sequence[Variant],
    solve_for: Mapping[str, str],
    command: Sequence[str],
    log: Log,
) -> None:
    """Plans, runs (or prints) the remaining runs, and reports the results.

    `solve_for` has the key to solve for by label; `command` was typed. Raises UserError for an
    unreachable budget or a failed run.
    """
    # Leaves accelerators to the runs: this process only evaluates shapes.
    jax.config.update("jax_platforms", "cpu")

    folder, num_devices = folder_of(request, variants), _num_devices(request, variants)
    budget = cast(float | None, request.budget)
    question = ComparisonSpec(request.match, budget, solve_for, request.tolerance, num_devices)
    is_script = request.launch == "print"

    def say(line: str) -> None:
        log(f"# {line}".rstrip() if is_script else line)

    with train_subprocess.signals_as_exceptions(), train_subprocess.lock_folder(folder):
        plan = load_or_create_plan(folder, variants, question, request.seeds)
        if not plan.planned:
            if request.match == "time":
                train_subprocess.time_steps(plan, variants, say)
            solve_plan(plan, variants)
        chains = chains_of(plan, variants)
        runs = [run for chain in chains for run in chain]
        for run in runs:
            if broken := validation_errors(run.config):
                raise UserError(f"{run.name}: {broken[0]}")
        plan.save()
        waiting = [run for run in runs if not comparison_results.is_over(run)]

        is_script = is_script and bool(waiting)
        for line in plan_lines(plan, variants):
            say(line)
        solved = {label: one.changed for label, one in plan.planned.items()}
        unasked = confounding_keys(solved_variants(plan, variants), solved)
        for line in unasked:
            say(f"warning: the configurations differ in {line}")
        if unasked:
            say("")
        if waiting and request.launch == "print":
            for run in waiting:
                train_subprocess.write_config(run)
            left = [[run.config_path for run in chain if run in waiting] for chain in chains]
            for line in format_launch_script([configs for configs in left if configs], command):
                log(line)
        elif waiting:
            _run_all(runs, folder, log)
        else:
            log(f"All {len(runs)} runs in {folder} are already complete.")
        _collect_results(plan, variants, chains, unasked, command, say)


def _num_devices(request: CompareArgs, variants: Sequence[Variant]) -> int:
    hardware = {variant.config.run.hardware for variant in variants}
    if len(hardware) > 1:
        raise UserError(
            f"hardware: the configurations set {' and '.join(sorted(hardware))}. Set one value for "
            "all of them on the command line."
        )
    if request.num_devices is not None and request.launch == "print":
        return request.num_devices
    present = train_subprocess.count_devices(hardware.pop())
    if request.num_devices not in (None, present):
        raise UserError(
            f"num_devices={request.num_devices}, but this machine has {present}, so runs here "
            "would miss the budget. Add launch=print to plan for another machine."
        )
    return present


def format_launch_script(chains: Sequence[Sequence[Path]], command: Sequence[str]) -> list[str]:
    """Returns the shell lines to run each chain in order, and to report."""
    variables = train_subprocess.key_variables(os.environ)
    # The shell may have the same variables set; the files already contain their values.
    without = ["env", *(word for name in variables for word in ("-u", name))] if variables else []

    def line(config: Path) -> str:
        return shlex.join([*without, *map(_short, train_subprocess.train_command(config))])

    lines = [" && ".join(map(line, configs)) for configs in chains]
    return [*lines, shlex.join([_short(sys.executable), *command])]


def _short(path: str) -> str:
    here = str(Path.cwd()) + os.sep
    return path.removeprefix(here)


def _run_all(runs: Sequence[Trial], folder: Path, log: Log) -> None:
    left = [run for run in runs if not comparison_results.is_over(run)]
    done = len(runs) - len(left)
    log(f"{len(runs)} runs in {folder}, {done} already complete; each writes train.log")
    work, seconds = 0.0, 0.0  # of whole runs so far
    for number, run in enumerate(runs, 1):
        if run not in left:
            continue
        name = f"[{number}/{len(runs)}] {run.name}"
        if comparison_results.is_over(run):
            log(f"{name}: skipped, because an earlier stage diverged")
            continue
        before = comparison_results.load_record(run)
        is_resumed, began = before is not None and before.steps, time.monotonic()
        log(f"{name}: {'resumed' if is_resumed else 'started'}")
        code = train_subprocess.train(run)
        # After exit code 0 the record must be readable: read_run raises otherwise.
        record = comparison_results.load_record(run) if code else read_run(run.folder)
        if record is None or record.state not in comparison_results.FINISHED:
            raise UserError(
                f"{run.name}: train.py exited with code {code} before the run was complete. "
                f"Last lines of {run.log}:\n{train_subprocess.tail(run.log)}\n"
                "  Run the same command to resume this run."
            )
        took = time.monotonic() - began
        if record.state == comparison_results.DIVERGED:
            log(f"{name}: diverged at step {record.last_step}, {format_duration(took)}")
            continue
        line = f"{name}: validation loss {loss(record.final_loss)}, {format_duration(took)}"
        if not is_resumed:
            work, seconds = work + run.weight, seconds + took
        ahead = sum(later.weight for later in runs[number:] if later in left)
        if work and ahead:
            line += f", about {format_duration(seconds / work * ahead)} left"
        log(line)


def _collect_results(
    plan: Plan,
    variants: Sequence[Variant],
    chains: Sequence[StageSequence],
    unasked: Sequence[str],
    command: Sequence[str],
    say: Log,
) -> None:
    records = [
        (chain, found) for chain in chains if (found := comparison_results.load_chain(chain))
    ]
    if not records:
        return
    results = [comparison_results.summarize(chain, found) for chain, found in records]
    groups = comparison_results.group_results([variant.label for variant in variants], results)
    for line in ["", *comparison_results.text_lines(groups, plan, variants), ""]:
        say(line)
    comparison_results.write_runs_csv(plan.folder / "runs.csv", results)
    comparison_results.write_summary_csv(plan.folder / "summary.csv", groups)
    report = write_report(
        [record for _, found in records for record in found],
        plan.folder,
        title=comparison_results.title_of(plan, groups),
        groups={
            name: [str(plan.folder / each) for each in runs] for name, runs in plan.groups.items()
        },
        sections=comparison_results.sections(plan, variants, groups, unasked, command),
    )
    say(f"Report: {report}; numbers: {plan.folder / 'runs.csv'}, {plan.folder / 'summary.csv'}")
