"""Device memory, compared with a lower bound of what a step needs."""

import contextlib
import math
import os

import jax

from MaxText.errors import UserError
from MaxText.input_pipeline.sequences.batch_schedule import BatchSchedule
from MaxText.parallelism.mesh import HOST_MEMORY
from MaxText.training.assembly import TrainSetup
from MaxText.value_types import Device, PyTree

_GIB = 2**30
_CGROUP = "/sys/fs/cgroup/memory.max"
GPU_FRACTION = 0.75  # JAX's default for XLA_PYTHON_CLIENT_MEM_FRACTION


def bytes_on_device(tree: PyTree) -> int:
    """Returns bytes of sharded arrays on one device, without host memory."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
        if leaf.sharding.memory_kind != HOST_MEMORY
    )


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
    if setup.abstract_frozen:
        needed["frozen models"] = bytes_on_device(setup.abstract_frozen)
    sharing = jax.local_device_count() if device.platform == "cpu" else 1
    total = sharing * sum(needed.values())
    if limit is None or total <= limit:
        return
    causes = ", ".join(f"{name} {sharing * size / _GIB:,.2f}" for name, size in needed.items())
    location = "this machine" if device.platform == "cpu" else f"a {device.device_kind}"
    raise UserError(
        f"a step needs at least {total / _GIB:,.2f} GiB (GiB of {causes}), but {location} has "
        f"{limit / _GIB:,.2f} GiB. Use a smaller model, fewer tokens per batch "
        "(per_device_batch_size, max_target_length, gradient_accumulation_steps), or more devices; "
        "plan.py finds settings that fit."
    )


def device_memory_bytes(device: Device) -> int | None:
    """Returns bytes of a device, or of a CPU device's host; None if unknown."""
    if device.platform != "cpu":
        return (device.memory_stats() or {}).get("bytes_limit")
    memory = None
    with contextlib.suppress(OSError, ValueError):
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        with open(_CGROUP, encoding="utf-8") as file:  # of a container with a limit
            memory = min(memory, int(file.read()))
    return memory
