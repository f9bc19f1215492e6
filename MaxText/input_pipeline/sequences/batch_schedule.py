"""Batch size and sequence length by step: constant, ramp, or stages.

A sample is a window of max_target_length tokens. Steps map to samples in closed form, so a run
resumes at any step without counting, and a data position (a number of samples) has the same meaning
for every batch size.
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
    samples: int  # windows of max_target_length per step, over all hosts
    length: int  # tokens of a sequence; if below max_target_length, windows are split


@dataclasses.dataclass(frozen=True)
class BatchSchedule:
    """The stages of a run; the first begins at step 0, the last is unbounded."""

    stages: tuple[ScheduleStage, ...]
    window: int  # max_target_length

    @classmethod
    def constant(cls, samples: int, window: int) -> "BatchSchedule":
        return cls((ScheduleStage(0, samples, window),), window)

    def at(self, step: int) -> ScheduleStage:
        return next(stage for stage in reversed(self.stages) if stage.first_step <= step)

    def batch_size(self, stage: ScheduleStage) -> int:
        return stage.samples * (self.window // stage.length)

    def samples_before(self, step: int) -> int:
        total = 0
        for stage in self.stages:
            first, end = self.steps_of(stage, step)
            total += (end - first) * stage.samples
        return total

    def steps_of(self, stage: ScheduleStage, num_steps: int) -> tuple[int, int]:
        """Returns a stage's step range [first, end) among `num_steps` steps."""
        following = self.stages.index(stage) + 1
        end = num_steps
        if following < len(self.stages):
            end = min(end, self.stages[following].first_step)
        return stage.first_step, max(end, stage.first_step)

    def steps_for(self, samples: int) -> int:
        """Returns the steps to read `samples`, the last one possibly in part."""
        done = 0
        for stage, following in itertools.pairwise((*self.stages, None)):
            assert stage is not None
            steps = math.ceil((samples - done) / stage.samples)
            if following is None or stage.first_step + steps <= following.first_step:
                return stage.first_step + steps
            done += (following.first_step - stage.first_step) * stage.samples
        raise AssertionError("the last stage has no end")

    @property
    def has_stages(self) -> bool:
        return len(self.stages) > 1


def plan_batches(
    section: BatchConfig, window: int, samples_of: Callable[[float], int]
) -> BatchSchedule:
    """Returns the stages of the batch keys.

    The ramp-up goes from per_device_batch_size_start to per_device_batch_size in equal increments;
    each of its stages sees an equal share of global_rampup_samples, in whole steps. `samples_of`
    converts per_device_batch_size to the global batch size.
    """
    sizes = _rampup_sizes(section)
    ramp = [(0, samples_of(sizes[0]))]
    share = math.ceil(section.global_rampup_samples / max(len(sizes) - 1, 1))
    for size in sizes[1:]:
        first, samples = ramp[-1]
        ramp.append((first + math.ceil(share / samples), samples_of(size)))
    lengths = list(section.sequence_length_stages) or [(0, window)]
    starts = sorted({first for first, _ in ramp} | {first for first, _ in lengths})
    stages = tuple(
        ScheduleStage(step, _value_at(ramp, step), _value_at(lengths, step)) for step in starts
    )
    return BatchSchedule(stages, window)


def _rampup_sizes(section: BatchConfig) -> list[float]:
    final = section.per_device_batch_size
    if not section.enable_rampup_batch_size:
        return [final]
    start = section.per_device_batch_size_start
    increment = section.per_device_batch_size_increment
    count = (final - start) / increment
    return [start + increment * index for index in range(round(count))] + [final]


def _value_at(stages: Sequence[tuple[int, int]], step: int) -> int:
    return next(value for first, value in reversed(stages) if first <= step)
