"""Which layers repeat (a prefix, a cycle that is repeated, a suffix), and how stages share them."""

from collections.abc import Hashable, Iterator, Sequence
from typing import NamedTuple

_LONGEST_CYCLE = 128  # layers; the search takes time proportional to it


class LayerPlan(NamedTuple):
    """Layers `prefix` to `prefix + repeats * cycle` are `cycle` different ones, `repeats` times."""

    num_layers: int  # of the model
    prefix: int  # layers before the cycle
    cycle: int  # layers of the cycle; 0 where nothing repeats
    repeats: int  # how often the cycle comes; 0 or at least 2

    @property
    def end(self) -> int:
        """The first layer after the repeated cycle."""
        return self.prefix + self.cycle * self.repeats

    @property
    def is_whole(self) -> bool:
        """Whether all layers are repeats of the cycle."""
        return self.cycle * self.repeats == self.num_layers

    def singles(self) -> Iterator[int]:
        """Layers outside of the repeated cycle."""
        yield from range(self.prefix)
        yield from range(self.end, self.num_layers)

    def cycled(self, index: int) -> tuple[int, int] | None:
        """(position in the cycle, repeat) of a layer; None for a layer outside."""
        if not self.prefix <= index < self.end:
            return None
        repeat, position = divmod(index - self.prefix, self.cycle)
        return position, repeat

    def path(self, index: int) -> tuple[str, int | None]:
        """Where a layer's parameters are stored if layers differ in shapes.

        Returns:
          The path below `layers`, and the row of the stacked arrays there.
        """
        place = self.cycled(index)
        return (str(index), None) if place is None else (f"cycle/{place[0]}", place[1])


def plan_layers(kinds: Sequence[Hashable]) -> LayerPlan:
    """The plan with the fewest different layers to compile.

    A cycle is worth its own arrays where it at least halves them; otherwise nothing repeats.

    Args:
      kinds: one value per layer; equal ones are interchangeable.
    """
    num_layers = len(kinds)
    best, fewest = LayerPlan(num_layers, num_layers, 0, 0), num_layers // 2 + 1
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
                best, fewest = LayerPlan(num_layers, start, cycle, repeats), compiled
            start = index - cycle + 1
    return best


class PipelineSchedule(NamedTuple):
    """A circular schedule: layers are cut into runs, run c lies on stage c mod num_stages."""

    num_stages: int  # groups of devices, each with a part of the layers
    num_repeats: int  # runs of a stage, which is how often a microbatch passes through all stages
    layers_per_stage: int  # layers of a run
    num_microbatches: int  # parts of a batch that are on their way at the same time

    @property
    def num_turns(self) -> int:
        """How often all stages compute, until the last microbatch has left the last stage."""
        return self.num_microbatches * self.num_repeats + self.num_stages - 1

    @property
    def bubble(self) -> float:
        """Share of its turns in which a stage has nothing to do."""
        return (self.num_stages - 1) / self.num_turns
