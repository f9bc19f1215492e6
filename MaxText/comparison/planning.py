"""From configurations to a solved plan, and how the plan looks."""

import dataclasses
from collections.abc import Mapping, Sequence

from MaxText.comparison.costs import cost
from MaxText.comparison.measuring import seconds_per_step
from MaxText.comparison.outcome import aligned
from MaxText.comparison.plan import Plan, Planned
from MaxText.comparison.request import Request
from MaxText.comparison.solving import UNITS, Amount, amount_of, solve
from MaxText.comparison.variants import Variant
from MaxText.configuration.catalogue import build
from MaxText.configuration.saved import flat
from MaxText.configuration.values import to_yaml
from MaxText.monitoring.report.wording import short_count


def solve_plan(plan: Plan, variants: Sequence[Variant], request: Request) -> None:
    """Fills in the budget and what each configuration becomes under it.

    Raises:
      UserError: the budget cannot be met.
    """
    question = plan.question

    seconds = {label: seconds_per_step(rounds) for label, rounds in plan.measurements.items()}

    def amount(label: str) -> Amount:
        return amount_of(request.match, question.num_devices, seconds.get(label, 0.0))

    first = variants[0]
    budget = question.budget
    if budget is None:
        budget = float(amount(first.label)(first.config))
    planned = {}
    for variant in variants:
        solution = solve(
            variant.label,
            variant.config,
            question.free[variant.label],
            amount(variant.label),
            budget,
            match=request.match,
            tolerance=request.tolerance,
        )
        of = cost(solution.config, question.num_devices)
        planned[variant.label] = Planned(
            changes={name: new for name, (_, new) in solution.changes.items()},
            parameters=of.parameters,
            flops_per_token=of.flops_per_token,
            flops=of.flops,
            tokens=of.tokens,
            steps=of.steps,
            deviation=solution.amount / budget - 1,
            seconds_per_step=seconds[variant.label] if request.match == "time" else None,
        )
    plan.budget, plan.planned = budget, planned


def solved_variants(plan: Plan, variants: Sequence[Variant]) -> list[Variant]:
    """The configurations with what was solved for in place."""
    return [
        dataclasses.replace(
            variant,
            config=build(flat(variant.config) | plan.planned[variant.label].changes),
        )
        for variant in variants
    ]


def changes_in_words(plan: Plan, variants: Sequence[Variant]) -> list[str]:
    """A line per configuration: what was changed to meet the budget."""
    lines = []
    for variant in variants:
        before = flat(variant.config)
        changes = [
            f"{name} {to_yaml(before[name])} -> {to_yaml(value)}"
            for name, value in plan.planned[variant.label].changes.items()
        ]
        lines.append(f"{variant.label}: {', '.join(changes) or 'nothing changed'}")
    return lines


def budget_in_words(plan: Plan, variants: Sequence[Variant]) -> str:
    """What is equal, how much it is, and where the number is from."""
    assert plan.budget is not None
    pattern = {"flops": ".4g", "time": ",.1f"}.get(plan.question.match, ",.0f")
    amount = format(plan.budget, pattern)
    source = f"as {variants[0].label} has" if plan.question.budget is None else "as asked"
    return f"{amount} {UNITS[plan.question.match]} each, {source}"


def plan_rows(plan: Plan) -> tuple[list[str], list[list[str]]]:
    """Header and a row of text per configuration."""
    timed = any(one.seconds is not None for one in plan.planned.values())
    header = ["configuration", "parameters", "FLOPs/token", "FLOPs", "tokens", "steps"]
    header += ["seconds", "off the budget"] if timed else ["off the budget"]
    rows = []
    for label, one in plan.planned.items():
        seconds = [f"{one.seconds:,.1f}"] if one.seconds is not None else []
        rows.append(
            [
                label, f"{one.parameters:,}", short_count(one.flops_per_token), f"{one.flops:.4g}",
                f"{one.tokens:,}", f"{one.steps:,}", *seconds, f"{one.deviation:+.2%}",
            ]
        )  # fmt: skip
    return header, rows


def plan_lines(plan: Plan, variants: Sequence[Variant]) -> list[str]:
    """The plan for the terminal."""
    devices = plan.question.num_devices
    return [
        f"match={plan.question.match}: {budget_in_words(plan, variants)}; "
        f"{devices} device{'s' if devices > 1 else ''}",
        *(f"  {line}" for line in changes_in_words(plan, variants)),
        "",
        *aligned(*plan_rows(plan)),
        "",
    ]


def changed_keys(plan: Plan) -> Mapping[str, set[str]]:
    """Label -> keys that were solved for."""
    return {label: set(one.changes) for label, one in plan.planned.items()}
