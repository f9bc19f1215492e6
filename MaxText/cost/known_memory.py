"""Compares a lower bound of a step's memory with the device, before arrays are created."""

import os
from typing import Any

import jax

from MaxText.cost.compiled_memory import bytes_on_device
from MaxText.errors import UserError
from MaxText.input_pipeline.sequences.batch_schedule import BatchSchedule
from MaxText.training.assembly import Assembled

_GIB = 2**30
_CGROUP = "/sys/fs/cgroup/memory.max"


def check_known_memory(
    built: Assembled, plan: BatchSchedule, num_devices: int, num_microbatches: int
) -> None:
    """Raises UserError if state, gradients and one activation per token cannot fit.

    CPU devices share the memory of their host. `num_devices` counts all processes.
    """
    device = jax.local_devices()[0]
    limit = memory_of(device)
    section = built.model.section
    tokens = max(plan.rows(stage) * stage.length for stage in plan.stages)
    width = section.shape.dimensions.emb_dim * jax.numpy.dtype(section.numerics.dtype).itemsize
    parameters = bytes_on_device(built.state.params)
    needed = {
        "parameters": parameters,
        "gradients": parameters,
        "optimizer state": bytes_on_device(built.state) - parameters,
        "one activation of each token": tokens // num_devices // num_microbatches * width,
    }
    sharing = jax.local_device_count() if device.platform == "cpu" else 1
    total = sharing * sum(needed.values())
    if limit is None or total <= limit:
        return
    causes = ", ".join(f"{name} {sharing * size / _GIB:,.2f}" for name, size in needed.items())
    where = "this machine" if device.platform == "cpu" else f"a {device.device_kind}"
    raise UserError(
        f"a step needs {total / _GIB:,.2f} GiB at least (GiB of {causes}), and {where} has "
        f"{limit / _GIB:,.2f} GiB. Choose a smaller model, fewer tokens in a batch "
        "(per_device_batch_size, max_target_length, gradient_accumulation_steps), or more devices; "
        "plan.py says what fits where."
    )


def memory_of(device: Any) -> int | None:
    """Returns bytes of a device, or of a CPU device's host; None if unknown."""
    if device.platform != "cpu":
        return (device.memory_stats() or {}).get("bytes_limit")
    try:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return None
    try:
        with open(_CGROUP) as file:
            return min(memory, int(file.read()))
    except (OSError, ValueError):  # no container, or one without a limit
        return memory
