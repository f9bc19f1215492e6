"""Learning rate and weight decay of each configuration, tuned before a comparison.

Every configuration is swept alone, with a seed that no run of the comparison has: the best of
several runs is better than another run at the same values, which would favor the configuration
that was tried more often. The weight decay is swept after the learning rate, at the one that was
found.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from MaxText.config.schema import flatten, unflatten
from MaxText.experiments import comparison_results
from MaxText.experiments.comparison_plan import Plan, StageSequence, chains_of
from MaxText.experiments.ladder.ladder_args import DECAY_KEY, SWEEP_SEED
from MaxText.experiments.ladder.learning_rate_sweep import (
    FACTORS,
    RateOptimum,
    find_optimum,
    run_sweeps,
)
from MaxText.experiments.variants import Variant
from MaxText.formatting import format_loss, pluralize
from MaxText.reports.page import PageSection, PageTable

TUNING_FOLDER = "tuning"
_CSV = "tuning.csv"


class TunedValue(NamedTuple):
    """What the sweep of a key of a configuration found."""

    label: str
    key: str
    before: float  # value in the configuration; of a chain, that of its last stage
    losses: Mapping[float, float | None]  # factor -> validation loss, None if it diverged
    optimum: RateOptimum
    rung: int | None = None  # of a ladder

    @property
    def value(self) -> float:
        """The optimum."""
        return self.before * self.optimum.factor

    @property
    def line(self) -> str:
        """What was found, in words."""
        where = "" if self.rung is None else f" at rung {self.rung}"
        line = (
            f"{self.key} of {self.label}{where}: best at {self.value:.3g}, "
            f"{self.optimum.factor:.3g} times {self.before:.3g}"
        )
        if self.optimum.edge:
            name = "largest" if self.optimum.edge > 0 else "smallest"
            line += f"; the {name} that was tried"
        return line

    @property
    def tried(self) -> str:
        """Values that were tried with their losses."""
        return ", ".join(
            f"{self.before * factor:.3g}: {'diverged' if loss is None else format_loss(loss)}"
            for factor, loss in sorted(self.losses.items())
        )


def with_key_factor(variant: Variant, key: str, factor: float) -> Variant:
    """Returns a variant with a key of each stage multiplied."""
    stages = []
    for stage in variant.stages:
        keys = flatten(stage)
        stages.append(unflatten(keys | {key: keys[key] * factor}))
    return variant._replace(stages=tuple(stages))


def tune(
    keys: Sequence[str],
    variants: Sequence[Variant],
    plan: Plan,
    run: Callable[[Sequence[StageSequence]], None],
) -> list[TunedValue]:
    """Sweeps keys of all variants, one key after the other.

    Args:
      keys: In this order.
      variants: Configurations at the size of the sweep.
      plan: Solved, of these variants; its folder gets the runs.
      run: Runs those that are not over.

    Raises:
      UserError: A learning rate has no optimum, or a run failed.
    """
    tuned: list[TunedValue] = []
    for key in keys:
        sweeps = {
            variant.label: functools.partial(_swept_run, plan, variant, key) for variant in variants
        }
        losses = run_sweeps(sweeps, run, loss_of, key)
        tuned_values = [
            TunedValue(
                label=variant.label,
                key=key,
                before=flatten(variant.config)[key],
                losses=losses[variant.label],
                optimum=find_optimum(losses[variant.label], key),
            )
            for variant in variants
        ]
        variants = apply_tuned(variants, tuned_values)
        tuned += tuned_values
    return tuned


def apply_tuned(variants: Sequence[Variant], tuned: Sequence[TunedValue]) -> list[Variant]:
    """Returns variants with the optimal values of all keys."""
    factors = {(value.label, value.key): value.optimum.factor for value in tuned}
    result = []
    for variant in variants:
        for key in dict.fromkeys(value.key for value in tuned):
            variant = with_key_factor(variant, key, factors[variant.label, key])
        result.append(variant)
    return result


def _swept_run(plan: Plan, variant: Variant, key: str, factor: float) -> StageSequence:
    """Returns the run of a variant with another value of a key."""
    changed = with_key_factor(variant, key, factor)._replace(
        label=f"{variant.label},{key}_x{factor:g}"
    )
    of_run = Plan(
        plan.folder,
        plan.question,
        {},
        planned={changed.label: plan.planned[variant.label]},
        seeds=(SWEEP_SEED,),
    )
    (chain,) = chains_of(of_run, [changed])
    return chain


def loss_of(chain: StageSequence) -> float | None:
    """Returns the validation loss of a run that is over; None if it diverged."""
    records = comparison_results.load_chain(chain)
    return comparison_results.summarize(chain, records).validation_loss


def tuning_plan_line(keys: Sequence[str], num_sweeps: int, where: str) -> str:
    """Returns what is swept before the comparison, in words.

    Args:
      keys: That are swept.
      num_sweeps: Sweeps of each key.
      where: The size of the runs.
    """
    runs = pluralize(len(FACTORS) * num_sweeps * len(keys), "run")
    return (
        f"Before the comparison, at least {runs} with the seed {SWEEP_SEED} tune "
        f"{' and then '.join(keys)} {where}, by factors of two."
    )


def tuning_section(tuned: Sequence[TunedValue], where: str) -> PageSection:
    """Returns the section of a report on what was tuned.

    Args:
      tuned: What was found.
      where: The size of the runs.
    """
    paragraphs = [
        f"Each configuration was tuned alone {where}, with the seed {SWEEP_SEED}, which no run of "
        "the result has. Values are a factor of two apart; the optimum is that of a parabola in "
        "the logarithm of the value through the losses around the best.",
    ]
    if any(value.key == DECAY_KEY for value in tuned):
        paragraphs.append("The weight decay was swept at the best learning rate.")
    header = ["configuration", "key", "in the file", "tuned", "tried: validation loss"]
    rows = []
    for value in tuned:
        at_rung = "" if value.rung is None else f", rung {value.rung}"
        edge = " (edge)" if value.optimum.edge else ""
        best = f"{value.value:.3g}{edge}"
        rows.append([value.label + at_rung, value.key, f"{value.before:.3g}", best, value.tried])
    return PageSection("How hyper-parameters were tuned", paragraphs, PageTable(header, rows))


def write_tuning_csv(folder: Path, tuned: Sequence[TunedValue]) -> Path:
    """Writes one row per value that was tried; returns the path."""
    rows = [
        {
            "config": value.label,
            "rung": value.rung,
            "key": value.key,
            "value": value.before * factor,
            "factor": factor,
            "validation_loss": loss,
            "tuned_value": value.value,
        }
        for value in tuned
        for factor, loss in sorted(value.losses.items())
    ]
    comparison_results.write_csv(folder / _CSV, rows)
    return folder / _CSV
