"""Plans, runs and reports a comparison.

Runs with results are not repeated. The remaining ones may be printed instead.
"""

import os
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import jax

from MaxText.errors import UserError
from MaxText.experiments import train_subprocess
from MaxText.experiments.compare_args import UNITS, CompareArgs
from MaxText.experiments.comparison_plan import (
    ComparisonSpec,
    Plan,
    StageSequence,
    Trial,
    chains_of,
    format_budget,
    format_changes,
    load_or_create_plan,
    plan_lines,
    plan_rows,
    run_path,
)
from MaxText.experiments.comparison_results import (
    DIVERGED,
    FINISHED,
    HEADER,
    RANKING_HEADER,
    RANKING_NOTE,
    TABLE_NOTE,
    ConfigResults,
    budget_deviations,
    group_results,
    is_over,
    load_chain_record,
    load_record,
    ranking_rows,
    summarize,
    summary_lines,
    table_rows,
    text_lines,
    write_runs_csv,
    write_summary_csv,
)
from MaxText.experiments.runs_progress import RunsProgress
from MaxText.experiments.solver import solve_plan, solved_variants, validation_errors
from MaxText.experiments.step_timing import time_steps
from MaxText.experiments.variants import Variant, confounding_keys
from MaxText.metrics.run_record import RunHistory, read_run
from MaxText.reports.formatting import loss
from MaxText.reports.page import PageSection, PageTable
from MaxText.reports.report_writer import write_report

Log = Callable[[str], None]

_LABELS_OF_TITLE = 3  # more would not fit on a line


def run_comparison(
    request: CompareArgs,
    variants: Sequence[Variant],
    question: ComparisonSpec,
    folder: Path,
    command: Sequence[str],
    log: Log,
) -> None:
    """Runs a comparison in its folder; see `runner.compare`."""
    # Leaves accelerators to the runs: this process only evaluates shapes.
    jax.config.update("jax_platforms", "cpu")

    is_script = request.launch == "print"

    def say(line: str) -> None:
        log(f"# {line}".rstrip() if is_script else line)

    with train_subprocess.signals_as_exceptions(), train_subprocess.lock_folder(folder):
        plan = load_or_create_plan(folder, variants, question, request.seeds)
        if not plan.planned:
            if request.match == "time":
                time_steps(plan, variants, say)
            solve_plan(plan, variants, request)
        chains = chains_of(plan, variants)
        runs = [run for chain in chains for run in chain]
        for run in runs:
            if broken := validation_errors(run.config):
                raise UserError(f"{run.name}: {broken[0]}")
        plan.save()
        waiting = [run for run in runs if not is_over(run)]

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
        _collect_results(plan, variants, chains, unasked, say)


def format_launch_script(chains: Sequence[Sequence[Path]], command: Sequence[str]) -> list[str]:
    """Returns the shell lines to run configurations and gather results.

    Each chain is a single line, because its runs must be sequential.
    """
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
    finished = [run for run in runs if is_over(run)]
    log(f"{len(runs)} runs in {folder}, {len(finished)} already complete")
    with RunsProgress(runs, finished, log) as progress:
        for run in runs:
            if run in finished:
                continue
            if is_over(run):
                progress.skip(run, "skipped, because an earlier stage diverged")
                continue
            progress.begin(run, train_subprocess.num_completed_steps(run.folder))
            code = train_subprocess.train(run, progress.steps)
            # After exit code 0 the record must be readable: read_run raises otherwise.
            record = load_record(run) if code else read_run(run.folder)
            if record is None or record.state not in FINISHED:
                raise UserError(
                    f"{run.name}: train.py exited with code {code} before the run was complete. "
                    f"Last lines of {run.log}:\n{train_subprocess.tail(run.log)}\n"
                    "  Run the same command to resume this run."
                )
            if record.state == DIVERGED:
                progress.end(run, f"diverged at step {record.last_step}")
            else:
                progress.end(run, f"validation loss {loss(record.final_loss)}")


def _collect_results(
    plan: Plan,
    variants: Sequence[Variant],
    chains: Sequence[StageSequence],
    unasked: Sequence[str],
    say: Log,
) -> None:
    records = [(chain, one) for chain in chains if (one := load_chain_record(chain))]
    if not records:
        return
    results = [summarize(chain, record) for chain, record in records]
    groups = group_results([variant.label for variant in variants], results)
    for line in ["", *text_lines(groups, plan, variants), ""]:
        say(line)
    write_runs_csv(plan.folder / "runs.csv", results)
    write_summary_csv(plan.folder / "summary.csv", groups)
    report = write_results(plan, variants, [record for _, record in records], groups, unasked)
    say(f"Report: {report}; numbers: {plan.folder / 'runs.csv'}, {plan.folder / 'summary.csv'}")


def sections(
    plan: Plan, variants: Sequence[Variant], groups: Sequence[ConfigResults], unasked: Sequence[str]
) -> list[PageSection]:
    """Returns the report's sections on the comparison."""
    found = PageSection(
        "Result",
        [TABLE_NOTE, *summary_lines(groups, plan, variants)],
        PageTable(HEADER, table_rows(groups)),
    )
    ranked = ranking_rows(groups)
    ranking = (
        [PageSection("Ranking", [RANKING_NOTE], PageTable(RANKING_HEADER, ranked))]
        if ranked
        else []
    )
    header, rows = plan_rows(plan)
    warnings = [f"The configurations differ in {line}." for line in unasked]
    made_equal = PageSection(
        "How the budgets were matched",
        [
            f"match={plan.question.match}: {format_budget(plan, variants)}.",
            *format_changes(plan, variants),
            "A seed gives every configuration the same order of the data and the same seed of the "
            f"initial weights. Seeds: {', '.join(map(str, plan.seeds))}.",
            *warnings,
        ],
        PageTable(header, rows),
    )
    return [found, *ranking, made_equal]


def write_results(
    plan: Plan,
    variants: Sequence[Variant],
    records: Sequence[RunHistory],
    groups: Sequence[ConfigResults],
    unasked: Sequence[str],
) -> Path:
    """Writes the report into the comparison's folder and returns its path.

    `records` has one record of `load_chain_record` per finished chain.
    """
    present = {str(record.folder) for record in records}
    by_label = {
        label: [
            path
            for seed in plan.seeds
            if (path := str(plan.folder / label / run_path(seed))) in present
        ]
        for label in plan.identities
    }
    return write_report(
        records,
        plan.folder,
        title=title_of(plan, groups),
        groups={label: folders for label, folders in by_label.items() if folders},
        sections=sections(plan, variants, groups, unasked),
    )


def title_of(plan: Plan, groups: Sequence[ConfigResults]) -> str:
    """Returns the report's title.

    It calls a budget equal only if it was.
    """
    labels = list(plan.identities)
    few = len(labels) <= _LABELS_OF_TITLE
    what = " and ".join(labels) if few else f"{len(labels)} configurations"
    how = "unequal" if budget_deviations(groups, plan) else "equal"
    return f"{what}, {how} {UNITS[plan.question.match]}"
