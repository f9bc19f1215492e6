"""Where the data of a run begins, and whether any of its steps is left."""

from typing import TYPE_CHECKING

from MaxText.checkpointing.starting_point import Start
from MaxText.errors import UserError

if TYPE_CHECKING:
    from MaxText.input_pipeline.loader import BatchIterator


def begin_data(start: Start, batches: "BatchIterator", steps: int) -> int:
    """Moves the data to a starting point.

    Args:
      steps: of the configuration.

    Returns:
      The last update of the run, from 0: of `steps`, or the last one that has data.

    Raises:
      UserError: the position counts in other data.
    """
    if start.position is None:
        batches.seek(start.first_step)
    else:
        try:
            batches.resume(start.position)
        except UserError as error:
            if start.how != "growth":
                raise
            raise UserError(f"growth_data=continue: {error} Or set growth_data=restart.") from None
    # Where the data ends depends on the samples read so far.
    num_steps = batches.num_steps
    return (steps if num_steps is None else min(steps, num_steps)) - 1


def complete(start: Start, steps: int, last_step: int, num_epoch: int) -> str:
    """What to tell the user of a run without a step left.

    Args:
      last_step: what begin_data gave.
      steps, num_epoch: of the configuration.
    """
    limit = "steps" if last_step + 1 == steps else "num_epoch"
    return (
        f"The run is complete: {start.source}, steps={steps}, num_epoch={num_epoch}. "
        f"Raise {limit} to go on."
    )
