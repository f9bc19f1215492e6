"""Inputs of the scorer, and scores for the terminal and JSON."""

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from MaxText.formatting import format_table
from MaxText.monitoring.step_line import perplexity, shown_perplexity

Progress = Callable[[int, int], None]  # (done, total)

_SECONDS_PER_LINE = 30.0  # between progress lines


def log_progress(name: str, log: Callable[[str], None]) -> Progress:
    """Returns a callback that logs progress, at most twice a minute.

    `name` says what is scored. The last call, with all done, logs nothing.
    """
    start_time = time.perf_counter()
    last_log_time = start_time

    def progress(num_done: int, total: int) -> None:
        nonlocal last_log_time
        current_time = time.perf_counter()
        if current_time - last_log_time >= _SECONDS_PER_LINE and num_done < total:
            last_log_time = current_time
            log(f"{name}: {num_done:,} of {total:,} scored in {current_time - start_time:.0f} s")

    return progress


class Continuation(NamedTuple):
    """Ids to score after a context. Both hold at least one id."""

    context: Sequence[int]
    ids: Sequence[int]


def rolling_windows(ids: Sequence[int], prefix: int, window: int) -> list[Continuation]:
    """Splits a text into continuations that score each id exactly once.

    Windows are disjoint, except that the last one is moved left until it is full and scores only
    the remaining ids. Same as loglikelihood_rolling of lm-evaluation-harness.

    Args:
      ids: Of the text.
      prefix: The id before the first one.
      window: Tokens that the model can read.
    """
    continuations = []
    for start in range(0, len(ids), window):
        end = min(start + window, len(ids))
        context = ids[max(0, end - window - 1) : start] if start else [prefix]
        continuations.append(Continuation(context, ids[start:end]))
    return continuations


@dataclasses.dataclass(frozen=True)
class SourceScore:
    """Sums over the targets of one or several sources."""

    name: str
    total_nll: float  # summed cross entropy of the targets, in nats
    num_targets: int
    num_bytes: int | None  # UTF-8 bytes of the targets; None if unknown
    bytes_unavailable_reason: str
    num_batches: int
    seconds: float  # wall time without compilation
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)  # split sizes and digests
    correct: int | None = None  # argmax hits; None except for masked language models
    objective: str = ""  # loss_type, unless the loss of the objective is that cross entropy
    total_objective: float = 0.0  # its mean times the targets

    @property
    def lm_loss(self) -> float:
        """Cross entropy of softmax(logits) in nats per target; NaN without targets."""
        return self.total_nll / (self.num_targets or math.nan)

    @property
    def loss(self) -> float:
        """The objective per target, without auxiliary losses; NaN without targets."""
        total = self.total_objective if self.objective else self.total_nll
        return total / (self.num_targets or math.nan)

    @property
    def perplexity(self) -> float:
        """Exponential of `lm_loss`."""
        return perplexity(self.lm_loss)

    @property
    def bits_per_byte(self) -> float | None:
        """Bits per UTF-8 byte by `lm_loss`, comparable across tokenizers; None if undefined."""
        if not self.num_bytes:
            return None
        return self.total_nll / math.log(2) / self.num_bytes

    @property
    def masked_accuracy(self) -> float | None:
        """Share of hidden tokens predicted as argmax."""
        return None if self.correct is None else self.correct / (self.num_targets or math.nan)

    @property
    def tokens_per_second(self) -> float:
        """Targets per second of wall time."""
        return self.num_targets / (self.seconds or math.nan)

    def to_json(self) -> dict[str, Any]:
        """Returns JSON values, including the derived metrics."""
        row = {
            "source": self.name,
            "loss": self.loss,
            "lm_loss": self.lm_loss,
            "perplexity": self.perplexity,
            "bits_per_byte": self.bits_per_byte,
            "nats": self.total_nll,
            "targets": self.num_targets,
            "bytes": self.num_bytes,
            "batches": self.num_batches,
            "seconds": self.seconds,
            "tokens_per_second": self.tokens_per_second,
        }
        if self.correct is not None:
            row |= {"masked_accuracy": self.masked_accuracy, "correct": self.correct}
        if self.objective:
            row["loss_type"] = self.objective
        if self.bytes_unavailable_reason:
            row["bytes_unavailable_reason"] = self.bytes_unavailable_reason
        return row | self.facts


def total_score(scores: Sequence[SourceScore]) -> SourceScore:
    """Sums all sources; means are weighted by targets."""
    sizes = [score.num_bytes for score in scores]
    missing = (score.bytes_unavailable_reason for score in scores if score.num_bytes is None)
    correct = [score.correct for score in scores]
    return SourceScore(
        name="total",
        total_nll=math.fsum(score.total_nll for score in scores),
        num_targets=sum(score.num_targets for score in scores),
        num_bytes=None if None in sizes else sum(size or 0 for size in sizes),
        bytes_unavailable_reason=next(missing, ""),
        num_batches=sum(score.num_batches for score in scores),
        seconds=sum(score.seconds for score in scores),
        correct=None if None in correct else sum(count or 0 for count in correct),
        objective=next((score.objective for score in scores if score.objective), ""),
        total_objective=math.fsum(score.total_objective for score in scores),
    )


def source_table(scores: Sequence[SourceScore]) -> str:
    """Formats one row per source, a total, and notes on missing metrics."""
    total = total_score(scores)
    header = ["source", "targets", "bytes", "loss", "perplexity", "bits/byte"]
    if total.objective:
        header.insert(header.index("perplexity"), "lm_loss")
    if total.correct is not None:
        header.append("masked accuracy")
    rows = [_cells(score) for score in scores]
    lines = [format_table(header, rows, _cells(total), right=range(1, len(header)))]
    for score in scores:
        if score.num_bytes is None:
            reason = score.bytes_unavailable_reason
            lines.append(f"bits/byte of {score.name} is not shown: {reason}")
    kinds = f"loss of {total.objective} and lm_loss in nats" if total.objective else "loss in nats"
    lines.append(
        f"{kinds} per token; "
        f"{total.num_batches:,} batches in {total.seconds:.1f} s, "
        f"{total.tokens_per_second:,.0f} tokens/s"
    )
    return "\n".join(lines)


def _cells(score: SourceScore) -> list[str]:
    """Returns a row of source_table; the accuracy only for masked language models."""
    size = score.num_bytes
    bits = score.bits_per_byte
    cells = [
        score.name,
        f"{score.num_targets:,}",
        "-" if size is None else f"{size:,}",
        f"{score.loss:.4f}",
        *([f"{score.lm_loss:.4f}"] if score.objective else []),
        shown_perplexity(score.perplexity),
        "-" if bits is None else f"{bits:.4f}",
    ]
    accuracy = score.masked_accuracy
    return cells if accuracy is None else [*cells, f"{accuracy:.4f}"]


class TaskScore(NamedTuple):
    """Numbers of one task, with the file it was read from."""

    task: str
    path: str
    metrics: dict[str, float]  # perplexities, shares between 0 and 1, bits
    counts: dict[str, int]  # of passages, pages, words, bytes, tokens
    seconds: float  # wall time


def task_table(scores: Sequence[TaskScore]) -> str:
    """Formats one row per metric, with the counts it was computed over."""
    rows = []
    for score in scores:
        counts = ", ".join(f"{count:,} {unit}" for unit, count in score.counts.items())
        for metric, value in score.metrics.items():
            formatted = f"{value:.4f}" if abs(value) < 100 else f"{value:.6g}"
            rows.append([score.task, metric.replace("_", " "), formatted, counts])
            counts = ""  # shown in the first row of a task
    seconds = sum(score.seconds for score in scores)
    total = ["in all", "", "", f"{seconds:.1f} s"]
    return format_table(["task", "metric", "value", "over"], rows, total, right=(2,))
