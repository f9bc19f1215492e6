"""How microbatches pass through the stages of a pipeline: numbers alone, without jax."""

from typing import NamedTuple


class PipelineSchedule(NamedTuple):
    """A circular schedule: layers are cut into runs, run c lies on stage c mod num_stages."""

    num_stages: int  # groups of devices, each with a part of the layers
    num_repeats: int  # runs of a stage, which is how often a microbatch passes through all stages
    layers_per_stage: int  # layers of a run
    num_microbatches: int  # parts of a batch that are on their way at the same time

    @property
    def num_turns(self) -> int:
        """How often all stages compute, until the last microbatch has left the last stage."""
        return self.num_microbatches * self.num_repeats + self.num_stages - 1

    @property
    def bubble(self) -> float:
        """Share of its turns in which a stage has nothing to do."""
        return (self.num_stages - 1) / self.num_turns
