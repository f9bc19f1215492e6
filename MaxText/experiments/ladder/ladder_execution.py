"""Runs a ladder: learning rates, all rungs but the top, a prediction, the top rung, a verdict."""

import functools
import shlex
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax

from MaxText.compilation.targets import find_target
from MaxText.config.problems import ConfigurationError
from MaxText.config.schema import flatten
from MaxText.errors import UserError
from MaxText.experiments import comparison_results
from MaxText.experiments.compare_args import CompareArgs
from MaxText.experiments.comparison_plan import (
    Plan,
    StageSequence,
    chains_of,
    load_or_create_plan,
    run_path,
)
from MaxText.experiments.comparison_results import RunResult
from MaxText.experiments.execution import (
    Log,
    RunsElsewhereError,
    count_run_devices,
    find_local_hardware,
    find_shares,
    lock_folder,
    run_chains,
    signals_as_exceptions,
    time_steps,
)
from MaxText.experiments.ladder.effective_speedup import FLOPS, MIN_TIMINGS, TIME
from MaxText.experiments.ladder.hardware_estimates import (
    CPU_MACHINE,
    HardwareEstimates,
    estimate_rungs,
)
from MaxText.experiments.ladder.ladder_args import RATE_KEY, SWEEP_SEED, is_size_grid
from MaxText.experiments.ladder.ladder_plan import (
    SolvedRung,
    plan_lines,
    plan_table,
    rung_spec,
    solve_rungs,
)
from MaxText.experiments.ladder.ladder_report import ladder_sections, write_ladder_files
from MaxText.experiments.ladder.ladder_results import analyze_ladder, summary_of
from MaxText.experiments.ladder.learning_rate_sweep import combine_rungs, find_optimum, run_sweeps
from MaxText.experiments.ladder.measurements import Arm, Rung
from MaxText.experiments.ladder.preregistration import (
    check_preregistered,
    load_preregistration,
    preregister,
    preregistered_sha256,
)
from MaxText.experiments.ladder.rung_sizes import Size
from MaxText.experiments.ladder.rungs import LadderRung, plan_rungs
from MaxText.experiments.ladder.size_study import (
    study_lines,
    study_sections,
    study_sizes,
    write_study_files,
)
from MaxText.experiments.solver import solve_plan
from MaxText.experiments.tuning import (
    TUNING_FOLDER,
    TunedValue,
    loss_of,
    tuning_section,
    with_key_factor,
    write_tuning_csv,
)
from MaxText.experiments.variants import Variant, folder_of
from MaxText.formatting import pluralize
from MaxText.hardware.chips import Hardware, find_hardware
from MaxText.reports.page import PageSection, PageTable
from MaxText.reports.report_writer import write_report


class _Ladder:
    """A ladder in its folder.

    Args:
      request: With the ladder's options.
      variants: Configurations as in their files.
      rungs: Planned and without problems.
      num_devices: Of a run.
      command: As typed.
      log: Prints a line.
    """

    def __init__(
        self,
        request: CompareArgs,
        variants: Sequence[Variant],
        rungs: Sequence[SolvedRung],
        num_devices: int,
        *,
        command: Sequence[str],
        log: Log,
    ):
        self.request = request
        self.labels = [variant.label for variant in variants]
        self.rungs = rungs
        self.folder = folder_of(request, variants)
        self.tuned: list[TunedValue] = []
        self._num_devices = num_devices
        self._command = command
        self.log = log
        self._print = log  # of scripts, in which all other lines are comments
        if request.launch == "print":
            self.log = lambda line: log(f"# {line}".rstrip())
        self._shares = find_shares(request, variants)
        self.machines: list[str] = []  # to estimate times on, that of the verdict first
        if request.target and len(variants) > 1:
            self.machines.append(request.target)
            local = find_local_hardware(request, variants)
            if local is not None and local.chip.platform == "cpu" and request.target != CPU_MACHINE:
                self.machines.append(CPU_MACHINE)

    def run(self, chains: Sequence[StageSequence]) -> None:
        """Runs what is unfinished, or lets it run elsewhere.

        Raises:
          RunsElsewhereError: Something is left to run elsewhere.
          UserError: A run failed.
        """
        run_chains(
            chains,
            self.folder,
            request=self.request,
            command=self._command,
            shares=self._shares,
            log=self.log,
            print_script=self._print,
        )

    def tune(self) -> dict[str, float]:
        """Sweeps what is tuned at the smallest rungs; gives all rungs the weight decays.

        Returns the factor of each arm's learning rate, 1 without a sweep.

        Raises:
          UserError: A sweep found no optimum.
        """
        rates = dict.fromkeys(self.labels, 1.0)
        for key in self.request.tune:
            factors = self._sweep(key, rates)
            if key == RATE_KEY:
                rates = factors
            else:
                self.rungs = [solved.with_key_factors(key, factors) for solved in self.rungs]
        return rates

    def _sweep(self, key: str, rates: Mapping[str, float]) -> dict[str, float]:
        """Returns the best factor of a key for each arm, swept at given learning rates."""
        swept = [solved.rung.with_rates(rates) for solved in self.rungs[: self.request.lr_sweep]]
        sweeps = {
            (rung.number, variant.label): functools.partial(self._swept_run, rung, variant, key)
            for rung in swept
            for variant in rung.variants
        }
        losses = run_sweeps(sweeps, self.run, loss_of, key)
        factors = {}
        for label in self.labels:
            tuned_values = [
                TunedValue(
                    label=label,
                    key=key,
                    before=flatten(variant.config)[key],
                    losses=losses[rung.number, label],
                    optimum=find_optimum(losses[rung.number, label], key),
                    rung=rung.number,
                )
                for rung in swept
                for variant in rung.variants
                if variant.label == label
            ]
            factors[label] = combine_rungs([value.optimum for value in tuned_values])
            for value in tuned_values:
                self.log(value.line)
            self.log(f"{key} of {label}: all rungs get {factors[label]:.3g} times their own")
            self.tuned += tuned_values
        return factors

    def _swept_run(
        self, rung: LadderRung, variant: Variant, key: str, factor: float
    ) -> StageSequence:
        """Returns the run of an arm at a rung with another value of a key, in its own folder."""
        name = f"{variant.label}_{key}_x{factor:g}"
        path = self.folder / rung.folder / TUNING_FOLDER / name
        changed = with_key_factor(variant, key, factor)
        spec = rung_spec(rung, self.request, self._num_devices)
        plan = load_or_create_plan(path, [changed], spec, [SWEEP_SEED])
        if not plan.planned:
            solve_plan(plan, [changed])
        path.mkdir(parents=True, exist_ok=True)
        plan.save()
        (chain,) = chains_of(plan, [changed])
        return chain

    def open_plans(self, rates: Mapping[str, float]) -> list[Plan]:
        """Returns the comparison of each rung, with the learning rates of a sweep."""
        return [solved.open_plan(self.folder, rates, self.request.seeds) for solved in self.rungs]

    def preregister(self, below: Mapping[str, tuple[Rung, ...]]) -> None:
        """Predicts the top rung from those below, unless it is predicted already.

        Args:
          below: Rungs below the top, by configuration.
        """
        if load_preregistration(self.folder) is None:
            top = self.rungs[-1].planned
            computes = {label: top[label].total("flops") for label in self.labels}
            try:
                arms = [Arm(*item) for item in below.items()]
                record = preregister(self.folder, arms, computes, self.request.linf)
            except UserError as error:
                self.log(f"warning: no prediction of the top rung: {error}")
                return
            for arm in record["arms"]:
                low, median, high = arm["prediction"]
                self.log(
                    f"Prediction of the top rung, {arm['label']} at {arm['compute']:.3g} FLOPs: "
                    f"{median:.4f} ({low:.4f} to {high:.4f})"
                )
        self.log(f"Predictions: SHA-256 {preregistered_sha256(self.folder)}")

    def time_rungs(self, plans: Sequence[Plan], rates: Mapping[str, float]) -> None:
        """Times the steps of all arms in turns, on a machine that does nothing else."""
        if len(self.labels) == 1 or self.request.launch != "local":
            return
        for solved, plan in zip(self.rungs, plans, strict=True):
            if any(
                len(plan.measurements.get(name, [])) < self.request.timings
                for variant in solved.rung.variants
                for name, _ in variant.named_stages
            ):
                self.log(f"timing rung {solved.rung.number}")
                variants = solved.sized_variants(rates)
                time_steps(plan, variants, self.log, self.request.timings)

    def report(
        self,
        plans: Sequence[Plan],
        chains: Sequence[Sequence[StageSequence]],
        estimates: HardwareEstimates,
    ) -> None:
        """Logs the verdict, and writes the report, its figures and its numbers."""
        arms = [Arm(*item) for item in self.measure(plans, chains, estimates).items()]
        timed = self.request.timings >= MIN_TIMINGS and all(
            len(rung.token_seconds) >= MIN_TIMINGS for arm in arms for rung in arm.rungs
        )
        currencies = [FLOPS, *([TIME] if timed else [])]
        currencies += [estimates.target] if estimates.target else []
        results = analyze_ladder(
            arms,
            asymptote=self.request.linf,
            currencies=currencies,
            outcomes=check_preregistered(self.folder, arms),
        )
        notes = [*estimates.assumptions, *(estimates.describe_error(arms) if timed else [])]
        for line in ["", *summary_of(results), *notes, ""]:
            self.log(line)
        written = write_ladder_files(self.folder, results)
        self._write_page(
            plans, chains, written, leading=ladder_sections(results), notes=notes, title="Ladder"
        )

    def report_sizes(
        self, plans: Sequence[Plan], chains: Sequence[Sequence[StageSequence]]
    ) -> None:
        """Logs the best sizes, and writes the report, its figures and its numbers."""
        studies = []
        for label, measured in self.measure(plans, chains).items():
            cells: dict[float, list[Rung]] = {}
            for solved, rung in zip(self.rungs, measured, strict=True):
                cells.setdefault(solved.rung.compute, []).append(rung)
            studies.append(study_sizes(label, cells))
        for line in ["", *(line for study in studies for line in study_lines(study)), ""]:
            self.log(line)
        written = write_study_files(self.folder, studies)
        leading = study_sections(studies)
        self._write_page(plans, chains, written, leading=leading, notes=(), title="Best sizes")

    def _write_page(
        self,
        plans: Sequence[Plan],
        chains: Sequence[Sequence[StageSequence]],
        written: Sequence[Path],
        *,
        leading: Sequence[PageSection],
        notes: Sequence[str],
        title: str,
    ) -> None:
        """Writes report.html and runs.csv, and logs where everything is.

        Args:
          plans: Of the rungs.
          chains: Runs of each rung.
          written: Files that are there already.
          leading: First sections of the page.
          notes: Of how the rungs were planned.
          title: Of the page, before the names of the configurations.
        """
        deviations = [
            f"rung {solved.rung.number}: {line}"
            for solved, plan, of_rung in zip(self.rungs, plans, chains, strict=True)
            for line in comparison_results.budget_deviations(_groups(plan, of_rung), plan)
        ]
        for line in deviations:
            self.log(f"warning: {line}")
        files = [*written, self._write_runs_csv(chains)]
        records = [
            record
            for of_rung in chains
            for c in of_rung
            for record in comparison_results.load_chain(c)
        ]
        report = write_report(
            records,
            self.folder,
            title=f"{title} of {' and '.join(self.labels)}",
            groups=self._run_groups(plans),
            leading=leading,
            sections=[self._plan_section(notes), *self._tuning_sections()],
            warnings=deviations,
        )
        self.log(f"Report: {report}; numbers: {', '.join(map(str, files))}")

    def measure(
        self,
        plans: Sequence[Plan],
        chains: Sequence[Sequence[StageSequence]],
        estimates: HardwareEstimates | None = None,
    ) -> dict[str, tuple[Rung, ...]]:
        """Returns what the runs of the rungs measured, by configuration; all of them are over.

        Args:
          plans: Of the rungs, from the smallest on; those above may be missing.
          chains: Runs of each of these rungs.
          estimates: Of step times on other hardware.
        """
        rungs: dict[str, list[Rung]] = {label: [] for label in self.labels}
        for solved, plan, of_rung in zip(self.rungs, plans, chains, strict=False):
            for group, variant in zip(_groups(plan, of_rung), solved.rung.variants, strict=True):
                planned = plan.planned[group.label]
                config = next(c[-1].config for c in of_rung if c[-1].label == group.label)
                size = Size.of(config)
                rungs[group.label].append(
                    Rung(
                        compute=planned.total("flops"),
                        tokens=planned.total("tokens"),
                        parameters=planned.stages[-1].parameters,
                        losses=group.losses,
                        diverged=tuple(
                            result.seed
                            for result in group.results
                            if result.state == comparison_results.DIVERGED
                        ),
                        width=size.width,
                        depth=size.depth,
                        learning_rate=flatten(config)[RATE_KEY],
                        token_seconds=_token_seconds(plan, variant),
                        estimated_token_seconds=(
                            estimates.of(solved.rung.number, group.label) if estimates else {}
                        ),
                    )
                )
        return {label: tuple(rungs[label]) for label in self.labels}

    def _run_groups(self, plans: Sequence[Plan]) -> dict[str, list[str]]:
        """Returns the run folders of each configuration and rung, for the curves of the report."""
        return {
            f"{name}, rung {solved.rung.number}": [str(plan.folder / run) for run in runs]
            for solved, plan in zip(self.rungs, plans, strict=True)
            for name, runs in plan.groups.items()
        }

    def _plan_section(self, notes: Sequence[str]) -> PageSection:
        lines = [f"Command: {shlex.join(['python', *self._command])}", *notes]
        table = PageTable(*plan_table(self.request, self.rungs))
        return PageSection("How the rungs were planned", lines, table)

    def _tuning_sections(self) -> list[PageSection]:
        if not self.tuned:
            return []
        write_tuning_csv(self.folder, self.tuned)
        where = f"at the smallest {pluralize(self.request.lr_sweep, 'rung')}"
        return [tuning_section(self.tuned, where)]

    def _write_runs_csv(self, chains: Sequence[Sequence[StageSequence]]) -> Path:
        """Writes one row per run; returns the path."""
        results = [
            _result(chain)._replace(
                folder=str(Path(solved.rung.folder) / chain[-1].label / run_path(chain[-1].seed))
            )
            for solved, of_rung in zip(self.rungs, chains, strict=True)
            for chain in of_rung
        ]
        comparison_results.write_runs_csv(self.folder / "runs.csv", results)
        return self.folder / "runs.csv"


def _result(chain: StageSequence) -> RunResult:
    """Returns the result of a chain that is over."""
    return comparison_results.summarize(chain, comparison_results.load_chain(chain))


def _groups(plan: Plan, chains: Sequence[StageSequence]) -> list[comparison_results.ConfigResults]:
    """Returns the results of a rung by configuration."""
    return comparison_results.group_results(list(plan.planned), list(map(_result, chains)))


def _token_seconds(plan: Plan, variant: Variant) -> tuple[float, ...]:
    """Returns the seconds per token of each timing; the i-th of all arms are neighbors in time."""
    names = [name for name, _ in variant.named_stages]
    rounds = [plan.measurements.get(name, []) for name in names]
    planned = plan.planned[variant.label]
    return tuple(
        sum(
            statistics.median(seconds) * stage.steps
            for seconds, stage in zip(of_stages, planned.stages, strict=True)
        )
        / planned.total("tokens")
        for of_stages in zip(*rounds, strict=False)
    )


def run_ladder(
    request: CompareArgs, variants: Sequence[Variant], command: Sequence[str], log: Log
) -> None:
    """Plans, runs (or prints, or submits) and judges a ladder.

    Args:
      request: With the ladder's options.
      variants: Its configurations; the first is the baseline.
      command: As typed, for the report and the printed script.
      log: Prints a line.

    Raises:
      ConfigurationError: Everything that is wrong with the plan, before anything runs.
      UserError: A run failed.
    """
    # Leaves accelerators to the runs: this process only evaluates shapes.
    jax.config.update("jax_platforms", "cpu")

    if request.target:
        find_target(request.target, 1)  # refuses an unknown machine
    num_devices = count_run_devices(request, variants)
    rungs, issues = plan_rungs(request, variants, num_devices)
    hardware = _hardware(request, variants)
    solved, more_issues = solve_rungs(
        request, variants, rungs, num_devices=num_devices, hardware=hardware
    )
    if issues or more_issues:
        raise ConfigurationError([*issues, *more_issues])
    ladder = _Ladder(request, variants, solved, num_devices, command=command, log=log)
    with signals_as_exceptions(), lock_folder(ladder.folder):
        for line in plan_lines(request, solved, num_devices):
            ladder.log(line)
        try:
            _climb(ladder)
        except RunsElsewhereError:
            return


def _hardware(request: CompareArgs, variants: Sequence[Variant]) -> Hardware | None:
    """Returns the hardware of the runs; None if it is unknown."""
    if request.launch != "local" and request.target:
        return find_hardware(request.target)
    return find_local_hardware(request, variants)


def _climb(ladder: _Ladder) -> None:
    """Runs all rungs but the top, predicts the top, runs it, and judges.

    A grid of sizes and computes has no top: all of it runs, and best sizes are reported.
    """
    rates = ladder.tune()
    plans = ladder.open_plans(rates)
    chains = [
        chains_of(plan, solved.with_rates(rates))
        for solved, plan in zip(ladder.rungs, plans, strict=True)
    ]
    if is_size_grid(ladder.request):
        ladder.run([chain for of_rung in chains for chain in of_rung])
        ladder.report_sizes(plans, chains)
        return
    ladder.run([chain for of_rung in chains[:-1] for chain in of_rung])
    ladder.preregister(ladder.measure(plans[:-1], chains[:-1]))
    ladder.run(chains[-1])
    ladder.time_rungs(plans, rates)
    estimates = estimate_rungs(ladder.rungs, rates, ladder.machines, ladder.folder, ladder.log)
    ladder.report(plans, chains, estimates)
