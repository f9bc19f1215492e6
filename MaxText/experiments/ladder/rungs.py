"""Rungs of a ladder: every configuration at several sizes, by stated rules.

All arms (configurations) have the same FLOPs at a rung, and the width and depth of the first one.
Batch sizes and learning rates of the files are those of the smallest rung's batch and of the file's
width; larger rungs scale them.
"""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from MaxText.config import values
from MaxText.config.problems import ConfigIssue, close_matches
from MaxText.config.schema import Config, all_keys, dotted, flatten, unflatten
from MaxText.config.sources import ALIASES
from MaxText.errors import UserError
from MaxText.experiments.compare_args import SET_PER_RUN, STEPS
from MaxText.experiments.ladder.ladder_args import (
    MIN_GRID_SIZES,
    MIN_RUNGS,
    MIN_SPAN,
    RATE_KEY,
    LadderOptions,
    is_size_grid,
)
from MaxText.experiments.ladder.rung_sizes import Size, choose_sizes, compute_of_tokens, resize
from MaxText.experiments.solver import cost, with_overrides
from MaxText.experiments.tuning import with_key_factor
from MaxText.experiments.variants import Variant
from MaxText.formatting import short_count

_EVAL_BATCH_KEY = "eval_per_device_batch_size"
_BATCH_KEYS = (
    "per_device_batch_size",
    "per_device_batch_size_start",
    "per_device_batch_size_increment",
)
_ROOM = 2.0  # steps per step of a fixed warm-up, before they are solved for
# Exponent of the learning rate in the width: the factor of a hidden matrix. Adam's in muP (Yang et
# al. 2022, arXiv:2203.03466, table 3); for updates of fixed rms, whose spectral norm grows as the
# root of the width, that of an update with the spectral norm of muP.
WIDTH_EXPONENTS = {"adamw": -1.0, "lion": -1.0, "muon": -0.5, "adafactor": -0.5, "sgd": 0.0}
# Exponent in the batch size of Delphi (Open Athena, 2026).
BATCH_RATE_EXPONENT = 0.5


@dataclasses.dataclass(frozen=True)
class LadderRung:
    """Configurations of a rung. Their steps are solved for later."""

    number: int  # from 1, ascending in compute
    compute: float  # FLOPs of one run
    variants: tuple[Variant, ...]

    @property
    def folder(self) -> str:
        """Its folder within the ladder's."""
        return f"rung_{self.number}"

    def with_rates(self, factors: Mapping[str, float]) -> "LadderRung":
        """Returns the rung with learning rates multiplied by a factor per configuration."""
        return self.with_key_factors(RATE_KEY, factors)

    def with_key_factors(self, key: str, factors: Mapping[str, float]) -> "LadderRung":
        """Returns the rung with a key multiplied by a factor per configuration."""
        variants = tuple(
            with_key_factor(variant, key, factors.get(variant.label, 1.0))
            for variant in self.variants
        )
        return dataclasses.replace(self, variants=variants)


def _changed(config: Config, changes: Mapping[str, Any]) -> Config:
    return unflatten(flatten(config) | dict(changes))


def plan_rungs(
    options: LadderOptions, variants: Sequence[Variant], num_devices: int
) -> tuple[list[LadderRung], list[ConfigIssue]]:
    """Returns the rungs of a ladder, and what is wrong with them.

    Args:
      options: Of the ladder, without problems of their own.
      variants: Configurations as in their files.
      num_devices: Of a run.

    Raises:
      UserError: The file of sizes cannot be read, or the batch does not fit the devices.
    """
    variants = [_with_room_for_warmup(variant) for variant in variants]
    listed: Sequence[Mapping[str, Any]]
    if isinstance(options.sizes, Path):
        listed = read_sizes(options.sizes)
        arms, issues = _listed_arms(listed, options.sizes, variants)
    else:
        spaced = _spaced_computes(options)
        listed = [{}] * len(spaced)
        sizes, issues = choose_sizes(variants, spaced, options, num_devices)
        arms = [_resized(variants, size) for size in sizes]
    costs = [cost(arm[0].config, num_devices) for arm in arms]
    tokens = [options.tokens_per_parameter * measured.parameters for measured in costs]
    computes = [compute_of_tokens(c, of_rung) for c, of_rung in zip(costs, tokens, strict=True)]
    if is_size_grid(options):
        issues = issues or _grid_issues(options, [measured.parameters for measured in costs])
        spaced = _spaced_computes(options)
        computes = [compute for compute in spaced for _ in costs]
        flops_per_token = [compute_of_tokens(measured, 1.0) for measured in costs] * len(spaced)
        tokens = [c / each for c, each in zip(computes, flops_per_token, strict=True)]
        arms = arms * len(spaced)
        listed = [*listed] * len(spaced)
    elif isinstance(options.sizes, Path):
        issues = issues or _listed_issues(options.sizes, computes)
    unknown = {v.config.optimizer.opt_type for v in variants if width_exponent(v.config) is None}
    if unknown and options.transfer == "scaled":
        message = f"transfer=scaled has no rule for opt_type={', '.join(sorted(unknown))}"
        fact = ("write", "transfer=none lr_sweep=2")
        issues = [*issues, ConfigIssue(message, ("command line",), (fact,))]
    if any(stage.batch.global_batch_size for variant in variants for stage in variant.stages):
        message = "global_batch_size: a ladder chooses the batch size of each rung"
        fact = ("write", "global_batch_size=0, and per_device_batch_size")
        issues = [*issues, ConfigIssue(message, ("configurations",), (fact,))]
    if issues:
        return [], issues
    rungs = []
    for index, (sized, keys) in enumerate(zip(arms, listed, strict=True)):
        growth = tokens[index] / tokens[0]
        sets_batch = bool(keys.keys() & set(_BATCH_KEYS))
        batch = 1.0 if sets_batch else batch_factor(options, variants, growth)
        horizon_factor = growth**-options.horizon_exponent
        scales_rate = options.transfer == "scaled" and RATE_KEY not in keys
        scaled = tuple(
            _scaled(arm, variant, batch, horizon_factor if scales_rate else None)
            for arm, variant in zip(sized, variants, strict=True)
        )
        rungs.append(LadderRung(index + 1, computes[index], scaled))
    return rungs, []


def _spaced_computes(options: LadderOptions) -> list[float]:
    """Returns FLOPs evenly spaced in their logarithm."""
    assert options.ladder is not None
    assert options.from_ is not None
    assert options.to is not None
    return np.geomspace(options.from_, options.to, options.ladder).tolist()


def _grid_issues(options: LadderOptions, parameters: Sequence[int]) -> list[ConfigIssue]:
    """Returns what is wrong with the sizes of a grid."""
    messages = []
    if len(parameters) < MIN_GRID_SIZES:
        messages.append(f"{len(parameters)} sizes: a parabola needs at least {MIN_GRID_SIZES}")
    if any(low >= high for low, high in itertools.pairwise(parameters)):
        listed = ", ".join(map(short_count, parameters))
        messages.append(f"the parameters of its sizes do not ascend: {listed}")
    return [
        ConfigIssue(f"sizes={options.sizes}: {message}", ("command line",)) for message in messages
    ]


def _with_room_for_warmup(variant: Variant) -> Variant:
    """Returns a variant with more steps than a fixed warm-up has.

    A ladder solves for the steps, so that those of the file need not obey the rules.
    """
    missing = [1.0]
    for stage in variant.stages:
        if stage.schedule.warmup_steps != -1:
            missing.append(_ROOM * (stage.schedule.warmup_steps + 1) / stage.run.steps)
    factor = math.ceil(max(missing))
    longer = [with_overrides(stage, {STEPS: stage.run.steps * factor}) for stage in variant.stages]
    return variant._replace(
        stages=tuple(new or old for new, old in zip(longer, variant.stages, strict=True))
    )


def _resized(variants: Sequence[Variant], size: Size) -> list[Variant]:
    resized = [resize(variant, size) for variant in variants]
    assert None not in resized, "choose_sizes has tried them"
    return [variant for variant in resized if variant is not None]


def batch_factor(options: LadderOptions, variants: Sequence[Variant], growth: float) -> float:
    """Returns the batch size relative to the smallest rung: a power law, to three binary digits.

    The exponent of the training tokens is that of Power Lines (Bergsma et al. 2025,
    arXiv:2505.13738) by default. Of the factors 1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4 ..., those
    are taken with which all batch sizes stay whole. A batch that only doubles would be up to 41 %
    off, which bends the law; one to the nearest sequence would not divide into microbatches.

    Args:
      options: With batch_exponent.
      variants: Configurations as in their files.
      growth: Training tokens relative to the smallest rung.
    """
    ideal = max(growth**options.batch_exponent, 1.0)
    stages = [stage for variant in variants for stage in variant.stages]
    sizes = [flatten(stage)[name] for stage in stages for name in _batch_keys(stage)]
    # Fractional sizes per device are whole only with the devices: multiples keep that.
    common = math.gcd(*map(int, sizes)) if all(size == int(size) for size in sizes) else 1
    smallest_unit = 1 / (common & -common)  # by the powers of two in all of them
    unit = max(2.0 ** (math.floor(math.log2(ideal)) - 2), smallest_unit)
    return round(ideal / unit) * unit


def rate_factor(config: Config, width: int, batch: float, horizon_factor: float) -> float:
    """Returns the learning rate of a rung relative to that of its file.

    Args:
      config: As in the file.
      width: Of the rung.
      batch: Sequences per step relative to the smallest rung.
      horizon_factor: Factor of the training tokens, relative to the smallest rung.
    """
    exponent = width_exponent(config)
    assert exponent is not None
    by_width = (width / Size.of(config).width) ** exponent
    return by_width * batch**BATCH_RATE_EXPONENT * horizon_factor


def width_exponent(config: Config) -> float | None:
    """Returns the exponent of the learning rate in the width; None if no rule has one."""
    if not config.model.is_standard:
        return 0.0  # the parametrization scales the rate of each weight itself
    return WIDTH_EXPONENTS.get(config.optimizer.opt_type)


def _batch_keys(config: Config) -> Sequence[str]:
    """Returns the keys that are the batch size of a run, the final one first."""
    return _BATCH_KEYS if config.batch.enable_rampup_batch_size else _BATCH_KEYS[:1]


def _scaled(arm: Variant, variant: Variant, batch: float, horizon_factor: float | None) -> Variant:
    """Returns a sized variant with the batch size and learning rate of its rung.

    Args:
      arm: The sized variant.
      variant: As in its file.
      batch: Factor of the batch size.
      horizon_factor: Of the learning rate by the training tokens; None leaves the learning rate.
    """
    stages = []
    for sized, stage in zip(arm.stages, variant.stages, strict=True):
        keys = flatten(sized)
        changes = {name: keys[name] * batch for name in _batch_keys(sized)}
        # The same validation text at every rung: eval_steps batches of the same size.
        changes[_EVAL_BATCH_KEY] = keys[_EVAL_BATCH_KEY] or keys[_BATCH_KEYS[0]]
        if horizon_factor is not None:
            factor = rate_factor(stage, Size.of(sized).width, batch, horizon_factor)
            changes[RATE_KEY] = keys[RATE_KEY] * factor
        stages.append(_changed(sized, changes))
    return arm._replace(stages=tuple(stages))


def read_sizes(path: Path) -> list[dict[str, Any]]:
    """Returns the keys of each rung in a file of sizes, ascending.

    Raises:
      UserError: The file is no list of mappings of keys that a rung may set.
    """
    try:
        content = values.from_text(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"sizes={path}: cannot be read ({error}).") from error
    if not isinstance(content, list) or not all(isinstance(item, dict) for item in content):
        example = "- {base_emb_dim: 64, base_num_decoder_layers: 2}"
        raise UserError(f"sizes={path}: write a list of one mapping per rung, such as {example}")
    entries = []
    for number, item in enumerate(content, 1):
        entry = {ALIASES.get(name, name): value for name, value in dotted(item).items()}
        for name in entry:
            if name in (*SET_PER_RUN, STEPS):
                raise UserError(
                    f"sizes={path}, rung {number}: {name} is set by the ladder; remove it."
                )
            if name not in all_keys():
                near = ", ".join(close_matches(name, all_keys()))
                raise UserError(
                    f"sizes={path}, rung {number}: unknown key {name}; nearest: {near}."
                )
        entries.append(entry)
    return entries


def _listed_arms(
    entries: Sequence[Mapping[str, Any]], path: Path, variants: Sequence[Variant]
) -> tuple[list[list[Variant]], list[ConfigIssue]]:
    """Returns every variant with the keys of each rung, and what is wrong with these."""
    arms: list[list[Variant]] = []
    issues = []
    for number, entry in enumerate(entries, 1):
        arms.append([])
        for variant in variants:
            stages = [with_overrides(stage, dict(entry)) for stage in variant.stages]
            if None in stages:
                message = f"rung {number} of {path} breaks a rule of {variant.label}"
                fact = ("try", f"the keys of the rung with train.py: {values.to_yaml(dict(entry))}")
                issues.append(ConfigIssue(message, (str(path),), (fact,)))
            arms[-1].append(variant._replace(stages=tuple(s for s in stages if s is not None)))
    return ([], issues) if issues else (arms, [])


def _listed_issues(path: Path, computes: Sequence[float]) -> list[ConfigIssue]:
    """Returns what is wrong with the compute of listed rungs."""
    messages = []
    if len(computes) < MIN_RUNGS:
        messages.append(f"{len(computes)} rungs: an interval needs at least {MIN_RUNGS}")
    if any(low >= high for low, high in itertools.pairwise(computes)):
        listed = ", ".join(f"{compute:.3g}" for compute in computes)
        messages.append(f"the FLOPs of its rungs do not ascend: {listed}")
    elif computes and computes[-1] < MIN_SPAN * computes[0]:
        messages.append(
            f"its rungs span {computes[0]:.3g} to {computes[-1]:.3g} FLOPs, a factor of "
            f"{computes[-1] / computes[0]:.3g}; a law needs {MIN_SPAN:g}. Add a rung of at least "
            f"{math.sqrt(MIN_SPAN * computes[0] / computes[-1]):.2g} times the parameters"
        )
    return [ConfigIssue(f"sizes={path}: {message}", ("command line",)) for message in messages]
