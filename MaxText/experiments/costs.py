"""What a run of a configuration holds and takes, from its abstract model: nothing is trained."""

import dataclasses
import functools

from MaxText.config.model_sections import Model as ModelSection
from MaxText.config.schema import Config
from MaxText.cost.peak_flops import PeakFlops
from MaxText.errors import UserError
from MaxText.input_pipeline.sequences.batch_schedule import BatchPlan, plan_batches
from MaxText.layers.model import Model
from MaxText.run.quantities import Quantities
from MaxText.training import backend_defaults

# Speed has no part in these figures.
_NO_PEAK = PeakFlops(0.0, "not needed")


@dataclasses.dataclass(frozen=True)
class Cost:
    """Sizes of one run.

    Attributes:
      parameters: of the model.
      flops_per_token: operations of training on one token, over the run.
      flops: operations of the whole run, over all devices.
      tokens: that all updates see, over all devices.
      steps: updates.
    """

    parameters: int
    flops_per_token: float
    flops: float
    tokens: int
    steps: int


def cost(config: Config, num_devices: int) -> Cost:
    """The cost of a run on a number of devices.

    Raises:
      UserError: the batch is no whole number of sequences on so many devices.
    """
    plan = batch_plan(config, num_devices)
    quantities = Quantities(
        abstract_model(config.model), config.batch, plan, num_devices, config.run.steps, _NO_PEAK
    )
    tokens, flops = quantities.tokens_of_run, quantities.flops_of_run
    return Cost(
        parameters=quantities.model.num_parameters,
        flops_per_token=flops / tokens if tokens else 0.0,
        flops=flops,
        tokens=tokens,
        steps=config.run.steps,
    )


def batch_plan(config: Config, num_devices: int) -> BatchPlan:
    """What each update sees on a number of devices.

    Raises:
      UserError: see `cost`.
    """

    def samples(per_device: float) -> int:
        rows = per_device * num_devices
        if rows != int(rows):
            raise UserError(
                f"per_device_batch_size={per_device:g} x {num_devices} devices = {rows:g} is no "
                "whole number of sequences. Set another per_device_batch_size."
            )
        return int(rows) * config.batch.gradient_accumulation_steps

    return plan_batches(config.batch, config.model.shape.max_target_length, samples)


def abstract_model(section: ModelSection) -> Model:
    """The model without arrays. Takes a tenth of a second, so searches ask for it only once."""
    return _model_of(section.model_dump_json())


@functools.lru_cache(maxsize=256)
def _model_of(section: str) -> Model:
    return Model(backend_defaults.resolve(ModelSection.model_validate_json(section), "cpu")[0])
