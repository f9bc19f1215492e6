"""The batch schedule of a run on its devices.

Apart from `batch_schedule`, which reader processes import: they need no jax.
"""

from MaxText.config.schema import Config
from MaxText.input_pipeline.sequences.batch_schedule import BatchSchedule, schedule_batches
from MaxText.parallelism.mesh import ShardingPlan, global_batch_size


def plan_batches(config: Config, sharding: ShardingPlan) -> BatchSchedule:
    """Returns the batch size and sequence length of each step.

    Raises UserError if a batch does not divide over the mesh.
    """

    def batch_size_of(per_device_batch_size: float) -> int:
        return global_batch_size(config.batch, sharding, per_device_batch_size)

    return schedule_batches(config.batch, config.model.shape.max_target_length, batch_size_of)
