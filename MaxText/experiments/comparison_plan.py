"""Comparison plan, saved in comparison.json for resuming.

The file holds the request, measurements, solved keys and run folders. Requests that differ are
refused, instead of mixing two comparisons in one folder; only the seeds may change.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from MaxText.config.catalog import unflatten
from MaxText.config.schema import Config
from MaxText.config.serialization import diff_configs, flatten
from MaxText.config.values import to_yaml
from MaxText.errors import UserError
from MaxText.experiments.compare_args import UNITS
from MaxText.experiments.variants import KEPT_AT_THE_END, SOURCE, Variant
from MaxText.metrics.tables import format_table, short_count
from MaxText.storage.atomic import atomic_write_text

FILE = "comparison.json"
_FORMAT = 2


@dataclasses.dataclass(frozen=True)
class ComparisonSpec:
    """Arguments determining the plan, apart from the configurations."""

    match: str
    budget: float | None  # None uses the amount of the first configuration
    free: Mapping[str, str]  # label -> key to solve for
    tolerance: float  # largest relative deviation from the budget
    num_devices: int


@dataclasses.dataclass(frozen=True)
class SolvedStage:
    """One run of a solved configuration."""

    changes: dict[str, Any]  # key -> new value
    parameters: int
    flops: float
    tokens: int
    steps: int
    seconds: float | None = None  # in training steps; None unless match=time


@dataclasses.dataclass(frozen=True)
class SolvedConfig:
    """A solved configuration."""

    stages: tuple[SolvedStage, ...]
    deviation: float  # of the matched amount, relative to the budget

    @property
    def changed(self) -> set[str]:
        """Solved keys."""
        return {name for stage in self.stages for name in stage.changes}

    @property
    def parameters(self) -> int:
        """Parameters of the final model."""
        return self.stages[-1].parameters

    @property
    def flops(self) -> float:
        return sum(stage.flops for stage in self.stages)

    @property
    def tokens(self) -> int:
        return sum(stage.tokens for stage in self.stages)

    @property
    def flops_per_token(self) -> float:
        """Training FLOPs per token, over all stages."""
        return self.flops / self.tokens if self.tokens else 0.0

    @property
    def steps(self) -> int:
        return sum(stage.steps for stage in self.stages)

    @property
    def seconds(self) -> float | None:
        """Seconds in training steps of all stages; None unless match=time."""
        seconds = [stage.seconds for stage in self.stages if stage.seconds is not None]
        return sum(seconds) if seconds else None


@dataclasses.dataclass
class Plan:
    """A comparison."""

    folder: Path
    question: ComparisonSpec
    identities: dict[str, dict[str, Any]]  # label -> flat configuration before solving
    # stage name -> rounds -> seconds per step
    measurements: dict[str, list[list[float]]] = dataclasses.field(default_factory=dict)
    budget: float | None = None  # None before solving
    planned: dict[str, SolvedConfig] = dataclasses.field(default_factory=dict)  # by label
    seeds: tuple[int, ...] = ()

    @property
    def groups(self) -> dict[str, list[str]]:
        """Run folders by stage name, relative to the comparison's folder."""
        counts = {label: len(planned.stages) for label, planned in self.planned.items()}
        return {
            stage_name(label, stage): [
                str(Path(label) / run_path(seed, stage)) for seed in self.seeds
            ]
            for label in self.identities
            for stage in stage_numbers(counts.get(label, 1))
        }

    def save(self) -> None:
        """Atomically writes comparison.json. The folder must exist."""
        content = {
            "format": _FORMAT,
            "question": dataclasses.asdict(self.question),
            "configurations": self.identities,
            "measurements": self.measurements,
            "budget": self.budget,
            "planned": {name: dataclasses.asdict(one) for name, one in self.planned.items()},
            "seeds": list(self.seeds),
            "groups": self.groups,
        }
        atomic_write_text(self.folder / FILE, json.dumps(content, indent=1) + "\n")


def stage_numbers(count: int) -> list[int | None]:
    """Returns stage numbers from 1, or [None] for a single run."""
    return [None] if count == 1 else list(range(1, count + 1))


def stage_name(label: str, stage: int | None) -> str:
    """Returns a unique name of a stage: labels contain no spaces."""
    return label if stage is None else f"{label} stage {stage}"


def run_path(seed: int, stage: int | None = None) -> Path:
    """Returns a run's folder, relative to its configuration's."""
    folder = Path(f"seed_{seed}")
    return folder if stage is None else folder / f"stage_{stage}"


def load_or_create_plan(
    folder: Path, variants: Sequence[Variant], question: ComparisonSpec, seeds: Sequence[int]
) -> Plan:
    """Loads the plan of a folder, or creates it.

    A plan that differs is replaced if none of its runs has begun. Otherwise raises UserError
    listing the differences.
    """
    fresh = Plan(
        folder, question, {one.label: one.identity for one in variants}, seeds=tuple(seeds)
    )
    path = folder / FILE
    if not path.exists():
        return fresh
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        if stored["format"] != _FORMAT:
            raise ValueError(f"format {stored['format']} instead of {_FORMAT}")
        old = Plan(
            folder,
            ComparisonSpec(**stored["question"]),
            stored["configurations"],
            stored["measurements"],
            stored["budget"],
            TypeAdapter(dict[str, SolvedConfig]).validate_python(stored["planned"]),
            tuple(seeds),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{path} is not a valid record of a comparison ({error}). Set output= to another "
            "folder, or remove this one."
        ) from error
    changed = _differences(old, fresh)
    if not changed:
        return old
    if old.planned and any(folder.glob("*/seed_*/**/events.jsonl")):
        lines = "\n".join(f"  {line}" for line in changed)
        raise UserError(
            f"{folder} contains another comparison whose runs have started. Differences:\n{lines}\n"
            "  What to do: repeat the earlier command to resume it, set output= to another folder, "
            "or remove this one."
        )
    identities = json.loads(json.dumps(fresh.identities))  # as they are stored
    if (old.identities, old.question.num_devices) == (identities, question.num_devices):
        fresh.measurements = old.measurements
    return fresh


def _differences(old: Plan, new: Plan) -> list[str]:
    lines = []
    asked, asks = dataclasses.asdict(old.question), dataclasses.asdict(new.question)
    for name in asked:
        if asked[name] != asks[name]:
            lines.append(f"{name}: {_shown(asked[name])} -> {_shown(asks[name])}")
    if list(old.identities) != list(new.identities):
        names = (", ".join(plan.identities) for plan in (old, new))
        lines.append("configurations: " + " -> ".join(names))
    for label in new.identities:
        if label in old.identities:
            changes = diff_configs(old.identities[label], new.identities[label])
            lines += [
                f"{label}: {name}: {before} -> {after}" for name, (before, after) in changes.items()
            ]
    return lines


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {item}" for name, item in value.items())
    return "what the first has" if value is None else to_yaml(value)


def format_changes(plan: Plan, variants: Sequence[Variant]) -> list[str]:
    """Returns one line per stage: the keys changed to meet the budget."""
    lines = []
    if not any(one.changed for one in plan.planned.values()):
        return ["no configuration was changed"]
    for variant in variants:
        planned = plan.planned[variant.label].stages
        if not plan.planned[variant.label].changed:
            lines.append(f"{variant.label}: nothing changed")
            continue
        for config, stage, number in zip(
            variant.stages, planned, stage_numbers(len(planned)), strict=True
        ):
            before = flatten(config)
            changes = (
                f"{name} {to_yaml(before[name])} -> {to_yaml(value)}"
                for name, value in stage.changes.items()
            )
            who = stage_name(variant.label, number)
            lines.append(f"{who}: {', '.join(changes) or 'nothing changed'}")
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
    timed = any(one.seconds is not None for one in plan.planned.values())
    header = ["configuration", "parameters", "FLOPs/token", "FLOPs", "tokens", "steps"]
    header += ["seconds", "off the budget"] if timed else ["off the budget"]
    rows = []
    for label, one in plan.planned.items():
        seconds = [f"{one.seconds:,.1f}"] if one.seconds is not None else []
        rows.append(
            [
                label, f"{one.parameters:,}", short_count(one.flops_per_token), f"{one.flops:.4g}",
                f"{one.tokens:,}", "+".join(f"{stage.steps:,}" for stage in one.stages), *seconds,
                f"{one.deviation:+.2%}",
            ]
        )  # fmt: skip
    return header, rows


def plan_lines(plan: Plan, variants: Sequence[Variant]) -> list[str]:
    """Returns the plan for the terminal."""
    devices = plan.question.num_devices
    return [
        f"match={plan.question.match}: {format_budget(plan, variants)}; "
        f"{devices} device{'s' if devices > 1 else ''}",
        *(f"  {line}" for line in format_changes(plan, variants)),
        "",
        *format_table(*plan_rows(plan), max_width=None).splitlines(),
        "",
    ]


@dataclasses.dataclass(frozen=True)
class Trial:
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
        name = f"{self.label} seed {self.seed}"
        return name if self.stage is None else f"{name} stage {self.stage}"

    @property
    def config_path(self) -> Path:
        """Path of the run's configuration file, next to its folder."""
        return self.folder.with_name(f"{self.folder.name}.yml")

    @property
    def log(self) -> Path:
        """Log of train.py's output."""
        return self.folder / "train.log"


StageSequence = Sequence[Trial]  # one configuration and seed: a single run, or its stages in order


def chains_of(plan: Plan, variants: Sequence[Variant]) -> list[StageSequence]:
    """Returns all chains, seed by seed; interruption leaves pairs."""
    return [_chain(plan, variant, seed) for seed in plan.seeds for variant in variants]


def _chain(plan: Plan, variant: Variant, seed: int) -> StageSequence:
    planned = plan.planned[variant.label].stages
    runs: list[Trial] = []
    for index, stage in enumerate(stage_numbers(len(planned))):
        changes = planned[index].changes
        if stage is not None and stage < len(planned):
            changes = changes | KEPT_AT_THE_END
        previous = runs[-1] if runs else None
        if previous is not None:
            changes = changes | {SOURCE: str(previous.folder)}
        folder = plan.folder / variant.label / run_path(seed, stage)
        config = run_config(variant.stages[index], changes, folder, seed)
        weight = planned[index].seconds or planned[index].flops
        runs.append(Trial(variant.label, seed, config, folder, weight, stage, previous))
    return runs


def run_config(config: Config, changes: Mapping[str, Any], folder: Path, seed: int) -> Config:
    """Returns a run's config: solved keys, seeds, folder, final evaluation."""
    keys = flatten(config) | dict(changes)
    if keys["eval_interval"] == -1:
        keys["eval_interval"] = keys["steps"]
    return unflatten(
        keys
        | {
            "run_name": folder.name,
            "base_output_directory": str(folder.parent),
            "metrics_file": "",
            "data_shuffle_seed": seed,
            "init_weights_seed": seed,
        }
    )
