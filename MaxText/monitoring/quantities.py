"""What follows from the configuration, the model and the devices, each with its formula."""

import dataclasses

from MaxText.configuration.training_sections import Batch
from MaxText.layers.model import Model
from MaxText.monitoring.flops import FlopCount
from MaxText.monitoring.peak_flops import PeakFlops
from MaxText.monitoring.tables import derived_quantities


@dataclasses.dataclass(frozen=True)
class Quantities:
    """Sizes of a run.

    Attributes:
      model: the model trained.
      batch: the keys about the batch.
      rows: sequences of an update over all devices.
      num_devices: devices trained on.
      num_updates: updates of the whole run.
      peak: what one device can do.
    """

    model: Model
    batch: Batch
    rows: int
    num_devices: int
    num_updates: int
    peak: PeakFlops

    @property
    def tokens_per_step(self) -> int:
        """Tokens an update sees, over all devices."""
        return self.rows * self.model.section.shape.max_target_length

    @property
    def tokens_per_device(self) -> float:
        """Tokens an update sees on one device."""
        return self.tokens_per_step / self.num_devices

    @property
    def flops(self) -> FlopCount:
        """Operations of training on one token."""
        dimensions = self.model.section.shape.dimensions
        return FlopCount.from_model(
            self.model.num_matmul_parameters,
            num_layers=dimensions.num_layers,
            num_query_heads=dimensions.num_query_heads,
            head_dim=dimensions.head_dim,
            sequence_length=dimensions.max_target_length,
        )

    @property
    def tflops_per_device(self) -> float:
        """1e12 operations of an update on one device."""
        return self.flops.tflops(self.tokens_per_device)

    def describe(self) -> str:
        """All of it as lines "name = formula = numbers = value"."""
        d = self.model.section.shape.dimensions
        batch, tokens = self.batch, self.tokens_per_step
        parameters = self.model.num_parameters
        rows = [
            (
                "sequences per update",
                "per_device_batch_size x devices x gradient_accumulation_steps",
                f"{batch.per_device_batch_size:g} x {self.num_devices} x "
                f"{batch.gradient_accumulation_steps}",
                self.rows,
            ),
            (
                "tokens per update",
                "sequences x max_target_length",
                f"{self.rows} x {d.max_target_length}",
                tokens,
            ),
            (
                "tokens of the run",
                "updates x tokens per update",
                f"{self.num_updates} x {tokens}",
                self.num_updates * tokens,
            ),
            (
                "tokens per parameter",
                "tokens of the run / parameters",
                f"{self.num_updates * tokens} / {parameters}",
                self.num_updates * tokens / parameters,
            ),
            (
                "FLOPs per token",
                "6 x matmul parameters + 6 x layers x heads x head_dim x length",
                f"6 x {self.model.num_matmul_parameters} + 6 x {d.num_layers} x "
                f"{d.num_query_heads} x {d.head_dim} x {d.max_target_length}",
                self.flops.per_token,
            ),
            (
                "FLOPs of the run",
                "tokens of the run x FLOPs per token",
                "",
                f"{self.num_updates * tokens * self.flops.per_token:.3e}",
            ),
            ("peak of a device", "", "", f"{self.peak.tflops:.3g} TFLOP/s ({self.peak.source})"),
        ]
        return "\n".join(
            [
                derived_quantities(rows),
                f"number parameters: {parameters / 1e9:.3f} billion",
                self.flops.line(self.tokens_per_device),
            ]
        )
