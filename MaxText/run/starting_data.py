"""The initial data position of a run, and its last step."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from MaxText.checkpointing.rewinds import Rewind
from MaxText.errors import UserError
from MaxText.run.starting_point import Start

if TYPE_CHECKING:
    from MaxText.input_pipeline.iterator import BatchIterator


def begin_data(
    start: Start, batches: "BatchIterator", steps: int, show: Callable[[str], None] = print
) -> int:
    """Moves the data to a start, applies the exclusions of rollbacks, returns the last step.

    Raises UserError if the stored position counts in other data.
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
    for rewind in standing_rewinds(start, batches):
        first, end = rewind.samples
        # The state may predate the rollback target: the excluded samples come after both.
        if batches.exclude_if_new(first, end):
            show(
                f"Samples {first} to {end - 1} of the training data are left out, because the run "
                f"went back at step {rewind.noticed} (rewinds.json): {rewind.reason}"
            )
    return last_update(batches, steps)


def standing_rewinds(start: Start, batches: "BatchIterator") -> list[Rewind]:
    """Returns the recorded rollbacks that apply to the run's current data."""
    return [rewind for rewind in start.rewinds if not batches.differences(rewind.data)]


def last_update(batches: "BatchIterator", steps: int) -> int:
    """Returns the last step of the run, from 0: of `steps`, or the last one with data."""
    num_steps = batches.num_steps
    return (steps if num_steps is None else min(steps, num_steps)) - 1


def complete(start: Start, steps: int, last_step: int, num_epoch: int) -> str:
    """Returns the message for a run without a step left."""
    limit = "steps" if last_step + 1 == steps else "num_epoch"
    return (
        f"The run is complete: {start.source}, steps={steps}, num_epoch={num_epoch}. "
        f"Raise {limit} to go on."
    )
