"""The batch size and the batch schedule of a run on its devices.

Apart from `batch_schedule`, which reader processes import: they need no jax.
"""

from collections.abc import Callable

from MaxText.config.schema import Config
from MaxText.errors import UserError
from MaxText.input_pipeline.sequences.batch_schedule import BatchSchedule, schedule_batches
from MaxText.parallelism.mesh import ShardingPlan, global_batch_size


def resolve_global_batch(
    config: Config, sharding: ShardingPlan, log: Callable[[str], None] = lambda line: None
) -> Config:
    """Returns a configuration whose batch keys make global_batch_size on a mesh.

    Args:
      config: Of the run. With global_batch_size=0 it is returned as it is.
      sharding: Of the mesh.
      log: Gets a line with the batch.

    Raises:
      UserError: The mesh does not divide the batch into microbatches of per_device_batch_size
        sequences per device at most.
    """
    batch = config.batch
    total = batch.global_batch_size
    if not total:
        return config
    num_devices = sharding.mesh.size
    multiple = sharding.batch_divisor
    largest = batch.per_device_batch_size * num_devices  # sequences of a microbatch
    for steps in range(1, total // multiple + 1):
        if total % (steps * multiple) == 0 and total / steps <= largest:
            break
    else:
        smallest = multiple / num_devices
        remedy = f"raise per_device_batch_size to {smallest:g} or more"
        if total % multiple:
            nearest = max(1, round(total / multiple)) * multiple
            remedy = f"set global_batch_size={nearest}, or start on a number of devices that fits"
        axes = ", ".join(sharding.batch_axes)
        raise UserError(
            f"global_batch_size={total} does not fit {num_devices} devices: a microbatch is a "
            f"multiple of {multiple} sequences (mesh axes {axes}, stages) "
            f"and has {largest:g} at most (per_device_batch_size={batch.per_device_batch_size:g})."
            f"\n  What to do: {remedy}."
        )
    per_device = total / steps / num_devices
    log(
        f"global_batch_size={total} on {num_devices} devices: {per_device:g} sequences per device "
        f"x {steps} microbatches"
    )
    sizes = {"per_device_batch_size": per_device, "gradient_accumulation_steps": steps}
    return config.model_copy(update={"batch": batch.model_copy(update=sizes)})


def plan_batches(config: Config, sharding: ShardingPlan) -> BatchSchedule:
    """Returns the batch size and sequence length of each step.

    Raises UserError if a batch does not divide over the mesh.
    """

    def batch_size_of(per_device_batch_size: float) -> int:
        return global_batch_size(config.batch, sharding, per_device_batch_size)

    return schedule_batches(config.batch, config.model.shape.max_target_length, batch_size_of)
