"""Parses and checks the command line of compare.py, without jax."""

import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from MaxText.config import values
from MaxText.config.keys import Count, Natural
from MaxText.config.problems import ConfigIssue, close_matches
from MaxText.config.program_options import option, read_options
from MaxText.config.schema import all_keys, dotted
from MaxText.config.values import UntypedValue
from MaxText.cost.plan_args import COUNT_SUFFIXES, parse_amount
from MaxText.experiments.ladder.ladder_args import (
    DECAY_KEY,
    DEFAULT_SEEDS,
    RATE_KEY,
    SWEEP_SEED,
    LadderOptions,
    asks_for_ladder,
    ladder_issues,
)
from MaxText.experiments.submission import read_launch_options

Match = Literal["params", "flops", "tokens", "time"]
Launch = Literal["local", "print", "slurm", "jobset", "sky"]

UNITS = {"params": "parameters", "flops": "FLOPs", "tokens": "tokens", "time": "seconds"}

# Keys that are set per run. A value for all runs would be silently overwritten.
SET_PER_RUN = {
    "data_shuffle_seed": "seeds=",
    "init_weights_seed": "seeds=",
    "metrics_file": "the folder of each run",
    "run_name": "output=",
}
# Names of what to solve for, besides key names.
WIDTH = "width"
DEPTH = "depth"
SLOTS = "slots"
STEPS = "steps"
_SOLVED_NAMES = (WIDTH, DEPTH, SLOTS, STEPS)
# Key of a name, if it differs.
KEY_OF = {WIDTH: "base_emb_dim", DEPTH: "base_num_decoder_layers", SLOTS: "slot_num"}

# What tune= names, and its key.
TUNABLE = {"learning_rate": RATE_KEY, "weight_decay": DECAY_KEY}

TIME_SUFFIXES = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}


def _items(text: str) -> list[str]:
    return [item.strip() for item in text.strip().removeprefix("[").removesuffix("]").split(",")]


def _seeds(text: str) -> tuple[int, ...]:
    """Parses seeds: `3` is 0, 1, 2; `[3]` and `4,7` are lists."""
    if "," not in text and not text.startswith("["):
        return tuple(range(values.convert(values.UntypedScalar(text), Count)))
    seeds = values.convert(list(map(values.UntypedScalar, _items(text))), tuple[Natural, ...])
    if len(set(seeds)) < len(seeds):
        raise ValueError(f"{text!r} names a seed twice")
    return seeds


def _solve_for(text: str) -> tuple[str, ...]:
    names = tuple(_items(text))
    keys = all_keys()
    for name in names:
        if name not in (*_SOLVED_NAMES, *keys):
            close = close_matches(name, [*_SOLVED_NAMES, *keys])
            nearest = f"; nearest: {', '.join(close)}" if close else ""
            raise ValueError(f"{name!r} is neither {', '.join(_SOLVED_NAMES)} nor a key{nearest}")
        if name in keys and name not in _SOLVED_NAMES and keys[name].annotation is not int:
            kind = values.type_name(keys[name].annotation)
            raise ValueError(f"{name} is not a whole number but {kind}")
    return names


def _tuned_keys(text: str) -> tuple[str, ...]:
    """Parses what to tune to keys, in the order of TUNABLE."""
    names = {name: TUNABLE.get(name, name) for name in _items(text)}
    for name, key in names.items():
        if key not in TUNABLE.values():
            raise ValueError(f"{name!r} cannot be tuned")
    return tuple(key for key in TUNABLE.values() if key in names.values())


def _keys_of_size(text: str) -> dict[str, Any]:
    """Parses the keys of another size."""
    mapping = values.from_text(text)
    if not isinstance(mapping, dict) or not mapping:
        raise ValueError(f"{text!r} is not a mapping of keys")
    return dotted(mapping)


def expand_sweep(sweep: UntypedValue) -> list[dict[str, Any]]:
    """Expands a sweep into a list of key-value mappings.

    A mapping of keys to lists is their product, with the last key varying fastest. A list of
    mappings concatenates their products. A scalar counts as a list of one. Raises
    InvalidValueError for anything else, or an empty sweep.
    """
    if isinstance(sweep, list | dict) and not sweep:
        raise values.InvalidValueError(f"{values.format_value(sweep)} has no variants")
    if isinstance(sweep, list):
        return [variant for part in sweep for variant in expand_sweep(part)]
    if not isinstance(sweep, dict):
        raise values.InvalidValueError(
            f"{values.format_value(sweep)} is not a mapping; write {{key: [value, value]}}, or a "
            "list of these"
        )
    choices = []
    for name, value in dotted(sweep).items():
        items = value if isinstance(value, list) else [value]
        if not items:
            raise values.InvalidValueError(f"{name} has an empty list of values")
        choices.append([(name, item) for item in items])
    return [dotted(dict(combination)) for combination in itertools.product(*choices)]


def _sweep(text: str) -> list[dict[str, Any]]:
    return expand_sweep(values.from_text(text))


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompareOptions(LadderOptions):
    """Options of compare.py."""

    match: Match = option(
        "params",
        "Equal budget: parameters, FLOPs, tokens, or time of training.",
    )
    budget: str | float | None = option(
        None, "Its size: 10M, 1e15, for time 10m or 1h; by default that of the first file."
    )
    solve_for: tuple[str, ...] = option(
        (),
        "Key to solve for: width, depth, slots, steps or an integer key; one for all, or "
        "[one,for,each]. By default width for params, steps for the others.",
        read=_solve_for,
        accepts="width, depth, slots, steps or a key",
    )
    tolerance: Annotated[float, Field(gt=0, lt=1)] = option(
        0.02, "Largest deviation from the budget."
    )
    seeds: tuple[int, ...] = option(
        (0,),
        "Runs of each; 3 is seeds 0, 1, 2 of data order and initial weights, [4,7] names them. By "
        "default 1, in a ladder 2.",
        read=_seeds,
        accepts="a number, or a list of seeds",
    )
    sweep: UntypedValue = option(
        None,
        "{key: [a, b], ...} is every combination, [{...}, {...}] one after the other; in a YAML "
        "file as `sweep:`. `stages:` there is a chain of runs.",
        read=_sweep,
        accepts="{key: [a, b], ...} in quotes, as '{position_embedding: [rotary]}'",
    )
    tune: tuple[str, ...] = option(
        (),
        "learning_rate or learning_rate,weight_decay: tune them for each configuration before the "
        "comparison, by factors of two with another seed; in a ladder at its smallest rungs.",
        read=_tuned_keys,
        accepts="learning_rate or learning_rate,weight_decay",
    )
    tune_at: UntypedValue = option(
        None,
        "Keys of a smaller size to tune at, by default that of the comparison: "
        "'{base_emb_dim: 32, steps: 100}' in quotes.",
        read=_keys_of_size,
        accepts="{key: value, ...} in quotes",
    )
    launch: Launch = option(
        "local",
        "local: here. print: one command per run instead of running, and the one that "
        "reports results. slurm, jobset (Kubernetes), sky (SkyPilot): submits them as an array.",
    )
    launch_options: str = option(
        "",
        "Options of launch.py for slurm, jobset or sky, as '--image=IMAGE --claim=shared:/data'; "
        "--dry-run prints the array.",
        metavar="OPTIONS",
    )
    num_devices: Count | None = option(
        None, "Devices per run, by default those of this machine.", metavar="NUMBER"
    )
    output: Path | None = option(
        None,
        "Output folder, by default maxtext_output/compare_<names>_<match>_<budget>.",
        read=Path,
        accepts="a folder",
    )
    name: str = option(
        "", "Name of the output folder in base_output_directory, instead of output=."
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompareArgs(CompareOptions):
    """A requested comparison.

    Attributes:
      configs: Paths of configuration files as typed.
      keys: key=value for every configuration.
    """

    configs: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()

    @property
    def at_tuning_size(self) -> "CompareArgs":
        """The same configurations at the size of `tune_at`."""
        assert isinstance(self.tune_at, dict)
        changed = [f"{name}={values.to_yaml(value)}" for name, value in self.tune_at.items()]
        other_keys = [key for key in self.keys if key.partition("=")[0] not in self.tune_at]
        return dataclasses.replace(self, keys=(*other_keys, *changed))


def parse_args(arguments: Sequence[str]) -> tuple[CompareArgs, list[ConfigIssue]]:
    """Returns the request and all problems in the program's own arguments.

    Keys and configuration files are not read yet.

    Args:
      arguments: The command line without the program.
    """
    parsed = read_options(CompareOptions, arguments)
    options = parsed.options
    keys = [*parsed.operands, *parsed.settings]
    issues = [*parsed.problems, *_key_issues(keys)]
    budget = options.budget
    if budget is not None:
        try:
            budget = _parse_budget(str(budget), options.match)
        except ValueError as error:
            example = "600, 10m or 1.5h" if options.match == "time" else "1e15, 10M or 1.5B"
            issues.append(_issue(f"budget: {error}", write=f"budget={example}"))
    issues += [*_option_issues(options), *_tuning_issues(options)]
    issues += read_launch_options(options.launch, options.launch_options)[1]
    issues += ladder_issues(options, parsed.given)
    issues += _url_issues(arguments)
    output = options.output and options.output.expanduser()
    option_values = vars(options) | {"budget": budget, "output": output}
    if asks_for_ladder(options):
        if "seeds" not in parsed.given:
            option_values["seeds"] = DEFAULT_SEEDS
        # lr_sweep=N is short for tuning the learning rate, at N rungs.
        option_values["tune"] = options.tune or ((RATE_KEY,) if options.lr_sweep else ())
        option_values["lr_sweep"] = options.lr_sweep or (1 if options.tune else 0)
    request = CompareArgs(**option_values, configs=tuple(parsed.config_files), keys=tuple(keys))
    return request, issues


def _issue(message: str, argument: str = "", **facts: str) -> ConfigIssue:
    """Returns an issue of the command line, or of one of its arguments."""
    location = f"command line, {argument}" if argument else "command line"
    return ConfigIssue(message, (location,), tuple(facts.items()))


def _parse_budget(text: str, match: Match) -> float:
    """Returns a budget in the unit of `match`; raises ValueError."""
    return parse_amount(text, TIME_SUFFIXES if match == "time" else COUNT_SUFFIXES)


def _key_issues(arguments: Sequence[str]) -> list[ConfigIssue]:
    """Returns issues of key=value arguments that cannot be the same for all runs."""
    issues = []
    for argument in arguments:
        name = argument.partition("=")[0]
        if name == "stages":
            message = "stages: they belong to one configuration, so write them in its file"
            example = "stages: [{steps: 100, slot_num: 64}, {...}] in a YAML file"
            issues.append(_issue(message, argument, write=example))
        elif name in SET_PER_RUN:
            message = f"{name}: {SET_PER_RUN[name]} sets it for each run of a comparison"
            issues.append(_issue(message, argument))
    return issues


def _option_issues(options: CompareOptions) -> list[ConfigIssue]:
    """Returns issues of options that contradict each other, or name no local folder."""
    issues = []
    if options.match == "time" and options.num_devices is not None:
        message = "num_devices: match=time measures steps on this machine, not on another one"
        issues.append(_issue(message, instead="run it there"))
    if options.name and options.output:
        message = f"name={options.name} and output={options.output} name two folders"
        issues.append(_issue(message, instead="one"))
    if Path(options.name).is_absolute() or ".." in Path(options.name).parts:
        message = f"name={options.name} is not a folder in base_output_directory"
        issues.append(_issue(message, instead="output= for another place"))
    return issues


def _tuning_issues(options: CompareOptions) -> list[ConfigIssue]:
    """Returns issues of what is tuned, and where."""
    issues = []
    tunes = options.tune or options.lr_sweep
    if tunes and SWEEP_SEED in options.seeds:
        message = f"seeds: {SWEEP_SEED} is the seed with which hyper-parameters are tuned"
        issues.append(_issue(message, write="other seeds="))
    if options.lr_sweep and options.tune and RATE_KEY not in options.tune:
        message = "lr_sweep sweeps the learning rate, and tune= leaves it out"
        issues.append(_issue(message, write="tune=learning_rate,weight_decay"))
    if not isinstance(options.tune_at, dict):
        return issues
    if not options.tune:
        message = "tune_at is a size to tune at, and nothing is tuned"
        issues.append(_issue(message, write="tune=learning_rate"))
    if asks_for_ladder(options):
        message = "tune_at: a ladder is tuned at its smallest rungs"
        issues.append(_issue(message, write="lr_sweep= for their number"))
    for name in options.tune_at:
        if name in SET_PER_RUN or name in options.tune:
            by = SET_PER_RUN.get(name, "tune=")
            issues.append(_issue(f"tune_at: {name} is set by {by}", remedy=f"remove {name}"))
    return issues


def _url_issues(arguments: Sequence[str]) -> list[ConfigIssue]:
    """Returns issues of output folders that are URLs."""
    issues = []
    for argument in arguments:
        name = argument.partition("=")[0]
        if name in ("output", "base_output_directory") and "://" in argument:
            issues.append(_issue(f"{name}: comparisons need a local folder", argument))
    return issues
