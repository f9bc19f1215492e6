"""Solves a plan, and formats it."""

import dataclasses
import itertools
from collections.abc import Sequence

from MaxText.config.catalog import unflatten
from MaxText.config.serialization import flatten
from MaxText.config.values import to_yaml
from MaxText.experiments.compare_args import CompareArgs
from MaxText.experiments.comparison_plan import (
    Plan,
    SolvedConfig,
    SolvedStage,
    stage_name,
    stage_numbers,
)
from MaxText.experiments.solver import UNITS, Amount, budget_metric, cost, solve
from MaxText.experiments.step_timing import seconds_per_step
from MaxText.experiments.variants import Variant
from MaxText.metrics.tables import format_table, short_count


def solve_plan(plan: Plan, variants: Sequence[Variant], request: CompareArgs) -> None:
    """Sets budget and solved configurations; UserError if out of reach."""
    question = plan.question
    measured = {name: seconds_per_step(rounds) for name, rounds in plan.measurements.items()}

    def step_seconds(variant: Variant) -> list[float]:
        numbers = stage_numbers(len(variant.stages))
        names = [stage_name(variant.label, number) for number in numbers]
        return [measured[name] for name in names] if question.match == "time" else []

    def amount(variant: Variant) -> Amount:
        return budget_metric(request.match, question.num_devices, step_seconds(variant))

    budget = question.budget
    if budget is None:
        budget = float(amount(variants[0])(variants[0].stages))
    planned = {}
    for variant in variants:
        solution = solve(
            variant.label,
            variant.stages,
            question.free[variant.label],
            amount(variant),
            budget,
            match=request.match,
            tolerance=request.tolerance,
        )
        stages = []
        for config, changes, seconds in itertools.zip_longest(
            solution.stages, solution.changes, step_seconds(variant)
        ):
            of = cost(config, question.num_devices)
            new = {name: value for name, (_, value) in changes.items()}
            stages.append(
                SolvedStage(new, *of, seconds=None if seconds is None else seconds * of.steps)
            )
        planned[variant.label] = SolvedConfig(tuple(stages), solution.amount / budget - 1)
    plan.budget, plan.planned = budget, planned


def solved_variants(plan: Plan, variants: Sequence[Variant]) -> list[Variant]:
    """Returns the variants with solved keys applied."""
    return [
        dataclasses.replace(
            variant,
            stages=tuple(
                unflatten(flatten(config) | planned.changes)
                for config, planned in zip(
                    variant.stages, plan.planned[variant.label].stages, strict=True
                )
            ),
        )
        for variant in variants
    ]


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
