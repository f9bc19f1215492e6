"""All records of a run."""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from etils import epath

from MaxText.config.model_sections import ModelConfig
from MaxText.config.schema import Config, flatten
from MaxText.config.serialization import changed_keys, resolved_yaml
from MaxText.cost.cost_table import model_cost
from MaxText.cost.peak_flops import PeakFlops
from MaxText.growth.record import event_fields, parent_folder, sizes
from MaxText.input_pipeline.iterator import EvalBatches, TrainIterator
from MaxText.input_pipeline.sequences.batch_schedule import BatchSchedule
from MaxText.metrics.event_stream import EventLog, open_stream
from MaxText.metrics.loss_trend import LossTrend
from MaxText.metrics.profiler import StepProfiler
from MaxText.metrics.provenance import provenance
from MaxText.metrics.sinks.tensorboard import TENSORBOARD_FOLDER
from MaxText.metrics.sinks.terminal import Terminal
from MaxText.run.lineage import Lineage
from MaxText.run.restore import RestoreResult
from MaxText.run.training_stats import TrainingStats
from MaxText.runtime import process_start
from MaxText.training.assembly import TrainSetup
from MaxText.training.objective import is_in_nats

# Parameters, FLOPs and memory as tables with formulas, of the newest start.
START_FILE = "start.txt"


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
    run, monitoring, model = config.run, config.monitoring, setup.model
    num_steps = last_step + 1
    stats = TrainingStats(model, config.batch, batch_schedule, len(devices), num_steps, peak)
    lineage = Lineage.of(restored, stats)
    length = model.config.shape.max_target_length
    cost = model_cost(model, sequence_length=length, optimizer_state=setup.abstract_state.opt_state)
    if jax.process_index() == 0:
        text = "\n".join([*details, stats.describe(), cost.describe()])
        (run_folder / START_FILE).write_text(f"{text}\n")
    log(f"{stats.summary(cost.training_bytes)}\nDetails: {run_folder / START_FILE}")
    tensorboard = run_folder / TENSORBOARD_FOLDER
    if monitoring.enable_tensorboard:
        log(f"To see full metrics 'tensorboard --logdir={tensorboard}'")
    terminal = Terminal(num_steps, step_line=monitoring.step_line)
    first_step = restored.first_step
    is_due = (
        bool(restored.metadata.get("evaluation_is_due")) and config.evaluation.eval_interval > 0
    )
    events = open_stream(
        run_folder,
        monitoring,
        run.run_name,
        flatten(config),
        first_step=first_step,
        first_evaluation=first_step - is_due,
        terminal=terminal,
        callbacks=callbacks,
    )
    baseline = batches.unigram_entropy_nats if is_in_nats(model.config.objective) else None
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
        "lineage": lineage.fields(),
        "data": {**batches.facts, "vocab_size": model.config.shape.vocab_size},
        "unigram_entropy_nats": baseline,
        # Only process 0 records it. Git need not search the checkout on every host.
        "provenance": provenance() if jax.process_index() == 0 else {},
        "changed_keys": changed_keys(config),
        "resolved_keys": _resolved_keys(config, model.config),
    }
    emit_start(events, restored, fields)
    profiler = StepProfiler(monitoring, tensorboard, first_step)
    trend = LossTrend(baseline, restored.metadata.get("loss_trend"))
    return RunLogger(events, terminal, profiler, stats, lineage, trend)


def _resolved_keys(config: Config, resolved: ModelConfig) -> dict[str, Any]:
    """Returns what replaced `auto`, such as the dtype, by key."""
    given = flatten(config)
    chosen = flatten(config.model_copy(update={"model": resolved}))
    return {key: value for key, value in chosen.items() if value != given[key]}


def emit_start(events: EventLog, restored: RestoreResult, fields: Mapping[str, Any]) -> None:
    """Emits "resume" (from the run's own checkpoint) or "start".

    A changed configuration and a growth are events of their own.
    """
    events.emit(
        "resume" if restored.how == "resume" else "start",
        step=restored.first_step,
        seconds=time.time() - process_start.launch_time(),
        source=restored.source,
        lost=events.lost,
        **fields,
    )
    if restored.changes:
        changes = {name: list(values) for name, values in restored.changes.items()}
        events.emit("config_change", step=restored.first_step, changes=changes)
    grown: dict[str, Any] = {}
    if restored.how == "growth" and restored.growth:
        grown = event_fields(restored.growth, restored.folder)
    # A model grown by convert.py is first trained here, and no run has reported that. A zoom alone
    # does not count.
    if restored.how == "parameters" and restored.growth and sizes(restored.growth):
        grown = event_fields(restored.growth, parent_folder(restored.metadata), restored.folder)
    if grown:
        events.emit("growth", step=restored.first_step, **grown)


def write_run_files(run_folder: Any, config: Config, tokenizer: Path | None) -> None:
    """Writes config.yml and the tokenizer on process 0."""
    from MaxText.conversion.tokenizer_copy import keep_tokenizer

    if jax.process_index() != 0:
        return
    (run_folder / "config.yml").write_text(resolved_yaml(config))
    if tokenizer is not None:
        keep_tokenizer(tokenizer, run_folder)
