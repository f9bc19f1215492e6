"""Log line and metric row of a train step and of an evaluation."""

import dataclasses
import math
from collections.abc import Mapping


def perplexity(lm_loss: float) -> float:
    """Returns exp(loss in nats per token), infinite on overflow."""
    try:
        return math.exp(lm_loss)
    except OverflowError:
        return math.inf


def _shown(perplexity: float) -> str:
    return f"{perplexity:.3f}" if perplexity < 1e6 else f"{perplexity:.3e}"


def format_duration(seconds: float) -> str:
    """Formats seconds as h:mm:ss."""
    if not math.isfinite(seconds):
        return "?"
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}"


_TAGS = {"learning_rate": "current_learning_rate"}  # metrics that MaxText's tags name differently

_NOT_RECORDED = ("last_skipped", "skips_began", "rise_began")  # scalars for run/rollback.py only


@dataclasses.dataclass(frozen=True)
class StepMetrics:
    """Report of a train step."""

    step: int
    seconds: float  # wall time of a step with the device's work; mean since the last report
    # Scalars of the train step: loss, total_weights (target tokens), lm_loss (nats per token) or
    # entmax_loss, and others. Losses are means since the last report, too.
    metrics: Mapping[str, float]
    tokens_per_device: float
    tflops_per_device: float
    peak_tflops: float = 0.0  # per device; 0 if unknown, which hides MFU
    seconds_left: float | None = None

    @property
    def tflops_per_second(self) -> float:
        return self.tflops_per_device / self.seconds

    @property
    def tokens_per_second(self) -> float:
        return self.tokens_per_device / self.seconds

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization (PaLM, appendix B)."""
        return self.tflops_per_second / self.peak_tflops if self.peak_tflops else math.nan

    @property
    def has_perplexity(self) -> bool:
        """False for losses other than log-probabilities, such as entmax."""
        return "lm_loss" in self.metrics

    @property
    def lm_loss(self) -> float:
        """Mean target loss without auxiliary losses; else the total loss."""
        names = ("lm_loss", "entmax_loss", "loss")
        return float(next(self.metrics[name] for name in names if name in self.metrics))

    def line(self) -> str:
        """Returns MaxText's line for scripts, plus additional fields."""
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
            parts.append(f"eta: {format_duration(self.seconds_left)}")
        return ", ".join(parts)

    def compact_line(self, num_steps: int) -> str:
        """Returns a line of about 90 columns, with `num_steps` of the run."""
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
            parts.append(f"{format_duration(self.seconds_left)} left")
        return "  ".join(parts)

    def row(self) -> dict[str, float]:
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
    """Report of one pass over held-out data."""

    step: int
    total_loss: float  # sum over targets, in nats for log-probability objectives
    total_weights: float  # number of target tokens
    num_batches: int
    seconds: float
    correct: float | None = None  # targets that were the argmax; None if not counted
    has_perplexity: bool = True

    @property
    def loss(self) -> float:
        """Mean loss in nats per token; NaN without targets."""
        return self.total_loss / self.total_weights if self.total_weights else math.nan

    @property
    def masked_accuracy(self) -> float | None:
        if self.correct is None:
            return None
        return self.correct / self.total_weights if self.total_weights else math.nan

    def line(self) -> str:
        shown = f", perplexity={_shown(perplexity(self.loss))}" if self.has_perplexity else ""
        accuracy = self.masked_accuracy
        return (
            f"Completed eval after train step {self.step}, loss={self.loss:.3f}{shown}, "
            f"total_weights={int(self.total_weights)}, batches={self.num_batches}, "
            f"seconds={self.seconds:.3f}"
            + ("" if accuracy is None else f", masked_accuracy={accuracy:.4f}")
        )

    def row(self) -> dict[str, float]:
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
