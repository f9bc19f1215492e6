"""Peak memory of a traced program, without compiling it.

An array lives from the node that writes it to the last one that reads it, through fused operations.
The order is the program's or a greedy one that frees most first, whichever needs less. Arrays of a
loop's body are live while the loop runs.
"""

import collections
import dataclasses
import math
from collections.abc import Mapping, Sequence, Set

from MaxText.cost.jaxpr_graph import Node, Traced, Value


@dataclasses.dataclass(frozen=True)
class LiveBuffer:
    """A live array at the peak."""

    size: float  # bytes
    shape: tuple[int, ...]  # on one device
    writer: str  # name of a primitive


@dataclasses.dataclass(frozen=True)
class PeakMemory:
    """Memory of a program besides its arguments."""

    outside: float  # bytes at the peak outside of loop bodies
    in_loops: float  # bytes of the running loop's body at the peak; 0 without one
    between: float  # bytes live from the first loop to the last, if the peak is there
    # other live arrays at the peak, largest first
    live: tuple[LiveBuffer, ...]
    in_body: tuple[LiveBuffer, ...] = ()  # live arrays inside that body

    @property
    def size(self) -> float:
        return self.outside + self.in_loops + self.between


def peak_memory(
    program: Traced, kept: Sequence[float | None] = (), between: float = 0.0
) -> PeakMemory:
    """Returns the memory needed by a program.

    Args:
      kept: Bytes of each result (gradient) that a device keeps if sharded; None for all. Empty for
        a loop body, whose results leave at once.
      between: Bytes live from before the first loop to the end of the last.
    """
    steps = _steps(program)
    left: dict[Value, float] = {}
    results = {root for value in program.results for root in value.roots} if kept else set()
    for value, share in zip(program.results, kept, strict=False):
        for root in value.roots:
            if share is not None and value.size:
                left[root] = root.size * min(share / value.size, 1.0)
    orders = (steps, _greedy(steps, left, results))
    return min(
        (_peak(order, left, results, between) for order in orders), key=lambda need: need.size
    )


_NOTHING = PeakMemory(0.0, 0.0, 0.0, ())


@dataclasses.dataclass(eq=False)
class _Step:
    node: Node
    reads: frozenset[Value]
    writes: tuple[Value, ...]
    body: PeakMemory  # needs of its largest body


def _steps(program: Traced) -> list[_Step]:
    return [
        _Step(
            node,
            frozenset(root for value in node.inputs for root in value.roots),
            tuple(value for value in node.outputs if value.is_written),
            max(map(peak_memory, node.bodies), key=lambda need: need.size, default=_NOTHING),
        )
        for node in program.nodes
        if node.is_written
    ]


def _peak(
    order: Sequence[_Step], left: Mapping[Value, float], results: Set[Value], between: float
) -> PeakMemory:
    last = {value: number for number, step in enumerate(order) for value in step.reads}
    loops = [number for number, step in enumerate(order) if step.node.bodies]
    living: dict[Value, LiveBuffer] = {}
    most = _NOTHING
    for number, step in enumerate(order):
        for value in step.writes:
            # The stacked results of a loop are sharded from the beginning.
            size = left.get(value, value.size) if step.node.bodies else value.size
            living[value] = LiveBuffer(size, value.shape, step.node.name)
        outside = sum(array.size for array in living.values())
        held = between if loops and loops[0] <= number <= loops[-1] else 0.0
        if outside + step.body.size + held > most.size:
            live = tuple(sorted(living.values(), key=lambda array: -array.size))
            most = PeakMemory(outside, step.body.size, held, live, step.body.live)
        for value in step.writes:
            living[value] = dataclasses.replace(living[value], size=left.get(value, value.size))
        for value in [*step.reads, *step.writes]:
            if value in living and value not in results and last.get(value, number) <= number:
                del living[value]
    return most


def _greedy(
    steps: Sequence[_Step], left: Mapping[Value, float], results: Set[Value]
) -> list[_Step]:
    """Orders steps; the runnable one freeing most memory comes next."""
    readers = collections.Counter(value for step in steps for value in step.reads)
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
