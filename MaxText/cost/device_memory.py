"""Device memory of a compiled step by cause, with advice if too large.

Before arrays are created, `check_memory_lower_bound` compares a lower bound with the device.
"""

import contextlib
import math
import os
from collections.abc import Mapping
from typing import Any

import jax

from MaxText.cost.hlo import HloModule
from MaxText.cost.saved_step import LoweredStep
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


def bytes_on_device(tree: Any) -> int:
    """Returns bytes of sharded arrays on one device, without host memory."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
        if leaf.sharding.memory_kind != HOST_MEMORY
    )


def memory_breakdown(planned: LoweredStep, compiled: jax.stages.Compiled) -> dict[str, int]:
    """Returns bytes on one device by cause."""
    parameters = bytes_on_device(planned.state.params)
    found = {
        "parameters": parameters,
        "optimizer state and counters": bytes_on_device(planned.state) - parameters,
        "batch": bytes_on_device(planned.batch),
    }
    if stats := memory_stats(compiled):
        analysis = compiled.memory_analysis()
        found |= {
            "padding of these": max(stats["arguments"] - sum(found.values()), 0),
            "outputs besides the state": max(stats["outputs"] - stats["aliased"], 0),
            "temporaries: gradients, activations": stats["temporaries"],
            "program": 0 if analysis is None else analysis.generated_code_size_in_bytes,
        }
    return found


def usable_bytes(target: CompileTarget) -> int:
    """Returns the usable bytes of a device; 0 if unknown."""
    if target.platform != "gpu":
        return target.memory
    fraction = os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION") or GPU_FRACTION
    return int(target.memory * float(fraction))


def check_fits(target: CompileTarget, memory: Mapping[str, int], program: HloModule) -> None:
    """Raises UserError if a compiled step exceeds the target's memory."""
    limit = usable_bytes(target)
    if limit and sum(memory.values()) > limit and target.platform != "tpu":  # their compiler checks
        needed = f"{sum(memory.values()) / _GIB:.2f} GiB of {limit / _GIB:.2f} GiB "
        needed += f"({limit / target.memory:.0%} of the device)"
        raise out_of_memory(target, "\n".join([needed, *describe_memory(target, memory, program)]))


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


def describe_memory(
    target: CompileTarget, memory: Mapping[str, int], program: HloModule
) -> list[str]:
    total = sum(memory.values())
    rows = [
        [cause, f"{size / _MIB:,.2f}", share(size, total)] for cause, size in memory.items() if size
    ]
    header = ["memory per device", "MiB", "share"]
    lines = [
        format_table(header, rows, ["peak", f"{total / _MIB:,.2f}", ""]),
        # Of the same shapes and dtypes as the parameters.
        f"all gradients, part of the temporaries: {memory['parameters'] / _MIB:,.2f} MiB",
        "",
        "largest arrays (per device, not all live at once), MiB:",
    ]
    for row in program.largest_arrays(_LARGE_ARRAYS):
        times = f"  x {row.count}" if row.count > 1 else ""
        lines.append(f"{row.num_bytes / _MIB:12,.2f}  {row.shape}  {row.made_by}{times}")
    if limit := usable_bytes(target):
        free = (limit - total) / _GIB
        lines.append(f"\nusable memory: {limit / _GIB:,.1f} GiB, free: {free:,.1f} GiB")
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
