"""Main sequence of compare.py, from request to report.

Modules that import jax are imported after the configurations were accepted.
"""

import os
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from MaxText.config.problems import ConfigurationError, Problem
from MaxText.errors import UserError
from MaxText.experiments import train_subprocess
from MaxText.experiments.compare_args import KEY_OF, STEPS, CompareArgs, default_free
from MaxText.experiments.comparison_plan import (
    Chain,
    ComparisonSpec,
    Plan,
    Run,
    chains_of,
    load_or_create_plan,
)
from MaxText.experiments.variants import Variant, confounding_keys, expand_variants

Show = Callable[[str], None]

# Of the default folder; file systems allow about twice as many.
_LONGEST_NAME = 120


def compare(
    request: CompareArgs, problems: Sequence[Problem], command: Sequence[str], show: Show
) -> None:
    """Plans, runs (or prints) the remaining runs, and reports the results.

    `problems` are mistakes already found in the request; `command` is the typed command line, to be
    printed. Raises UserError for mistakes, an unreachable budget or a failed run, and
    KeyboardInterrupt once the current run has ended.
    """
    variants = expand_variants(request, problems)
    free = solve_key_by_label(request, variants)
    folder = request.output or default_folder(request, variants)
    hardware = {variant.config.run.hardware for variant in variants}
    if len(hardware) > 1:
        raise UserError(
            f"hardware: the configurations set {' and '.join(sorted(hardware))}. Set one value for "
            "all of them on the command line."
        )
    num_devices = _num_devices(request, hardware.pop())

    _force_cpu_backend()
    from MaxText.experiments.solved_plan import (
        changed_keys,
        plan_lines,
        solve_plan,
        solved_variants,
    )
    from MaxText.experiments.solving import validation_errors
    from MaxText.experiments.step_timing import time_steps

    question = ComparisonSpec(request.match, request.budget, free, request.tolerance, num_devices)
    with (
        train_subprocess.signals_as_exceptions(),
        train_subprocess.lock_folder(folder) as descriptor,
    ):
        plan = load_or_create_plan(folder, variants, question, request.seeds)
        if not plan.planned:
            if request.match == "time":
                time_steps(plan, variants, descriptor, _commented(show, request))
            solve_plan(plan, variants, request)
        chains = chains_of(plan, variants)
        runs = [run for chain in chains for run in chain]
        for run in runs:
            if broken := validation_errors(run.config):
                raise UserError(f"{run.name}: {broken[0]}")
        plan.save()
        waiting = [run for run in runs if not _is_over(run)]

        say = _commented(show, request) if waiting else show
        for line in plan_lines(plan, variants):
            say(line)
        unasked = confounding_keys(solved_variants(plan, variants), changed_keys(plan))
        for line in unasked:
            say(f"warning: the configurations differ in {line}")
        if unasked:
            say("")
        if waiting and request.launch == "print":
            for run in waiting:
                train_subprocess.write_config(run)
            left = [[run.config_path for run in chain if run in waiting] for chain in chains]
            for line in format_launch_script([configs for configs in left if configs], command):
                show(line)
        elif waiting:
            _run_all(runs, descriptor, folder, show)
        else:
            show(f"All {len(runs)} runs in {folder} are already complete.")
        _collect_results(plan, variants, chains, unasked, say)


def _num_devices(request: CompareArgs, hardware: str) -> int:
    """Returns the device count that runs are planned for."""
    if request.num_devices is not None and request.launch == "print":
        return request.num_devices
    present = train_subprocess.count_devices(hardware)
    if request.num_devices not in (None, present):
        raise UserError(
            f"num_devices={request.num_devices}, but this machine has {present}, so runs here "
            "would miss the budget. Add launch=print to plan for another machine."
        )
    return present


def _force_cpu_backend() -> None:
    """Leaves accelerators to the runs: this process only evaluates shapes."""
    import jax

    jax.config.update("jax_platforms", "cpu")


def _commented(show: Show, request: CompareArgs) -> Show:
    """Comments lines out for launch=print: the output is a shell script."""
    if request.launch == "run":
        return show
    return lambda line: show(f"# {line}".rstrip())


def default_folder(request: CompareArgs, variants: Sequence[Variant]) -> Path:
    """Returns a folder that the same command reproduces."""
    swept = dict.fromkeys(name for variant in variants for name in variant.swept)
    stems = [Path(path).stem for path in request.configs]
    name = "_".join(["compare", *stems, *swept, request.match])
    return Path(variants[0].config.run.base_output_directory).expanduser() / name[:_LONGEST_NAME]


def solve_key_by_label(request: CompareArgs, variants: Sequence[Variant]) -> dict[str, str]:
    """Returns the key to solve for, by configuration label.

    Raises ConfigurationError if `free` does not fit the configurations or `match`.
    """
    names = request.free or (default_free(request.match),)
    num_sources = max(len(request.configs), 1)
    if len(names) == 1:
        chosen = [names[0]] * len(variants)
    elif len(names) == num_sources:
        chosen = [names[variant.source] for variant in variants]
    elif len(names) == len(variants):
        chosen = list(names)
    else:
        what = f"free: {len(names)} names for {len(variants)} configurations"
        raise ConfigurationError([Problem(what, ("command line",), (("write", "one for each"),))])
    problems = []
    for variant, name in zip(variants, chosen, strict=True):
        if request.match == "time" and name != STEPS:
            what = f"free={name}: match=time measures the given model, and solves for steps"
            problems.append(Problem(what, ("command line",)))
        if request.match == "params" and name == STEPS:
            what = "free=steps: the number of parameters does not depend on the steps"
            problems.append(Problem(what, ("command line",), (("write", "free=width or depth"),)))
        if KEY_OF.get(name, name) in variant.swept:
            what = f"{name} is swept, but match={request.match} solves for it"
            facts = (("write", f"free= another key, or remove {name} from the sweep"),)
            problems.append(Problem(what, ("command line",), facts))
    if problems:
        raise ConfigurationError(list(dict.fromkeys(problems)))
    return {variant.label: name for variant, name in zip(variants, chosen, strict=True)}


def format_launch_script(chains: Sequence[Sequence[Path]], command: Sequence[str]) -> list[str]:
    """Returns shell lines that run the configurations and gather results.

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
    """Shortens a path inside the working directory to a relative one."""
    here = str(Path.cwd()) + os.sep
    return path.removeprefix(here)


def _is_over(run: Run) -> bool:
    from MaxText.experiments.comparison_results import is_over

    return is_over(run)


def _run_all(runs: Sequence[Run], descriptor: int, folder: Path, show: Show) -> None:
    from MaxText.experiments.comparison_results import DIVERGED, FINISHED, is_over, load_record
    from MaxText.experiments.runs_progress import RunsProgress
    from MaxText.metrics.run_record import read_run
    from MaxText.reports.formatting import loss

    finished = [run for run in runs if is_over(run)]
    show(f"{len(runs)} runs in {folder}, {len(finished)} already complete")
    with RunsProgress(runs, finished, show) as progress:
        for run in runs:
            if run in finished:
                continue
            if is_over(run):
                progress.skip(run, "skipped, because an earlier stage diverged")
                continue
            progress.begin(run, train_subprocess.num_completed_steps(run.folder))
            code = train_subprocess.train(run, descriptor, progress.steps)
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
    chains: Sequence[Chain],
    unasked: Sequence[str],
    say: Show,
) -> None:
    from MaxText.experiments import comparison_results, results_report

    records = [
        (chain, one) for chain in chains if (one := comparison_results.load_chain_record(chain))
    ]
    if not records:
        return
    results = [comparison_results.summarize(chain, record) for chain, record in records]
    groups = comparison_results.group_results([variant.label for variant in variants], results)
    for line in ["", *comparison_results.text_lines(groups, plan), ""]:
        say(line)
    comparison_results.write_runs_csv(plan.folder / "runs.csv", results)
    comparison_results.write_summary_csv(plan.folder / "summary.csv", groups)
    report = results_report.write(
        plan, variants, [record for _, record in records], groups, unasked
    )
    say(f"Report: {report}; numbers: {plan.folder / 'runs.csv'}, {plan.folder / 'summary.csv'}")
