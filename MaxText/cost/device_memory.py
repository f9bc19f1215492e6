"""Device memory of a compiled step by cause, with advice if too large.

Before arrays are created, `check_memory_lower_bound` compares a lower bound with the device.
"""

import contextlib
import math
import os
from typing import Any, NamedTuple

import jax

from MaxText.cost.hlo import HloModule
from MaxText.cost.lowering import LoweredStep
from MaxText.cost.targets import CompileTarget
from MaxText.errors import UserError
from MaxText.input_pipeline.sequences.batch_schedule import BatchSchedule
from MaxText.metrics.tables import format_table, share
from MaxText.parallelism.mesh import HOST_MEMORY
from MaxText.runtime.compiled_steps import memory_stats
from MaxText.training.assembly import TrainSetup

_GIB, _MIB = 2**30, 2**20
_LARGE_ARRAYS = 8  # number shown
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
    parameters = bytes_on_device(planned.state.params)
    before = MemoryBreakdown(
        parameters=parameters,
        optimizer=bytes_on_device(planned.state) - parameters,
        batch=bytes_on_device(planned.batch),
        gradients=parameters,  # same shapes and dtypes as the parameters
    )
    stats, analysis = memory_stats(compiled), compiled.memory_analysis()
    if not stats:
        return before
    return before._replace(
        padding=max(stats["arguments"] - before.arguments, 0),
        outputs=max(stats["outputs"] - stats["aliased"], 0),
        temporaries=stats["temporaries"],
        code=0 if analysis is None else analysis.generated_code_size_in_bytes,
    )


def usable_bytes(target: CompileTarget) -> int:
    """Returns the usable bytes of a device; 0 if unknown."""
    if target.platform != "gpu":
        return target.memory
    fraction = os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION") or GPU_FRACTION
    return int(target.memory * float(fraction))


def check_fits(target: CompileTarget, memory: MemoryBreakdown, program: HloModule) -> None:
    """Raises UserError if a compiled step exceeds the target's memory."""
    limit = usable_bytes(target)
    if limit and memory.total > limit and target.platform != "tpu":  # their compiler checks it
        needs = (
            f"the step needs {memory.total / _GIB:.2f} GiB; {limit / _GIB:.2f} GiB are usable "
            f"({limit / target.memory:.0%} of the device)"
        )
        raise out_of_memory(target, "\n".join([needs, *describe_memory(memory, program)]))


def out_of_memory(target: CompileTarget, what: str) -> UserError:
    """Returns an error with advice; `what` may end in the largest arrays."""
    name = target.name if target.num_slices == 1 else f"{target.num_slices}x{target.name}"
    return UserError(
        f"{name} has too little memory: {what}\n"
        "What to do, cheapest first:\n"
        "    remat_policy=full scan_layers=true num_vocab_tiling=8: fewer activations at once\n"
        "    half of per_device_batch_size, twice of gradient_accumulation_steps: the same batch\n"
        "    ici_fsdp_parallelism=-1 shard_optimizer_over_data=true mu_dtype=bfloat16: less state\n"
        f"    python MaxText/plan.py ... hardware={name} --fit: keys that fit"
    )


def describe_memory(memory: MemoryBreakdown, program: HloModule) -> list[str]:
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
        "largest arrays (per device, not all live at once), MiB:",
        *(
            f"{row.num_bytes / _MIB:12,.2f}  {row.described}"
            for row in program.largest_arrays(_LARGE_ARRAYS)
        ),
    ]


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
