"""Seconds of a step, as an interval, from the program and hardware.

Every matmul, reduction and copy takes the longer of two times: its FLOPs over the reachable share
of peak, and its bytes over memory bandwidth. The interval spans the shares that published runs
reached on the chip, with all communication overlapped at best and none at worst. Products of
matrices in the optimizer (optimizer_flops.py) run at the same share.

A device receives, by mesh axis:

    sharded weights           gathered in the compute dtype for the forward and the backward pass of
                              every microbatch; gradients reduce-scattered once per microbatch
    replicated weights        gradients all-reduced, 2 times their bytes
    pipeline stage weights    gathered, and gradients scattered, in every turn that uses them;
                              between stages if they have several runs of layers
    stage                     a hidden state of a microbatch in every turn, forward and backward;
                              all sequences from the last stage to the head and back
    tensor                    hidden states reduce-scattered after matmuls that contract a sharded
                              axis, and gathered again, forward, backward and recomputed
    context                   keys and values of the other parts of a sequence: gathered for both
                              passes, gradients scattered; or around the ring in both, the second
                              time with gradients in float32
    expert                    tokens to their experts and back, forward, backward and recomputed

Each of n devices receives (n - 1) / n of an array from the others.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from MaxText.config.axis_rules import MESH_AXES
from MaxText.cost.abstract_step import Program
from MaxText.cost.flops import count_flops
from MaxText.cost.jaxpr_graph import PRODUCTS, REDUCTIONS, Node, Traced
from MaxText.cost.optimizer_flops import optimizer_flops_per_device
from MaxText.cost.step_memory import MemoryEstimate, trace
from MaxText.hardware.peak_flops import PeakFlops, peak_of
from MaxText.layers.attention.attention import average_keys_computed
from MaxText.layers.attention.attention_core import softmax_layers
from MaxText.layers.attention.flash_attention import splash_operations
from MaxText.layers.feed_forward.moe import expert_capacity

BANDWIDTH_SHARE = 0.8  # share of memory bandwidth that an elementwise loop reaches
# Remat policies that recompute the output projection of attention.
_RECOMPUTE_OUT_PROJ = ("full", "save_qkv_proj", "qkv_proj_offloaded")
_RECOMPUTE_QKV = (
    "full",
    "save_qkv_proj",
    "qkv_proj_offloaded",
    "save_out_proj",
    "save_dot_except_mlp",
    "save_dot_except_mlpwi",
)


@dataclasses.dataclass(frozen=True)
class CommCost:
    """Communication of a step over one mesh axis."""

    axis: str
    size: int  # devices along the axis
    num_bytes: float  # received by a device
    bandwidth: float  # bytes per second received by a device

    @property
    def seconds(self) -> float:
        """Time without overlap."""
        return self.num_bytes / self.bandwidth


class OpCost(NamedTuple):
    """An unfused operation: a matmul, a reduction, a copy."""

    operations: float  # 2 per multiply-add of matmuls, nothing else
    num_bytes: float  # read from and written to memory
    times: int
    is_8_bit: bool = False  # whether both factors are int8 or fp8


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepTime:
    """The time of a train step, as an interval."""

    lower: float  # seconds in the best case: all communication overlaps compute
    upper: float  # seconds in the worst case: none does
    compute_seconds: tuple[float, float]  # seconds at best and at worst
    comm_seconds: float  # seconds without overlap
    operations: float  # executed matmul FLOPs of a device, without those of the optimizer
    optimizer_operations: float  # of a device, by matrix products and factorizations
    tflops: float  # of a device, by the MFU rule
    peak: PeakFlops

    @property
    def estimate(self) -> float:
        """Geometric mean of the interval."""
        return math.sqrt(self.lower * self.upper)

    def mfu(self, seconds: float) -> float:
        """Returns the MFU of a step that takes `seconds`."""
        return self.tflops / (seconds * self.peak.tflops)


def min_step_time(program: Program) -> float:
    """Returns a lower bound of StepTime.estimate, without tracing.

    `program` must be without recomputation, with the fewest microbatches.
    """
    executed = _tflops(program) / (1 - program.bubble)
    tflops = peak_of(program.hardware).tflops
    low_share, high_share = program.hardware.chip.efficiency
    slow = executed / (low_share * tflops)
    fast = executed / (high_share * tflops)
    comm_seconds = sum(cost.seconds for cost in communication_costs(program))
    return math.sqrt(max(fast, comm_seconds) * (slow + comm_seconds))


def _tflops(program: Program) -> float:
    """Returns the training TFLOPs of a device in a step, by the MFU rule."""
    return count_flops(program.model, program.length).tflops(program.tokens_per_device)


def list_ops(program: Traced, *, splash_keys: float = 0.0, times: int = 1) -> Iterator[OpCost]:
    """Yields all executed nodes; a loop's body runs once per iteration.

    `splash_keys` is the average number of keys per query in splash attention over all layers.
    """
    for node in program.nodes:
        for body in node.bodies:
            yield from list_ops(body, splash_keys=splash_keys, times=times * node.times)
        if node.writes and not node.bodies and not node.name.startswith(REDUCTIONS):
            arrays = () if node.in_kernel else (*node.reads, *node.writes)
            num_bytes = sum(array.size for array in arrays)
            is_8_bit = node.name == "dot_general" and {x.width for x in node.inputs} == {1}
            yield OpCost(operations(node, splash_keys), num_bytes, times, is_8_bit)


def operations(node: Node, splash_keys: float) -> float:
    """Returns the FLOPs of a matmul; 0 for other nodes."""
    if node.name not in PRODUCTS:
        return 0.0
    if node.name == "dot_general":
        (contracted, _), _ = node.params["dimension_numbers"]
        inner = math.prod(node.inputs[0].shape[axis] for axis in contracted)
        return 2.0 * inner * math.prod(node.outputs[0].shape)
    if node.name == "pallas_call":
        estimate = node.params.get("cost_estimate")
        name = str(node.params.get("name"))
        if estimate is None and name.startswith("splash_"):
            queries, _, values = (x.shape for x in node.inputs[2:5])
            return splash_operations(name, queries, values[-1], splash_keys)
        return float(estimate.flops) if estimate is not None else 0.0
    # Each row of a ragged matmul meets one matrix, or the rows of both sides are contracted.
    return 2.0 * math.prod(node.inputs[0].shape) * node.outputs[0].shape[-1]


def _splash_keys(program: Program) -> float:
    """Returns the average number of keys that a query meets in the splash kernel."""
    config = program.local_model.config
    _, length = program.local_shape
    keys = total = 0.0
    for mixer, (layer_config, dimensions) in softmax_layers(config):
        if mixer.hooks():  # no kernel serves it
            continue
        heads = mixer.heads(layer_config, dimensions)
        weight = heads.num_query_heads * heads.key_width
        keys += weight * average_keys_computed(mixer, layer_config.attention, length)
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
    _, traced_length = program.local_shape
    ring = attention.context_parallel_strategy == "ring"
    flash = attention.attention == "flash"
    balanced = ring and attention.context_parallel_load_balance
    exceeding = 0.0
    for mixer, layer in softmax_layers(config):
        heads = mixer.heads(layer.config, layer.dimensions)
        per_key = 2 * heads.num_query_heads * (heads.key_width + heads.value_width)
        keys = average_keys_computed(mixer, attention, program.length)
        window = mixer.sliding_window(attention)
        if not (ring or flash):
            keys = program.length  # all keys, including those masked by windows
        elif window is None and mixer.is_causal(attention) and not balanced:
            keys *= 2 - 1 / parts
        missing_keys = keys - average_keys_computed(mixer, attention, traced_length)
        exceeding += per_key * max(missing_keys, 0.0)
    # Forward, twice backward; again what is not kept, the kernel's scores in any case.
    keeps_scores = config.memory.remat_policy in ("none", "minimal_with_context")
    times = 3.0
    if not keeps_scores:
        times += 1
    if flash and not ring:
        times += 1.5
    return exceeding * times * program.local_tokens


def step_time(
    program: Program, memory: MemoryEstimate, communication: Sequence[CommCost]
) -> StepTime:
    """Estimates the time of a train step.

    Args:
        program: the step on its hardware.
        memory: whose parameters and optimizer state the update reads and writes.
        communication: from `communication_costs`.
    """
    chip = program.hardware.chip
    peak = peak_of(program.hardware)
    work = [*list_ops(trace(program), splash_keys=_splash_keys(program))]
    work.append(OpCost(context_parallel_attention_flops(program), 0, 1))
    bandwidth = BANDWIDTH_SHARE * chip.bandwidth / chip.devices
    optimizer_operations = optimizer_flops_per_device(
        program.config.optimizer, program.model.parameters, program.sharding
    )
    # Parameters and moments are read and written, gradients read.
    state = memory.parameters + memory.optimizer + memory.fetched
    update = (2 * state + memory.parameters) / bandwidth

    def seconds(share: float) -> float:
        """Returns the compute time of the step if matmuls reach a share of the peak."""
        speed = share * peak.tflops * 1e12
        total = 0.0
        for op in work:
            op_speed = speed * chip.speed_of_8_bits if op.is_8_bit else speed
            total += op.times * max(op.operations / op_speed, op.num_bytes / bandwidth)
        # Pipeline stages compute, or wait, in turns without tokens, too.
        total *= program.num_microbatches / (1 - program.bubble)
        return total + update + optimizer_operations / speed

    low_share, high_share = chip.efficiency
    compute_seconds = seconds(high_share), seconds(low_share)
    comm_seconds = sum(cost.seconds for cost in communication)
    return StepTime(
        lower=max(compute_seconds[0], comm_seconds),
        upper=compute_seconds[1] + comm_seconds,
        compute_seconds=compute_seconds,
        comm_seconds=comm_seconds,
        operations=program.num_microbatches * sum(op.times * op.operations for op in work),
        optimizer_operations=optimizer_operations,
        tflops=_tflops(program),
        peak=peak,
    )


def communication_costs(program: Program) -> list[CommCost]:
    """Returns the communication of a step over each mesh axis of several devices."""
    mesh = program.sharding.mesh
    bytes_of = {axis: 0.0 for axis in MESH_AXES if mesh.shape[axis] > 1}
    if not bytes_of:
        return []
    _add_weights(program, bytes_of)
    amounts = {"tensor": _tensor_bytes, "expert": _expert_bytes, "context": _context_bytes}
    for axis, amount in (amounts | {"stage": _pipeline_bytes}).items():
        if axis in bytes_of:
            bytes_of[axis] += amount(program) * program.num_microbatches
    return [
        CommCost(axis, mesh.shape[axis], amount, _bandwidth(axis, program))
        for axis, amount in bytes_of.items()
    ]


def _add_weights(program: Program, bytes_of: dict[str, float]) -> None:
    """Adds the bytes of gathered weights and reduced gradients to those of each axis."""
    sharding = program.sharding
    parameters = program.model.parameters
    width = np.dtype(program.config.model.numerics.dtype).itemsize
    shape = sharding.mesh.shape
    schedule = program.schedule
    batch = [axis for axis in (*sharding.batch_axes, *sharding.length_axes) if shape[axis] > 1]
    for name, weight in sharding.parameter_shardings(parameters).items():
        param = parameters[name]
        num_bytes = param.size * width
        turns = 1.0  # gathers per use of all layers
        in_layers = "layers" in param.logical_axes
        if schedule is not None and in_layers:
            turns = schedule.num_turns / schedule.num_repeats
        # Each stage's embedding and head have gradients of their own.
        if schedule is not None and (schedule.num_repeats > 1 or not in_layers):
            share = (schedule.num_stages - 1) / schedule.num_stages
            shard = math.prod(weight.shard_shape(param.shape)) * param.dtype.itemsize
            bytes_of["stage"] += 2 * program.num_microbatches * shard * share
        split: list[str] = []
        for logical, axes in zip(param.logical_axes, weight.spec, strict=False):
            for axis in (axes,) if isinstance(axes, str) else axes or ():
                if axis in batch and logical != "exp":
                    split.append(axis)
                else:
                    num_bytes /= shape[axis]  # computed with while sharded
        splits_experts = "exp" in param.logical_axes and "expert" in batch
        # Gradients are scattered before the parts are reduced.
        for axis in sorted(batch, key=lambda axis: axis not in split):
            if axis == "expert" and splits_experts and axis not in split:
                continue
            per_microbatch = (3.0 if axis in split else 2.0) * turns
            share = (shape[axis] - 1) / shape[axis]
            bytes_of[axis] += per_microbatch * program.num_microbatches * num_bytes * share
            if axis in split:
                num_bytes /= shape[axis]  # the next axis gathers or reduces only this part


def _tensor_bytes(program: Program) -> float:
    """Returns bytes received over the tensor axis in a microbatch: hidden states."""
    config = program.config.model
    sharding = program.sharding
    parameters = program.model.parameters
    layers = config.shape.dimensions.num_layers
    sums = 0.0
    recomputed_sums = 0.0
    for param in parameters.values():
        axes = [name for name in param.logical_axes if name != "layers"]
        contracted = axes[: param.num_input_dims]
        sizes = param.shape[len(param.logical_axes) - len(axes) :]
        spec = sharding.named_sharding(axes, sizes).spec
        if not any("tensor" in (axes or ()) for axes in spec[: len(contracted)]):
            continue
        times = param.shape[0] if "layers" in param.logical_axes else 1
        if config.block.share_layer_params and param.owner == "layers":
            times = layers
        sums += times
        recomputed_sums += times * param.is_recomputed
    policy = config.memory.remat_policy
    # Forward, and backward of the matmuls that begin each block; embedding and head add one each.
    num_exchanges = 2 * sums + 2 + (recomputed_sums if policy in _RECOMPUTE_OUT_PROJ else 0)
    n = sharding.mesh.shape["tensor"]
    return 2 * num_exchanges * program.state_bytes * (n - 1) / n


def _pipeline_bytes(program: Program) -> float:
    """Returns bytes received over the stage axis in a microbatch: hidden states."""
    schedule = program.schedule
    assert schedule is not None
    turns = schedule.num_turns / schedule.num_microbatches
    return 2 * (turns + 1) * program.state_bytes


def _expert_bytes(program: Program) -> float:
    """Returns bytes received over the expert axis in a microbatch: dispatched tokens."""
    config = program.config.model
    experts = config.mixture_of_experts
    if experts.num_experts == 1 or experts.capacity_factor < 0:
        return 0.0
    group, capacity = expert_capacity(experts, program.length, experts.capacity_factor)
    filled = experts.num_experts * capacity / group
    layers = sum(layer.config.mixture_of_experts.num_experts > 1 for layer in config.layers)
    passes = 3 if config.memory.remat_policy in _RECOMPUTE_QKV else 2
    n = program.sharding.mesh.shape["expert"]
    return 2 * passes * layers * filled * program.state_bytes * (n - 1) / n


def _context_bytes(program: Program) -> float:
    """Returns bytes received over the context axis in a microbatch: keys and values."""
    config = program.config.model
    attention = config.attention
    width = np.dtype(config.numerics.dtype).itemsize
    layers = softmax_layers(program.model_of_all_stages.config)
    heads = [mixer.heads(layer.config, layer.dimensions) for mixer, layer in layers]
    key_size = sum(shape.num_key_heads * shape.key_width for shape in heads)
    value_size = sum(shape.num_value_heads * shape.value_width for shape in heads)
    part = (key_size + value_size) * program.local_tokens * float(width)
    other_parts = program.sharding.mesh.shape["context"] - 1
    forward = 2 if config.memory.remat_policy in _RECOMPUTE_QKV else 1
    if attention.context_parallel_strategy == "ring":
        return part * (other_parts * (forward + 1) + (other_parts + 1) * 4 / width)
    return part * other_parts * (forward + 1)


def _bandwidth(axis: str, program: Program) -> float:
    """Returns the bytes per second received by a device over one axis.

    On a torus, a single axis uses the links of all dimensions; of several, the inner ones get one
    dimension each. Across slices, each device sends only its part of what its slice has reduced.
    """
    chip = program.hardware.chip
    axis_index = MESH_AXES.index(axis)
    within = program.sizes.ici[axis_index]
    across = program.sizes.dcn[axis_index]
    axes_in_slice = [
        name for name, size in zip(MESH_AXES, program.sizes.ici, strict=True) if size > 1
    ]
    links = chip.links / chip.devices
    if chip.torus and axis in axes_in_slice:
        dimensions = max(chip.torus - len(axes_in_slice) + 1, 1) if axis == axes_in_slice[0] else 1
        links *= dimensions / chip.torus
    if across == 1:
        return links
    return min(links, chip.network / chip.devices * within)
