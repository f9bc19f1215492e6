"""What one step or one evaluation reports: the line people grep, and the row of numbers."""

import dataclasses
import math
from collections.abc import Mapping


def perplexity(lm_loss: float) -> float:
    """exp(loss in nats per token); infinite instead of an overflow error."""
    try:
        return math.exp(lm_loss)
    except OverflowError:
        return math.inf


def _shown(perplexity: float) -> str:
    return f"{perplexity:.3f}" if perplexity < 1e6 else f"{perplexity:.3e}"


def duration(seconds: float) -> str:
    """Hours, minutes and seconds as h:mm:ss."""
    if not math.isfinite(seconds):
        return "?"
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}"


# Numbers of the compiled step whose MaxText tag has another name.
_TAGS = {"learning_rate": "current_learning_rate"}

# Scalars by which checkpointing/recovery.py decides, and which tell people nothing.
_NOT_RECORDED = ("last_skipped", "skips_began", "rise_began")


@dataclasses.dataclass(frozen=True)
class StepReport:
    """One update.

    Attributes:
      step: the update, from 0.
      seconds: wall time of the update, with the device's work done.
      metrics: scalars of the compiled step; needs loss, total_weights (targets in the loss), and
        lm_loss (nats per token) or entmax_loss, where the objective has them; grad_norm and
        learning_rate are shown if given. Losses are means over `updates`.
      tokens_per_device: tokens an update sees, over the number of devices.
      tflops_per_device: 1e12 floating point operations of an update, over the number of devices.
      peak_tflops: what a device can do per second; 0 if unknown, then no mfu is shown.
      seconds_left: until the last step, if known.
      updates: since the last report; `seconds` is their mean.
      data_seconds: wall time of all of them in which the devices waited for data.
    """

    step: int
    seconds: float
    metrics: Mapping[str, float]
    tokens_per_device: float
    tflops_per_device: float
    peak_tflops: float = 0.0
    seconds_left: float | None = None
    updates: int = 1
    data_seconds: float = 0.0

    @property
    def tflops_per_second(self) -> float:
        """Per device."""
        return self.tflops_per_device / self.seconds

    @property
    def tokens_per_second(self) -> float:
        """Per device."""
        return self.tokens_per_device / self.seconds

    @property
    def mfu(self) -> float:
        """Share of the device's peak that the model's own products use (PaLM, appendix B)."""
        return self.tflops_per_second / self.peak_tflops if self.peak_tflops else math.nan

    @property
    def has_perplexity(self) -> bool:
        """False for an objective that is no log-probability, such as entmax."""
        return "lm_loss" in self.metrics

    @property
    def lm_loss(self) -> float:
        """Mean loss of the targets, without what is added to it; of an objective that has another
        name for it, all that is minimised.
        """
        names = ("lm_loss", "entmax_loss", "loss")
        return float(next(self.metrics[name] for name in names if name in self.metrics))

    def line(self) -> str:
        """MaxText's line, which scripts parse, and then our additions."""
        metrics = self.metrics
        parts = [
            f"completed step: {self.step}",
            f"seconds: {self.seconds:.3f}",
            f"TFLOP/s/device: {self.tflops_per_second:.3f}",
            f"Tokens/s/device: {self.tokens_per_second:.3f}",
            f"total_weights: {int(metrics['total_weights'])}",
            f"loss: {float(metrics['loss']):.3f}",
            f"lm_loss: {self.lm_loss:.3f}",
        ]
        if self.has_perplexity:
            parts.append(f"perplexity: {_shown(perplexity(self.lm_loss))}")
        if self.peak_tflops:
            parts.append(f"mfu: {100 * self.mfu:.1f}%")
        if "grad_norm" in metrics:
            parts.append(f"grad_norm: {float(metrics['grad_norm']):.3f}")
        if metrics.get("skipped"):
            parts.append("skipped: 1")
        if "learning_rate" in metrics:
            parts.append(f"lr: {float(metrics['learning_rate']):.3e}")
        if self.seconds_left is not None:
            parts.append(f"eta: {duration(self.seconds_left)}")
        return ", ".join(parts)

    def compact_line(self, num_steps: int) -> str:
        """What a person looks at, in about 90 columns.

        Args:
          num_steps: updates of the whole run.
        """
        metrics, done = self.metrics, self.step + 1
        parts = [
            f"step {done}/{num_steps} ({done / num_steps:.0%})",
            f"loss {float(metrics['loss']):.4f}",
        ]
        if "grad_norm" in metrics:
            parts.append(f"grad_norm {float(metrics['grad_norm']):.3f}")
        if "learning_rate" in metrics:
            parts.append(f"lr {float(metrics['learning_rate']):.2e}")
        parts.append(f"{self.tokens_per_second:,.0f} tokens/s/device")
        if self.peak_tflops:
            parts.append(f"mfu {self.mfu:.1%}")
        if metrics.get("skipped"):
            parts.append("skipped")
        if self.seconds_left is not None:
            parts.append(f"{duration(self.seconds_left)} left")
        return "  ".join(parts)

    def row(self) -> dict[str, float]:
        """The same by MaxText's tags, for metrics.jsonl and TensorBoard."""
        row = {
            f"learning/{_TAGS.get(name, name)}": float(value)
            for name, value in self.metrics.items()
            if name not in _NOT_RECORDED
        }
        row["learning/lm_loss"] = self.lm_loss
        if self.has_perplexity:
            row["learning/perplexity"] = perplexity(self.lm_loss)
        row |= {
            "perf/step_time_seconds": self.seconds,
            "perf/per_device_tflops": self.tflops_per_device,
            "perf/per_device_tflops_per_sec": self.tflops_per_second,
            "perf/per_device_tokens": self.tokens_per_device,
            "perf/per_device_tokens_per_sec": self.tokens_per_second,
        }
        if self.peak_tflops:
            row["perf/mfu"] = self.mfu
        return row


@dataclasses.dataclass(frozen=True)
class EvaluationReport:
    """One pass over held-out data.

    Attributes:
      step: the last update done before it.
      total_loss: sum over targets, in nats, or as the objective has it.
      total_weights: targets.
      num_batches: batches read.
      seconds: wall time.
      correct: targets that were the likeliest id; None if they were not counted.
      has_perplexity: False for an objective that is no log-probability, such as entmax.
    """

    step: int
    total_loss: float
    total_weights: float
    num_batches: int
    seconds: float
    correct: float | None = None
    has_perplexity: bool = True

    @property
    def loss(self) -> float:
        """Mean loss in nats per token; NaN without targets."""
        return self.total_loss / self.total_weights if self.total_weights else math.nan

    @property
    def masked_accuracy(self) -> float | None:
        """Share of the hidden tokens that were the likeliest id; None if they were not counted."""
        if self.correct is None:
            return None
        return self.correct / self.total_weights if self.total_weights else math.nan

    def line(self) -> str:
        """MaxText's line, then our additions."""
        shown = f", perplexity={_shown(perplexity(self.loss))}" if self.has_perplexity else ""
        accuracy = self.masked_accuracy
        return (
            f"Completed eval after train step {self.step}, loss={self.loss:.3f}{shown}, "
            f"total_weights={int(self.total_weights)}, batches={self.num_batches}, "
            f"seconds={self.seconds:.3f}"
            + ("" if accuracy is None else f", masked_accuracy={accuracy:.4f}")
        )

    def row(self) -> dict[str, float]:
        """The same by MaxText's tags."""
        row = {
            "eval/avg_loss": self.loss,
            "eval/total_loss": self.total_loss,
            "eval/total_weights": self.total_weights,
            "eval/seconds": self.seconds,
        }
        if self.has_perplexity:
            row["eval/avg_perplexity"] = perplexity(self.loss)
        if self.masked_accuracy is not None:
            row["eval/masked_accuracy"] = self.masked_accuracy
        return row
