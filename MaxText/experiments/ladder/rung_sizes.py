"""Widths and depths of a ladder's rungs, by a rule."""

import functools
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
_ASPECT_WEIGHT = 0.5  # of a deviation from the aspect, against one in tokens per parameter
_MAX_TOKENS_FACTOR = 1.5  # by which it may then depart from the tokens per parameter
_SEARCH_FACTOR = 4.0  # sizes with so many times fewer tokens per parameter are not tried
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


def tokens_of_compute(measured: SolvedStage, compute: float) -> float:
    """Returns the training tokens that FLOPs buy in a model."""
    return compute * measured.tokens / measured.flops


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
        self.cost = functools.cache(self._cost)

    def _cost(self, size: Size) -> SolvedStage | None:
        """Returns the first configuration's cost at a size; None if an arm cannot have it."""
        resized = [resize(variant, size) for variant in self._variants]
        if resized[0] is None or None in resized:
            return None
        return cost(resized[0].config, self._num_devices)

    def tokens_per_parameter(self, size: Size, compute: float) -> float:
        """Returns the training tokens that FLOPs buy at an allowed size, per parameter."""
        measured = self.cost(size)
        assert measured is not None
        return tokens_of_compute(measured, compute) / measured.parameters

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
        for depth in range(1, most_layers + 1):
            candidates = [Size(width, depth) for width in self._widths(depth)]
            allowed = [size for size in candidates if self.cost(size) is not None]
            sizes += allowed
            ratios = [self.tokens_per_parameter(size, compute) for size in allowed]
            deepest = depth if allowed else deepest
            is_too_large = bool(ratios) and max(ratios) < self._ratio / _SEARCH_FACTOR
            if is_too_large or depth - deepest >= _MAX_FORBIDDEN:
                break
        return sizes

    def nearest(self, sizes: Sequence[Size], compute: float) -> Size:
        """Returns the size nearest to the tokens per parameter and, less strictly, the aspect."""

        def distance(size: Size) -> float:
            aspect = 0.0 if self._width else math.log(size.width / size.depth / self._aspect)
            return math.hypot(self._deviation(size, compute), _ASPECT_WEIGHT * aspect)

        return min(sizes, key=distance)

    def _deviation(self, size: Size, compute: float) -> float:
        return abs(math.log(self.tokens_per_parameter(size, compute) / self._ratio))

    def fits(self, size: Size, compute: float) -> bool:
        """Whether a size comes near enough to the tokens per parameter asked for."""
        return self._deviation(size, compute) <= math.log(_MAX_TOKENS_FACTOR)

    def describe(self, size: Size, compute: float) -> str:
        """Returns what FLOPs buy at a size."""
        measured = self.cost(size)
        assert measured is not None
        return (
            f"{compute:.3g} FLOPs buy {self.tokens_per_parameter(size, compute):.3g} tokens per "
            f"parameter instead of {self._ratio:g} at the nearest size, width {size.width} and "
            f"depth {size.depth} ({short_count(measured.parameters)} parameters)"
        )

    def nearest_plan(self, computes: Sequence[float]) -> str:
        """Returns options that move all rungs by the smallest factor with which they fit."""
        for exponent in range(1, _MAX_MOVES + 1):
            for factor in (_MOVE**exponent, _MOVE**-exponent):
                moved = [round_up(compute * factor) for compute in (computes[0], computes[-1])]
                planned = np.geomspace(moved[0], moved[1], len(computes))
                sizes = self.sizes(moved[1])
                if all(self.fits(self.nearest(sizes, c), c) for c in planned):
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
    with the least sum of squares of two deviations, in logarithms: of the tokens per parameter that
    its FLOPs buy, and half of that of the aspect. Parameters and FLOPs are those of the first
    configuration; every one must allow the size.

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
    misfits = [
        f"rung {number}: {search.describe(size, compute)}"
        for number, (size, compute) in enumerate(zip(sizes, computes, strict=True), 1)
        if not search.fits(size, compute)
    ]
    if not misfits:
        return sizes, []
    fact = ("write", search.nearest_plan(computes))
    return sizes, [ConfigIssue(message, ("command line",), (fact,)) for message in misfits]
