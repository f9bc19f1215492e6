"""A session of the arena: its settings, its folder, and the resolved configuration of its baseline.

SESSION/
  session.json              settings; another question for the same folder is refused
  ledger.jsonl              every candidate, run, look and verdict (ledger.py)
  baseline.yml              resolved configuration
  baseline/seed_0.yml       complete configuration of a run, for train.py
  baseline/seed_0/          run folder and train.log
  candidates/<name>/        examination.json, candidate.yml, source/, seed_0.yml, seed_0/, ...
  report.html               the leaderboard
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from MaxText.config.config_files import Source, find_config
from MaxText.config.loading import LoadedConfig, load
from MaxText.config.problems import ConfigIssue, ConfigurationError
from MaxText.config.schema import Config, flatten
from MaxText.config.serialization import resolved_yaml
from MaxText.config.values import to_yaml
from MaxText.errors import UserError
from MaxText.experiments.arena.arena_args import PER_CALL, ArenaArgs, ArenaOptions, Budget
from MaxText.experiments.arena.ledger import BASELINE
from MaxText.experiments.arena.sequential_test import SequentialTest
from MaxText.storage.atomic import atomic_write_text

FILE = "session.json"
BASELINE_FILE = "baseline.yml"
_FORMAT = 1
_PROGRAM = "train.py"  # configurations must pass its rules
# Names of runs and places of output, which decide nothing.
_PLACES = frozenset({"run_name", "base_output_directory", "metrics_file"})
_SEEDS = frozenset({"data_shuffle_seed", "init_weights_seed"})


@dataclasses.dataclass(frozen=True, kw_only=True)
class SessionSpec:
    """Settings of a session, fixed by its first call.

    Attributes:
      baseline: Resolved configuration, by key, as YAML.
      keys: key=value of the command line, for the baseline and all candidates.
      environment: The same of environment variables, as of the first call.
      budget: Of each run; None for the FLOPs of the baseline's own steps.
      num_devices: Of each run.
      jobs: Runs at once that `num_devices` is for.
    """

    baseline: Mapping[str, str]
    keys: tuple[str, ...]
    budget: Budget | None
    match: tuple[str, ...]
    tolerance: float
    alpha: float
    num_candidates: int
    min_effect: float
    max_seeds: int
    baseline_seeds: int
    time_limit: float | None
    num_devices: int
    environment: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Session:
    """A session's folder and settings."""

    folder: Path
    spec: SessionSpec

    @property
    def baseline_path(self) -> Path:
        """The baseline's resolved configuration."""
        return self.folder / BASELINE_FILE

    @property
    def test(self) -> SequentialTest:
        """The test of each candidate: an equal share of alpha (Bonferroni)."""
        spec = self.spec
        return SequentialTest(
            level=spec.alpha / spec.num_candidates,
            max_seeds=spec.max_seeds,
            min_effect=spec.min_effect,
        )

    def runs_folder(self, owner: str) -> Path:
        """Returns the folder of a candidate's runs, or of the baseline's."""
        return self.folder / (owner if owner == BASELINE else f"candidates/{owner}")

    def load_baseline(self) -> Config:
        """Returns the baseline's configuration as it was resolved at first."""
        return load([str(self.baseline_path)]).config


def load_session(folder: Path) -> Session | None:
    """Returns the session of a folder; None if there is none.

    Raises:
      UserError: session.json is damaged.
    """
    path = folder / FILE
    if not path.exists():
        return None
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        if fields.pop("format") != _FORMAT:
            raise ValueError("another format")
        return Session(folder, TypeAdapter(SessionSpec).validate_python(fields))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path} is not a valid record of a session ({error}). Set output= to another folder."
        ) from error


def open_session(args: ArenaArgs, num_devices: int) -> Session:
    """Returns the session of a request, which is new or asks the same as the folder's.

    The caller holds the folder's lock.

    Args:
      args: The request.
      num_devices: Of each run.

    Raises:
      ConfigurationError: A new session has no baseline, or one that is wrong.
      UserError: The folder is of another question; the message has the differences.
    """
    stored = load_session(args.output)
    if stored is None:
        if not args.options.baseline:
            facts = (("write", "baseline=A.yml; later calls of the session need only output="),)
            message = f"{args.output} has no session yet, and baseline= is missing"
            raise ConfigurationError([ConfigIssue(message, ("command line",), facts)])
        loaded = _load_baseline(args)
        session = Session(args.output, _spec_of(args, loaded, num_devices))
        atomic_write_text(session.baseline_path, resolved_yaml(loaded.config))
        content = {"format": _FORMAT, **dataclasses.asdict(session.spec)}
        atomic_write_text(session.folder / FILE, json.dumps(content, indent=1) + "\n")
        return session
    differences = _differences(stored, args, num_devices)
    if differences:
        lines = "\n".join(f"  {line}" for line in differences)
        raise UserError(
            f"{args.output} is a session with another question. Differences:\n{lines}\n"
            "  What to do: leave out these arguments to continue it, or set output= to another "
            "folder, which is a session with an alpha of its own."
        )
    return stored


def load_baseline(args: ArenaArgs) -> Config:
    """Returns the baseline that a request names.

    Raises:
      ConfigurationError: It cannot be trained.
    """
    return _load_baseline(args).config


def _load_baseline(args: ArenaArgs) -> LoadedConfig:
    """Returns the baseline with the origins of its keys; see `load_baseline`."""
    find_config(args.options.baseline)
    loaded = load([args.options.baseline, *args.keys], _PROGRAM)
    config = loaded.config
    issues = []
    if config.evaluation.target_eval_loss:
        message = "target_eval_loss: runs of a session have the same cost, and end at it"
        issues.append(ConfigIssue(message, ("baseline",), (("write", "target_eval_loss=0"),)))
    if config.batch.global_batch_size:
        message = "global_batch_size: the cost of a step is counted from the batch of a device"
        write = "global_batch_size=0, with per_device_batch_size and gradient_accumulation_steps"
        issues.append(ConfigIssue(message, ("baseline",), (("write", write),)))
    if config.data.dataset_type == "synthetic":
        message = "dataset_type=synthetic: random tokens have no validation text"
        issues.append(ConfigIssue(message, ("baseline",)))
    if config.masking.mlm_training:
        message = "mlm_training=true: the arena measures the next token, not masked tokens"
        write = "compare.py baseline.yml candidate.yml, which compares such models"
        issues.append(ConfigIssue(message, ("baseline",), (("write", write),)))
    if issues:
        raise ConfigurationError(issues)
    return loaded


def _spec_of(args: ArenaArgs, loaded: LoadedConfig, num_devices: int) -> SessionSpec:
    options = args.options
    keys = flatten(loaded.config)
    variables = [
        name for name, origin in loaded.origins.items() if origin.source is Source.ENVIRONMENT
    ]
    return SessionSpec(
        baseline=identity(keys),
        keys=args.keys,
        environment=tuple(f"{name}={to_yaml(keys[name])}" for name in variables),
        num_devices=num_devices,
        **{
            field.name: getattr(options, field.name)
            for field in dataclasses.fields(ArenaOptions)
            if field.name not in (*PER_CALL, "baseline")
        },
    )


def identity(keys: Mapping[str, Any]) -> dict[str, str]:
    """Returns keys that decide what a configuration computes, as YAML."""
    ignored = _PLACES | _SEEDS
    return {name: to_yaml(value) for name, value in keys.items() if name not in ignored}


def _differences(stored: Session, args: ArenaArgs, num_devices: int) -> list[str]:
    """Returns a line for each given setting that differs from the session's."""
    spec = stored.spec
    lines = []
    for name in args.given:
        if name in (*PER_CALL, "baseline"):
            continue
        stored_value = getattr(spec, name)
        value = getattr(args.options, name)
        if value != stored_value:
            lines.append(f"{name}: {_shown(stored_value)} -> {_shown(value)}")
    if args.options.baseline:
        keys = identity(flatten(load_baseline(args)))
        for name in dict.fromkeys([*spec.baseline, *keys]):
            stored_value, value = spec.baseline.get(name), keys.get(name)
            if stored_value != value:
                lines.append(f"{name}: {stored_value} -> {value}")
    elif args.keys and args.keys != spec.keys:
        lines.append(f"keys: {_shown(spec.keys)} -> {_shown(args.keys)}")
    if num_devices != spec.num_devices:
        lines.append(f"devices per run: {spec.num_devices} -> {num_devices}")
    return lines


def _shown(value: object) -> str:
    if isinstance(value, Budget):
        return f"{value.amount:g} {value.unit}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return " ".join(map(str, value)) or "none"
    return "none" if value is None else str(value)
