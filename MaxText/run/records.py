"""All records of a run: its start, its steps, its files."""

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from etils import epath

from MaxText import program_start
from MaxText.compilation import compilation_cache
from MaxText.config.schema import Config, flatten
from MaxText.config.serialization import changed_keys, resolved_yaml
from MaxText.cost.flops import model_cost
from MaxText.errors import TrainingDivergedError
from MaxText.growth.growth_plan import event_fields, parent, sizes
from MaxText.hardware.peak_flops import PeakFlops, peak_flops
from MaxText.input_pipeline.iterator import EvalBatches, TrainIterator
from MaxText.input_pipeline.sequences.batch_schedule import BatchSchedule
from MaxText.metrics.event_stream import EventLog, open_stream
from MaxText.metrics.events import provenance
from MaxText.metrics.loss_trend import LossTrend
from MaxText.metrics.profiler import StepProfiler, memory_row
from MaxText.metrics.run_record import trained_loss_tag
from MaxText.metrics.sinks.tensorboard import TENSORBOARD_FOLDER
from MaxText.metrics.step_line import Terminal, step_row
from MaxText.run.restore import Lineage, RestoreResult
from MaxText.run.training_stats import TrainingStats
from MaxText.training.assembly import TrainSetup
from MaxText.training.objective import is_in_nats
from MaxText.training.step import is_loss

# Parameters, FLOPs and memory as tables with formulas, of the newest start.
START_FILE = "start.txt"
_BEATEN_REPORTS = 3  # reports above a peak measured again, after which they are the peak


@dataclasses.dataclass(frozen=True)
class RunLogger:
    """All records of a run."""

    events: EventLog
    terminal: Terminal
    profiler: StepProfiler
    stats: TrainingStats
    lineage: Lineage
    trend: LossTrend

    def close(self) -> None:
        self.events.close()
        self.profiler.close()

    def log_data_events(self, batches: TrainIterator | EvalBatches | None, step: int) -> None:
        """Records retried reads and skipped records."""
        if batches is None:
            return
        for message in batches.retries.drain():
            self.events.emit("data_retry", step=step, reason=message)
        while batches.skipped:
            reason = batches.skipped.pop(0)
            self.events.emit("record_skipped", step=step, reason=reason, count=1)


def open_run_logger(
    config: Config,
    run_folder: epath.Path,
    restored: RestoreResult,
    setup: TrainSetup,
    batch_schedule: BatchSchedule,
    batches: TrainIterator,
    devices: Sequence[Any],
    last_step: int,
    peak: PeakFlops,
    details: Sequence[str] = (),
    callbacks: Sequence[Callable[[Mapping[str, Any]], None]] = (),
    log: Callable[[str], None] = print,
) -> RunLogger:
    """Opens the records of a run, and records this start.

    `details` are lines for START_FILE; `callbacks` get each event as a row of events.jsonl.
    """
    run = config.run
    monitoring = config.monitoring
    model = setup.model
    num_steps = last_step + 1
    stats = TrainingStats(model, config.batch, batch_schedule, len(devices), num_steps, peak)
    lineage = Lineage.of(restored, stats)
    length = model.config.shape.max_target_length
    cost = model_cost(model, sequence_length=length, optimizer_state=setup.abstract_state.opt_state)
    summary = stats.summary(cost.training_bytes)
    if jax.process_index() == 0:
        text = "\n".join([*details, summary, stats.describe(), cost.describe()])
        (run_folder / START_FILE).write_text(f"{text}\n", encoding="utf-8")
    log(f"{summary}\nDetails: {run_folder / START_FILE}")
    tensorboard = run_folder / TENSORBOARD_FOLDER
    if monitoring.enable_tensorboard:
        log(f"To see full metrics 'tensorboard --logdir={tensorboard}'")
    in_nats = is_in_nats(model.config.objective)
    terminal = Terminal(num_steps, step_line=monitoring.step_line, lm_loss_beside=not in_nats)
    first_step = restored.first_step
    is_due = restored.metadata.get("evaluation_is_due") and config.evaluation.eval_interval > 0
    events = open_stream(
        run_folder,
        monitoring,
        run.run_name,
        flatten(config),
        first_step=first_step,
        first_evaluation=first_step - bool(is_due),
        terminal=terminal,
        callbacks=callbacks,
    )
    baseline = batches.unigram_entropy_nats if in_nats else None
    given = flatten(config)
    chosen = flatten(config.model_copy(update={"model": model.config}))
    fields = {
        "run_name": run.run_name,
        "num_steps": num_steps,
        "num_parameters": model.num_parameters,
        "num_devices": len(devices),
        "num_processes": jax.process_count(),
        "device_kind": jax.devices()[0].device_kind,
        "platform": jax.default_backend(),
        "jax": jax.__version__,
        "tokens_of_run": stats.tokens_of_run,
        "flops_of_run": stats.flops_of_run,
        "peak_tflops": peak.tflops,
        "peak_source": peak.source,
        "cost": cost.fields(),
        "lineage": [*lineage.ancestors],
        "data": {**batches.facts, "vocab_size": model.config.shape.vocab_size},
        "objective_in_nats": in_nats,
        "unigram_entropy_nats": baseline,
        # Only process 0 records it. Git need not search the checkout on every host.
        "provenance": provenance() if jax.process_index() == 0 else {},
        "changed_keys": changed_keys(config),
        # What replaced `auto`, such as the dtype.
        "resolved_keys": {key: value for key, value in chosen.items() if value != given[key]},
    }
    emit_start(events, restored, fields)
    profiler = StepProfiler(monitoring, tensorboard, first_step)
    trend = LossTrend(baseline, restored.metadata.get("loss_trend"))
    return RunLogger(events, terminal, profiler, stats, lineage, trend)


def emit_start(events: EventLog, restored: RestoreResult, fields: Mapping[str, Any]) -> None:
    """Emits "resume" (from the run's own checkpoint) or "start".

    A changed configuration and a growth are events of their own.
    """
    events.emit(
        "resume" if restored.how == "resume" else "start",
        step=restored.first_step,
        seconds=time.time() - program_start.launch_time(),
        source=restored.source,
        lost=events.lost,
        **fields,
    )
    if restored.changes:
        changes = {name: list(values) for name, values in restored.changes.items()}
        events.emit("config_change", step=restored.first_step, changes=changes)
    record = restored.growth
    places = {"from": restored.folder}
    # A model grown by convert.py is first trained here, and no run has reported that.
    if restored.how == "parameters":
        places = {"from": parent(restored.metadata).get("folder", ""), "through": restored.folder}
    # A zoom alone does not count.
    if record and restored.how in ("growth", "parameters") and sizes(record):
        events.emit("growth", step=restored.first_step, **places, **event_fields(record))


def write_run_files(run_folder: Any, config: Config, tokenizer: Path | None) -> None:
    """Writes config.yml and the tokenizer on process 0."""
    from MaxText.conversion.tokenizer_copy import keep_tokenizer

    if jax.process_index() != 0:
        return
    (run_folder / "config.yml").write_text(resolved_yaml(config), encoding="utf-8")
    if tokenizer is not None:
        keep_tokenizer(tokenizer, run_folder)


@dataclasses.dataclass
class MetricLogger:
    """Converts the scalars of train steps to events, one step late.

    Reading metrics blocks on the device, so they are read after the next step was dispatched. The
    loss and its parts are means since the last report; other metrics are of the newest step.
    `observe` gets step and scalars of each report.
    """

    run_logger: RunLogger
    config: Config
    last_step: int
    observe: Callable[[int, Mapping[str, float]], None] = lambda step, metrics: None

    def __post_init__(self) -> None:
        self._has_reported = False
        self._data_seconds = 0.0
        self._peak = self.run_logger.stats.peak
        self._beaten: list[float] = []  # TFLOP/s of the last reports, all above the peak
        self._trend_tag = trained_loss_tag(is_in_nats(self.config.model.objective))
        self.start(0)

    def start(self, first_step: int) -> None:
        """Starts the clock before the first step or after a rollback."""
        if self._has_reported:
            self.run_logger.trend.roll_back()
        self._losses: list[dict[str, Any]] = []  # of the steps since, on the device
        self._newest: Mapping[str, Any] | None = None
        self._in_flight: Mapping[str, Any] | None = None  # of the step after the newest one
        self.newest_step: int | None = None  # the last dispatched step
        self._waiting = False  # whether the newest step is unreported
        self._reported_step = first_step - 1
        self._since = time.perf_counter()

    def add(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Records the scalars of a step; reports the previous one if pending."""
        self._in_flight = metrics
        self.flush()
        averaged = {name: x for name, x in metrics.items() if is_loss(name) or name == "skipped"}
        self._losses.append(averaged)
        self._newest = metrics
        self.newest_step = step
        self._waiting = step % self.config.monitoring.step_log_period == 0 or step == self.last_step

    @property
    def idle_seconds(self) -> float:
        """Wall time since the last report, without pauses."""
        return time.perf_counter() - self._since

    def flush(self) -> None:
        """Reports a pending step; raises TrainingDivergedError on a bad loss."""
        step = self.newest_step
        if not self._waiting or step is None:
            return
        self._waiting = False
        newest = jax.device_get(self._newest)
        metrics = {name: np.asarray(value).item() for name, value in newest.items()}
        shown = metrics | self._mean_losses()
        now = time.perf_counter()
        elapsed = now - self._since
        updates = step - self._reported_step
        self._since = now
        self._reported_step = step
        stats = self.run_logger.stats
        tokens = stats.tokens_per_device(step)
        tflops = stats.flops(step).tflops(tokens)
        speed = tflops * updates / elapsed
        if speed > self._peak.tflops > 0:
            self._raise_peak(step, speed)
        else:
            self._beaten = []
        row = step_row(shown, elapsed / updates, tokens, tflops, self._peak.tflops)
        data_seconds = min(self._data_seconds, elapsed)
        self._data_seconds = 0.0
        fields: dict[str, Any] = {}
        if not self._has_reported:
            self._has_reported = True
            fields["seconds_since_launch"] = round(time.time() - program_start.launch_time(), 3)
        self.run_logger.events.emit(
            "step",
            step=step,
            seconds=elapsed,
            updates=updates,
            data_seconds=round(data_seconds, 6),
            **row,
            **memory_row(),
            **self.run_logger.lineage.progress(step),
            **fields,
        )
        if not metrics.get("skipped"):
            self.run_logger.trend.add(row[self._trend_tag], updates)
            if not math.isfinite(shown["loss"]) and self.config.guard.abort_on_nan_loss:
                raise TrainingDivergedError(
                    f"the loss of step {step} is {shown['loss']}: stopped without saving. Rerun "
                    "the command to resume from the last checkpoint, or set "
                    "abort_on_nan_loss=false to continue training."
                )
        self.observe(step, metrics)

    def _raise_peak(self, step: int, speed: float) -> None:
        """Corrects a measured peak that a report has beaten, at `speed` TFLOP/s.

        Measures it again. If even that is too low for several reports, they are the peak: one alone
        may be an artifact of the clock.
        """
        self._beaten.append(speed)
        number = len(self._beaten)
        if not self._peak.is_measured or number not in (1, _BEATEN_REPORTS):
            return
        jax.block_until_ready(self._in_flight)  # a running step would slow the measurement down
        began = time.perf_counter()
        if number == 1:
            folder = compilation_cache.folder_in_use()
            peak = peak_flops(cache_folder=folder, beaten_by=speed)
        else:
            source = f"measured: the fastest of {number} reports that all exceeded a matmul"
            peak = PeakFlops(max(self._beaten), source)
        if peak.tflops > self._peak.tflops:
            previous = self._peak
            self._peak = peak
            self.run_logger.events.emit(
                "peak_measured",
                step=step,
                seconds=time.perf_counter() - began,
                peak_tflops=peak.tflops,
                peak_source=peak.source,
                previous_tflops=previous.tflops,
            )
        self._since += time.perf_counter() - began

    def _mean_losses(self) -> dict[str, float]:
        """Blocks for the means since the last report, and resets.

        Empty if those are of the last step. Skipped steps count only if all were skipped.
        """
        steps = self._losses
        self._losses = []
        if len(steps) < 2:
            return {}
        steps = [losses for losses in jax.device_get(steps) if not losses.pop("skipped", 0)]
        return {
            name: float(sum((losses[name] for losses in steps), np.float32(0))) / len(steps)
            for name in (steps[0] if steps else ())
        }

    def complete(self) -> None:
        """Blocks on the newest step and reports it. Raises like `flush`.

        Called before a checkpoint, so that no broken state is saved and the rows cover every step
        that a restart does not repeat, and at the end of the run.
        """
        self._waiting = self.newest_step != self._reported_step
        self.flush()

    @contextlib.contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        """Counts the time inside as data wait if the devices are idle after it."""
        began = time.perf_counter()
        yield
        if self._newest is None or self._newest["loss"].is_ready():
            self._data_seconds += time.perf_counter() - began

    @contextlib.contextmanager
    def exclude_time(self) -> Iterator[None]:
        """Reports a pending step, then excludes the time inside.

        Waits for the newest step first, or its computation would count as part of the pause.
        """
        self.flush()
        jax.block_until_ready(self._newest)
        began = time.perf_counter()
        try:
            yield
        finally:
            self._since += time.perf_counter() - began
