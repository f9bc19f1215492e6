"""Configurations of a comparison and their differences; without jax.

A configuration may be a chain of stages, each starting from the previous one:

    stages:
      - {steps: 150, slot_num: 64}
      - {steps: 100, slot_num: 128, growth.data: continue}

Each stage overrides keys of the file. From the second on, it starts from the previous parameters
(load_parameters_path), which grow if the model is larger.
"""

import contextlib
import dataclasses
import io
import itertools
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from MaxText.config import sources, values
from MaxText.config.loading import load
from MaxText.config.parametrization_rules import FIXED_NORM_OPTIMIZERS
from MaxText.config.problems import ConfigIssue, ConfigurationError
from MaxText.config.schema import Config, all_keys, dotted, flatten
from MaxText.config.values import TypedValue, UntypedValue
from MaxText.experiments.compare_args import (
    KEY_OF,
    SET_PER_RUN,
    STEPS,
    WIDTH,
    CompareArgs,
    expand_sweep,
)
from MaxText.experiments.ladder.ladder_args import DECAY_KEY, asks_for_ladder, ladder_name

_PROGRAM = "train.py"  # configurations must pass its rules
_LONGEST_LABEL = 60
_LONGEST_FOLDER = 120  # file systems allow about twice as many

# Keys that name a run or affect only its output, not its result.
_PLACE = ("base_output_directory", *SET_PER_RUN)
_SHOWN_SECTIONS = ("decoding", "scoring", "monitoring", "guard", "mesh", "run")
_WITHOUT_EFFECT = {
    "model_name",
    "jax_cache_dir",
    "log_config",
    "async_checkpointing",
    "enable_checkpointing",
    "checkpoint_period",
    "save_checkpoint_on_start",
    "save_checkpoint_on_completion",
    "max_to_keep",
    "keep_period",
    "eval_interval",
    "data_cache_dir",
    "grain_worker_count",
    "prepare_num_workers",
    "num_vocab_tiling",
}
# Keys that make losses incomparable if they differ.
_UNLIKE_LOSSES = {
    "vocab_size",
    "max_target_length",
    "dataset_type",
    "dataset_path",
    "data_mixture_weights",
    "grain_train_files",
    "grain_eval_files",
    "train_split",
    "eval_split",
    "eval_steps",
    "tokenizer_path",
    "tokenizer_vocab_size",
    "prepare_source",
    "mlm_training",
    "loss_type",
    "entmax_alpha",
}


SOURCE = "load_parameters_path"  # key of the previous stage's folder, which differs for each run
PREVIOUS = "the_stage_before"  # placeholder of that folder
# Keys of a run that another stage starts from, whatever its configuration says.
KEPT_AT_THE_END = {"enable_checkpointing": True, "save_checkpoint_on_completion": True}


def read_stages(value: UntypedValue) -> list[dict[str, Any]]:
    """Returns each stage's keys; InvalidValueError below two mappings."""
    if not isinstance(value, list) or not all(isinstance(stage, dict) for stage in value):
        problem = f"{values.format_value(value)} is not a list of mappings"
        raise values.InvalidValueError(f"{problem}; write one mapping of keys per stage")
    if len(value) < 2:
        raise values.InvalidValueError("a chain needs two or more stages")
    return [dotted(stage) for stage in value]


def stage_names(label: str, count: int) -> dict[int | None, str]:
    """Returns unique names by stage number; None numbers a single run."""
    numbers = range(1, count + 1)
    return {None: label} if count == 1 else {n: f"{label} stage {n}" for n in numbers}


class Variant(NamedTuple):
    """One configuration of a comparison, before solving."""

    label: str  # short and unique; also names its folder
    source: int  # index of its file
    swept: tuple[str, ...]  # keys set by a sweep
    stages: tuple[Config, ...]  # resolved; one per run of a chain

    @property
    def config(self) -> Config:
        """Last stage, with the compared loss."""
        return self.stages[-1]

    @property
    def named_stages(self) -> list[tuple[str, Config]]:
        """The configuration of each stage, with a unique name."""
        names = stage_names(self.label, len(self.stages)).values()
        return list(zip(names, self.stages, strict=True))

    @property
    def identity(self) -> dict[str, Any]:
        """Flat keys with an effect on a run, except those set per run.

        For a chain: keys of the last stage, total steps, and each stage's value of differing keys.
        """
        keys = {name: value for name, value in flatten(self.config).items() if name not in _PLACE}
        return {
            **keys,
            "steps": sum(stage.run.steps for stage in self.stages),
            **{
                f"{name} of stage {number}": flatten(stage)[name]
                for name in sorted(self.keys_that_differ.difference(_PLACE))
                for number, stage in enumerate(self.stages, 1)
            },
        }

    @property
    def keys_that_differ(self) -> set[str]:
        """Keys that a later stage sets to another value than the first one."""
        first, *later_stages = map(flatten, self.stages)
        return {name for name in first for other in later_stages if other[name] != first[name]}


class _RequestedVariant(NamedTuple):
    """A configuration that is not loaded yet."""

    source: int  # index of its file
    assignment: Mapping[str, Any]  # swept key -> value
    origin: str  # of the sweep, for messages
    stages: Sequence[tuple[dict[str, Any], str]]  # keys of each stage, and their origin


def _requested_variants(
    request: CompareArgs, source: int, path: str, issues: list[ConfigIssue]
) -> list[_RequestedVariant]:
    """Returns the variants of a file, by its sweep and stages or the command line's sweep.

    `issues` collects mistakes in these.
    """
    blocks = sources.collect([path]).sweep_blocks if path else {}
    assignments = request.sweep or [{}]
    origin = "command line, sweep=..."
    if request.sweep is None and "sweep" in blocks:
        origin = blocks["sweep"].origin.place
        try:
            assignments = expand_sweep(blocks["sweep"].value)
        except values.InvalidValueError as error:
            issues.append(ConfigIssue(f"sweep: {error}", (origin,)))
    stages: list[tuple[dict[str, Any], str]] = [({}, "")]
    if "stages" in blocks:
        stages_origin = blocks["stages"].origin.place
        try:
            numbered_stages = enumerate(read_stages(blocks["stages"].value), 1)
            stages = [(keys, f"{stages_origin}, stage {n}") for n, keys in numbered_stages]
        except values.InvalidValueError as error:
            issues.append(ConfigIssue(f"stages: {error}", (stages_origin,)))
    return [_RequestedVariant(source, assignment, origin, stages) for assignment in assignments]


def expand_variants(request: CompareArgs, problems: Sequence[ConfigIssue] = ()) -> list[Variant]:
    """Returns all requested configurations in order.

    Raises ConfigurationError for `problems` and every mistake in any of them, once.
    """
    issues = list(problems)
    if not request.configs and request.sweep is None:
        fact = ("write", "python MaxText/compare.py A.yml B.yml match=params seeds=3")
        issues.append(ConfigIssue("no configurations are given", ("command line",), (fact,)))
        raise ConfigurationError(issues)
    requested: list[_RequestedVariant] = []
    labels = []
    stems = _stems(request.configs)
    for source, path in enumerate(request.configs or ("",)):
        for variant in _requested_variants(request, source, path, issues):
            requested.append(variant)
            labels.append(_label(stems[source], variant.assignment, len(stems) > 1))

    variants = []
    with _deduplicate_notices():
        for variant, label in zip(requested, _unique(labels), strict=True):
            try:
                configs = _load_stages(request, variant)
            except ConfigurationError as error:
                issues += error.problems
            else:
                swept = tuple(map(_canonical_name, variant.assignment))
                variants.append(Variant(label, variant.source, swept, configs))
    if len(requested) == 1 and not issues and not asks_for_ladder(request):
        message = "only one configuration is given, so there is nothing to compare"
        alternative = ("or", "'sweep={learning_rate: [1e-3, 3e-3]}', in quotes")
        facts = (("write", "a second CONFIG.yml,"), alternative)
        issues.append(ConfigIssue(message, ("command line",), facts))
    if issues:
        raise ConfigurationError(list(dict.fromkeys(issues)))
    _note_equal_variants(variants)
    return variants


def _note_equal_variants(variants: Sequence[Variant]) -> None:
    """Prints a note for each pair of variants with the same configuration."""
    for variant, other_variant in itertools.combinations(variants, 2):
        if variant.identity == other_variant.identity:
            note = f"note: {variant.label} and {other_variant.label} are the same configuration"
            sources.print_notices([note])


def _load_stages(request: CompareArgs, variant: _RequestedVariant) -> tuple[Config, ...]:
    """Returns the configuration of each stage of a variant.

    Raises ConfigurationError with the problems of all stages.
    """
    origins_of_run = {
        _canonical_name(argument.partition("=")[0]): "command line" for argument in request.keys
    }
    swept_names = map(_canonical_name, variant.assignment)
    swept_arguments = _as_arguments(variant.assignment, variant.origin)
    _check_names("sweep", variant.assignment, variant.origin, origins_of_run)
    origins = origins_of_run | dict.fromkeys(swept_names, variant.origin)
    stages = []
    problems = []
    for number, (keys, stage_origin) in enumerate(variant.stages):
        try:
            _check_names("stages", keys, stage_origin, origins)
            stage_arguments = _as_arguments(keys, stage_origin)
            if number:
                stage_arguments[f"{SOURCE}={PREVIOUS}"] = stage_origin
            stages.append(_load(request, variant.source, swept_arguments | stage_arguments))
        except ConfigurationError as error:
            problems += error.problems
    if problems:
        raise ConfigurationError(list(dict.fromkeys(problems)))
    return tuple(stages)


def _canonical_name(name: str) -> str:
    return sources.ALIASES.get(name, name)


def _as_arguments(assignment: Mapping[str, Any], origin: str) -> dict[str, str]:
    """Returns `key=value` as it would be typed -> its origin."""
    return {f"{name}={to_override(value)}": origin for name, value in assignment.items()}


def _check_names(
    block: Literal["sweep", "stages"],
    assignment: Mapping[str, Any],
    origin: str,
    origins: Mapping[str, str],
) -> None:
    """Refuses keys set per run or stage, or also given elsewhere."""
    verb = "swept" if block == "sweep" else "set by a stage"
    for name in map(_canonical_name, assignment):
        problem = ""
        locations = (origin,)
        if block == "stages" and name in (SOURCE, "load_full_state_path"):
            problem = f"stages: {name}: each stage starts from the previous one"
        elif name in _PLACE:
            setter = SET_PER_RUN.get(name, "output=")
            problem = f"{block}: {name} cannot be {verb}; {setter} sets it for each run"
        elif name in origins:
            problem = f"{name}: set for all runs and also {verb}"
            locations = (origins[name], origin)
        if problem:
            raise ConfigurationError([ConfigIssue(problem, locations)])


def _load(request: CompareArgs, source: int, arguments: Mapping[str, str]) -> Config:
    """Loads a configuration; `arguments` maps extra ones to their origin."""
    path = [request.configs[source]] if request.configs else []
    try:
        return load([*path, *request.keys, *arguments], _PROGRAM, for_compare=True).config
    except ConfigurationError as error:
        # These arguments apply like typed ones, but originate elsewhere.
        locations = {
            f"command line, {argument}": f"{origin}, {argument}"
            for argument, origin in arguments.items()
        }
        problems = []
        for issue in error.problems:
            location = tuple(locations.get(line, line) for line in issue.location)
            problems.append(dataclasses.replace(issue, location=location))
        raise ConfigurationError(problems) from error


def to_override(value: TypedValue) -> str:
    """Formats a sweep value as it would be typed after `key=`."""
    if isinstance(value, values.UntypedScalar):
        return str(value)
    if isinstance(value, list):
        return "[" + ", ".join(to_override(item) for item in value) + "]"
    return values.to_yaml(value)


def _stems(paths: Sequence[str]) -> list[str]:
    """Returns file stems, prefixed with the folder name if ambiguous."""
    if not paths:
        return [""]
    stems = [Path(path).stem for path in paths]
    count = Counter(stems)
    return [
        f"{Path(path).absolute().parent.name}-{stem}" if count[stem] > 1 else stem
        for path, stem in zip(paths, stems, strict=True)
    ]


def _label(stem: str, assignment: Mapping[str, Any], several_sources: bool) -> str:
    """Returns a label, with key names only for numbers and switches."""
    parts = [stem] if several_sources or not assignment else []
    for name, value in assignment.items():
        items = value if isinstance(value, list) else [value]
        text = "+".join(to_override(item) for item in items)
        says_itself = re.fullmatch(r"[A-Za-z][\w.+-]*", text)
        is_switch = text.lower() in ("true", "false", "yes", "no", "on", "off", "none", "null")
        parts.append(text if says_itself and not is_switch else f"{name}={text}")
    label = ",".join(parts)
    return re.sub(r"[^\w.=,+-]+", "-", label).strip("-.")[:_LONGEST_LABEL] or "run"


def _unique(labels: Sequence[str]) -> list[str]:
    taken: set[str] = set()
    unique = []
    for label in labels:
        names = itertools.chain([label], (f"{label}_{number}" for number in itertools.count(2)))
        unique.append(next(name for name in names if name not in taken))
        taken.add(unique[-1])
    return unique


@contextlib.contextmanager
def _deduplicate_notices():
    buffer = io.StringIO()
    try:
        with contextlib.redirect_stderr(buffer):
            yield
    finally:
        sources.print_notices(buffer.getvalue().splitlines())


def folder_of(request: CompareArgs, variants: Sequence[Variant]) -> Path:
    """Returns the folder as asked, or one reproduced by the same command."""
    if request.output:
        return request.output
    parent = Path(variants[0].config.run.base_output_directory).expanduser()
    if request.name:
        return parent / request.name
    swept = dict.fromkeys(name for variant in variants for name in variant.swept)
    stems = [Path(path).stem for path in request.configs]
    # Another budget is another comparison, whose runs belong elsewhere.
    budget = [] if request.budget is None else [f"{request.budget:g}"]
    program = "compare"
    tuned = ["tuned"] if request.tune else []
    suffix = "_".join(["", request.match, *budget, *tuned])
    if asks_for_ladder(request):
        program = "ladder"
        suffix = f"_{ladder_name(request)}"
    name = "_".join([program, *stems, *swept])
    return parent / (name[: _LONGEST_FOLDER - len(suffix)] + suffix)


def solve_key_by_label(request: CompareArgs, variants: Sequence[Variant]) -> dict[str, str]:
    """Returns the key to solve for by label; ConfigurationError if unfit."""
    names = request.solve_for or (WIDTH if request.match == "params" else STEPS,)
    num_sources = max(len(request.configs), 1)
    if len(names) == 1:
        chosen = [names[0]] * len(variants)
    elif len(names) == num_sources:
        chosen = [names[variant.source] for variant in variants]
    elif len(names) == len(variants):
        chosen = list(names)
    else:
        problem = f"solve_for: {len(names)} names for {len(variants)} configurations"
        remedy = ("write", "one for each")
        raise ConfigurationError([ConfigIssue(problem, ("command line",), (remedy,))])
    remedies: dict[str, str] = {}  # problem -> what to write
    for variant, name in zip(variants, chosen, strict=True):
        if request.match == "time" and name != STEPS:
            problem = f"solve_for={name}: match=time measures the given model, and solves for steps"
            remedies[problem] = "solve_for=steps"
        if request.match == "params" and name == STEPS:
            problem = "solve_for=steps: the number of parameters does not depend on the steps"
            remedies[problem] = "solve_for=width or depth"
        if KEY_OF.get(name, name) in variant.swept:
            problem = f"{name} is swept, but match={request.match} solves for it"
            remedies[problem] = f"solve_for= another key, or remove {name} from the sweep"
    if remedies:
        location = ("command line",)
        raise ConfigurationError(
            [
                ConfigIssue(problem, location, (("write", remedy),))
                for problem, remedy in remedies.items()
            ]
        )
    return {variant.label: name for variant, name in zip(variants, chosen, strict=True)}


def check_tunable(request: CompareArgs, variants: Sequence[Variant]) -> None:
    """Raises ConfigurationError if a key that is tuned has no effect in a variant."""
    issues = []
    for variant, key in itertools.product(variants, request.tune):
        opt_type = variant.config.optimizer.opt_type
        if any(flatten(stage)[key] == 0 for stage in variant.stages):
            problem = f"tune: {key} of {variant.label} is 0, and factors of it change nothing"
            remedy = f"{key}= above 0, or tune= without it"
        elif key == DECAY_KEY and opt_type in FIXED_NORM_OPTIMIZERS:
            problem = (
                f"tune: {variant.label} has opt_type={opt_type}, which keeps the norms of matrices "
                "without weight decay"
            )
            remedy = "tune=learning_rate"
        else:
            continue
        issues.append(ConfigIssue(problem, ("command line",), (("write", remedy),)))
    if issues:
        raise ConfigurationError(issues)


def confounding_keys(variants: Sequence[Variant], solved: Mapping[str, set[str]]) -> list[str]:
    """Returns warnings about different keys outside the model.

    These were neither swept nor solved for, or make the losses incomparable. `variants` have solved
    keys applied; `solved` maps labels to these.
    """
    on_purpose = {name for variant in variants for name in variant.swept}
    on_purpose |= set().union(*solved.values())
    for variant in variants:
        if len(variant.stages) > 1:
            # Steps of a chain are totals, and each stage has its own schedule.
            on_purpose |= variant.keys_that_differ - {"steps"}
            on_purpose.add("learning_rate_schedule_steps")
    passed_over = (on_purpose - _UNLIKE_LOSSES) | _WITHOUT_EFFECT | set(_PLACE)
    keys = all_keys()
    flats = {variant.label: variant.identity for variant in variants}
    lines = []
    for name, key in keys.items():
        of_model = key.section[0] == "model" and name not in _UNLIKE_LOSSES
        shown_only = key.section[0] in _SHOWN_SECTIONS and name != "steps"
        if name in passed_over or of_model or shown_only:
            continue
        by_value: dict[str, list[str]] = {}
        for label, config in flats.items():
            by_value.setdefault(values.to_yaml(config[name]), []).append(label)
        if len(by_value) > 1:
            parts = "; ".join(
                f"{value} ({', '.join(labels)})" for value, labels in by_value.items()
            )
            is_of_data = key.section[:2] == ("data", "parts")  # a key of a data source
            end = ": losses may not be of the same thing"
            if not is_of_data and name not in _UNLIKE_LOSSES:
                end = ""
            lines.append(f"{name}: {parts}{end}")
    return lines
