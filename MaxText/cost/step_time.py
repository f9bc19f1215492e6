"""Seconds of a step, as an interval, from the program and hardware.

Every matmul, reduction and copy takes the longer of two times: its FLOPs over the reachable share
of peak, and its bytes over memory bandwidth. The interval spans the shares that published runs
reached on the chip, with all communication overlapped at best and none at worst.
"""

import dataclasses
import math
from collections.abc import Sequence

from MaxText.cost.abstract_step import Program
from MaxText.cost.communication import CommCost
from MaxText.cost.flops import FlopCount, count_flops
from MaxText.cost.hardware import Hardware
from MaxText.cost.jaxpr_graph import PRODUCTS, REDUCTIONS, Node, Traced
from MaxText.cost.peak_flops import PeakFlops
from MaxText.cost.step_memory import MemoryEstimate, trace
from MaxText.layers.attention_core import softmax_layers
from MaxText.layers.attention_flops import average_keys_computed
from MaxText.layers.flash_attention import splash_operations

BANDWIDTH_SHARE = 0.8  # share of memory bandwidth that an elementwise loop reaches


@dataclasses.dataclass(frozen=True)
class OpCost:
    """An unfused operation: a matmul, a reduction, a copy."""

    operations: float  # 2 per multiply-add of matmuls, nothing else
    num_bytes: float  # read from and written to memory
    times: int


@dataclasses.dataclass(frozen=True)
class StepTime:
    # seconds, best and worst case
    lower: float
    upper: float
    compute_seconds: tuple[float, float]  # seconds at best and at worst
    comm_seconds: float  # seconds without overlap
    operations: float  # executed matmul FLOPs of a device
    count: FlopCount  # by the MFU rule
    peak: PeakFlops

    @property
    def estimate(self) -> float:
        """Geometric mean of the interval."""
        return math.sqrt(self.lower * self.upper)

    def mfu(self, seconds: float, tokens_per_device: float) -> float:
        return self.count.tflops(tokens_per_device) / (seconds * self.peak.tflops)


def min_step_time(
    program: Program, hardware: Hardware, communication: Sequence[CommCost], peak: PeakFlops
) -> float:
    """Returns a lower bound of StepTime.estimate, without tracing.

    `communication` must be that without recomputation, with the fewest microbatches.
    """
    count = count_flops(program.model, program.length)
    executed = count.tflops(program.tokens_per_update / program.num_devices) / (1 - program.bubble)
    slow, fast = (executed / (share * peak.tflops) for share in hardware.chip.efficiency)
    comm_seconds = sum(one.seconds for one in communication)
    return math.sqrt(max(fast, comm_seconds) * (slow + comm_seconds))


def list_ops(program: Traced, *, splash_keys: float = 0.0) -> list[OpCost]:
    """Returns all executed nodes, with loop bodies once per iteration.

    `splash_keys` is the average number of keys per query in splash attention over all layers.
    """
    found = []

    def add(program: Traced, times: int) -> None:
        for node in program.nodes:
            for body in node.bodies:
                add(body, times * node.times)
            if node.is_written and not node.bodies and not node.name.startswith(REDUCTIONS):
                roots = {root for value in node.inputs for root in value.roots}
                arrays = [*roots, *(value for value in node.outputs if value.is_written)]
                num_bytes = sum(array.size for array in arrays)
                found.append(OpCost(operations(node, splash_keys), num_bytes, times))

    add(program, 1)
    return found


def operations(node: Node, splash_keys: float) -> float:
    """Returns the FLOPs of a matmul; 0 for other nodes."""
    if node.name not in PRODUCTS:
        return 0.0
    if node.name == "dot_general":
        (contracted, _), _ = node.params["dimension_numbers"]
        inner = math.prod(node.inputs[0].shape[axis] for axis in contracted)
        return 2.0 * inner * math.prod(node.outputs[0].shape)
    if node.name == "pallas_call":
        estimate, name = node.params.get("cost_estimate"), str(node.params.get("name"))
        if estimate is None and name.startswith("splash_"):
            return splash_operations(name, node.inputs[2].shape, splash_keys)
        return float(estimate.flops) if estimate is not None else 0.0
    # Each row of a ragged matmul meets one matrix, whichever side is ragged.
    rows, width = node.inputs[0].shape[-2:]
    return 2.0 * rows * width * node.inputs[1].shape[-1]


def _splash_keys(program: Program) -> float:
    config = program.local_model.config
    _, length = program.local_batch().tokens_BT.shape
    keys = total = 0.0
    for window, (own, d) in softmax_layers(config):
        weight = d.num_query_heads * d.head_dim
        keys += weight * average_keys_computed(own.attention, length, window)
        total += weight
    return keys / max(total, 1)


def context_parallel_attention_flops(program: Program) -> float:
    """Returns attention FLOPs missing in the traced microbatch.

    With fewer sequences than parts the trace has too few keys. Under a causal mask the last part of
    a sequence sees more than the mean, except in a balanced ring. 0 for unsplit sequences.
    """
    parts = program.sharding.num_length_parts
    if parts == 1:
        return 0.0
    config = program.local_model.config
    attention = config.attention
    _, traced_length = program.local_batch().tokens_BT.shape
    ring, flash = attention.context_parallel_strategy == "ring", attention.attention == "flash"
    balanced = ring and attention.context_parallel_load_balance
    exceeding = 0.0
    for window, layer in softmax_layers(config):
        per_key = 4 * layer.dimensions.num_query_heads * layer.dimensions.head_dim
        keys = average_keys_computed(attention, program.length, window)
        if not (ring or flash):
            keys = program.length  # all keys, including those masked by windows
        elif window is None and attention.causal and not balanced:
            keys *= 2 - 1 / parts
        more = keys - average_keys_computed(attention, traced_length, window)
        exceeding += per_key * max(more, 0.0)
    # Forward, twice backward; again what is not kept, the kernel's scores in any case.
    kept = config.memory.remat_policy in ("none", "minimal_with_context")
    times = 3 + (0 if kept else 1) + (1.5 if flash and not ring else 0)
    return exceeding * times * program.local_tokens


def step_time(
    program: Program,
    hardware: Hardware,
    memory: MemoryEstimate,
    communication: list[CommCost],
    peak: PeakFlops,
) -> StepTime:
    chip = hardware.chip
    work = list_ops(trace(program), splash_keys=_splash_keys(program))
    work.append(OpCost(context_parallel_attention_flops(program), 0, 1))
    bandwidth = BANDWIDTH_SHARE * chip.bandwidth / chip.devices
    # Parameters and moments are read and written, gradients read.
    state = memory.parameters + memory.optimizer + memory.fetched
    update = (2 * state + memory.parameters) / bandwidth

    def seconds(share: float) -> float:
        speed = share * peak.tflops * 1e12
        times = (one.times * max(one.operations / speed, one.num_bytes / bandwidth) for one in work)
        # Pipeline stages compute, or wait, in turns without tokens, too.
        return sum(times) * program.num_microbatches / (1 - program.bubble) + update

    least, most = chip.efficiency
    compute_seconds = seconds(most), seconds(least)
    comm_seconds = sum(one.seconds for one in communication)
    return StepTime(
        lower=max(compute_seconds[0], comm_seconds),
        upper=compute_seconds[1] + comm_seconds,
        compute_seconds=compute_seconds,
        comm_seconds=comm_seconds,
        operations=program.num_microbatches * sum(one.times * one.operations for one in work),
        count=count_flops(program.model, program.length),
        peak=peak,
    )
