"""Comparison plan, saved in comparison.json for resuming.

The file holds the request, measurements, solved keys and run folders. Requests that differ are
refused, instead of mixing two comparisons in one folder; only the seeds may change.
"""

import dataclasses
import itertools
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import TypeAdapter

from MaxText.config.schema import Config, flatten, unflatten
from MaxText.config.serialization import diff_configs
from MaxText.config.values import to_yaml
from MaxText.errors import UserError
from MaxText.experiments.compare_args import UNITS, Match
from MaxText.experiments.variants import KEPT_AT_THE_END, SOURCE, Variant, stage_names
from MaxText.formatting import format_table, pluralize, short_count
from MaxText.storage.atomic import atomic_write_text

FILE = "comparison.json"
_FORMAT = 2


@dataclasses.dataclass(frozen=True)
class ComparisonSpec:
    """Arguments determining the plan, apart from the configurations."""

    match: Match
    budget: float | None  # None uses the amount of the first configuration
    solve_for: Mapping[str, str]  # label -> key to solve for
    tolerance: float  # largest relative deviation from the budget
    num_devices: int


@dataclasses.dataclass(frozen=True)
class SolvedStage:
    """One run of a solved configuration, over all devices."""

    changes: dict[str, Any]  # key -> new value
    parameters: int
    flops: float
    tokens: int
    steps: int
    seconds: float | None = None  # in training steps; None unless match=time


@dataclasses.dataclass(frozen=True)
class SolvedConfig:
    """The stages of a configuration, solved for the budget."""

    stages: tuple[SolvedStage, ...]
    deviation: float  # of the matched amount, relative to the budget

    @property
    def changed(self) -> set[str]:
        """Keys changed in any stage."""
        return {name for stage in self.stages for name in stage.changes}

    def total(self, name: str) -> Any:
        """Returns the sum of a field over the stages; None if one has none."""
        numbers = [getattr(stage, name) for stage in self.stages]
        return None if None in numbers else sum(numbers)


@dataclasses.dataclass
class Plan:
    """A comparison; its fields are those of comparison.json."""

    folder: Path
    question: ComparisonSpec
    configurations: dict[str, dict[str, Any]]  # label -> flat configuration before solving
    # stage name -> rounds -> seconds per step
    measurements: dict[str, list[list[float]]] = dataclasses.field(default_factory=dict)
    budget: float | None = None  # None before solving
    planned: dict[str, SolvedConfig] = dataclasses.field(default_factory=dict)  # by label
    seeds: tuple[int, ...] = ()

    @property
    def groups(self) -> dict[str, list[str]]:
        """Run folders by stage name, relative to the comparison's folder."""
        names = {
            label: stage_names(label, len(solved.stages)) for label, solved in self.planned.items()
        }
        return {
            name: [str(Path(label) / run_path(seed, stage)) for seed in self.seeds]
            for label in self.configurations
            for stage, name in names.get(label, {None: label}).items()
        }

    def seconds_per_step(self, name: str) -> float:
        """Returns the median over all measurements of a stage."""
        return statistics.median(itertools.chain(*self.measurements[name]))

    def save(self) -> None:
        """Atomically writes comparison.json. The folder must exist."""
        content = {"format": _FORMAT, **dataclasses.asdict(self), "groups": self.groups}
        del content["folder"]
        atomic_write_text(self.folder / FILE, json.dumps(content, indent=1) + "\n")


def run_path(seed: int, stage: int | None = None) -> Path:
    """Returns a run's folder, relative to its configuration's."""
    folder = Path(f"seed_{seed}")
    return folder if stage is None else folder / f"stage_{stage}"


def load_or_create_plan(
    folder: Path, variants: Sequence[Variant], question: ComparisonSpec, seeds: Sequence[int]
) -> Plan:
    """Loads the plan of a folder, or creates it.

    A plan that differs is replaced if none of its runs has begun, and refused otherwise.
    """
    fresh = Plan(
        folder,
        question,
        {variant.label: variant.identity for variant in variants},
        seeds=tuple(seeds),
    )
    path = folder / FILE
    if not path.exists():
        return fresh
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        if stored["format"] != _FORMAT:
            raise ValueError(f"format {stored['format']} instead of {_FORMAT}")
        stored_fields = stored | {"folder": folder, "seeds": seeds}
        stored_plan = TypeAdapter(Plan).validate_python(stored_fields)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path} is not a valid record of a comparison ({error}). Set output= to another "
            "folder, or remove this one."
        ) from error
    changed = _differences(stored_plan, fresh)
    if not changed:
        return stored_plan
    if stored_plan.planned and any(folder.glob("*/seed_*/**/events.jsonl")):
        lines = "\n".join(f"  {line}" for line in changed)
        raise UserError(
            f"{folder} contains another comparison whose runs have started. Differences:\n{lines}\n"
            "  What to do: repeat the earlier command to resume it, set output= to another folder, "
            "or remove this one."
        )
    configurations = json.loads(json.dumps(fresh.configurations))  # as they are stored
    if (stored_plan.configurations, stored_plan.question.num_devices) == (
        configurations,
        question.num_devices,
    ):
        fresh.measurements = stored_plan.measurements
    return fresh


def _differences(stored_plan: Plan, new_plan: Plan) -> list[str]:
    """Returns a line for each argument and key that differs between two plans."""

    def facts(plan: Plan) -> dict[str, Any]:
        return {**dataclasses.asdict(plan.question), "configurations": list(plan.configurations)}

    stored_facts = facts(stored_plan)
    changes = {}
    for name, value in facts(new_plan).items():
        stored_value = to_yaml(stored_facts[name])
        new_value = to_yaml(value)
        if stored_value != new_value:
            changes[name] = (stored_value, new_value)
    for label, keys in new_plan.configurations.items():
        if label in stored_plan.configurations:
            changed = diff_configs(stored_plan.configurations[label], keys)
            changes |= {f"{label}: {name}": change for name, change in changed.items()}
    return [
        f"{name}: {stored_value} -> {new_value}"
        for name, (stored_value, new_value) in changes.items()
    ]


def format_changes(plan: Plan, variants: Sequence[Variant]) -> list[str]:
    """Returns one line per stage: the keys changed to meet the budget."""
    if not any(solved.changed for solved in plan.planned.values()):
        return ["no configuration was changed"]
    lines = []
    for variant in variants:
        planned = plan.planned[variant.label]
        if not planned.changed:
            lines.append(f"{variant.label}: nothing changed")
            continue
        for (name, config), stage in zip(variant.named_stages, planned.stages, strict=True):
            keys_before = flatten(config)
            changes = (
                f"{key} {to_yaml(keys_before[key])} -> {to_yaml(value)}"
                for key, value in stage.changes.items()
            )
            lines.append(f"{name}: {', '.join(changes) or 'nothing changed'}")
    return lines


def format_budget(plan: Plan, variants: Sequence[Variant]) -> str:
    """Describes the budget and its source."""
    assert plan.budget is not None
    pattern = {"flops": ".4g", "time": ",.1f"}.get(plan.question.match, ",.0f")
    amount = format(plan.budget, pattern)
    source = f"as {variants[0].label} has" if plan.question.budget is None else "as asked"
    return f"{amount} {UNITS[plan.question.match]} each, {source}"


def plan_rows(plan: Plan) -> tuple[list[str], list[list[str]]]:
    """Returns the table header and one row per configuration."""
    timed = any(solved.total("seconds") is not None for solved in plan.planned.values())
    header = ["configuration", "parameters", "FLOPs/token", "FLOPs", "tokens", "steps"]
    header += ["seconds", "off the budget"] if timed else ["off the budget"]
    rows = []
    for label, solved in plan.planned.items():
        flops = solved.total("flops")
        tokens = solved.total("tokens")
        seconds = solved.total("seconds")
        per_token = short_count(flops / tokens if tokens else 0.0)
        steps = "+".join(f"{stage.steps:,}" for stage in solved.stages)
        cost_cells = [f"{solved.stages[-1].parameters:,}", per_token, f"{flops:.4g}", f"{tokens:,}"]
        time_cells = [] if seconds is None else [f"{seconds:,.1f}"]
        rows.append([label, *cost_cells, steps, *time_cells, f"{solved.deviation:+.2%}"])
    return header, rows


def warmup_problems(plan: Plan, variants: Sequence[Variant]) -> list[str]:
    """Returns a line for each configuration whose runs are too short for their warm-up.

    Either a run ends within it, or it would take less than a step of so few, so that the first
    update has the full learning rate. Losses of such runs say nothing about longer ones.
    """
    lines = []
    for variant in variants:
        planned = plan.planned[variant.label].stages
        for (name, config), stage in zip(variant.named_stages, planned, strict=True):
            solved = unflatten(flatten(config) | stage.changes)
            requested_warmup = config.schedule.num_warmup_steps
            warmup = solved.schedule.num_warmup_steps
            if warmup > 0 and stage.steps <= warmup:
                problem = f"ends within its warm-up of {warmup:,} steps"
            elif requested_warmup > 0 and warmup == 0:
                fraction = solved.schedule.warmup_steps_fraction
                problem = f"is too short for a warm-up ({fraction:.0%} of the steps)"
            else:
                continue
            steps = pluralize(stage.steps, "step")
            lines.append(f"{name}: a run of {steps} {problem}")
    return lines


def plan_lines(plan: Plan, variants: Sequence[Variant]) -> list[str]:
    """Returns the budget, the changes that meet it, and the table of configurations."""
    devices = pluralize(plan.question.num_devices, "device")
    return [
        f"match={plan.question.match}: {format_budget(plan, variants)}; {devices}",
        *(f"  {line}" for line in format_changes(plan, variants)),
        "",
        *format_table(*plan_rows(plan), max_width=None).splitlines(),
        "",
    ]


class Trial(NamedTuple):
    """One training run of a comparison."""

    label: str
    seed: int  # of data order and initial weights
    config: Config
    folder: Path
    weight: float  # share of the total work, in seconds or FLOPs
    stage: int | None = None  # from 1; None for a single run
    previous: "Trial | None" = None  # run of the previous stage

    @property
    def name(self) -> str:
        """Label, seed and stage, as logged."""
        name = f"{self.label} seed {self.seed}"
        return name if self.stage is None else f"{name} stage {self.stage}"

    @property
    def config_path(self) -> Path:
        """Path of the run's configuration file, next to its folder."""
        return self.folder.with_name(f"{self.folder.name}.yml")

    @property
    def log(self) -> Path:
        """The file that holds the output of train.py."""
        return self.folder / "train.log"


StageSequence = Sequence[Trial]  # one configuration and seed: a single run, or its stages in order


def chains_of(plan: Plan, variants: Sequence[Variant]) -> list[StageSequence]:
    """Returns all chains, seed by seed; interruption leaves pairs."""
    return [_chain(plan, variant, seed) for seed in plan.seeds for variant in variants]


def _chain(plan: Plan, variant: Variant, seed: int) -> StageSequence:
    """Returns the runs of a configuration with one seed, in order of its stages."""
    planned = plan.planned[variant.label].stages
    numbers = stage_names(variant.label, len(planned))
    runs: list[Trial] = []
    for stage, config, solved in zip(numbers, variant.stages, planned, strict=True):
        changes = dict(solved.changes)
        if stage not in (None, len(planned)):
            changes |= KEPT_AT_THE_END
        previous = runs[-1] if runs else None
        if previous is not None:
            changes[SOURCE] = str(previous.folder)
        folder = plan.folder / variant.label / run_path(seed, stage)
        config = run_config(config, changes, folder, seed)
        trial = Trial(
            label=variant.label,
            seed=seed,
            config=config,
            folder=folder,
            weight=solved.seconds or solved.flops,
            stage=stage,
            previous=previous,
        )
        runs.append(trial)
    return runs


def run_config(config: Config, changes: Mapping[str, Any], folder: Path, seed: int) -> Config:
    """Returns a run's config: solved keys, seeds, folder, final evaluation."""
    keys = flatten(config) | dict(changes)
    if keys["eval_interval"] == -1:
        keys["eval_interval"] = keys["steps"]
    keys |= {"run_name": folder.name, "base_output_directory": str(folder.parent)}
    keys |= {"metrics_file": "", "data_shuffle_seed": seed, "init_weights_seed": seed}
    return unflatten(keys)
