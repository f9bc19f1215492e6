"""Plan of a ladder: every run with its cost, and what is wrong with it, before anything runs."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from MaxText.config.problems import ConfigIssue
from MaxText.config.schema import Config, flatten
from MaxText.cost.auto_layout import choose_layout
from MaxText.cost.job_plan import JobPlan, make_plan
from MaxText.errors import UserError
from MaxText.experiments.compare_args import STEPS, CompareArgs
from MaxText.experiments.comparison_plan import (
    ComparisonSpec,
    Plan,
    SolvedConfig,
    chains_of,
    load_or_create_plan,
    warmup_problems,
)
from MaxText.experiments.ladder.ladder_args import RATE_KEY, is_size_grid
from MaxText.experiments.ladder.ladder_power import POWER, smallest_speedup
from MaxText.experiments.ladder.learning_rate_sweep import FACTORS
from MaxText.experiments.ladder.rung_sizes import Size
from MaxText.experiments.ladder.rungs import (
    BATCH_RATE_EXPONENT,
    LadderRung,
    width_exponent,
)
from MaxText.experiments.ladder.size_law import MIN_CELLS
from MaxText.experiments.solver import cost, solve_plan, solved_variants, validation_errors
from MaxText.experiments.tuning import tuning_plan_line
from MaxText.experiments.variants import Variant, confounding_keys
from MaxText.formatting import format_duration, format_table, pluralize, short_count
from MaxText.hardware.chips import Hardware

_BATCH_KEY = "per_device_batch_size"


@dataclasses.dataclass(frozen=True)
class SolvedRung:
    """A rung with the steps of its runs, and their time where the hardware is known."""

    rung: LadderRung
    spec: ComparisonSpec
    planned: Mapping[str, SolvedConfig]  # by label
    job_plans: Mapping[str, JobPlan] = dataclasses.field(default_factory=dict)  # by label

    @property
    def compute(self) -> float:
        """FLOPs of all of its configurations, with one seed."""
        return sum(solved.total("flops") for solved in self.planned.values())

    def open_plan(self, folder: Path, rates: Mapping[str, float], seeds: Sequence[int]) -> Plan:
        """Loads or creates the comparison of this rung.

        Args:
          folder: Of the ladder.
          rates: Factor of the learning rate by label.
          seeds: Of its runs.

        Raises:
          UserError: The folder has another comparison, whose runs have begun.
        """
        path = folder / self.rung.folder
        variants = self.rung.with_rates(rates).variants
        plan = load_or_create_plan(path, variants, self.spec, seeds)
        plan.planned = dict(self.planned)
        plan.budget = self.rung.compute
        path.mkdir(parents=True, exist_ok=True)
        plan.save()
        return plan

    def with_key_factors(self, key: str, factors: Mapping[str, float]) -> "SolvedRung":
        """Returns the rung with a key multiplied by a factor per configuration."""
        return dataclasses.replace(self, rung=self.rung.with_key_factors(key, factors))

    def with_rates(self, rates: Mapping[str, float]) -> tuple[Variant, ...]:
        """Returns its configurations with learning rates multiplied by a factor, without steps."""
        return self.rung.with_rates(rates).variants

    def sized_variants(self, rates: Mapping[str, float]) -> list[Variant]:
        """Returns its configurations with all of their keys, steps included."""
        plan = Plan(Path(), self.spec, {}, planned=dict(self.planned))
        return solved_variants(plan, self.with_rates(rates))

    def seconds(self, label: str) -> float | None:
        """Returns the estimated seconds of a run; None if the hardware is unknown."""
        if label not in self.job_plans:
            return None
        return self.job_plans[label].time.estimate * self.planned[label].total("steps")


def rung_spec(rung: LadderRung, request: CompareArgs, num_devices: int) -> ComparisonSpec:
    """Returns the comparison that a rung is: equal FLOPs, met by the number of steps."""
    return ComparisonSpec(
        match="flops",
        budget=rung.compute,
        solve_for={variant.label: STEPS for variant in rung.variants},
        tolerance=request.tolerance,
        num_devices=num_devices,
    )


def solve_rungs(
    request: CompareArgs,
    variants: Sequence[Variant],
    rungs: Sequence[LadderRung],
    *,
    num_devices: int,
    hardware: Hardware | None,
) -> tuple[list[SolvedRung], list[ConfigIssue]]:
    """Returns the rungs with their steps, and everything that is wrong with them.

    Args:
      request: With the ladder's options.
      variants: Configurations as in their files.
      rungs: Of `plan_rungs`.
      num_devices: Of a run.
      hardware: That runs will have; None if it is unknown.
    """
    messages: dict[str, str] = {}  # message -> remedy
    solved = []
    for rung in rungs:
        spec = rung_spec(rung, request, num_devices)
        plan = Plan(Path(), spec, {v.label: {} for v in rung.variants}, seeds=request.seeds)
        too_short = _steps_within_warmup(rung, num_devices)
        for problem, factor in too_short.items():
            messages[problem] = _more_steps(rung.variants, factor)
        if too_short:
            continue
        try:
            solve_plan(plan, rung.variants)
        except UserError as error:
            messages[f"rung {rung.number}: {error}"] = "a larger tolerance=, or a larger from="
            continue
        messages |= _run_messages(rung, plan)
        solved.append(SolvedRung(rung, spec, plan.planned))
    messages |= _difference_messages(request, variants)
    messages |= _timing_messages(request, variants)
    if hardware is not None and not messages:
        solved = [_with_job_plans(rung, hardware) for rung in solved]
        messages |= _memory_messages(solved, hardware)
    issues = [
        ConfigIssue(message, ("command line",), (("write", remedy),))
        for message, remedy in messages.items()
    ]
    return solved, issues


def _run_messages(rung: LadderRung, plan: Plan) -> dict[str, str]:
    """Returns what is wrong with the solved runs of a rung: message -> remedy."""
    messages = {}
    for problem in warmup_problems(plan, rung.variants):
        factor = _missing_steps(rung.variants, plan)
        messages[f"rung {rung.number}: {problem}"] = _more_steps(rung.variants, factor)
    for chain in chains_of(plan, rung.variants):
        for run in chain:
            for error in validation_errors(run.config):
                messages[f"rung {rung.number}: {error}"] = "the keys of the configuration"
    return messages


def _steps_within_warmup(rung: LadderRung, num_devices: int) -> dict[str, float]:
    """Returns the configurations whose FLOPs buy no more steps than a fixed warm-up has.

    The keys are sentences; the values are the factors by which steps are missing.
    """
    missing = {}
    for variant in rung.variants:
        measured = [cost(stage, num_devices) for stage in variant.stages]
        share = rung.compute / sum(stage_cost.flops for stage_cost in measured)
        for (name, config), stage_cost in zip(variant.named_stages, measured, strict=True):
            warmup = config.schedule.warmup_steps
            steps = int(stage_cost.steps * share)
            if steps <= warmup:
                problem = (
                    f"rung {rung.number}, {name}: {rung.compute:.3g} FLOPs buy "
                    f"{pluralize(steps, 'step')}, within its warm-up of {warmup:,} steps"
                )
                missing[problem] = (warmup + 2) / max(steps, 1)
    return missing


def _missing_steps(variants: Sequence[Variant], plan: Plan) -> float:
    """Returns the factor by which the runs of a rung have too few steps for their warm-up."""
    factors = [2.0]
    for variant in variants:
        steps = plan.planned[variant.label].total("steps")
        schedule = variant.config.schedule
        needed = 1 / schedule.warmup_steps_fraction if schedule.warmup_steps_fraction else 1.0
        needed = max(needed, schedule.num_warmup_steps + 1)
        factors.append(needed / steps)
    return max(factors)


def _more_steps(variants: Sequence[Variant], factor: float) -> str:
    """Returns options with which runs have `factor` times as many steps, or a shorter warm-up."""
    batch = flatten(variants[0].config)[_BATCH_KEY] / 2 ** math.ceil(math.log2(factor))
    options = [f"{_BATCH_KEY}={batch:g}"] if batch >= 1 else []
    if any(variant.config.schedule.warmup_steps != -1 for variant in variants):
        options.append("warmup_steps=-1, which makes it a fraction of the steps")
    else:
        options.append("warmup_steps_fraction=0")
    return ", or ".join(options)


def _difference_messages(request: CompareArgs, variants: Sequence[Variant]) -> dict[str, str]:
    """Returns what differs between the arms outside of the model, and how to make it equal."""
    solved_for = {STEPS, *request.tune}
    on_purpose = {variant.label: solved_for for variant in variants}
    messages = {}
    for line in confounding_keys(variants, on_purpose):
        name = line.partition(":")[0]
        value = flatten(variants[0].config)[name]
        remedy = f"{name}={value} for all of them"
        if name == RATE_KEY:
            remedy = (
                "tune=learning_rate, which finds the learning rate of each, or one learning_rate="
            )
        messages[f"the configurations differ outside of the model in {line}"] = remedy
    return messages


def _timing_messages(request: CompareArgs, variants: Sequence[Variant]) -> dict[str, str]:
    """Returns which arms cannot be timed, as the shape of their batches changes."""
    is_timed = request.timings > 0 and request.launch == "local" and not is_size_grid(request)
    if not is_timed or len(variants) == 1:
        return {}
    changing = [
        variant.label
        for variant in variants
        if any(
            stage.batch.enable_rampup_batch_size or stage.batch.sequence_length_stages
            for stage in variant.stages
        )
    ]
    if not changing:
        return {}
    message = f"steps of {', '.join(changing)} cannot be timed: the shape of their batches changes"
    return {message: "timings=0, for a verdict in FLOPs"}


def _with_job_plans(solved: SolvedRung, hardware: Hardware) -> SolvedRung:
    """Returns a rung with the plan of a step of each configuration that has one."""
    plans = {}
    for variant in solved.rung.variants:
        try:
            plans[variant.label] = plan_step(variant.config, hardware)
        except UserError:
            continue  # reported by _memory_messages
    return dataclasses.replace(solved, job_plans=plans)


def plan_step(config: Config, hardware: Hardware) -> JobPlan:
    """Returns what a step needs on hardware; UserError if the mesh does not fit it."""
    return make_plan(choose_layout(config, hardware, lambda line: None), hardware)


def _memory_messages(rungs: Sequence[SolvedRung], hardware: Hardware) -> dict[str, str]:
    """Returns which rungs do not fit the memory of the devices, and the largest that does."""
    too_large = []
    for solved in rungs:
        for variant in solved.rung.variants:
            try:
                job = solved.job_plans.get(variant.label) or plan_step(variant.config, hardware)
            except UserError as error:
                return {f"rung {solved.rung.number}, {variant.label}: {error}": "another mesh"}
            if not job.fits:
                needed = f"{job.memory.total / 1e9:.3g} GB of {hardware.memory / 1e9:.3g} GB"
                too_large.append((solved, f"{variant.label} needs {needed} per device"))
    if not too_large:
        return {}
    first, reason = too_large[0]
    message = (
        f"rung {first.rung.number} does not fit {hardware.describe()}: {reason}, and larger rungs "
        "need more"
    )
    remedy = "remat_policy=full, a smaller per_device_batch_size"
    fitting = [solved for solved in rungs if solved.rung.number < first.rung.number]
    if fitting:
        remedy += f", or to={fitting[-1].rung.compute:.3g}"
    return {message: remedy}


def plan_lines(request: CompareArgs, rungs: Sequence[SolvedRung], num_devices: int) -> list[str]:
    """Returns the plan to print: all runs with their cost, the rules, and the power."""
    labels = [variant.label for variant in rungs[0].rung.variants]
    num_seeds = len(request.seeds)
    num_runs = len(rungs) * len(labels) * num_seeds
    low = rungs[0].rung.compute
    high = rungs[-1].rung.compute
    total = sum(rung.compute for rung in rungs) * num_seeds
    is_grid = is_size_grid(request)
    kind = "grid" if is_grid else "ladder"
    lines = [
        f"{kind} of {len(rungs)} rungs, {low:.3g} to {high:.3g} FLOPs per run; seeds "
        f"{', '.join(map(str, request.seeds))}; {pluralize(num_devices, 'device')}",
        *_rule_lines(request, rungs),
        "",
        *format_table(*plan_table(request, rungs), max_width=None).splitlines(),
        "",
        f"{num_runs} runs of {total:.3g} FLOPs in total{_total_time(request, rungs)}.",
    ]
    if request.tune:
        swept = sum(rung.rung.compute for rung in rungs[: request.lr_sweep])
        flops = swept * len(FACTORS) * len(labels) * len(request.tune)
        where = f"at the smallest {pluralize(request.lr_sweep, 'rung')} ({flops:.3g} FLOPs)"
        lines.append(tuning_plan_line(request.tune, len(labels) * request.lr_sweep, where))
    if is_grid and len(rungs) < MIN_CELLS:
        lines.append(
            f"{len(rungs)} pairs of parameters and tokens are too few for E + A/N^alpha + "
            f"B/D^beta, which needs {MIN_CELLS}; each compute still has its best size."
        )
    if len(labels) > 1 and not is_grid:
        smallest = smallest_speedup([rung.rung.compute for rung in rungs], num_seeds)
        lines.append(
            f"Power: such a ladder calls a speed-up of {smallest:.2f} in FLOPs or more "
            f'"worked" in {POWER:.0%} of cases, with the noise of published ladders. In time, more '
            "by the throughput that the variant loses."
        )
    return [*lines, ""]


def _rule_lines(request: CompareArgs, rungs: Sequence[SolvedRung]) -> list[str]:
    """Returns the rules of sizes, batches and learning rates."""
    rate = "as in the file"
    if request.transfer == "scaled":
        exponents = {
            f"{width_exponent(config) or 0.0:g} ({_rate_rule(config)})"
            for config in (variant.config for variant in rungs[0].rung.variants)
        }
        rate = (
            f"width^{', '.join(sorted(exponents))} x batch^{BATCH_RATE_EXPONENT:g} "
            f"x tokens^{-request.horizon_exponent:g}, "
            "from the file's width and the smallest rung's batch and tokens"
        )
    tokens = (
        f"{request.tokens_per_parameter:g} tokens per parameter of "
        f"{rungs[0].rung.variants[0].label}, embeddings included"
    )
    if is_size_grid(request):
        tokens = f"each at {pluralize(request.ladder or 1, 'compute')}"
    return [
        f"  sizes: {request.sizes}; {tokens}",
        f"  batch: tokens^{request.batch_exponent:g}, to three binary digits; the smallest rung "
        "has that of the file",
        f"  learning rate: {rate}",
    ]


def _rate_rule(config: Config) -> str:
    """Returns whose rule scales the learning rate with the width."""
    if config.model.is_standard:
        return config.optimizer.opt_type
    return f"{config.model.parametrization.parametrization} scales each weight"


def _total_time(request: CompareArgs, rungs: Sequence[SolvedRung]) -> str:
    """Returns the estimated time of all runs, empty if the hardware is unknown."""
    seconds = [rung.seconds(variant.label) for rung in rungs for variant in rung.rung.variants]
    known = [number for number in seconds if number is not None]
    if not known or len(known) < len(seconds):
        return ""
    total = sum(known) * len(request.seeds) / (request.jobs or 1)
    return f", about {format_duration(total)} of training steps by the estimate of plan.py"


def plan_table(
    request: CompareArgs, rungs: Sequence[SolvedRung]
) -> tuple[list[str], list[list[str]]]:
    """Returns the header and one row per rung and configuration."""
    header = ["rung", "configuration", "width", "layers", "parameters", "tokens", "tokens/param"]
    header += ["batch", "steps", "learning rate", "FLOPs", "runs", "seconds/run"]
    rows = []
    for solved in rungs:
        for variant in solved.rung.variants:
            planned = solved.planned[variant.label]
            size = Size.of(variant.config)
            tokens = planned.total("tokens")
            steps = planned.total("steps")
            parameters = planned.stages[-1].parameters
            seconds = solved.seconds(variant.label)
            sequences = tokens / steps / variant.config.model.shape.max_target_length
            rows.append(
                [
                    str(solved.rung.number),
                    variant.label,
                    str(size.width),
                    str(size.depth),
                    short_count(parameters),
                    short_count(tokens),
                    f"{tokens / parameters:.3g}",
                    f"{sequences:g}",
                    f"{steps:,}",
                    f"{flatten(variant.config)[RATE_KEY]:.3g}",
                    f"{planned.total('flops'):.3g}",
                    str(len(request.seeds)),
                    "" if seconds is None else f"{seconds:,.0f}",
                ]
            )
    return header, rows
