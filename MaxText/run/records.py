"""All records of a run: its start, its steps, its files.

`RunLogger` holds what records a run; `MetricLogger` feeds it with the scalars of train steps.
"""

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
from MaxText.cost.flops import ModelCost, model_cost
from MaxText.errors import TrainingDivergedError
from MaxText.growth.growth_plan import event_fields, parent, sizes
from MaxText.hardware.peak_flops import PeakFlops, peak_flops
from MaxText.input_pipeline.iterator import EvalBatches, TrainIterator
from MaxText.monitoring.event_stream import EventLog, open_stream
from MaxText.monitoring.events import provenance
from MaxText.monitoring.loss_trend import LossTrend
from MaxText.monitoring.profiler import StepProfiler, memory_row
from MaxText.monitoring.run_record import trained_loss_tag
from MaxText.monitoring.sinks.tensorboard import TENSORBOARD_FOLDER
from MaxText.monitoring.step_line import Terminal, step_row
from MaxText.run.restore import Lineage, RestoreResult
from MaxText.run.training_stats import TrainingStats
from MaxText.training.assembly import TrainSetup
from MaxText.training.metric_names import as_scalars, is_loss
from MaxText.training.objective import is_in_nats

# Parameters, FLOPs and memory as tables with formulas, of the newest start.
START_FILE = "start.txt"
_REPORTS_ABOVE_PEAK = 3  # reports above a peak measured again, after which they are the peak


@dataclasses.dataclass(frozen=True)
class RunLogger:
    """All records of a run.

    Attributes:
      events: The events, sent to files, TensorBoard, W&B and the terminal.
      terminal: Prints lines; `terminal.line` is the log function of the run.
      profiler: Traces some steps.
      stats: Sizes of the run.
      lineage: What the run and its ancestors have spent.
      trend: Judges the training loss.
    """

    events: EventLog
    terminal: Terminal
    profiler: StepProfiler
    stats: TrainingStats
    lineage: Lineage
    trend: LossTrend

    def close(self) -> None:
        """Closes all files, within a minute or so."""
        self.events.close()
        self.profiler.close()

    def log_data_events(self, batches: TrainIterator | EvalBatches | None, step: int) -> None:
        """Records retried reads and skipped records of the data; None has none."""
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
    *,
    restored: RestoreResult,
    setup: TrainSetup,
    stats: TrainingStats,
    batches: TrainIterator,
    details: Sequence[str] = (),
    callbacks: Sequence[Callable[[Mapping[str, Any]], None]] = (),
) -> RunLogger:
    """Opens the records of a run, and records this start.

    Args:
      config: The resolved configuration.
      run_folder: The folder of the run.
      restored: Where this start begins.
      setup: Model and optimizer, with `auto` values resolved.
      stats: Sizes of the run.
      batches: The training batches, which know the facts of their data.
      details: Lines for START_FILE, before the sizes.
      callbacks: Get each event as a row of events.jsonl.

    Returns:
      The records, with an event "start" or "resume".
    """
    monitoring = config.monitoring
    first_step = restored.first_step
    in_nats = is_in_nats(setup.model)
    terminal = Terminal(stats.num_steps, step_line=monitoring.step_line, lm_loss_beside=not in_nats)
    length = setup.model.config.shape.max_target_length
    cost = model_cost(
        setup.model, sequence_length=length, optimizer_state=setup.abstract_state.opt_state
    )
    _log_sizes(run_folder, stats=stats, cost=cost, details=details, log=terminal.line)
    tensorboard = run_folder / TENSORBOARD_FOLDER
    if monitoring.enable_tensorboard:
        terminal.line(f"To see full metrics 'tensorboard --logdir={tensorboard}'")
    makes_up_for_evaluation = config.evaluation.eval_interval > 0 and restored.progress.get(
        "evaluation_is_due"
    )
    events = open_stream(
        run_folder,
        monitoring,
        config.run.run_name,
        flatten(config),
        first_step=first_step,
        first_evaluation=first_step - 1 if makes_up_for_evaluation else first_step,
        terminal=terminal,
        callbacks=callbacks,
    )
    lineage = Lineage.of(restored, stats)
    baseline = batches.unigram_entropy_nats if in_nats else None
    fields = {
        **_size_fields(stats, cost),
        **_environment_fields(),
        **_config_fields(config, setup),
        "lineage": list(lineage.ancestors),
        "data": {**batches.facts, "vocab_size": setup.model.config.shape.vocab_size},
        "objective_in_nats": in_nats,
        "unigram_entropy_nats": baseline,
    }
    emit_start(events, restored, fields)
    if events.lost["steps"]:
        terminal.line(
            f"Steps repeated: {events.lost['steps']}, which were done after the last checkpoint, "
            f"from step {first_step} on"
        )
    return RunLogger(
        events=events,
        terminal=terminal,
        profiler=StepProfiler(monitoring, tensorboard, first_step),
        stats=stats,
        lineage=lineage,
        trend=LossTrend(baseline, restored.progress.get("loss_trend")),
    )


def _log_sizes(
    run_folder: epath.Path,
    *,
    stats: TrainingStats,
    cost: ModelCost,
    details: Sequence[str],
    log: Callable[[str], None],
) -> None:
    """Logs the sizes of a run in a few lines, and writes all of them to START_FILE."""
    summary = stats.summary(cost.training_bytes)
    if jax.process_index() == 0:
        text = "\n".join([*details, summary, stats.describe(), cost.describe()])
        (run_folder / START_FILE).write_text(f"{text}\n", encoding="utf-8")
    log(f"{summary}\nDetails: {run_folder / START_FILE}")


def _size_fields(stats: TrainingStats, cost: ModelCost) -> dict[str, Any]:
    """Returns the fields of a start event about the sizes of the run."""
    return {
        "num_steps": stats.num_steps,
        "num_parameters": stats.model.num_parameters,
        "num_devices": stats.num_devices,
        "tokens_of_run": stats.tokens_of_run,
        "flops_of_run": stats.flops_of_run,
        "peak_tflops": stats.peak.tflops,
        "peak_source": stats.peak.source,
        "cost": cost.fields(),
    }


def _environment_fields() -> dict[str, Any]:
    """Returns the fields of a start event about devices and programs."""
    return {
        "num_processes": jax.process_count(),
        "device_kind": jax.devices()[0].device_kind,
        "platform": jax.default_backend(),
        "jax": jax.__version__,
        # Only process 0 records it. Git need not search the checkout on every host.
        "provenance": provenance() if jax.process_index() == 0 else {},
    }


def _config_fields(config: Config, setup: TrainSetup) -> dict[str, Any]:
    """Returns the fields of a start event about the configuration."""
    values = flatten(config)
    resolved_values = flatten(config.model_copy(update={"model": setup.model.config}))
    return {
        "run_name": config.run.run_name,
        "changed_keys": changed_keys(config),
        # What replaced `auto`, such as the dtype.
        "resolved_keys": {
            key: value for key, value in resolved_values.items() if value != values[key]
        },
    }


def emit_start(events: EventLog, restored: RestoreResult, fields: Mapping[str, Any]) -> None:
    """Emits "resume" (from the run's own checkpoint) or "start".

    A changed configuration and a growth are events of their own.

    Args:
      events: Gets the events.
      restored: Where this start begins.
      fields: More fields of the event.
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
    folders = {"from": restored.folder}
    # A model grown by convert.py is first trained here, and no run has reported that.
    if restored.how == "parameters":
        folders = {"from": parent(restored.metadata).get("folder", ""), "through": restored.folder}
    # A zoom alone does not count.
    if record and restored.how in ("growth", "parameters") and sizes(record):
        events.emit("growth", step=restored.first_step, **folders, **event_fields(record))


def write_run_files(run_folder: epath.Path, config: Config, tokenizer: Path | None) -> None:
    """Writes config.yml and, if there is one, the tokenizer; on process 0."""
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

    Attributes:
      run_logger: Gets the events.
      config: The configuration of the run.
      last_step: The last step of the run, which is always reported.
      observe: Gets step and scalars of each report.
      newest_step: The last dispatched step; None before the first one.
    """

    run_logger: RunLogger
    config: Config
    last_step: int
    observe: Callable[[int, Mapping[str, float]], None] = lambda step, metrics: None

    def __post_init__(self) -> None:
        self._has_reported = False
        self._data_seconds = 0.0
        self._peak = self.run_logger.stats.peak
        self._speeds_above_peak: list[float] = []  # TFLOP/s of the last reports
        self._trend_tag = trained_loss_tag(is_in_nats(self.run_logger.stats.model))
        self.start(0)

    def start(self, first_step: int) -> None:
        """Starts the clock before the first step or after a rollback."""
        if self._has_reported:
            self.run_logger.trend.roll_back()
        self._losses: list[dict[str, jax.Array]] = []  # of the steps since the last report
        self._newest: Mapping[str, Any] | None = None  # arrays on the devices
        self._in_flight: Mapping[str, jax.Array] | None = None  # of the step after the newest one
        self.newest_step: int | None = None
        self._waiting = False  # whether the newest step is unreported
        self._reported_step = first_step - 1
        self._since = time.perf_counter()

    def add(self, step: int, metrics: Mapping[str, jax.Array]) -> None:
        """Records the scalars of a step; reports the previous one if pending."""
        self._in_flight = metrics
        self.flush()
        self._losses.append(
            {name: value for name, value in metrics.items() if is_loss(name) or name == "skipped"}
        )
        self._newest = metrics
        self.newest_step = step
        self._waiting = step % self.config.monitoring.step_log_period == 0 or step == self.last_step

    @property
    def idle_seconds(self) -> float:
        """Wall time since the last report, without pauses."""
        return time.perf_counter() - self._since

    def flush(self) -> None:
        """Reports a pending step.

        Raises:
          TrainingDivergedError: If its loss is not finite and `abort_on_nan_loss` is set.
        """
        step = self.newest_step
        if not self._waiting or step is None:
            return
        self._waiting = False
        newest = jax.device_get(self._newest)
        metrics = as_scalars(newest)
        reported = metrics | self._mean_losses()
        reported_at = time.perf_counter()
        elapsed = reported_at - self._since
        updates = step - self._reported_step
        self._since = reported_at
        self._reported_step = step
        row = self._step_row(step, reported, elapsed / updates)
        self._emit_step(step, row, elapsed=elapsed, updates=updates)
        if not metrics.get("skipped"):
            self.run_logger.trend.add(row[self._trend_tag], updates)
            if not math.isfinite(reported["loss"]) and self.config.guard.abort_on_nan_loss:
                raise TrainingDivergedError(
                    f"the loss of step {step} is {reported['loss']}: stopped without saving. Rerun "
                    "the command to resume from the last checkpoint, or set "
                    "abort_on_nan_loss=false to continue training."
                )
        self.observe(step, metrics)

    def _step_row(
        self, step: int, metrics: Mapping[str, float], seconds: float
    ) -> dict[str, float]:
        """Returns the numbers of a report by tag, after correcting a peak that it has beaten.

        Args:
          step: The reported step.
          metrics: Its scalars.
          seconds: Wall time of a step.
        """
        stats = self.run_logger.stats
        tokens = stats.tokens_per_device(step)
        tflops = stats.flops(step).tflops(tokens)
        speed = tflops / seconds
        if speed > self._peak.tflops > 0:
            self._raise_peak(step, speed)
        else:
            self._speeds_above_peak = []
        return step_row(
            metrics,
            seconds=seconds,
            tokens=tokens,
            tflops=tflops,
            peak_tflops=self._peak.tflops,
        )

    def _emit_step(
        self, step: int, row: Mapping[str, float], *, elapsed: float, updates: int
    ) -> None:
        """Emits the event of a report; the first one of a start has the time since its launch.

        Args:
          step: The reported step.
          row: Its numbers by tag.
          elapsed: Seconds since the last report, without pauses.
          updates: Steps since the last report.
        """
        data_seconds = min(self._data_seconds, elapsed)
        self._data_seconds = 0.0
        first_report: dict[str, float] = {}
        if not self._has_reported:
            self._has_reported = True
            seconds_since_launch = time.time() - program_start.launch_time()
            first_report["seconds_since_launch"] = round(seconds_since_launch, 3)
        self.run_logger.events.emit(
            "step",
            step=step,
            seconds=elapsed,
            updates=updates,
            data_seconds=round(data_seconds, 6),
            **row,
            **memory_row(),
            **self.run_logger.lineage.progress(step),
            **first_report,
        )

    def _raise_peak(self, step: int, speed: float) -> None:
        """Corrects a measured peak that a report has beaten.

        Measures it again. If even that is too low for several reports, they are the peak: one alone
        may be an artifact of the clock.

        Args:
          step: The reported step.
          speed: Its TFLOP/s per device.
        """
        self._speeds_above_peak.append(speed)
        num_reports = len(self._speeds_above_peak)
        if not self._peak.is_measured or num_reports not in (1, _REPORTS_ABOVE_PEAK):
            return
        jax.block_until_ready(self._in_flight)  # a running step would slow the measurement down
        began = time.perf_counter()
        if num_reports == 1:
            folder = compilation_cache.folder_in_use()
            peak = peak_flops(cache_folder=folder, beaten_by=speed)
        else:
            source = f"measured: the fastest of {num_reports} reports that all exceeded a matmul"
            peak = PeakFlops(max(self._speeds_above_peak), source)
        if peak.tflops > self._peak.tflops:
            previous_peak = self._peak
            self._peak = peak
            self.run_logger.events.emit(
                "peak_measured",
                step=step,
                seconds=time.perf_counter() - began,
                peak_tflops=peak.tflops,
                peak_source=peak.source,
                previous_tflops=previous_peak.tflops,
            )
        self._since += time.perf_counter() - began

    def _mean_losses(self) -> dict[str, float]:
        """Returns the mean losses since the last report, and begins new ones. Blocks.

        Empty if those are of the last step. Skipped steps count only if all were skipped.
        """
        losses_of_steps = self._losses
        self._losses = []
        if len(losses_of_steps) < 2:
            return {}
        applied = []
        for losses in jax.device_get(losses_of_steps):
            is_skipped = losses.pop("skipped", 0)
            if not is_skipped:
                applied.append(losses)
        if not applied:
            return {}
        return {
            name: float(sum((losses[name] for losses in applied), np.float32(0))) / len(applied)
            for name in applied[0]
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
