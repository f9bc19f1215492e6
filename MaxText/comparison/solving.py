"""Solving for one key of a configuration, so that a run holds or takes a given amount.

The amount grows with the key, so a search by halves over whole numbers finds the two neighbours of
the budget. Values that break a rule of the configuration (heads that do not divide the width, odd
rotary dimensions) are passed over.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from MaxText.comparison.costs import Cost, cost
from MaxText.comparison.request import DEPTH, KEY_OF, STEPS, WIDTH, Match
from MaxText.configuration.catalogue import all_keys, build
from MaxText.configuration.rules import RULES
from MaxText.configuration.saved import flat
from MaxText.configuration.schema import Config
from MaxText.errors import UserError

UNITS = {"params": "parameters", "flops": "FLOPs", "tokens": "tokens", "time": "seconds"}
_MLP = "base_mlp_dim"
# No search goes beyond these. Widths above would not be a model any more.
_MOST = {STEPS: 10**12}
_MOST_OF_OTHERS = 2**20
# Neighbours that are looked at for one that no rule forbids.
_LONGEST_WALK = 512
# Multiples that sizes of products are kept to, where the size is at least so many times as large:
# hardware likes them, and coarser ones would not leave a choice.
_MULTIPLES = (64, 8, 2, 1)
_TIMES = 16
# How far the feed-forward may leave its proportion to meet the budget closely.
_MLP_SHARE = 0.2

# What changes each amount, most useful first.
_HELPFUL = {
    "params": (WIDTH, DEPTH, _MLP),
    "flops": (STEPS, WIDTH, DEPTH),
    "tokens": (STEPS,),
    "time": (STEPS,),
}

Amount = Callable[[Config], float]


@dataclasses.dataclass(frozen=True)
class Solution:
    """A configuration that meets the budget.

    Attributes:
      config: with the solved keys.
      changes: key -> (old, new), empty if the configuration met the budget as it was.
      amount: what it holds or takes.
    """

    config: Config
    changes: dict[str, tuple[Any, Any]]
    amount: float


def amount_of(match: Match, num_devices: int, seconds_per_step: float = 0.0) -> Amount:
    """The function whose value is made equal.

    Args:
      match: what is made equal.
      num_devices: that a run is made for.
      seconds_per_step: of the configuration, measured; only for time.
    """

    def amount(config: Config) -> float:
        if match == "time":
            return seconds_per_step * config.run.steps
        of: Cost = cost(config, num_devices)
        return {"params": of.parameters, "flops": of.flops, "tokens": of.tokens}[match]

    return amount


def solve(
    label: str,
    config: Config,
    free: str,
    amount: Amount,
    budget: float,
    *,
    match: Match,
    tolerance: float,
) -> Solution:
    """Changes the free key of a configuration until the amount is nearest to the budget.

    Args:
      label: of the configuration, for messages.
      config: as it stands.
      free: width, depth, steps, or the name of a whole-number key.
      amount: grows with the free key.
      budget: the amount wanted.
      match: what the amount is of.
      tolerance: largest accepted deviation, as a share of the budget.

    Raises:
      UserError: the amount does not depend on the key, or no value comes near enough.
    """
    if amount(config) == budget:
        return Solution(config, {}, budget)
    search = _Search(config, free, amount)
    if search.start < 1:
        raise UserError(
            f"{label}: {free}={search.start} is decided by other keys. Give it a number of its "
            "own, or name another key by free=."
        )
    further = search.first_from(2 * search.start)
    if further is not None and search.amount(further) <= search.amount(search.start):
        raise UserError(
            f"{label}: the {UNITS[match]} of a run do not grow with {free}. "
            f"Write free={' or free='.join(_HELPFUL[match])}."
        )
    for step in _finer(search.step):
        search.keep_to_multiples_of(step)
        neighbours = search.around(budget)
        solved = search.config(search.best(neighbours, budget))
        assert solved is not None
        if free == WIDTH:
            solved = _with_fitting_mlp(solved, amount, budget)
        if abs(amount(solved) / budget - 1) <= tolerance:
            break
    # What the configuration has already may be the nearest, then nothing is changed.
    if abs(amount(config) - budget) <= abs(amount(solved) - budget):
        solved = config
    reached = amount(solved)
    if abs(reached / budget - 1) > tolerance:
        raise UserError(_unreachable(label, search, neighbours, budget, match, tolerance))
    return Solution(solved, _changes(config, solved), reached)


def _unreachable(
    label: str,
    search: "_Search",
    neighbours: list[int],
    budget: float,
    match: Match,
    tolerance: float,
) -> str:
    lines = [
        f"{label}: a budget of {budget:,.6g} {UNITS[match]} cannot be met within "
        f"{tolerance:.1%} by {search.free}."
    ]
    for value in neighbours:
        reached = search.amount(value)
        lines.append(
            f"  {search.key}={value} gives {reached:,.6g} {UNITS[match]} "
            f"({reached / budget - 1:+.1%})"
        )
    if len(neighbours) == 1:
        which = "smallest" if search.amount(neighbours[0]) > budget else "largest"
        lines.append(f"  That is the {which} {search.key} that is tried.")
    remedies = [f"free={name}" for name in _HELPFUL[match] if name != search.free]
    remedies.append("another budget=")
    nearest = min(abs(search.amount(value) / budget - 1) for value in neighbours)
    if nearest < 0.5:
        remedies.append(f"tolerance={math.ceil(nearest * 1000) / 1000:g}")
    lines.append(f"  What to do: {', '.join(remedies)}.")
    return "\n".join(lines)


class _Search:
    """Values of the free key in order, with the amounts they give."""

    def __init__(self, config: Config, free: str, amount: Amount):
        self.free = free
        self.key = KEY_OF.get(free, free)
        self._config = config
        self._flat = flat(config)
        self._amount = amount
        self.start = int(self._flat[self.key])
        bounds = dict(all_keys()[self.key].bounds)
        self._bound = int(bounds.get("ge", bounds.get("gt", 0) + 1))
        self.keep_to_multiples_of(_multiple(self.start) if free == WIDTH else 1)
        self.most = min(_MOST.get(free, _MOST_OF_OTHERS), int(bounds.get("le", 10**12)))
        self._at = functools.cache(self._amount_at)

    def keep_to_multiples_of(self, step: int) -> None:
        """Takes only values that `step` divides from here on."""
        self.step = step
        self.least = max(self._bound, step)

    def amount(self, value: int) -> float:
        """The amount at an allowed value."""
        found = self._at(value)
        assert found is not None
        return found

    def config(self, value: int) -> Config | None:
        """The configuration with the free key at `value`; None if a rule forbids it."""
        if value == self.start:
            return self._config
        changes: dict[str, Any] = {self.key: value}
        if self.free == WIDTH:
            mlp = self._flat[_MLP]
            step = _multiple(mlp)
            changes[_MLP] = max(round(mlp * value / self.start / step), 1) * step
        return changed(self._config, changes)

    def _amount_at(self, value: int) -> float | None:
        config = self.config(value)
        return None if config is None else self._amount(config)

    def first_from(self, low: int) -> int | None:
        """The first allowed value from `low` on."""
        upwards = range(self._rounded_up(low), self.most + 1, self.step)
        return self._first_allowed(upwards)

    def nearest(self, middle: int, low: int, high: int) -> int | None:
        """The allowed value among low..high that is nearest to the middle."""
        return self._first_allowed(_outwards(self._rounded_up(middle), self.step, low, high))

    def best(self, neighbours: list[int], budget: float) -> int:
        """The one of some allowed values that comes nearest to the budget."""
        return min(neighbours, key=lambda value: abs(self.amount(value) - budget))

    def _first_allowed(self, values: Iterable[int]) -> int | None:
        looked_at = itertools.islice(values, _LONGEST_WALK)
        return next((value for value in looked_at if self.config(value) is not None), None)

    def _rounded_up(self, value: int) -> int:
        return -(-value // self.step) * self.step

    def around(self, budget: float) -> list[int]:
        """The largest allowed value whose amount is at most the budget, and the next one.

        One of them alone where the budget is beyond all values.
        """
        below = above = self.start
        if self.amount(self.start) <= budget:
            while self.amount(above) <= budget:
                below = above
                # The last doubling may go beyond the most.
                following = self.first_from(2 * below) or self.nearest(
                    self.most, below + 1, self.most
                )
                if following is None:
                    return [below]
                above = following
        else:
            while self.amount(below) > budget:
                above = below
                following = self.nearest(above // 2, self.least, above - 1)
                if following is None:
                    return [above]
                below = following
        while (value := self.nearest((below + above) // 2, below + 1, above - 1)) is not None:
            if self.amount(value) <= budget:
                below = value
            else:
                above = value
        return [below, above]


def _outwards(middle: int, step: int, low: int, high: int) -> Iterator[int]:
    """Multiples of step from the middle outwards, those within low..high only."""
    for distance in itertools.count():
        down, up = middle - distance * step, middle + distance * step
        if down < low and up > high:
            return
        if low <= down <= high:
            yield down
        if distance and low <= up <= high:
            yield up


def _multiple(size: int) -> int:
    return next(m for m in _MULTIPLES if size % m == 0 and (size >= m * _TIMES or m == 1))


def _finer(step: int) -> list[int]:
    """A multiple and the smaller ones, for budgets that it steps over."""
    return [step, *(multiple for multiple in _MULTIPLES if multiple < step)]


def changed(config: Config, changes: dict[str, Any]) -> Config | None:
    """The configuration with some keys changed; None if a rule of train.py forbids that.

    A schedule that is as long as the run stays so.
    """
    values = flat(config)
    if STEPS in changes and values["learning_rate_schedule_steps"] == values[STEPS]:
        changes = {"learning_rate_schedule_steps": changes[STEPS], **changes}
    result = build(values | changes)
    return None if broken_rules(result) else result


def broken_rules(config: Config) -> list[str]:
    """What train.py would refuse the configuration for."""
    checks = (rule.check(config) for rule in RULES if not rule.programs or "train" in rule.programs)
    return [message for message in checks if message]


def _with_fitting_mlp(config: Config, amount: Amount, budget: float) -> Config:
    """Lets the feed-forward take up what is left of the budget.

    Widths come in multiples, so the best one misses by up to half of one; some columns more or less
    in the feed-forward, which keeps its proportion otherwise, meet the budget closely.
    """
    search = _Search(config, _MLP, amount)
    search.step = _multiple(search.start)
    search.least = max(math.ceil(search.start * (1 - _MLP_SHARE)), 1)
    search.most = math.floor(search.start * (1 + _MLP_SHARE))
    fitting = search.config(search.best(search.around(budget), budget))
    assert fitting is not None
    return fitting


def _changes(old: Config, new: Config) -> dict[str, tuple[Any, Any]]:
    before, after = flat(old), flat(new)
    return {name: (before[name], after[name]) for name in before if before[name] != after[name]}
