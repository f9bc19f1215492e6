"""Bytes received by a device in a step, by mesh axis, and their seconds.

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

import numpy as np

from MaxText.config.axis_rules import MESH_AXES
from MaxText.cost.abstract_step import Program
from MaxText.cost.hardware import Hardware
from MaxText.layers.attention_core import softmax_layers
from MaxText.layers.moe import expert_capacity

# Remat policies that recompute the output projection of attention.
_RECOMPUTE_OUT_PROJ = ("full", "save_qkv_proj", "qkv_proj_offloaded")
_RECOMPUTE_QKV = ("full", "save_qkv_proj", "qkv_proj_offloaded", "save_out_proj",
               "save_dot_except_mlp", "save_dot_except_mlpwi")  # fmt: skip


@dataclasses.dataclass(frozen=True)
class CommCost:
    """Communication of a step over one mesh axis."""

    axis: str
    size: int  # devices along the axis
    num_bytes: float  # received by a device
    bandwidth: float  # bytes per second received by a device

    @property
    def seconds(self) -> float:
        return self.num_bytes / self.bandwidth


def communication_costs(program: Program, hardware: Hardware) -> list[CommCost]:
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
        CommCost(axis, mesh.shape[axis], amount, _bandwidth(axis, program, hardware))
        for axis, amount in bytes_of.items()
    ]


def _add_weights(program: Program, bytes_of: dict[str, float]) -> None:
    sharding, parameters = program.sharding, program.model.parameters
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
    config, sharding = program.config.model, program.sharding
    parameters = program.model.parameters
    layers = config.shape.dimensions.num_layers
    sums, again = 0.0, 0.0
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
        again += times * param.is_recomputed
    policy = config.memory.remat_policy
    # Forward, and backward of the matmuls that begin each block; embedding and head add one each.
    number = 2 * sums + 2 + (again if policy in _RECOMPUTE_OUT_PROJ else 0)
    n = sharding.mesh.shape["tensor"]
    return 2 * number * program.state_bytes * (n - 1) / n


def _pipeline_bytes(program: Program) -> float:
    schedule = program.schedule
    if schedule is None:
        return 0.0
    turns = schedule.num_turns / schedule.num_microbatches
    return 2 * (turns + 1) * program.state_bytes


def _expert_bytes(program: Program) -> float:
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
    config = program.config.model
    attention, width = config.attention, np.dtype(config.numerics.dtype).itemsize
    layers = softmax_layers(program.model_of_all_stages.config)
    heads = sum(one.dimensions.num_kv_heads * one.dimensions.head_dim for _, one in layers)
    part = 2 * program.local_tokens * heads * float(width)
    others = program.sharding.mesh.shape["context"] - 1
    forward = 2 if config.memory.remat_policy in _RECOMPUTE_QKV else 1
    if attention.context_parallel_strategy == "ring":
        return part * (others * (forward + 1) + (others + 1) * 4 / width)
    return part * others * (forward + 1)


def _bandwidth(axis: str, program: Program, hardware: Hardware) -> float:
    """Returns the bytes per second received by a device over one axis.

    On a torus, a single axis uses the links of all dimensions; of several, the inner ones get one
    dimension each. Across slices, each device sends only its part of what its slice has reduced.
    """
    chip = hardware.chip
    place = MESH_AXES.index(axis)
    within, across = program.sizes.ici[place], program.sizes.dcn[place]
    several = [name for name, size in zip(MESH_AXES, program.sizes.ici, strict=True) if size > 1]
    links = chip.links / chip.devices
    if chip.torus and axis in several:
        inside = len(several) - 1
        dimensions = max(chip.torus - inside, 1) if axis == several[0] else 1
        links *= dimensions / chip.torus
    if across == 1:
        return links
    return min(links, chip.network / chip.devices * within)
