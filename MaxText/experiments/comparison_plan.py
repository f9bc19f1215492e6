"""What a comparison consists of, and comparison.json, by which the same command goes on.

The file holds what was asked for, what was measured, what was solved for, and which run folders
belong to which configuration. A command that asks for something else is refused instead of mixing
two comparisons in one folder. Only the seeds may change: that adds runs, or leaves some out.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from MaxText.config.catalogue import build
from MaxText.config.saved import differences, flat
from MaxText.config.schema import Config
from MaxText.config.values import to_yaml
from MaxText.errors import UserError
from MaxText.experiments.stages import KEPT_AT_THE_END, source_keys
from MaxText.experiments.variants import Variant

FILE = "comparison.json"
_FORMAT = 2


@dataclasses.dataclass(frozen=True)
class Question:
    """What decides the plan, besides the configurations.

    Attributes:
      match: what is made equal.
      budget: how much of it; None is what the first configuration has.
      free: label -> what is solved for.
      tolerance: largest deviation from the budget, as a share.
      num_devices: that the runs are made for.
    """

    match: str
    budget: float | None
    free: Mapping[str, str]
    tolerance: float
    num_devices: int


@dataclasses.dataclass(frozen=True)
class PlannedStage:
    """One run of a configuration after solving.

    Attributes:
      changes: key -> new value.
      parameters: of the model.
      flops: of the run.
      tokens: of the run.
      steps: of the run.
      seconds: of training steps in the run; None where time is not matched.
    """

    changes: dict[str, Any]
    parameters: int
    flops: float
    tokens: int
    steps: int
    seconds: float | None = None


@dataclasses.dataclass(frozen=True)
class Planned:
    """One configuration after solving.

    Attributes:
      stages: its runs in order, mostly one alone.
      deviation: of the matched amount from the budget, as a share.
    """

    stages: tuple[PlannedStage, ...]
    deviation: float

    @property
    def changed(self) -> set[str]:
        """Keys that were solved for."""
        return {name for stage in self.stages for name in stage.changes}

    @property
    def parameters(self) -> int:
        """Of the model at the end."""
        return self.stages[-1].parameters

    @property
    def flops(self) -> float:
        """Of all stages."""
        return sum(stage.flops for stage in self.stages)

    @property
    def tokens(self) -> int:
        """Of all stages."""
        return sum(stage.tokens for stage in self.stages)

    @property
    def flops_per_token(self) -> float:
        """Operations of training on one token, over all stages."""
        return self.flops / self.tokens if self.tokens else 0.0

    @property
    def steps(self) -> int:
        """Of all stages."""
        return sum(stage.steps for stage in self.stages)

    @property
    def seconds(self) -> float | None:
        """Of training steps in all stages; None where time is not matched."""
        seconds = [stage.seconds for stage in self.stages if stage.seconds is not None]
        return sum(seconds) if seconds else None


@dataclasses.dataclass
class Plan:
    """A comparison.

    Attributes:
      folder: of the comparison.
      question: what was asked.
      identities: label -> every key of the configuration as it stands, flat.
      measurements: name of a stage (stage_name) -> rounds -> seconds of single steps.
      budget: the amount that all have; None before solving.
      planned: label -> what solving gave; empty before.
      seeds: of the runs.
    """

    folder: Path
    question: Question
    identities: dict[str, dict[str, Any]]
    measurements: dict[str, list[list[float]]] = dataclasses.field(default_factory=dict)
    budget: float | None = None
    planned: dict[str, Planned] = dataclasses.field(default_factory=dict)
    seeds: tuple[int, ...] = ()

    @property
    def groups(self) -> dict[str, list[str]]:
        """Name of a stage -> run folders of its seeds, relative to the comparison's folder."""
        counts = {label: len(planned.stages) for label, planned in self.planned.items()}
        return {
            stage_name(label, stage): [
                str(Path(label) / run_path(seed, stage)) for seed in self.seeds
            ]
            for label in self.identities
            for stage in stage_numbers(counts.get(label, 1))
        }

    def save(self) -> None:
        """Writes comparison.json, whole or not at all, into the folder, which exists."""
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
        temporary = self.folder / f"{FILE}.writing"
        temporary.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        temporary.replace(self.folder / FILE)


def stage_numbers(count: int) -> list[int | None]:
    """Numbers of stages from 1; a run that is alone has none."""
    return [None] if count == 1 else list(range(1, count + 1))


def stage_name(label: str, stage: int | None) -> str:
    """Name of a stage of a configuration. Labels have no spaces, so it is no other one's."""
    return label if stage is None else f"{label} stage {stage}"


def run_path(seed: int, stage: int | None = None) -> Path:
    """A run's folder, relative to that of its configuration."""
    folder = Path(f"seed_{seed}")
    return folder if stage is None else folder / f"stage_{stage}"


def open_plan(
    folder: Path, variants: Sequence[Variant], question: Question, seeds: Sequence[int]
) -> Plan:
    """The plan of a folder, new or as an earlier command left it.

    A plan of which no run has begun is dropped if it differs.

    Raises:
      UserError: the folder belongs to another comparison; lists what differs.
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
        planned = {name: _read_planned(fields) for name, fields in stored["planned"].items()}
        old = Plan(
            folder,
            Question(**stored["question"]),
            stored["configurations"],
            stored["measurements"],
            stored["budget"],
            planned,
            tuple(seeds),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{path} cannot be read as the record of a comparison ({error}). "
            "Choose another folder by output=, or remove this one."
        ) from error
    changed = _differences(old, fresh)
    if not changed:
        return old
    if old.planned and any(folder.glob("*/seed_*/**/events.jsonl")):
        lines = "\n".join(f"  {line}" for line in changed)
        raise UserError(
            f"{folder} holds another comparison, of which runs have begun. What differs:\n{lines}\n"
            "  What to do: repeat the earlier command to go on with it, name another folder by "
            "output=, or remove this one."
        )
    if old.identities == _stored(fresh.identities) and (
        old.question.num_devices == question.num_devices
    ):
        fresh.measurements = old.measurements
    return fresh


def _read_planned(fields: Mapping[str, Any]) -> Planned:
    stages = tuple(PlannedStage(**stage) for stage in fields["stages"])
    return Planned(stages, fields["deviation"])


def _stored(content: Any) -> Any:
    return json.loads(json.dumps(content))


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
            changes = differences(old.identities[label], new.identities[label])
            lines += [
                f"{label}: {name}: {before} -> {after}" for name, (before, after) in changes.items()
            ]
    return lines


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {item}" for name, item in value.items())
    return "what the first has" if value is None else to_yaml(value)


@dataclasses.dataclass(frozen=True)
class Run:
    """One training run of a comparison.

    Attributes:
      label: of its configuration.
      seed: of data order and initial weights.
      config: resolved, with the folder it writes to.
      folder: the run's.
      weight: its share of the whole work, in seconds or FLOPs.
      stage: from 1; None of a run alone.
      previous: the run that this one begins from, of which it is the next stage.
    """

    label: str
    seed: int
    config: Config
    folder: Path
    weight: float
    stage: int | None = None
    previous: "Run | None" = None

    @property
    def name(self) -> str:
        """For people."""
        name = f"{self.label} seed {self.seed}"
        return name if self.stage is None else f"{name} stage {self.stage}"

    @property
    def config_path(self) -> Path:
        """Where its configuration is written, beside its folder."""
        return self.folder.with_name(f"{self.folder.name}.yml")

    @property
    def log(self) -> Path:
        """What train.py prints."""
        return self.folder / "train.log"


# The runs of one configuration and seed in order: mostly one, or the stages.
Chain = Sequence[Run]


def chains_of(plan: Plan, variants: Sequence[Variant]) -> list[Chain]:
    """Every chain, seed by seed, so that a comparison that is stopped leaves whole pairs."""
    return [_chain(plan, variant, seed) for seed in plan.seeds for variant in variants]


def _chain(plan: Plan, variant: Variant, seed: int) -> Chain:
    planned = plan.planned[variant.label].stages
    runs: list[Run] = []
    for index, stage in enumerate(stage_numbers(len(planned))):
        changes = planned[index].changes
        if stage is not None and stage < len(planned):
            changes = changes | KEPT_AT_THE_END
        previous = runs[-1] if runs else None
        if previous is not None:
            changes = changes | source_keys(str(previous.folder))
        folder = plan.folder / variant.label / run_path(seed, stage)
        config = run_config(variant.stages[index], changes, folder, seed)
        weight = planned[index].seconds or planned[index].flops
        runs.append(Run(variant.label, seed, config, folder, weight, stage, previous))
    return runs


def run_config(config: Config, changes: Mapping[str, Any], folder: Path, seed: int) -> Config:
    """The configuration of one run: solved keys, seeds, its own folder, a loss at the end."""
    keys = flat(config) | dict(changes)
    if keys["eval_interval"] == -1:
        keys["eval_interval"] = keys["steps"]
    return build(
        keys
        | {
            "run_name": folder.name,
            "base_output_directory": str(folder.parent),
            "metrics_file": "",
            "data_shuffle_seed": seed,
            "init_weights_seed": seed,
        }
    )
