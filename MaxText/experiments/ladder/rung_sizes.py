"""Widths and depths of a ladder's rungs, by a rule."""

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from MaxText.config.problems import ConfigIssue
from MaxText.config.schema import Config, all_keys, flatten
from MaxText.experiments.comparison_plan import SolvedStage
from MaxText.experiments.ladder.ladder_args import DEPTH_ONLY, LadderOptions, round_up
from MaxText.experiments.solver import cost, hardware_multiple, in_proportion, with_overrides
from MaxText.experiments.variants import Variant
from MaxText.formatting import short_count

WIDTH_KEY = "base_emb_dim"
DEPTH_KEY = "base_num_decoder_layers"
# Sizes that grow in proportion to the width if a configuration sets them.
_WIDTH_KEYS = (
    "base_mlp_dim",
    "moe_mlp_dim",
    "shared_expert_mlp_dim",
    "q_lora_rank",
    "kv_lora_rank",
    "kda_lora_rank",
    "slot_num",
    "qkv_slot_num",
    "proj_slot_num",
    "ffn_slot_num",
)
# Numbers of heads that grow with the width, and of the groups that share something.
_HEAD_KEYS = {
    "base_num_query_heads": "base_num_kv_heads",
    "linear_num_value_heads": "linear_num_key_heads",
    "mamba_n_heads": "mamba_n_groups",
}

_ASPECT_FACTOR = 1.5  # by which a rung may depart from the aspect, to come near its parameters
_MAX_COMPUTE_FACTOR = 1.5  # by which it may then depart from the FLOPs asked for
_SEARCH_FACTOR = 4.0  # sizes that take so many times the FLOPs of the top rung are not tried
# Fewest layers, unless the configuration has one: what two layers of attention do together, such
# as induction (Olsson et al. 2022, arXiv:2209.11895), one does not, so that its loss is off the law
# of the others.
_MIN_DEPTH = 2
# Steps by which computes move in the search for a plan that works.
_MOVE = 1.04
_MAX_MOVES = 200
_MAX_FORBIDDEN = 64  # depths tried in vain until none is expected to be allowed


class Size(NamedTuple):
    """Width and depth of a rung's models."""

    width: int
    depth: int

    @classmethod
    def of(cls, config: Config) -> "Size":
        """Returns the size of a configuration."""
        shape = config.model.shape
        return cls(shape.base_emb_dim, shape.base_num_decoder_layers)


def resize(variant: Variant, size: Size) -> Variant | None:
    """Returns a variant at another width and depth; None if a rule forbids it.

    Widths of feed-forwards, slots and low ranks stay in proportion to the width, as does the number
    of heads, whose own width stays. Stages of a chain keep their proportions.
    """
    last = Size.of(variant.config)
    stages = []
    for stage in variant.stages:
        before = Size.of(stage)
        width = size.width * before.width // last.width
        depth = max(size.depth * before.depth // last.depth, 1)
        changes = _width_changes(flatten(stage), width) if width != before.width else {}
        resized = with_overrides(stage, {**changes, DEPTH_KEY: depth})
        if resized is None:
            return None
        stages.append(resized)
    return variant._replace(stages=tuple(stages))


def _width_changes(keys: Mapping[str, Any], width: int) -> dict[str, Any]:
    """Returns the keys of another width."""
    factor = width / keys[WIDTH_KEY]
    changes: dict[str, Any] = {WIDTH_KEY: width}
    # A key at its default may be one without effect, which must stay at its default.
    is_set = {name for name, key in all_keys().items() if keys[name] != key.default}
    is_set |= {"base_mlp_dim", "base_num_query_heads"}
    for name in _WIDTH_KEYS:
        if name in is_set and (keys[name] or 0) > 0:
            changes[name] = in_proportion(keys[name], factor, hardware_multiple(keys[name]))
    for name, group_name in _HEAD_KEYS.items():
        if name in is_set and keys[name] > 0:
            num_heads = in_proportion(keys[name], factor, 1)
            most = max(num_heads * keys[group_name] // keys[name], 1)
            changes[name] = num_heads
            changes[group_name] = next(n for n in range(most, 0, -1) if num_heads % n == 0)
    return changes


def width_multiple(config: Config) -> int:
    """Returns what widths are multiples of: the width of a head if heads span the model."""
    shape = config.model.shape
    num_heads = shape.base_num_query_heads
    if shape.head_dim == -1 and shape.base_emb_dim % num_heads == 0:
        return shape.base_emb_dim // num_heads
    if shape.head_dim * num_heads == shape.base_emb_dim:
        return shape.head_dim
    return hardware_multiple(shape.base_emb_dim)


def compute_of_tokens(measured: SolvedStage, tokens: float) -> float:
    """Returns the FLOPs of training tokens in a model."""
    return tokens * measured.flops / measured.tokens


class _SizeSearch:
    """Sizes of the rule, with their cost in the first configuration."""

    def __init__(self, variants: Sequence[Variant], options: LadderOptions, num_devices: int):
        config = variants[0].config
        self._variants = variants
        self._num_devices = num_devices
        self._ratio = options.tokens_per_parameter
        self._width = config.model.shape.base_emb_dim if options.sizes == DEPTH_ONLY else None
        self._aspect = options.aspect or Size.of(config).width / Size.of(config).depth
        self._multiple = width_multiple(config)
        self._min_depth = min(Size.of(config).depth, _MIN_DEPTH)
        self.cost = functools.cache(self._cost)

    def _cost(self, size: Size) -> SolvedStage | None:
        """Returns the first configuration's cost at a size; None if an arm cannot have it."""
        resized = [resize(variant, size) for variant in self._variants]
        if resized[0] is None or None in resized:
            return None
        return cost(resized[0].config, self._num_devices)

    def compute(self, size: Size) -> float:
        """Returns the FLOPs of the tokens per parameter asked for, at an allowed size."""
        measured = self.cost(size)
        assert measured is not None
        return compute_of_tokens(measured, self._ratio * measured.parameters)

    def _widths(self, depth: int) -> list[int]:
        if self._width is not None:
            return [self._width]
        center = self._aspect * depth / self._multiple
        lowest = max(math.ceil(center / _ASPECT_FACTOR), 1)
        highest = math.floor(center * _ASPECT_FACTOR)
        multiples = list(range(lowest, highest + 1)) or [max(round(center), 1)]
        return [multiple * self._multiple for multiple in multiples]

    def sizes(self, compute: float) -> list[Size]:
        """Returns the allowed sizes, ascending in depth, up to well above that of `compute`."""
        most_layers = int(dict(all_keys()[DEPTH_KEY].bounds)["le"])
        sizes: list[Size] = []
        deepest = 0  # of the allowed ones
        for depth in range(self._min_depth, most_layers + 1):
            candidates = [Size(width, depth) for width in self._widths(depth)]
            allowed = [size for size in candidates if self.cost(size) is not None]
            sizes += allowed
            computes = [self.compute(size) for size in allowed]
            deepest = depth if allowed else deepest
            is_too_large = bool(computes) and min(computes) > compute * _SEARCH_FACTOR
            if is_too_large or depth - deepest >= _MAX_FORBIDDEN:
                break
        return sizes

    def nearest(self, sizes: Sequence[Size], compute: float) -> Size:
        """Returns the size nearest to the FLOPs and the aspect."""

        def distance(size: Size) -> float:
            aspect = 0.0 if self._width else math.log(size.width / size.depth / self._aspect)
            return math.hypot(self._deviation(size, compute), aspect)

        return min(sizes, key=distance)

    def _deviation(self, size: Size, compute: float) -> float:
        return abs(math.log(self.compute(size) / compute))

    def problems(self, sizes: Sequence[Size], computes: Sequence[float]) -> list[str]:
        """Returns what is wrong with the sizes of the rungs."""
        problems = [
            f"rung {number}: the nearest size to {compute:.3g} FLOPs, {self._describe(size)}, "
            f"takes {self.compute(size):.3g} for {self._ratio:g} tokens per parameter"
            for number, (size, compute) in enumerate(zip(sizes, computes, strict=True), 1)
            if self._deviation(size, compute) > math.log(_MAX_COMPUTE_FACTOR)
        ]
        if problems:
            return problems
        return [
            f"rungs {number} and {number + 1}: {low_compute:.3g} and {high_compute:.3g} FLOPs are "
            f"nearest to {self._describe(low)} and {self._describe(high)}, which do not ascend"
            for number, ((low, low_compute), (high, high_compute)) in enumerate(
                itertools.pairwise(zip(sizes, computes, strict=True)), 1
            )
            if self.compute(low) >= self.compute(high)
        ]

    def _describe(self, size: Size) -> str:
        measured = self.cost(size)
        assert measured is not None
        parameters = short_count(measured.parameters)
        return f"width {size.width} and depth {size.depth} ({parameters} parameters)"

    def nearest_plan(self, computes: Sequence[float]) -> str:
        """Returns options that move all rungs by the smallest factor with which they fit."""
        for exponent in range(1, _MAX_MOVES + 1):
            for factor in (_MOVE**exponent, _MOVE**-exponent):
                moved = [round_up(compute * factor) for compute in (computes[0], computes[-1])]
                planned = np.geomspace(moved[0], moved[1], len(computes))
                allowed = self.sizes(moved[1])
                sizes = [self.nearest(allowed, c) for c in planned]
                if not self.problems(sizes, planned.tolist()):
                    return f"from={moved[0]:.2g} to={moved[1]:.2g}, or another aspect="
        return "another aspect=, a configuration with narrower heads, or sizes=FILE.yml"


def choose_sizes(
    variants: Sequence[Variant],
    computes: Sequence[float],
    options: LadderOptions,
    num_devices: int,
) -> tuple[list[Size], list[ConfigIssue]]:
    """Returns the size of each rung, and what is wrong with them.

    Of the sizes whose width per layer is within a factor of 1.5 of the aspect, a rung has the one
    with the least sum of squares of two deviations, in logarithms: of its FLOPs with the tokens per
    parameter of the ladder, and of its aspect. Parameters and FLOPs are those of the first
    configuration; every one must allow the size. Rungs have at least two layers, unless the first
    configuration has one.

    Args:
      variants: Configurations as in their files.
      computes: FLOPs of a run at each rung, ascending.
      options: Of the ladder.
      num_devices: Of a run.
    """
    search = _SizeSearch(variants, options, num_devices)
    allowed = search.sizes(computes[-1])
    if not allowed:
        message = (
            f"sizes={options.sizes}: no width and depth that the configurations all allow. Each "
            "may have rules, such as a pattern of layers that must divide the depth"
        )
        fact = ("write", "sizes=FILE.yml with a list of one mapping of keys per rung")
        return [], [ConfigIssue(message, ("command line",), (fact,))]
    sizes = [search.nearest(allowed, compute) for compute in computes]
    problems = search.problems(sizes, computes)
    if not problems:
        return sizes, []
    fact = ("write", search.nearest_plan(computes))
    return sizes, [ConfigIssue(message, ("command line",), (fact,)) for message in problems]
