"""All records of a run."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from etils import epath

from MaxText.config.schema import Config
from MaxText.config.serialization import flatten
from MaxText.cost.cost_table import model_cost
from MaxText.cost.peak_flops import PeakFlops
from MaxText.input_pipeline.iterator import BatchIterator, EvalBatches
from MaxText.input_pipeline.sequences.batch_schedule import BatchPlan
from MaxText.metrics.event_stream import EventStream, open_stream
from MaxText.metrics.loss_trend import LossTrend
from MaxText.metrics.profiler import StepProfiler
from MaxText.metrics.sinks.tensorboard import TENSORBOARD_FOLDER
from MaxText.metrics.sinks.terminal import Terminal
from MaxText.run.lineage import Lineage
from MaxText.run.quantities import Quantities
from MaxText.run.run_facts import emit_start, start_facts
from MaxText.run.starting_point import Start
from MaxText.run.step_log import StepLog
from MaxText.training.assembly import Assembled
from MaxText.training.objective import is_in_nats

# Parameters, FLOPs and memory as tables with formulas, of the newest start.
START_FILE = "start.txt"


@dataclasses.dataclass(frozen=True)
class Records:
    """All records of a run."""

    events: EventStream
    terminal: Terminal
    profiler: StepProfiler
    quantities: Quantities
    lineage: Lineage
    trend: LossTrend

    def step_log(
        self, config: Config, last_step: int, observe: Callable[[int, Mapping[str, float]], None]
    ) -> StepLog:
        return StepLog(
            self.events,
            config.guard,
            period=config.monitoring.step_log_period,
            last_step=last_step,
            quantities=self.quantities,
            lineage=self.lineage,
            trend=self.trend,
            observe=observe,
        )

    def close(self) -> None:
        self.events.close()
        self.profiler.close()

    def tell_of_data(self, batches: BatchIterator | EvalBatches | None, step: int) -> None:
        """Records retried reads and skipped records."""
        if batches is None:
            return
        for message in batches.retry_log.drain():
            self.events.emit("retry", step=step, reason=message)
        while batches.skipped:
            reason = batches.skipped.pop(0)
            self.events.emit("skip", step=step, what="record", reason=reason, count=1)


def open_records(
    config: Config,
    run_folder: epath.Path,
    start: Start,
    built: Assembled,
    plan: BatchPlan,
    batches: BatchIterator,
    devices: Sequence[Any],
    last_step: int,
    peak: PeakFlops,
    details: Sequence[str] = (),
    callbacks: Sequence[Callable[[Mapping[str, Any]], None]] = (),
    show: Callable[[str], None] = print,
) -> Records:
    """Opens the records of a run, continuing earlier ones, and records this start.

    `details` are lines for START_FILE; `callbacks` get each event as a row of events.jsonl. Raises
    UserError if a package is missing.
    """
    run, monitoring, model = config.run, config.monitoring, built.model
    num_steps = last_step + 1
    quantities = Quantities(model, config.batch, plan, len(devices), num_steps, peak)
    lineage = Lineage.of(start, quantities)
    length = model.section.shape.max_target_length
    cost = model_cost(model, sequence_length=length, optimizer_state=built.state.opt_state)
    if jax.process_index() == 0:
        text = "\n".join([*details, quantities.describe(), cost.describe()])
        (run_folder / START_FILE).write_text(f"{text}\n")
    show(f"{quantities.summary(cost.training_bytes)}\nDetails: {run_folder / START_FILE}")
    tensorboard = run_folder / TENSORBOARD_FOLDER
    if monitoring.enable_tensorboard:
        show(f"To see full metrics 'tensorboard --logdir={tensorboard}'")
    terminal = Terminal(num_steps, step_line=monitoring.step_line)
    first_step = start.first_step
    is_due = bool(start.metadata.get("evaluation_is_due")) and config.evaluation.eval_interval > 0
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
    emit_start(events, start, start_facts(run.run_name, quantities, cost, lineage, batches))
    profiler = StepProfiler(monitoring, tensorboard, first_step)
    baseline = batches.unigram_entropy if is_in_nats(model.section.objective) else None
    trend = LossTrend(baseline, start.metadata.get("loss_trend"))
    return Records(events, terminal, profiler, quantities, lineage, trend)
