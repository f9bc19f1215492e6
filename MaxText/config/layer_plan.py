"""Kinds of layers (`layer_kinds`), their repetition, and stages.

Layers can differ by keys: `layer_kinds` gives each letter some, and `layer_pattern` gives each
layer a letter. Layers of the same kind that repeat in a cycle are compiled once: their parameters
are stacked, and the train step scans over the repeats. `plan_layers` finds that cycle.
"""

import itertools
import re
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple, Self

from MaxText.config.problems import ConfigIssue, InvalidCombinationError
from MaxText.config.values import InvalidValueError, TypedValue, UntypedValue, format_value, is_null

_LONGEST_CYCLE = 128  # layers; the search takes time proportional to it
_PATTERN = re.compile(r"([^()\s]*)(?:\(([^()\s]+)\)([^()\s]*))?")


class LayerKinds(tuple[tuple[str, tuple[tuple[str, Any], ...]], ...]):
    """The value of `layer_kinds`: pairs of a letter and the keys of its layers.

    It is a tuple of tuples, so that a configuration can be hashed.
    """

    __slots__ = ()

    @classmethod
    def of(cls, kinds: Any) -> Self:
        """Builds it from pairs, or from a mapping of mappings such as a checkpoint records."""
        pairs = kinds.items() if isinstance(kinds, dict) else kinds
        return cls(
            (letter, tuple((name, hashable(value)) for name, value in dict(keys).items()))
            for letter, keys in pairs
        )

    def as_dict(self) -> dict[str, dict[str, Any]]:
        """Returns {letter: {key: value}}."""
        return {letter: dict(keys) for letter, keys in self}


def hashable(value: TypedValue) -> TypedValue:
    """Returns a value with tuples in place of lists."""
    return tuple(map(hashable, value)) if isinstance(value, list | tuple) else value


def parse_kinds(
    value: UntypedValue, convert: Callable[[str, UntypedValue], TypedValue]
) -> LayerKinds:
    """Parses {letter: {key: value}}.

    Args:
      value: What was typed.
      convert: (key, value) -> the value in the key's type. Raises KeyError for a key that cannot
        differ between layers, and InvalidValueError for a value of another type.

    Raises:
      InvalidValueError: all that is wrong.
    """
    if is_null(value) or value in ((), []):
        return LayerKinds()
    if isinstance(value, LayerKinds):
        return value
    if not isinstance(value, dict):
        raise InvalidValueError(f"{format_value(value)} is not {{letter: {{key: value}}}}")
    kinds = []
    reasons: list[str] = []
    for letter, keys in value.items():
        if len(str(letter)) != 1 or str(letter) in "() ":
            reasons.append(f"{format_value(letter)} is not one letter")
        elif not isinstance(keys, dict):
            reasons.append(f"{letter}: {format_value(keys)} is not {{key: value}}")
        else:
            key_reasons: list[str] = []
            kinds.append((str(letter), _typed_keys(keys, convert, key_reasons)))
            reasons += [f"{letter}: {reason}" for reason in key_reasons]
    if reasons:
        raise InvalidValueError.of(reasons)
    return LayerKinds(kinds)


def _typed_keys(
    keys: dict[Any, Any], convert: Callable[[str, Any], Any], reasons: list[str]
) -> tuple[tuple[str, Any], ...]:
    """Returns the keys of one letter with their values.

    Args:
      keys: Values by key, or by named section.
      convert: As of `parse_kinds`.
      reasons: Gets what is wrong with keys, which are then left out.
    """
    typed = []
    for name, value in values_by_key(keys):
        try:
            typed.append((name, convert(name, value)))
        except KeyError:
            reasons.append(f"{name} is not a key of a layer's parts")
        except InvalidValueError as error:
            reasons.append(f"{name}: {error}")
    return tuple(typed)


def values_by_key(keys: dict[Any, Any]) -> Iterator[tuple[str, Any]]:
    """Yields keys with their values; a mapping stands for dotted keys of a named section."""
    for name, value in keys.items():
        if isinstance(value, dict):
            yield from ((f"{name}.{inner_name}", item) for inner_name, item in value.items())
        else:
            yield str(name), value


def letters(pattern: str, num_layers: int) -> str:
    """Returns the letter of each layer.

    Args:
      pattern: The value of layer_pattern: a cycle such as "GGG*", or prefix(cycle)suffix.
      num_layers: The layers of the model, which the cycle is repeated to fill.

    Raises:
      InvalidCombinationError: the pattern is malformed or does not fill the layers.
    """
    match = _PATTERN.fullmatch(pattern)
    if match is None:
        raise InvalidCombinationError(
            ConfigIssue(
                message=f"layer_pattern={pattern}: letters, with one repeated part in parentheses",
                keys=("layer_pattern",),
            )
        )
    prefix, cycle, suffix = match.groups()
    if cycle is None:
        prefix, cycle, suffix = "", prefix, ""
    repeats, num_left_over = divmod(num_layers - len(prefix) - len(suffix), len(cycle))
    if num_left_over or repeats < 1:
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
    """The repetition of layers: those from `prefix` to `end` repeat one cycle.

    A cycle consists of runs: neighbors of the same kind, whose parameters are stacked. Layers
    outside of the cycle are compiled one by one.

    Attributes:
      num_layers: Layers of the model.
      prefix: Layers before the first cycle.
      runs: Lengths of the cycle's runs: (3, 1) is GGG*.
      repeats: Times that the cycle is repeated: 0, or at least 2.
    """

    num_layers: int
    prefix: int
    runs: tuple[int, ...]
    repeats: int

    @property
    def cycle(self) -> int:
        """Layers of one cycle."""
        return sum(self.runs)

    @property
    def end(self) -> int:
        """The index after the last layer of the last cycle."""
        return self.prefix + self.cycle * self.repeats

    @property
    def is_whole(self) -> bool:
        """Whether all layers are in the cycle."""
        return self.cycle * self.repeats == self.num_layers

    def singles(self) -> Iterator[int]:
        """Yields the layers outside of the repeated cycle."""
        yield from range(self.prefix)
        yield from range(self.end, self.num_layers)

    def cycled(self, index: int) -> tuple[int, int] | None:
        """Returns a layer's run and its index among the stacked layers of the run.

        None for a layer outside of the cycle.
        """
        if not self.prefix <= index < self.end:
            return None
        repeat, offset = divmod(index - self.prefix, self.cycle)
        for run, length in enumerate(self.runs):
            if offset < length:
                return run, repeat * length + offset
            offset -= length
        raise AssertionError("runs make up the cycle")

    def first_of(self, run: int) -> int:
        """Returns the first layer of a run, in the first cycle."""
        return self.prefix + sum(self.runs[:run])

    def layers_of(self, run: int) -> list[int]:
        """Returns the layers of a run in all cycles, in the order in which they are stacked."""
        starts = range(self.first_of(run), self.end, self.cycle)
        return [start + offset for start in starts for offset in range(self.runs[run])]

    def path(self, index: int) -> tuple[str, int | None]:
        """Returns a layer's path below `layers`, and its row in the stacked arrays there.

        The row of a layer outside of the cycle, whose arrays are not stacked, is None.
        """
        stacked_at = self.cycled(index)
        if stacked_at is None:
            return str(index), None
        run, row = stacked_at
        return f"cycle/{run}", row


def plan_layers(kinds: Sequence[Hashable]) -> LayerPlan:
    """Returns the plan with the fewest different layers to compile.

    Layers of equal kinds are interchangeable. A cycle that saves only one layer is not worth arrays
    of its own, unless all layers are alike.

    Args:
      kinds: What distinguishes each layer from others, for example its keys.
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
    """A circular schedule: run c of the layers is on stage c mod num_stages.

    Attributes:
      num_stages: Groups of devices, each with a part of the layers.
      num_repeats: Runs of a stage, which is how often a microbatch passes through all stages.
      layers_per_stage: Layers of a run.
      num_microbatches: Chunks of a batch in flight at the same time.
    """

    num_stages: int
    num_repeats: int
    layers_per_stage: int
    num_microbatches: int

    @property
    def num_turns(self) -> int:
        """Turns until the last microbatch has left the last stage."""
        return self.num_microbatches * self.num_repeats + self.num_stages - 1

    @property
    def bubble(self) -> float:
        """Fraction of a stage's turns in which it is idle."""
        return (self.num_stages - 1) / self.num_turns
