"""Batch size and sequence length by step: constant, ramp, or stages.

Steps map to sequences in closed form, so a run resumes at any step without counting, and a data
position (a number of sequences) has the same meaning for every batch size.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence

from MaxText.config.training_sections import BatchConfig


@dataclasses.dataclass(frozen=True)
class ScheduleStage:
    """Steps with batches of one shape."""

    first_step: int
    num_sequences: int  # of max_target_length tokens per step, over all processes
    length: int  # tokens of a row; if below max_target_length, sequences are split into rows


@dataclasses.dataclass(frozen=True)
class BatchSchedule:
    """The stages of a run; the first begins at step 0, the last is unbounded."""

    stages: tuple[ScheduleStage, ...]
    sequence_length: int  # max_target_length

    @classmethod
    def constant(cls, batch_size: int, sequence_length: int) -> "BatchSchedule":
        """Returns a schedule of one stage, with `batch_size` sequences over all processes."""
        stage = ScheduleStage(first_step=0, num_sequences=batch_size, length=sequence_length)
        return cls((stage,), sequence_length)

    def at(self, step: int) -> ScheduleStage:
        """Returns the stage of a step."""
        return next(stage for stage in reversed(self.stages) if stage.first_step <= step)

    def batch_size(self, stage: ScheduleStage) -> int:
        """Returns the rows of a global batch, each of `stage.length` tokens."""
        return stage.num_sequences * (self.sequence_length // stage.length)

    def sequences_before(self, step: int) -> int:
        """Returns the sequences of all steps before `step`."""
        total = 0
        for stage in self.stages:
            first, end = self.steps_of(stage, step)
            total += (end - first) * stage.num_sequences
        return total

    def steps_of(self, stage: ScheduleStage, num_steps: int) -> tuple[int, int]:
        """Returns a stage's step range [first, end) among `num_steps` steps."""
        following = self.stages.index(stage) + 1
        end = num_steps
        if following < len(self.stages):
            end = min(end, self.stages[following].first_step)
        return stage.first_step, max(end, stage.first_step)

    def steps_for(self, num_sequences: int) -> int:
        """Returns the steps to read `num_sequences`, the last one possibly in part."""
        num_read = 0
        for stage, following in itertools.pairwise((*self.stages, None)):
            assert stage is not None
            steps = math.ceil((num_sequences - num_read) / stage.num_sequences)
            if following is None or stage.first_step + steps <= following.first_step:
                return stage.first_step + steps
            num_read += (following.first_step - stage.first_step) * stage.num_sequences
        raise AssertionError("the last stage has no end")

    @property
    def has_stages(self) -> bool:
        """Whether the shape of the batch changes during the run."""
        return len(self.stages) > 1


def schedule_batches(
    section: BatchConfig, sequence_length: int, batch_size_of: Callable[[float], int]
) -> BatchSchedule:
    """Returns the stages of the batch keys.

    The ramp-up goes from per_device_batch_size_start to per_device_batch_size in equal increments;
    each of its stages sees an equal share of global_rampup_samples, in whole steps.

    Args:
      section: The batch keys.
      sequence_length: max_target_length.
      batch_size_of: Converts a per_device_batch_size to sequences over all devices. Not called
        with a global_batch_size, which says how many there are and has no ramp-up.
    """
    sizes = _rampup_sizes(section)
    ramp = [(0, section.global_batch_size or batch_size_of(sizes[0]))]
    sequences_per_stage = math.ceil(section.global_rampup_samples / max(len(sizes) - 1, 1))
    for size in sizes[1:]:
        first_step, batch_size = ramp[-1]
        num_steps = math.ceil(sequences_per_stage / batch_size)
        ramp.append((first_step + num_steps, batch_size_of(size)))
    lengths = list(section.sequence_length_stages) or [(0, sequence_length)]
    first_steps = sorted({first for first, _ in ramp} | {first for first, _ in lengths})
    stages = tuple(
        ScheduleStage(
            first_step=step,
            num_sequences=_value_at(ramp, step),
            length=_value_at(lengths, step),
        )
        for step in first_steps
    )
    return BatchSchedule(stages, sequence_length)


def _rampup_sizes(section: BatchConfig) -> list[float]:
    """Returns the values of per_device_batch_size in the order of the ramp-up."""
    final = section.per_device_batch_size
    if not section.enable_rampup_batch_size:
        return [final]
    start = section.per_device_batch_size_start
    increment = section.per_device_batch_size_increment
    num_increments = round((final - start) / increment)
    return [start + increment * index for index in range(num_increments)] + [final]


def _value_at(values: Sequence[tuple[int, int]], step: int) -> int:
    """Returns the last value of pairs (first step, value) that have begun at `step`."""
    return next(value for first_step, value in reversed(values) if first_step <= step)
