"""Solves a plan, and formats it."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

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
from MaxText.experiments.costs import cost
from MaxText.experiments.solving import UNITS, Amount, budget_metric, solve
from MaxText.experiments.step_timing import seconds_per_step
from MaxText.experiments.variants import Variant
from MaxText.metrics.tables import format_table, short_count


def solve_plan(plan: Plan, variants: Sequence[Variant], request: CompareArgs) -> None:
    """Sets budget and solved configurations; UserError if out of reach."""
    question = plan.question

    measured = {name: seconds_per_step(rounds) for name, rounds in plan.measurements.items()}

    def seconds(variant: Variant) -> list[float]:
        numbers = stage_numbers(len(variant.stages))
        return [measured[stage_name(variant.label, number)] for number in numbers]

    def amount(variant: Variant) -> Amount:
        of_time = seconds(variant) if request.match == "time" else []
        return budget_metric(request.match, question.num_devices, of_time)

    first = variants[0]
    budget = question.budget
    if budget is None:
        budget = float(amount(first)(first.stages))
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
        for index, (config, changes) in enumerate(
            zip(solution.stages, solution.changes, strict=True)
        ):
            of = cost(config, question.num_devices)
            of_time = request.match == "time"
            stages.append(
                SolvedStage(
                    changes={name: new for name, (_, new) in changes.items()},
                    parameters=of.parameters,
                    flops=of.flops,
                    tokens=of.tokens,
                    steps=of.steps,
                    seconds=seconds(variant)[index] * of.steps if of_time else None,
                )
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
    for variant in variants:
        planned = plan.planned[variant.label].stages
        if not plan.planned[variant.label].changed:
            lines.append(f"{variant.label}: nothing changed")
            continue
        for config, stage, number in zip(
            variant.stages, planned, stage_numbers(len(planned)), strict=True
        ):
            who = variant.label if number is None else f"{variant.label} stage {number}"
            lines.append(f"{who}: {_format_changes(flatten(config), stage.changes)}")
    return lines


def _format_changes(before: Mapping[str, Any], changes: Mapping[str, Any]) -> str:
    pairs = (
        f"{name} {to_yaml(before[name])} -> {to_yaml(value)}" for name, value in changes.items()
    )
    return ", ".join(pairs) or "nothing changed"


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


def changed_keys(plan: Plan) -> Mapping[str, set[str]]:
    """Returns solved keys by label."""
    return {label: one.changed for label, one in plan.planned.items()}
