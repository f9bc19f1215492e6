"""Size and cost of a run from its abstract model, without training."""

import dataclasses

from MaxText.config.model_sections import Model as ModelSection
from MaxText.config.schema import Config
from MaxText.cost import abstract_step
from MaxText.cost.peak_flops import PeakFlops
from MaxText.errors import UserError
from MaxText.input_pipeline.sequences.batch_schedule import BatchSchedule, plan_batches
from MaxText.layers.model import Model
from MaxText.run.training_stats import TrainingStats
from MaxText.training import backend_defaults

_NO_PEAK = PeakFlops(0.0, "not needed")  # costs do not depend on speed


@dataclasses.dataclass(frozen=True)
class Cost:
    """Size and cost of one run, over all devices."""

    parameters: int
    flops_per_token: float  # training FLOPs, mean over the run
    flops: float
    tokens: int
    steps: int


def cost(config: Config, num_devices: int) -> Cost:
    """Returns the cost of a run; raises UserError if the batch does not fit."""
    plan = batch_plan(config, num_devices)
    stats = TrainingStats(
        abstract_model(config.model), config.batch, plan, num_devices, config.run.steps, _NO_PEAK
    )
    tokens, flops = stats.tokens_of_run, stats.flops_of_run
    return Cost(
        parameters=stats.model.num_parameters,
        flops_per_token=flops / tokens if tokens else 0.0,
        flops=flops,
        tokens=tokens,
        steps=config.run.steps,
    )


def batch_plan(config: Config, num_devices: int) -> BatchSchedule:
    """Returns the batch schedule; raises UserError as `cost` does."""

    def samples(per_device: float) -> int:
        rows = per_device * num_devices
        if rows != int(rows):
            raise UserError(
                f"per_device_batch_size={per_device:g} x {num_devices} devices = {rows:g} is not "
                "a whole number of sequences. Set another per_device_batch_size."
            )
        return int(rows) * config.batch.gradient_accumulation_steps

    return plan_batches(config.batch, config.model.shape.max_target_length, samples)


def abstract_model(section: ModelSection) -> Model:
    """Returns the model without arrays, with CPU numerics; cached."""
    return abstract_step.abstract_model(backend_defaults.resolve_auto(section, "cpu")[0])
