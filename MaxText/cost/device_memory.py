"""Device memory of a compiled step by cause, with advice if too large.

Before arrays are created, `check_memory_lower_bound` compares a lower bound with the device.
"""

import contextlib
import math
import os
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from MaxText.config.catalog import all_keys
from MaxText.cost.hlo import HloModule, LargeBuffer, largest_unoptimized_buffers
from MaxText.cost.lowering import LoweredStep
from MaxText.cost.targets import CompileTarget
from MaxText.errors import UserError
from MaxText.input_pipeline.sequences.batch_schedule import BatchSchedule
from MaxText.metrics.tables import format_table, share
from MaxText.parallelism.mesh import HOST_MEMORY
from MaxText.runtime.compiled_steps import memory_stats
from MaxText.training.assembly import TrainSetup

_GIB, _MIB = 2**30, 2**20
LARGE_ARRAYS = 8  # number shown
OF_A_DEVICE = "per device, not all live at once"
_CGROUP = "/sys/fs/cgroup/memory.max"
GPU_FRACTION = 0.75  # JAX's default for XLA_PYTHON_CLIENT_MEM_FRACTION


class MemoryBreakdown(NamedTuple):
    """Bytes on one device."""

    parameters: int
    optimizer: int
    batch: int
    gradients: int  # all at once, a part of the temporaries
    padding: int = 0  # of the arguments, by the compiler's layouts
    outputs: int = 0  # besides the donated state
    temporaries: int = 0
    code: int = 0  # size of the program; 0 if unknown

    @property
    def arguments(self) -> int:
        return self.parameters + self.optimizer + self.batch + self.padding

    @property
    def total(self) -> int:
        return self.arguments + self.outputs + self.temporaries + self.code

    def rows(self) -> list[tuple[str, int]]:
        return [
            ("parameters", self.parameters),
            ("optimizer state and counters", self.optimizer),
            ("batch", self.batch),
            ("padding of these", self.padding),
            ("outputs besides the state", self.outputs),
            ("temporaries: gradients, activations", self.temporaries),
            ("program", self.code),
        ]


def bytes_on_device(tree: Any) -> int:
    """Returns bytes of sharded arrays on one device, without host memory."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
        if leaf.sharding.memory_kind != HOST_MEMORY
    )


def memory_breakdown(planned: LoweredStep, compiled: jax.stages.Compiled) -> MemoryBreakdown:
    """Returns the memory of a compiled step on one device."""
    before = _before_compilation(planned)
    stats, analysis = memory_stats(compiled), compiled.memory_analysis()
    if not stats:
        return before
    return before._replace(
        padding=max(stats["arguments"] - before.arguments, 0),
        outputs=max(stats["outputs"] - stats["aliased"], 0),
        temporaries=stats["temporaries"],
        code=0 if analysis is None else analysis.generated_code_size_in_bytes,
    )


def _before_compilation(planned: LoweredStep) -> MemoryBreakdown:
    state = planned.state
    parameters = bytes_on_device(state.params)
    return MemoryBreakdown(
        parameters=parameters,
        optimizer=bytes_on_device(state) - parameters,
        batch=bytes_on_device(planned.batch),
        gradients=parameters,  # same shapes and dtypes as the parameters
    )


def usable_bytes(target: CompileTarget) -> int:
    """Returns the usable bytes of a device; 0 if unknown."""
    if target.platform != "gpu":
        return target.memory
    fraction = os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION", "")
    return int(target.memory * (float(fraction) if fraction else GPU_FRACTION))


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether a compiler error reports a lack of memory."""
    return "RESOURCE_EXHAUSTED" in str(error)


def out_of_memory(target: CompileTarget, planned: LoweredStep, error: BaseException) -> UserError:
    """Returns an error if compilation ran out of memory."""
    needs = str(error).splitlines()[0].partition("RESOURCE_EXHAUSTED: ")[2]
    arrays = largest_unoptimized_buffers(planned.lowered, LARGE_ARRAYS)
    where = f"unsharded, over all {planned.sharding.mesh.size} devices, before fusion"
    return _oom_message(target, planned, _before_compilation(planned), arrays, where, needs)


def check_fits(
    target: CompileTarget, planned: LoweredStep, memory: MemoryBreakdown, program: HloModule
) -> None:
    """Raises UserError if a compiled step exceeds the target's memory."""
    limit = usable_bytes(target)
    if limit and memory.total > limit and target.platform != "tpu":  # their compiler checks it
        needs = (
            f"the step needs {memory.total / _GIB:.2f} GiB; {limit / _GIB:.2f} GiB are usable "
            f"({limit / target.memory:.0%} of the device)"
        )
        arrays = program.largest_arrays(LARGE_ARRAYS)
        raise _oom_message(target, planned, memory, arrays, OF_A_DEVICE, needs)


def _oom_message(
    target: CompileTarget,
    planned: LoweredStep,
    memory: MemoryBreakdown,
    arrays: Sequence[LargeBuffer],
    where: str,
    needs: str,
) -> UserError:
    lines = [
        f"{target.name} has too little memory: {needs}",
        *describe_memory(memory, arrays, where),
        "What to do, cheapest first:",
        *(f"    {line}" for line in _advice(target, planned, memory, arrays)),
    ]
    return UserError("\n".join(lines))


def describe_memory(
    memory: MemoryBreakdown, arrays: Sequence[LargeBuffer], where: str
) -> list[str]:
    """Returns memory of one device by cause, and large arrays."""
    rows = [
        [cause, f"{size / _MIB:,.2f}", share(size, memory.total)]
        for cause, size in memory.rows()
        if size
    ]
    total = ["peak", f"{memory.total / _MIB:,.2f}", ""]
    return [
        format_table(["memory per device", "MiB", "share"], rows, total),
        f"all gradients, part of the temporaries: {memory.gradients / _MIB:,.2f} MiB",
        "",
        f"largest arrays ({where}), MiB:",
        *(f"{row.num_bytes / _MIB:12,.2f}  {row.described}" for row in arrays),
    ]


def _advice(
    target: CompileTarget,
    planned: LoweredStep,
    memory: MemoryBreakdown,
    arrays: Sequence[LargeBuffer],
) -> list[str]:
    config, batch, sharding = planned.model.config, planned.config.batch, planned.sharding
    lines = []
    limit = usable_bytes(target)
    if limit and memory.arguments + memory.gradients > limit:
        lines.append("parameters, optimizer state and gradients alone exceed device memory")
        if sharding.mesh.shape["data"] > 1:
            lines.append("ici_data_parallelism=1 ici_fsdp_parallelism=-1: shard the weights")
    else:
        if config.memory.remat_policy != "full":
            policy = config.memory.remat_policy
            lines.append(f"remat_policy=full: recompute all activations (currently {policy})")
        if not config.memory.scan_layers and config.scan_unsupported_reason is None:
            lines.append("scan_layers=true: one layer's temporaries at a time")
        vocabulary, length = config.shape.vocab_size, planned.plan.stages[-1].length
        sizes = [list(map(int, re.findall(r"\d+", row.shape.partition("[")[2]))) for row in arrays]
        if any(vocabulary in of for of in sizes) and config.objective.num_vocab_tiling == 1:
            lines.append("num_vocab_tiling=8: compute logits in chunks of the sequence")
        whole = config.attention.attention == "dot_product"
        if whole and any(of.count(length) >= 2 for of in sizes):
            lines.append("attention=autoselected: compute scores in a kernel, or in blocks")
        rows = batch.per_device_batch_size
        if rows * sharding.mesh.size / 2 >= sharding.num_batch_parts:
            lines.append(
                f"per_device_batch_size={rows / 2:g} "
                f"gradient_accumulation_steps={2 * batch.gradient_accumulation_steps}: the same "
                "batch in more microbatches"
            )
    if not sharding.optimizer_state_axis and sharding.mesh.shape["data"] > 1:
        lines.append("shard_optimizer_over_data=true: each replica keeps a shard of the moments")
    optimizer, (condition,) = planned.config.optimizer, all_keys()["mu_dtype"].conditions
    if optimizer.opt_type in condition["opt_type"] and not optimizer.mu_dtype:
        lines.append("mu_dtype=bfloat16: halve the bytes of the first moment")
    lines.append(f"a machine with more devices or more memory than {target.name}")
    return lines


def check_memory_lower_bound(
    setup: TrainSetup, plan: BatchSchedule, num_devices: int, num_microbatches: int
) -> None:
    """Raises UserError if state, gradients and activations cannot fit.

    CPU devices share the memory of their host. `num_devices` counts all processes.
    """
    device = jax.local_devices()[0]
    limit = device_memory_bytes(device)
    config = setup.model.config
    tokens = max(plan.batch_size(stage) * stage.length for stage in plan.stages)
    width = config.shape.dimensions.emb_dim * jax.numpy.dtype(config.numerics.dtype).itemsize
    parameters = bytes_on_device(setup.abstract_state.params)
    needed = {
        "parameters": parameters,
        "gradients": parameters,
        "optimizer state": bytes_on_device(setup.abstract_state) - parameters,
        "one activation of each token": tokens // num_devices // num_microbatches * width,
    }
    sharing = jax.local_device_count() if device.platform == "cpu" else 1
    total = sharing * sum(needed.values())
    if limit is None or total <= limit:
        return
    causes = ", ".join(f"{name} {sharing * size / _GIB:,.2f}" for name, size in needed.items())
    where = "this machine" if device.platform == "cpu" else f"a {device.device_kind}"
    raise UserError(
        f"a step needs at least {total / _GIB:,.2f} GiB (GiB of {causes}), but {where} has "
        f"{limit / _GIB:,.2f} GiB. Use a smaller model, fewer tokens per batch "
        "(per_device_batch_size, max_target_length, gradient_accumulation_steps), or more devices; "
        "plan.py finds settings that fit."
    )


def device_memory_bytes(device: Any) -> int | None:
    """Returns bytes of a device, or of a CPU device's host; None if unknown."""
    if device.platform != "cpu":
        return (device.memory_stats() or {}).get("bytes_limit")
    memory = None
    with contextlib.suppress(OSError, ValueError):
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        with open(_CGROUP) as file:  # of a container with a limit
            memory = min(memory, int(file.read()))
    return memory
