"""Sizes of a run: tokens, FLOPs and parameters, with their formulas."""

import dataclasses
import functools

from MaxText.config.training_sections import BatchConfig
from MaxText.cost.flops import FlopCount, count_flops
from MaxText.formatting import byte_count, derived_quantities
from MaxText.hardware.peak_flops import PeakFlops
from MaxText.input_pipeline.sequences.batch_schedule import BatchSchedule
from MaxText.layers.assembly.model import Model


@dataclasses.dataclass(frozen=True)
class TrainingStats:
    """Sizes of a run.

    Attributes:
      model: The model.
      batch: The keys of the batch size.
      batch_schedule: Batch size and sequence length of each step.
      num_devices: Devices over all processes.
      num_steps: Steps of the run.
      peak: Peak TFLOP/s of a device.
    """

    model: Model
    batch: BatchConfig
    batch_schedule: BatchSchedule
    num_devices: int
    num_steps: int
    peak: PeakFlops

    def tokens(self, step: int) -> int:
        """Returns the tokens of a step over all devices."""
        return self.batch_schedule.at(step).num_sequences * self.batch_schedule.sequence_length

    def tokens_before(self, step: int) -> int:
        """Returns the tokens of all steps before `step`, over all devices."""
        return self.batch_schedule.sequences_before(step) * self.batch_schedule.sequence_length

    @property
    def tokens_of_run(self) -> int:
        """Tokens of all steps, over all devices."""
        return self.tokens_before(self.num_steps)

    def tokens_per_device(self, step: int) -> float:
        """Returns the tokens of a step on one device."""
        return self.tokens(step) / self.num_devices

    def flops(self, step: int) -> FlopCount:
        """Returns the FLOPs per token of a step."""
        return self._flops_of_length[self.batch_schedule.at(step).length]

    def flops_before(self, step: int) -> float:
        """Returns the FLOPs of all steps before `step`, over all devices."""
        total = 0.0
        for stage in self.batch_schedule.stages:
            first, end = self.batch_schedule.steps_of(stage, step)
            total += (end - first) * self.tokens(first) * self.flops(first).per_token
        return total

    @property
    def flops_of_run(self) -> float:
        """FLOPs of all steps, over all devices."""
        return self.flops_before(self.num_steps)

    @functools.cached_property
    def _flops_of_length(self) -> dict[int, FlopCount]:
        lengths = {stage.length for stage in self.batch_schedule.stages}
        return {length: count_flops(self.model, length) for length in lengths}

    def summary(self, training_bytes: int) -> str:
        """Returns a few lines for the terminal.

        Args:
          training_bytes: Bytes of parameters, gradients and optimizer state.
        """
        dimensions = self.model.config.shape.dimensions
        last_step = max(self.num_steps - 1, 0)
        flops = self.flops(last_step)
        parameters = self.model.num_parameters
        batches = ["Batch"]
        if self.batch_schedule.has_stages:
            batches = [
                f"Batch, stage from step {stage.first_step}" for stage in self.batch_schedule.stages
            ]
        return "\n".join(
            [
                f"number parameters: {parameters / 1e9:.3f} billion ({parameters:,})",
                f"Model: {self.model.config.shape.decoder_block}, {dimensions.num_layers} layers "
                f"of width {dimensions.emb_dim}; training state of {byte_count(training_bytes)}",
                *(
                    f"{name}: {stage.num_sequences:,} sequences x {stage.length:,} tokens = "
                    f"{self.tokens(stage.first_step):,} tokens per step"
                    for name, stage in zip(batches, self.batch_schedule.stages, strict=True)
                ),
                f"Run: {self.num_steps:,} steps, {self.tokens_of_run:,} tokens "
                f"({self.tokens_of_run / parameters:.3g} per parameter), {self.flops_of_run:.3g} "
                "FLOPs",
                flops.line(self.tokens_per_device(last_step)),
                f"Peak of a device, for MFU: {self.peak.tflops:.3g} TFLOP/s",
                f"  ({self.peak.source})",
            ]
        )

    def describe(self) -> str:
        """Returns derived sizes as lines "name = formula = numbers = value"."""
        batch = self.batch
        last_step = max(self.num_steps - 1, 0)
        parameters = self.model.num_parameters
        flops = self.flops(last_step)
        tokens_of_run = self.tokens_of_run
        sizes = (batch.per_device_batch_size, self.num_devices, batch.gradient_accumulation_steps)
        stages = []
        steps = []
        for stage in self.batch_schedule.stages:
            first, end = self.batch_schedule.steps_of(stage, self.num_steps)
            name = f"tokens per step from step {first}"
            shape = f"{self.batch_schedule.batch_size(stage)} x {stage.length}"
            stages.append((name, "sequences x length", shape, self.tokens(first)))
            steps.append(f"{end - first} x {self.tokens(first)}")
        rows = [
            (
                "sequences per step",
                "per_device_batch_size x devices x gradient_accumulation_steps",
                " x ".join(f"{size:g}" for size in sizes),
                self.batch_schedule.at(last_step).num_sequences,
            ),
            *stages,
            ("tokens of the run", "steps x tokens per step", " + ".join(steps), tokens_of_run),
            (
                "tokens per parameter",
                "tokens of the run / parameters",
                f"{tokens_of_run} / {parameters}",
                tokens_of_run / parameters,
            ),
            (
                "FLOPs per token",
                "6 x matmul parameters + attention + depth aggregation",
                f"6 x {flops.matmul_parameters} + {flops.attention:.0f} + {flops.aggregation:.0f}",
                flops.per_token,
            ),
            (
                "FLOPs of the run",
                "tokens of the run x FLOPs per token",
                "",
                f"{self.flops_of_run:.3e}",
            ),
        ]
        return derived_quantities(rows)
