"""Metric rows of train steps and evaluations, and lines on the terminal."""

import dataclasses
import math
import sys
from collections.abc import Callable, Mapping

from MaxText.formatting import format_duration, short_count
from MaxText.monitoring.events import Event, Sink


def perplexity(lm_loss: float) -> float:
    """Returns exp(loss in nats per token), infinite on overflow."""
    try:
        return math.exp(lm_loss)
    except OverflowError:
        return math.inf


def shown_perplexity(perplexity: float) -> str:
    """Formats a perplexity, however large it is."""
    return f"{perplexity:.3f}" if perplexity < 1e6 else f"{perplexity:.3e}"


_TAGS = {"learning_rate": "current_learning_rate"}  # metrics that MaxText's tags name differently

_COLUMNS = 80  # of a terminal of the usual width

_NOT_RECORDED = ("last_skipped", "skips_began", "rise_began")  # scalars for run/rollback.py only


def step_row(
    metrics: Mapping[str, float],
    seconds: float,
    tokens: float,
    tflops: float,
    peak_tflops: float = 0.0,
) -> dict[str, float]:
    """Returns the numbers of a train step, under MaxText's tags.

    Args:
      metrics: The scalars of the step: loss, total_weights (target tokens), lm_loss (cross entropy
        in nats per token), and others.
      seconds: Wall time of a step with the device's work.
      tokens: Tokens of a step on one device.
      tflops: TFLOPs of a step on one device.
      peak_tflops: Peak TFLOP/s of a device. An unknown one is 0 and has no MFU, and neither has one
        that the step beats.
    """
    row = {
        f"learning/{_TAGS.get(name, name)}": float(value)
        for name, value in metrics.items()
        if name not in _NOT_RECORDED
    }
    if "lm_loss" in metrics:
        row["learning/perplexity"] = perplexity(row["learning/lm_loss"])
    row |= {
        "perf/step_time_seconds": seconds,
        "perf/per_device_tflops": tflops,
        "perf/per_device_tflops_per_sec": tflops / seconds,
        "perf/per_device_tokens": tokens,
        "perf/per_device_tokens_per_sec": tokens / seconds,
    }
    if peak_tflops and tflops / seconds <= peak_tflops:
        row["perf/mfu"] = tflops / seconds / peak_tflops  # PaLM, appendix B
    return row


def step_line(step: int, row: Mapping[str, float], seconds_left: float | None = None) -> str:
    """Returns MaxText's line for scripts, plus additional fields.

    Args:
      step: The reported step.
      row: Its numbers, of `step_row`.
      seconds_left: Estimated seconds until the end of the run; None leaves them out.
    """
    parts = [
        f"completed step: {step}",
        f"seconds: {row['perf/step_time_seconds']:.3f}",
        f"TFLOP/s/device: {row['perf/per_device_tflops_per_sec']:.3f}",
        f"Tokens/s/device: {row['perf/per_device_tokens_per_sec']:.3f}",
        f"total_weights: {int(row['learning/total_weights'])}",
        f"loss: {row['learning/loss']:.3f}",
    ]
    if "learning/lm_loss" in row:
        parts.append(f"lm_loss: {row['learning/lm_loss']:.3f}")
    if "learning/perplexity" in row:
        parts.append(f"perplexity: {shown_perplexity(row['learning/perplexity'])}")
    if "perf/mfu" in row:
        parts.append(f"mfu: {100 * row['perf/mfu']:.1f}%")
    if "learning/grad_norm" in row:
        parts.append(f"grad_norm: {row['learning/grad_norm']:.3f}")
    if row.get("learning/skipped"):
        parts.append("skipped: 1")
    if "learning/current_learning_rate" in row:
        parts.append(f"lr: {row['learning/current_learning_rate']:.3e}")
    if seconds_left is not None:
        parts.append(f"eta: {format_duration(seconds_left)}")
    return ", ".join(parts)


def compact_step_line(
    step: int,
    row: Mapping[str, float],
    num_steps: int,
    seconds_left: float,
    *,
    lm_loss_beside: bool = False,
) -> str:
    """Returns a line of at most 80 columns.

    Of what does not fit, the gradient norm is left out first, then the MFU, then the learning rate.

    Args:
      step: The reported step.
      row: Its numbers, of `step_row`. Tokens per second are those of a device.
      num_steps: Steps of the run.
      seconds_left: Estimated seconds until its end.
      lm_loss_beside: Shows the cross entropy beside an objective that is none.
    """
    done = f"step {step + 1}/{num_steps}"
    parts = {"step": done, "loss": f"loss {row['learning/loss']:.4f}"}
    if lm_loss_beside and "learning/lm_loss" in row:
        parts["lm_loss"] = f"lm_loss {row['learning/lm_loss']:.4f}"
    if "learning/grad_norm" in row:
        parts["grad_norm"] = f"grad {row['learning/grad_norm']:.3f}"
    if "learning/current_learning_rate" in row:
        mantissa, _, exponent = f"{row['learning/current_learning_rate']:.1e}".partition("e")
        parts["lr"] = f"lr {mantissa}e{int(exponent)}"
    parts["speed"] = f"{short_count(row['perf/per_device_tokens_per_sec'])} tok/s"
    if "perf/mfu" in row:
        parts["mfu"] = f"mfu {row['perf/mfu']:.0%}"
    if row.get("learning/skipped"):
        parts["skipped"] = "skipped"
    parts["left"] = f"eta {format_duration(seconds_left).removeprefix('0:').removeprefix('0')}"
    # As wide as it will be at the end, so that the same numbers are shown all the time.
    spare = len(f"step {num_steps}/{num_steps}") - len(done)
    for name in ("grad_norm", "mfu", "lr", "lm_loss"):
        if len("  ".join(parts.values())) + spare <= _COLUMNS:
            break
        parts.pop(name, None)
    return "  ".join(parts.values())


@dataclasses.dataclass(frozen=True)
class EvaluationReport:
    """Report of one pass over held-out data.

    Attributes:
      step: The last completed training step.
      total_loss: Sum over targets, as the objective defines it.
      total_weights: Number of target tokens.
      num_batches: Number of batches.
      seconds: Wall time.
      correct: Number of targets that were the argmax; None if not counted.
      has_perplexity: Whether `total_loss` is a cross entropy, in nats.
      total_nats: Sum of the cross entropy beside an objective that is none; None if unknown.
      parts: Means of single losses and metrics of an objective that reads the model, by name.
    """

    step: int
    total_loss: float
    total_weights: float
    num_batches: int
    seconds: float
    correct: float | None = None
    has_perplexity: bool = True
    total_nats: float | None = None
    parts: Mapping[str, float] = dataclasses.field(default_factory=dict)

    @property
    def loss(self) -> float:
        """Mean of the objective per token; NaN without targets."""
        return self.total_loss / (self.total_weights or math.nan)

    @property
    def lm_loss(self) -> float | None:
        """Mean cross entropy in nats per token; NaN without targets."""
        if self.has_perplexity:
            return self.loss
        if self.total_nats is None:
            return None
        return self.total_nats / (self.total_weights or math.nan)

    @property
    def masked_accuracy(self) -> float | None:
        """Share of targets that were the argmax; NaN without targets, None if not counted."""
        return None if self.correct is None else self.correct / (self.total_weights or math.nan)

    def line(self) -> str:
        """Returns MaxText's line for scripts, plus additional fields."""
        parts = [f"Completed eval after train step {self.step}", f"loss={self.loss:.3f}"]
        if self.lm_loss is not None:
            if not self.has_perplexity:
                parts.append(f"lm_loss={self.lm_loss:.3f}")
            parts.append(f"perplexity={shown_perplexity(perplexity(self.lm_loss))}")
        parts += [
            f"total_weights={int(self.total_weights)}",
            f"batches={self.num_batches}",
            f"seconds={self.seconds:.3f}",
        ]
        if self.masked_accuracy is not None:
            parts.append(f"masked_accuracy={self.masked_accuracy:.4f}")
        return ", ".join(parts)

    def row(self) -> dict[str, float]:
        """Returns the numbers of the report, under MaxText's tags."""
        row = {
            "eval/avg_loss": self.loss,
            "eval/total_loss": self.total_loss,
            "eval/total_weights": self.total_weights,
            "eval/seconds": self.seconds,
        }
        if self.lm_loss is not None:
            row["eval/lm_loss"] = self.lm_loss
            row["eval/avg_perplexity"] = perplexity(self.lm_loss)
        if self.masked_accuracy is not None:
            row["eval/masked_accuracy"] = self.masked_accuracy
        return row | {f"eval/{name}": mean for name, mean in self.parts.items()}


# Source of a compiled step, see runtime.compiled_steps.
_SOURCES = {
    "": "compiled",
    "cache": "loaded from the compilation cache",
    "file": "loaded from compiled_trainstep_file",
}


class Terminal(Sink):
    """Prints steps, compilations, skips and rollbacks."""

    def __init__(
        self,
        num_steps: int,
        log: Callable[[str], None] = print,
        *,
        step_line: str = "auto",
        lm_loss_beside: bool = False,
    ):
        """Prints nothing yet.

        Args:
          num_steps: Steps of the run.
          log: Prints a line.
          step_line: "compact", "full", or "auto": compact on a terminal, else full.
          lm_loss_beside: As in `compact_step_line`.
        """
        self._compact = step_line == "compact" or (step_line == "auto" and sys.stdout.isatty())
        self._num_steps = num_steps
        self._lm_loss_beside = lm_loss_beside
        self.line = log

    def write(self, event: Event) -> None:
        """Prints a line for the kinds of events that users wait for, and none for others."""
        fields = event.fields
        if event.kind == "compile":
            shape = f"{fields['rows']} x {fields['length']} tokens"
            source = _SOURCES[fields.get("source", "")]
            self.line(f"Train step ({shape}) {source} in {fields['compile_seconds']:.1f} s")
        if event.kind == "step_skipped":
            count = fields["count"]
            steps = f"Step {event.step}" if count == 1 else f"{count} steps up to {event.step}"
            self.line(f"{steps} skipped: {fields['reason']}")
        if event.kind == "warning":
            self.line(f"WARNING: {fields['reason']}.")
        # A repeated event was printed before, and its exclusions when the data were opened.
        if event.kind == "rollback" and not fields.get("again"):
            first, end = fields["samples"]
            self.line(
                f"Rolling back to step {fields['restored_step']} ({fields['source']}), skipping "
                f"samples {first} to {end - 1}. Reason (step {fields['detected_step']}): "
                f"{fields['reason']}"
            )
        if event.kind == "peak_measured":
            self.line(
                f"Peak of a device, for MFU: {fields['peak_tflops']:.3g} TFLOP/s instead of "
                f"{fields['previous_tflops']:.3g}, which a step exceeded ({fields['peak_source']})"
            )
        if event.kind == "step" and event.step is not None:
            steps_left = self._num_steps - 1 - event.step
            seconds_left = fields["perf/step_time_seconds"] * steps_left
            if self._compact:
                line = compact_step_line(
                    event.step,
                    fields,
                    self._num_steps,
                    seconds_left,
                    lm_loss_beside=self._lm_loss_beside,
                )
                self.line(line)
            else:
                self.line(step_line(event.step, fields, seconds_left))
        seconds_since_launch = fields.get("seconds_since_launch")
        if seconds_since_launch:
            self.line(f"First step after {seconds_since_launch:.1f} s")
