"""Solves for one key under a budget (parameters, FLOPs, tokens, time).

The amount grows with the key, so bisection over integers finds the two neighbors of the budget.
Values that break a configuration rule (heads that do not divide the width, odd rotary dimensions)
are skipped.

A configuration is a tuple of stages, mostly one. In a chain, the key of every stage scales with
that of the last one; steps are the total of all stages.
"""

import bisect
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from MaxText.config.rules import RULES, broken_letters
from MaxText.config.schema import Config, all_keys, flatten, unflatten
from MaxText.config.values import InvalidValueError
from MaxText.cost.abstract_step import cached
from MaxText.errors import UserError
from MaxText.experiments.compare_args import DEPTH, KEY_OF, SLOTS, STEPS, UNITS, WIDTH, Match
from MaxText.experiments.comparison_plan import Plan, SolvedConfig, SolvedStage
from MaxText.experiments.variants import Variant
from MaxText.hardware.peak_flops import PeakFlops
from MaxText.input_pipeline.sequences.batch_schedule import schedule_batches
from MaxText.run.training_stats import TrainingStats
from MaxText.training.backend_defaults import abstract_model

_MLP = "base_mlp_dim"
_OWN_SLOTS = ("qkv_slot_num", "proj_slot_num", "ffn_slot_num")
# largest values to search
_LARGEST_STEPS = 10**12
_LARGEST_OTHER = 2**20
_MAX_TRIED = 512  # candidates tried until one breaks no rule
# Matrix sizes stay multiples of these, for hardware efficiency, if at least _TIMES as large:
# coarser steps would leave no choice.
_MULTIPLES = (64, 8, 2, 1)
_TIMES = 16
_MLP_SHARE = 0.2  # by which the feed-forward may change its proportion to meet the budget

_NO_PEAK = PeakFlops(0.0, "not needed")  # costs do not depend on speed

_abstract_model = cached(abstract_model)  # the search tries many steps of one model

Stages = tuple[Config, ...]
Amount = Callable[[Stages], float]


def cost(config: Config, num_devices: int) -> SolvedStage:
    """Returns a run with its cost; UserError if its batch does not fit."""

    def batch_size_of(per_device: float) -> int:
        rows = per_device * num_devices
        if rows != int(rows):
            raise UserError(
                f"per_device_batch_size={per_device:g} x {num_devices} devices = {rows:g} is not "
                "a whole number of sequences. Set another per_device_batch_size."
            )
        return int(rows) * config.batch.gradient_accumulation_steps

    length = config.model.shape.max_target_length
    batches = schedule_batches(config.batch, length, batch_size_of)
    model = _abstract_model(config.model)
    steps = config.run.steps
    stats = TrainingStats(model, config.batch, batches, num_devices, steps, _NO_PEAK)
    return SolvedStage(
        changes={},
        parameters=model.num_parameters,
        flops=stats.flops_of_run,
        tokens=stats.tokens_of_run,
        steps=steps,
    )


def budget_metric(match: Match, num_devices: int, seconds_per_step: Sequence[float] = ()) -> Amount:
    """Returns the function of the stages with the equalized value.

    Parameters are those of the last stage; other amounts are summed. `seconds_per_step` has one
    measurement per stage, for match=time.
    """

    def amount(stages: Stages) -> float:
        if match == "time":
            pairs = zip(seconds_per_step, stages, strict=True)
            return sum(seconds * stage.run.steps for seconds, stage in pairs)
        if match == "params":
            return cost(stages[-1], num_devices).parameters
        costs = [cost(stage, num_devices) for stage in stages]
        if match == "flops":
            return sum(stage_cost.flops for stage_cost in costs)
        return sum(stage_cost.tokens for stage_cost in costs)

    return amount


def solve(
    label: str,
    stages: Stages,
    solve_for: str,
    amount: Amount,
    budget: float,
    *,
    match: Match,
    tolerance: float,
) -> Stages:
    """Returns the stages with the solved key nearest to the budget.

    Args:
        label: of the configuration, for messages.
        stages: of the configuration; one without a chain.
        solve_for: width, depth, slots, steps or an integer key.
        amount: what the budget limits; it must grow with the key.
        budget: of `amount`.
        match: the kind of the budget.
        tolerance: largest relative deviation from the budget.

    Raises:
        UserError: the amount does not depend on the key, or no value comes close enough.
    """
    if amount(stages) == budget:
        return stages
    search = _Search(stages, solve_for, amount)
    helpful = _helpful_keys(match, stages[-1])
    _check_solvable(label, search, stages[-1], match, helpful)
    # The step and finer ones, for budgets between its multiples.
    for step in (search.step, *(finer for finer in _MULTIPLES if finer < search.step)):
        search.step = step
        neighbors = search.around(budget)
        if not neighbors:
            raise UserError(
                f"{label}: rules of the configuration forbid every {search.key} near a budget of "
                f"{budget:,.6g} {UNITS[match]}; fewer steps than the warm-up, for example. Set "
                "another budget=, or a shorter warm-up."
            )
        solved = search.stages(search.best(neighbors, budget))
        assert solved is not None
        if solve_for == WIDTH:
            solved = _adjust_mlp_to_budget(solved, amount, budget)
        if abs(amount(solved) / budget - 1) <= tolerance:
            break
    # The unchanged configuration may be the nearest.
    if abs(amount(stages) - budget) <= abs(amount(solved) - budget):
        solved = stages
    reached = amount(solved)
    if abs(reached / budget - 1) > tolerance:
        amounts = {value: search.amount(value) for value in neighbors}
        nearest = "; ".join(
            f"{search.key}={value} gives {amount:,.6g} ({amount / budget - 1:+.1%})"
            for value, amount in amounts.items()
        )
        smallest_deviation = min(abs(amount / budget - 1) for amount in amounts.values())
        remedies = [f"solve_for={name}" for name in helpful if name != solve_for]
        remedies.append("another budget=")
        if smallest_deviation < 0.5:
            remedies.append(f"tolerance={math.ceil(smallest_deviation * 1000) / 1000:g}")
        raise UserError(
            f"{label}: a budget of {budget:,.6g} {UNITS[match]} cannot be met within "
            f"{tolerance:.1%} by {solve_for}: {nearest}.\n  What to do: {', '.join(remedies)}."
        )
    return solved


def _check_solvable(
    label: str, search: "_Search", config: Config, match: Match, helpful: Sequence[str]
) -> None:
    """Raises UserError if the key of a search cannot change the budget's amount.

    Args:
        label: of the configuration, for messages.
        search: of the solved key.
        config: the last stage.
        match: the kind of the budget.
        helpful: keys to propose instead.
    """
    solve_for = search.solve_for
    has_slots = config.model.attention.attention_projections != "dense"
    if solve_for == WIDTH and has_slots and config.model.shape.head_dim != -1:
        raise UserError(
            f"{label}: with attention_projections=pattention, heads x head_dim is the width of the "
            "model, so a fixed head_dim fixes the width. Set head_dim=-1, or "
            f"{' or '.join(f'solve_for={name}' for name in helpful if name != WIDTH)}."
        )
    if search.start < 1:
        raise UserError(
            f"{label}: {solve_for}={search.start} is derived from other keys. Set it to a number, "
            "or choose another key by solve_for=."
        )
    doubled = search.first_from(2 * search.start)
    if doubled is not None and search.amount(doubled) <= search.amount(search.start):
        raise UserError(
            f"{label}: {solve_for} does not change the {UNITS[match]} of a run. "
            f"Set solve_for={' or solve_for='.join(helpful)}."
        )


def _helpful_keys(match: Match, config: Config) -> tuple[str, ...]:
    """Returns the keys affecting an amount, most useful first."""
    if match == "flops":
        return STEPS, WIDTH, DEPTH
    if match == "params":
        return (WIDTH, DEPTH, SLOTS if _is_of_slots(config) else _MLP)
    return (STEPS,)


def _is_of_slots(config: Config) -> bool:
    """Returns whether the feed-forward has slots, without base_mlp_dim."""
    return config.model.feed_forward.feed_forward_type == "pattention"


class _Search:
    """Ordered values of the solved key and the amounts they give."""

    def __init__(self, stages: Stages, solve_for: str, amount: Amount):
        self.solve_for = solve_for
        self.key = KEY_OF.get(solve_for, solve_for)
        self._stages = stages
        self._flats = [flatten(stage) for stage in stages]
        self._starts = [self._start(keys) for keys in self._flats]
        self.start = sum(self._starts) if solve_for == STEPS else self._starts[-1]
        bounds = dict(all_keys()[self.key].bounds)
        self._bound = self.least = int(bounds.get("ge", bounds.get("gt", 0) + 1))
        largest = _LARGEST_STEPS if solve_for == STEPS else _LARGEST_OTHER
        self.most = min(largest, int(bounds.get("le", largest)))
        # Values are multiples of it.
        self.step = hardware_multiple(self.start) if solve_for == WIDTH else 1
        self.amount = functools.cache(lambda value: amount(cast(Stages, self.stages(value))))

    def _start(self, keys: dict[str, Any]) -> int:
        value = int(keys[self.key])
        # slot_num=-1 means base_emb_dim.
        return keys["base_emb_dim"] if self.solve_for == SLOTS and value == -1 else value

    def stages(self, value: int) -> Stages | None:
        """Returns the stages at `value` of the key; None if a rule forbids it."""
        if value == self.start:
            return self._stages
        parts = self._parts(value)
        stages = []
        if min(parts) < self._bound:
            return None
        for number, stage_value in enumerate(parts):
            stage = with_overrides(self._stages[number], self._changes(number, stage_value))
            if stage is None:
                return None
            stages.append(stage)
        return tuple(stages)

    def _parts(self, value: int) -> list[int]:
        """Returns the solved key of each stage."""
        if self.solve_for == STEPS:
            # Rounds cumulative ends, so that stages add up to the value.
            ends = [round(value * end / self.start) for end in itertools.accumulate(self._starts)]
            return [end - begin for begin, end in itertools.pairwise([0, *ends])]
        return [
            value
            if stage_start == self.start
            else in_proportion(stage_start, value / self.start, self.step)
            for stage_start in self._starts
        ]

    def _changes(self, number: int, stage_value: int) -> dict[str, Any]:
        """Returns the solved key of a stage and its dependent keys."""
        keys = self._flats[number]
        factor = stage_value / self._starts[number]
        changes: dict[str, Any] = {self.key: stage_value}
        if self.solve_for == WIDTH and not _is_of_slots(self._stages[number]):
            changes[_MLP] = in_proportion(keys[_MLP], factor, hardware_multiple(keys[_MLP]))
        if self.solve_for == SLOTS:
            slots = {name: keys[name] for name in _OWN_SLOTS if keys[name] != -1}
            changes |= {name: in_proportion(value, factor, 1) for name, value in slots.items()}
        return changes

    def first_from(self, low: int) -> int | None:
        """Returns the first allowed value from `low` on."""
        upwards = range(_round_up(low, self.step), self.most + 1, self.step)
        looked_at = itertools.islice(upwards, _MAX_TRIED)
        return next((value for value in looked_at if self.stages(value) is not None), None)

    def amount_from(self, low: int) -> float:
        """Returns the amount at the first allowed value from `low` on."""
        value = self.first_from(low)
        return math.inf if value is None else self.amount(value)

    def best(self, neighbors: list[int], budget: float) -> int:
        """Returns the value whose amount is nearest to the budget."""
        return min(neighbors, key=lambda value: abs(self.amount(value) - budget))

    def around(self, budget: float) -> list[int]:
        """Returns the largest allowed value within the budget, and the next one."""
        # Amounts are mostly in proportion to the steps, so that the first guess is right.
        if self.solve_for == STEPS:
            guess = int(self.start * budget / self.amount(self.start))
            for low in (guess, guess - 1):
                if self.stages(low) is None or self.stages(low + 1) is None:
                    continue
                if self.amount(low) <= budget < self.amount(low + 1):
                    return [low, low + 1]
        # Doubling first, because amounts of the largest values take long to compute.
        end = self.start
        while end < self.most and self.amount_from(end) <= budget:
            end *= 2
        lowest = _round_up(max(self.least, 1), self.step)
        values = range(lowest, min(end, self.most) + 1, self.step)
        count = bisect.bisect_right(values, budget, key=self.amount_from)
        next_value = self.first_from(lowest + count * self.step)
        # Of the values within the budget, the last is allowed: from it, the first is not above.
        neighbors = [*values[:count][-1:]]
        if next_value is not None:
            neighbors.append(next_value)
        return neighbors


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step


def in_proportion(size: int, factor: float, step: int) -> int:
    """Returns a size times a factor as a multiple of `step`, at least one."""
    return max(round(size * factor / step), 1) * step


def hardware_multiple(size: int) -> int:
    """Returns the number that sizes near `size` stay multiples of, for hardware efficiency."""
    return next(m for m in _MULTIPLES if size % m == 0 and (size >= m * _TIMES or m == 1))


def with_overrides(config: Config, changes: dict[str, Any]) -> Config | None:
    """Returns the changed configuration; None if a bound or rule forbids it."""
    values = flatten(config)
    if STEPS in changes:
        changes = steps_changes(values, changes[STEPS]) | changes
    try:
        changes = {name: all_keys()[name].convert(value) for name, value in changes.items()}
    except InvalidValueError:
        return None
    result = unflatten(values | changes)
    return None if validation_errors(result) else result


def steps_changes(keys: Mapping[str, Any], steps: int) -> dict[str, int]:
    """Returns the keys of a run of another length; a schedule that spans it keeps doing so."""
    changes = {STEPS: steps}
    if keys["learning_rate_schedule_steps"] == keys[STEPS]:
        changes["learning_rate_schedule_steps"] = steps
    return changes


def validation_errors(config: Config) -> list[str]:
    """Returns the messages of train.py's broken configuration rules."""
    checked = [rule.check(config) for rule in RULES if rule.applies_to("train")]
    issues = [issue for issue in checked if issue is not None] or list(broken_letters(config))
    return [issue.text for issue in issues]


def _adjust_mlp_to_budget(stages: Stages, amount: Amount, budget: float) -> Stages:
    """Tunes the feed-forward (MLP width or slots) to absorb the remainder.

    Widths come in multiples, so the best one misses the budget by up to half a multiple.
    """
    search = _Search(stages, SLOTS if _is_of_slots(stages[-1]) else _MLP, amount)
    search.step = hardware_multiple(search.start)
    search.least = math.ceil(search.start * (1 - _MLP_SHARE))
    search.most = math.floor(search.start * (1 + _MLP_SHARE))
    fitting = search.stages(search.best(search.around(budget), budget))
    assert fitting is not None
    return fitting


def solve_plan(plan: Plan, variants: Sequence[Variant]) -> None:
    """Sets budget and solved configurations; UserError if out of reach."""
    question = plan.question
    match = plan.question.match
    budget = plan.question.budget
    for variant in variants:
        label = variant.label
        seconds = [0.0] * len(variant.stages)
        if match == "time":
            names = (name for name, _ in variant.named_stages)
            seconds = [plan.seconds_per_step(name) for name in names]
        amount = budget_metric(match, question.num_devices, seconds)
        if budget is None:
            budget = float(amount(variant.stages))
        key = question.solve_for[label]
        tolerance = question.tolerance
        solved = solve(
            label,
            variant.stages,
            solve_for=key,
            amount=amount,
            budget=budget,
            match=match,
            tolerance=tolerance,
        )
        stages = []
        for config, solved_config, seconds_per_step in zip(
            variant.stages, solved, seconds, strict=True
        ):
            keys_before = flatten(config)
            keys_after = flatten(solved_config)
            changes = {
                name: value for name, value in keys_after.items() if value != keys_before[name]
            }
            stage_cost = cost(solved_config, question.num_devices)
            stage_seconds = seconds_per_step * stage_cost.steps if match == "time" else None
            stages.append(dataclasses.replace(stage_cost, changes=changes, seconds=stage_seconds))
        plan.planned[label] = SolvedConfig(tuple(stages), amount(solved) / budget - 1)
    plan.budget = budget


def solved_variants(plan: Plan, variants: Sequence[Variant]) -> list[Variant]:
    """Returns the variants with the keys that a plan solved."""
    solved = []
    for variant in variants:
        pairs = zip(variant.stages, plan.planned[variant.label].stages, strict=True)
        stages = tuple(unflatten(flatten(config) | stage.changes) for config, stage in pairs)
        solved.append(variant._replace(stages=stages))
    return solved
