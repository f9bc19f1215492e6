"""Kinds of layers (`layer_kinds`), their repetition, and stages."""

import itertools
import re
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple, Self

from MaxText.config.problems import ConfigIssue, InvalidCombinationError
from MaxText.config.values import InvalidValueError, format_value, is_null

_LONGEST_CYCLE = 128  # layers; the search takes time proportional to it
_PATTERN = re.compile(r"([^()\s]*)(?:\(([^()\s]+)\)([^()\s]*))?")


class LayerKinds(tuple[tuple[str, tuple[tuple[str, Any], ...]], ...]):
    """Pairs of a letter and the keys of its layers."""

    __slots__ = ()

    @classmethod
    def of(cls, value: Any) -> Self:
        """Builds it from a mapping of mappings, such as a checkpoint records."""
        pairs = value.items() if isinstance(value, dict) else value
        return cls(
            (letter, tuple((name, _hashable(one)) for name, one in dict(keys).items()))
            for letter, keys in pairs
        )

    def as_dict(self) -> dict[str, dict[str, Any]]:
        return {letter: dict(keys) for letter, keys in self}


def _hashable(value: Any) -> Any:
    return tuple(map(_hashable, value)) if isinstance(value, list | tuple) else value


def parse_kinds(value: Any, convert: Callable[[str, Any], Any]) -> LayerKinds:
    """Parses {letter: {key: value}}; `convert` raises KeyError for others."""
    if is_null(value) or value in ((), []):
        return LayerKinds()
    if isinstance(value, LayerKinds):
        return value
    if not isinstance(value, dict):
        raise InvalidValueError(f"{format_value(value)} is not {{letter: {{key: value}}}}")
    kinds = []
    for letter, keys in value.items():
        if len(str(letter)) != 1 or str(letter) in "() ":
            raise InvalidValueError(f"{format_value(letter)} is not one letter")
        if not isinstance(keys, dict):
            raise InvalidValueError(f"{letter}: {format_value(keys)} is not {{key: value}}")
        typed = []
        for name, given in _with_entries(keys):
            try:
                typed.append((name, convert(name, given)))
            except KeyError:
                what = f"{letter}: {name} is not a key of a layer's parts"
                raise InvalidValueError(what) from None
            except InvalidValueError as error:
                raise InvalidValueError(f"{letter}: {name}: {error}") from None
        kinds.append((str(letter), tuple(typed)))
    return LayerKinds(kinds)


def _with_entries(keys: dict[Any, Any]) -> Iterator[tuple[str, Any]]:
    for name, given in keys.items():
        if isinstance(given, dict):
            yield from ((f"{name}.{entry}", one) for entry, one in given.items())
        else:
            yield str(name), given


def letters(pattern: str, num_layers: int) -> str:
    """Returns the letter of each layer, by prefix(cycle)suffix or a cycle."""
    found = _PATTERN.fullmatch(pattern)
    if found is None:
        raise InvalidCombinationError(
            ConfigIssue(
                message=f"layer_pattern={pattern}: letters, with one repeated part in parentheses",
                keys=("layer_pattern",),
            )
        )
    prefix, cycle, suffix = found.groups()
    if cycle is None:
        prefix, cycle, suffix = "", prefix, ""
    repeats, rest = divmod(num_layers - len(prefix) - len(suffix), len(cycle))
    if rest or repeats < 1:
        count = len(prefix) + len(suffix) + max(repeats, 1) * len(cycle)
        raise InvalidCombinationError(
            ConfigIssue(
                message=f"layer_pattern={pattern}: {num_layers} layers (base_num_decoder_layers) "
                f"are not repeats of its {len(cycle)} letters",
                remedies=(f"base_num_decoder_layers={count}",),
                keys=("layer_pattern", "base_num_decoder_layers"),
            )
        )
    return prefix + cycle * repeats + suffix


class LayerPlan(NamedTuple):
    """Layers `prefix` to `prefix + repeats * cycle` repeat one cycle."""

    num_layers: int
    prefix: int
    runs: tuple[int, ...]  # lengths of the cycle's runs of like layers: (3, 1) is GGG*
    repeats: int  # 0, or at least 2

    @property
    def cycle(self) -> int:
        return sum(self.runs)

    @property
    def end(self) -> int:
        return self.prefix + self.cycle * self.repeats

    @property
    def is_whole(self) -> bool:
        return self.cycle * self.repeats == self.num_layers

    def singles(self) -> Iterator[int]:
        """Yields the layers outside of the repeated cycle."""
        yield from range(self.prefix)
        yield from range(self.end, self.num_layers)

    def cycled(self, index: int) -> tuple[int, int] | None:
        """Returns (run, index among its repeats) of a layer, or None."""
        if not self.prefix <= index < self.end:
            return None
        repeat, place = divmod(index - self.prefix, self.cycle)
        for run, length in enumerate(self.runs):
            if place < length:
                return run, repeat * length + place
            place -= length
        raise AssertionError("runs make up the cycle")

    def first_of(self, run: int) -> int:
        return self.prefix + sum(self.runs[:run])

    def layers_of(self, run: int) -> list[int]:
        starts = range(self.first_of(run), self.end, self.cycle)
        return [start + place for start in starts for place in range(self.runs[run])]

    def path(self, index: int) -> tuple[str, int | None]:
        """Returns a layer's path below `layers`, and its row there."""
        place = self.cycled(index)
        return (str(index), None) if place is None else (f"cycle/{place[0]}", place[1])


def plan_layers(kinds: Sequence[Hashable]) -> LayerPlan:
    """Returns the plan with the fewest different layers to compile.

    Layers of equal kinds are interchangeable. A cycle that saves only one layer is not worth arrays
    of its own, unless all layers are alike.
    """
    num_layers = len(kinds)
    if num_layers > 1 and len(set(kinds)) == 1:
        return LayerPlan(num_layers, 0, (1,), num_layers)
    best = LayerPlan(num_layers, num_layers, (), 0)
    fewest = num_layers - 1
    for cycle in range(1, min(num_layers // 2, _LONGEST_CYCLE) + 1):
        if cycle >= fewest:
            break
        start = 0
        for index in range(cycle, num_layers + 1):
            if index < num_layers and kinds[index] == kinds[index - cycle]:
                continue
            repeats = (index - start) // cycle
            compiled = num_layers - repeats * cycle + cycle
            if repeats > 1 and compiled < fewest:
                same = itertools.groupby(kinds[start : start + cycle])
                runs = tuple(len(list(layers)) for _, layers in same)
                best = LayerPlan(num_layers, start, runs, repeats)
                fewest = compiled
            start = index - cycle + 1
    return best


class PipelineSchedule(NamedTuple):
    """A circular schedule: run c of the layers is on stage c mod num_stages."""

    num_stages: int  # groups of devices, each with a part of the layers
    num_repeats: int  # runs of a stage, which is how often a microbatch passes through all stages
    layers_per_stage: int  # layers of a run
    num_microbatches: int  # chunks of a batch in flight at the same time

    @property
    def num_turns(self) -> int:
        """Turns until the last microbatch has left the last stage."""
        return self.num_microbatches * self.num_repeats + self.num_stages - 1

    @property
    def bubble(self) -> float:
        """Share of its turns with an idle stage."""
        return (self.num_stages - 1) / self.num_turns
