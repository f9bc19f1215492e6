"""How much memory a traced program needs, found without compiling it.

An array lives from the node that writes it to the last one that reads it, through whatever is
fused between. The order is the program's, or one in which always that runs which frees most: of the
two the one that needs less, as compilers choose.

Two habits of XLA's TPU compiler are taken over. What the body of a loop works with has memory of
its own beside the arrays outside of loops; loops take turns in it. And a loop that stacks gradients
begins with zeros of each of their shapes, which it copies.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence, Set

from MaxText.planning.traced import Node, Traced, Value


@dataclasses.dataclass(frozen=True)
class Alive:
    """An array that is in memory at the peak.

    Attributes:
      size: bytes.
      shape: on one device.
      writer: the primitive that wrote it.
    """

    size: float
    shape: tuple[int, ...]
    writer: str


@dataclasses.dataclass(frozen=True)
class Need:
    """Memory of a program besides what it is given.

    Attributes:
      outside: bytes at the peak outside of loops.
      in_loops: bytes that the largest body of a loop works with.
      alive: what is in memory at the peak outside of loops, largest first.
      in_body: the same of that body.
    """

    outside: float
    in_loops: float
    alive: tuple[Alive, ...]
    in_body: tuple[Alive, ...] = ()

    @property
    def size(self) -> float:
        """Bytes in all."""
        return self.outside + self.in_loops


def memory_need(program: Traced, kept: Sequence[float | None] = ()) -> Need:
    """The memory that a program needs.

    Args:
      kept: of each result, the bytes that one device keeps of it once it is written, where devices
        share it (gradients); None for all. Results stay to the end. Empty for the body of a loop,
        whose results go where they belong as soon as they are written.
    """
    steps = _steps(program)
    left: dict[Value, float] = {}
    results = {root for value in program.results for root in value.roots} if kept else set()
    for value, share in zip(program.results, kept, strict=False):
        for root in value.roots:
            if share is not None and value.size:
                left[root] = root.size * min(share / value.size, 1.0)
    orders = (steps, _greedy(steps, left, results))
    most, alive = min((_peak(order, left, results) for order in orders), key=lambda found: found[0])
    nodes = program.nodes
    bodies = [memory_need(body) for node in nodes for body in node.bodies]
    largest = max(bodies, key=lambda need: need.size, default=Need(0.0, 0.0, ()))
    by_size = tuple(sorted(alive, key=lambda array: -array.size))
    return Need(most, largest.size, by_size, largest.alive)


@dataclasses.dataclass(eq=False)
class _Step:
    """A node that writes.

    Attributes:
      reads: arrays in memory.
      writes: arrays it makes.
    """

    node: Node
    reads: frozenset[Value]
    writes: tuple[Value, ...]


def _steps(program: Traced) -> list[_Step]:
    return [
        _Step(
            node,
            frozenset(root for value in node.reads for root in value.roots),
            tuple(value for value in node.makes if value.is_written),
        )
        for node in program.nodes
        if node.is_written
    ]


def _peak(
    order: Sequence[_Step], left: Mapping[Value, float], results: Set[Value]
) -> tuple[float, tuple[Alive, ...]]:
    """The most bytes in memory at once, and the arrays that they are."""
    last = {value: number for number, step in enumerate(order) for value in step.reads}
    living: dict[Value, Alive] = {}
    most, alive = 0.0, ()
    for number, step in enumerate(order):
        for value in step.writes:
            # The stacked results of a loop are shared by devices from the beginning.
            size = left.get(value, value.size) if step.node.bodies else value.size
            living[value] = Alive(size, value.shape, step.node.name)
        size = sum(array.size for array in living.values())
        if step.node.bodies:
            stacked = step.node.makes[step.node.params.get("num_carry", 0) :]
            zeros = {value.shape: living[value].size for value in stacked if value in results}
            size += sum(zeros.values())
        if size > most:
            most, alive = size, tuple(living.values())
        for value in step.writes:
            living[value] = dataclasses.replace(living[value], size=left.get(value, value.size))
        for value in [*step.reads, *step.writes]:
            if value in living and value not in results and last.get(value, number) <= number:
                del living[value]
    return most, alive


def _greedy(
    steps: Sequence[_Step], left: Mapping[Value, float], results: Set[Value]
) -> list[_Step]:
    """Of what can run next, always what frees most; in the order of the program among equals."""
    readers: dict[Value, int] = {}
    for step in steps:
        for value in step.reads:
            readers[value] = readers.get(value, 0) + 1
    there: set[Value] = set()
    made = {value for step in steps for value in step.writes}
    waiting, order = list(steps), []
    while waiting:
        best, most = None, -math.inf
        for step in waiting:
            if any(value in made and value not in there for value in step.reads):
                continue
            freed = sum(
                left.get(value, value.size)
                for value in step.reads
                if value in there and readers[value] == 1 and value not in results
            )
            gain = freed - sum(left.get(value, value.size) for value in step.writes)
            if gain > most:
                best, most = step, gain
        assert best is not None, "a program is in an order in which it can run"
        waiting.remove(best)
        order.append(best)
        there.update(best.writes)
        for value in best.reads:
            readers[value] -= 1
    return order
