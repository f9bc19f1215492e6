"""The training loop: batch, step, evaluation, checkpoint, end."""

import collections
import contextlib
import dataclasses
import shlex
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
from etils import epath

from MaxText import exit_codes
from MaxText.checkpointing.manager import CheckpointManager
from MaxText.compilation.compiled_steps import ShapeSpecializedStep
from MaxText.config import command_line
from MaxText.config.registry import lookup
from MaxText.config.schema import Config
from MaxText.errors import TrainingDivergedError, UserError, WaitCancelledError
from MaxText.evaluation.validation import evaluate
from MaxText.input_pipeline.iterator import EvalBatches, TrainIterator
from MaxText.input_pipeline.sequences.batch_schedule import BatchSchedule
from MaxText.layers.assembly.model import Model
from MaxText.parallelism.mesh import ShardingPlan
from MaxText.run.final_state import MAX_SKIPPED_AT_END, broken_state_reason, skipped_at_end
from MaxText.run.learning_checks import LearningChecks
from MaxText.run.records import MetricLogger, RunLogger
from MaxText.run.restore import final_step
from MaxText.run.rollback import RollbackController
from MaxText.runtime import processes
from MaxText.runtime.preemption import PreemptionHandler
from MaxText.runtime.watchdog import Watchdog
from MaxText.training.assembly import TrainSetup
from MaxText.training.objective import is_in_nats

_JUDGING_BATCHES = 3  # newest batches that are kept on the devices

COMPLETED = "completed"
PREEMPTED = "preempted"
TARGET_REACHED = "target_eval_loss is reached"
STORAGE_FAILED = "storage failed"


class Actions(NamedTuple):
    """The actions after a step, all decided before the first of them."""

    report: bool  # report this step's metrics now: no row before a checkpoint may be missing
    evaluation_due: bool
    evaluate: bool  # a stopping run leaves a due evaluation to the run that resumes it
    save: bool
    stop: bool


def is_evaluation_due(step: int, last_step: int, eval_interval: int) -> bool:
    """Returns whether to evaluate after a step; an `eval_interval` <= 0 never evaluates."""
    return eval_interval > 0 and ((step + 1) % eval_interval == 0 or step == last_step)


def actions_after(
    step: int, last_step: int, *, eval_interval: int, checkpoint_due: bool, stop_requested: bool
) -> Actions:
    """Decides the actions after a step; `eval_interval` <= 0 never evaluates."""
    is_last = step == last_step
    stop = stop_requested and not is_last  # the last step ends the run anyway
    save = checkpoint_due or stop
    due = is_evaluation_due(step, last_step, eval_interval)
    return Actions(save or is_last, due, due and not stop, save, stop)


@dataclasses.dataclass
class Loop:
    """The training loop of a run; `step` is the next step."""

    config: Config
    sharding: ShardingPlan
    batch_schedule: BatchSchedule
    eval_batch_size: int
    batches: TrainIterator
    eval_batches: EvalBatches | None
    train_step: ShapeSpecializedStep
    eval_step: Callable[..., Any]
    checkpoints: CheckpointManager
    metadata: Mapping[str, Any]  # stored with every checkpoint
    run_logger: RunLogger
    rollback: RollbackController
    watchdog: Watchdog
    preemption: PreemptionHandler
    metric_logger: MetricLogger
    learning_checks: LearningChecks
    state: Any
    step: int
    last_step: int
    eval_loss: float | None = None  # of the last evaluation; None without one
    # Batches that can judge the final state: the first one of this start, and the newest ones.
    first_batch: Any = None
    newest_batches: collections.deque[Any] = dataclasses.field(
        default_factory=lambda: collections.deque(maxlen=_JUDGING_BATCHES)
    )
    _is_saving: bool = False  # also after a save that failed

    def run(self, evaluation_due: bool) -> str:
        """Trains to the end; returns COMPLETED, PREEMPTED, TARGET_REACHED or STORAGE_FAILED.

        `evaluation_due` first makes up for the evaluation of the previous step. If data or records
        cannot be read or written, saves the state first.
        """
        try:
            return self._run(evaluation_due)
        except (UserError, OSError):
            self._save_before_exit()
            raise

    def _run(self, evaluation_due: bool) -> str:
        if evaluation_due and self.eval_batches is not None and not self.evaluate(self.step - 1):
            return PREEMPTED
        self.metric_logger.start(self.step)
        while self.step <= self.last_step:
            step = self.step
            batch = self.next_batch()
            if batch is None:
                if self.metric_logger.newest_step is not None:
                    self.save(step - 1)
                return PREEMPTED
            self.update(batch)
            actions = actions_after(
                step,
                self.last_step,
                eval_interval=self.config.evaluation.eval_interval,
                checkpoint_due=self.checkpoints.should_save(step, self.last_step),
                stop_requested=self._stop_requested(step),
            )
            if actions.report:
                self.metric_logger.complete()
            if self.rollback.trigger:
                self.roll_back()
                continue
            self.rollback.snapshot(step, self.state, self.batches.get_state())
            if self.learning_checks.gradients_due(step):
                with self.metric_logger.exclude_time():
                    self.learning_checks.check_gradients(self.state)
            # Before the checkpoint, so that a run resumed from it has no evaluation to make up for.
            stopping = actions.stop or (actions.evaluate and not self.evaluate(step))
            target = self.config.evaluation.target_eval_loss
            reached = self.eval_loss is not None and self.eval_loss < target
            if actions.save or stopping or reached:
                self.save(step, evaluation_is_due=actions.evaluation_due and stopping)
            if stopping or reached:
                reason = PREEMPTED if stopping else TARGET_REACHED
                if stopping and self.run_logger.events.failure:
                    reason = STORAGE_FAILED
                self.run_logger.terminal.line(f"Stopping after step {step}: {reason}")
                return reason
            self.step += 1
        return COMPLETED

    def _stop_requested(self, step: int) -> bool:
        """Returns whether to save and stop after `step`. Collective."""
        if self.run_logger.events.failure:
            # Only process 0 has records; its request reaches the others.
            self.preemption.request()
        return self.preemption.requested(step)

    def _save_before_exit(self) -> None:
        """Saves the state of the last step after an error that says nothing against it.

        Of several processes the others could not take part.
        """
        step = self.metric_logger.newest_step
        if step is None or self._is_saving or jax.process_count() > 1:
            return
        with _optional("last state", self.run_logger.terminal.line):
            if int(self.state.step) != step + 1:
                return
            if self.batches.get_state()["step"] != step + 1:
                self.batches.seek(step + 1)
            interval = self.config.evaluation.eval_interval
            due = is_evaluation_due(step, self.last_step, interval)
            self.save(step, evaluation_is_due=due)
            self.checkpoints.wait()

    def next_batch(self) -> Any:
        """Returns the next step's batch on the devices; None on a stop request."""
        self.watchdog.enter("data", self.step)
        batch = None
        with contextlib.suppress(WaitCancelledError), self.metric_logger.waiting_for_data():
            batch_size = self.batch_schedule.batch_size(self.batch_schedule.at(self.step))
            host_batch = next(self.batches)
            if self.first_batch is None:
                self.learning_checks.check_first_batch(host_batch)
            batch = self.sharding.to_global_batch(host_batch, batch_size)
        self.run_logger.log_data_events(self.batches, self.step)
        return batch

    def update(self, batch: Any) -> None:
        """Runs one train step, compiled first if the batch has a new shape."""
        if not self.train_step.fits(batch):
            self.watchdog.enter("compile", self.step)
            with (
                self.metric_logger.exclude_time(),
                self.run_logger.events.timed("compile", step=self.step) as fields,
            ):
                fields |= self.train_step.prepare(batch)
        self.watchdog.enter("step", self.step)
        with self.run_logger.profiler.step(self.step):
            self.state, metrics = self.train_step(self.state, batch)
        if self.first_batch is None:
            self.first_batch = batch
        self.newest_batches.appendleft(batch)
        self.metric_logger.add(self.step, metrics)
        self.run_logger.profiler.finished(self.step, metrics)

    def roll_back(self) -> None:
        self.state = None  # frees memory for the healthy state
        self.state = self.rollback.roll_back()
        self.step = int(self.state.step)
        self.last_step = final_step(self.batches, self.config.run.steps)
        self.metric_logger.start(self.step)

    def evaluate(self, step: int) -> bool:
        """Evaluates the state after a step; False on a stop request."""
        self.eval_loss = None
        batches = self.watchdog.watch_iterator(self.eval_batches or (), "evaluation", step)
        with (
            contextlib.suppress(WaitCancelledError),
            self.metric_logger.exclude_time(),
            self.run_logger.events.timed("evaluation", step=step) as fields,
        ):
            global_batches = (
                self.sharding.to_global_batch(batch, self.eval_batch_size) for batch in batches
            )
            report = evaluate(self.eval_step, self.state.params, global_batches, step=step)
            fields |= {**report.row(), **self.run_logger.lineage.progress(step)}
            self.run_logger.terminal.line(report.line())
            self.run_logger.log_data_events(self.eval_batches, step)
            self.eval_loss = report.loss
        return self.eval_loss is not None

    def save(self, step: int, **fields: Any) -> None:
        self._is_saving = True
        self.watchdog.enter("checkpoint", step)
        run_logger = self.run_logger
        events = self.run_logger.events
        self.metric_logger.complete()
        with self.metric_logger.exclude_time():
            events.flush()
            kept = {**self.metadata, **run_logger.lineage.metadata(step), **fields}
            kept |= {"rollbacks": self.rollback.num_rollbacks, "loss_trend": run_logger.trend.state}
            with events.timed("checkpoint", step=step):
                self.checkpoints.save(step, self.state, self.batches.get_state(), kept)
        self._is_saving = False

    def write_sample(self, run_folder: epath.Path, model: Model) -> None:
        """Generates text with the final parameters, if the configuration asks for it."""
        config = self.config
        run_logger = self.run_logger
        line = run_logger.terminal.line
        tokenizer = self.batches.tokenizer_folder
        if not config.decoding.sample_tokens or tokenizer is None:
            return
        with _optional("sample", line):
            from MaxText.inference.decoding import write_sample

            text = write_sample(
                model,
                self.state.params,
                self.sharding,
                config,
                tokenizer_folder=tokenizer,
                run_folder=run_folder,
            )
            # Its time is part of the finish, which the stop row records.
            run_logger.events.emit("sample", step=run_logger.stats.num_steps - 1, text=text)
            line(f"Sample, also in {run_folder / 'sample.txt'}:\n{text}")

    def confirm_final_state(self) -> str:
        """Promotes the final checkpoint, or sets it aside if its state is broken.

        Uses up the state. Returns a description of a broken end of the run, "" for a healthy one.
        """
        last_step = int(self.state.step) - 1
        self.learning_checks.finish(self.state)
        num_skipped = skipped_at_end(self.state.guard, last_step)
        # donated
        state = self.state
        self.state = None
        reason = broken_state_reason(
            self.train_step,
            state,
            self._judging_batches(last_step),
            self.run_logger.trend.outlier_limit,
        )
        skipped = ""
        if num_skipped > MAX_SKIPPED_AT_END or num_skipped == last_step + 1:
            skipped = f"the last {num_skipped} steps, up to step {last_step}, were all skipped"
        if not reason:
            if not skipped and self.rollback.is_healthy and not self.run_logger.trend.diverged:
                # No later step can show that it was healthy.
                self.checkpoints.promote(last_step)
            return skipped and f"{skipped}; the state before them is healthy"
        broken_since = last_step - num_skipped  # no later step changed the parameters
        problem = f"the state after step {broken_since} is broken ({reason})"
        if skipped:
            problem = f"{skipped}: {problem}"
        return problem + self._set_aside(broken_since)

    def _judging_batches(self, last_step: int) -> Iterator[Any]:
        """Yields batches for the final state, the newest first.

        A start after the last step has trained on none, and reads the batch of that step again.
        """
        batches = [*self.newest_batches, self.first_batch]
        if self.first_batch is None:
            self.batches.seek(last_step)
            self.step = last_step
            batches = [self.next_batch()]
        for batch in batches:
            if batch is not None and self.train_step.fits(batch):
                yield batch

    def _set_aside(self, broken_since: int) -> str:
        """Renames the checkpoints of a broken state if there is one of an earlier state.

        Returns what became of them, for a message.
        """
        earlier = [step for step in self.checkpoints.steps() if step < broken_since]
        if not earlier:
            return ""
        try:
            broken = self.checkpoints.set_aside(lambda step: step >= broken_since)
        except OSError as error:
            return f". Its checkpoints could not be renamed: {error}"
        if not broken:
            return ""
        names = ", ".join(f"{step}.unhealthy" for step in broken)
        return f". Renamed its checkpoints to {names}; a restart resumes from step {earlier[-1]}"

    def finish(self, run_folder: epath.Path, setup: TrainSetup, problem: str = "") -> None:
        """Prints and writes the final outputs of a run.

        Args:
          problem: What is wrong with the final state, of `confirm_final_state`.

        Raises:
          TrainingDivergedError: If the training loss diverged or the final state is broken.
        """
        config = self.config
        run_logger = self.run_logger
        model = setup.model
        line = run_logger.terminal.line
        tokenizer = self.batches.tokenizer_folder
        entropy = self.batches.unigram_entropy_nats if is_in_nats(model.config.objective) else None
        if self.eval_loss is not None and entropy is not None:
            line(f"Validation loss {self.eval_loss:.3f}, unigram entropy {entropy:.3f} nats")
        if config.monitoring.loss_curve and jax.process_index() == 0:
            with _optional("loss curve", line):
                from MaxText.reports.report_writer import write_loss_curve

                run_logger.events.flush()
                line(f"Loss curve: {write_loss_curve(run_folder)}")
        can_generate = (
            tokenizer is not None
            and model.config.attention.causal
            and all(lookup("mixer", name).decodes() for name in set(model.config.mixers))
        )
        folder = shlex.quote(str(run_folder))
        newest = self.checkpoints.latest_step()
        if newest is not None:
            line(f"Checkpoint:  {self.checkpoints.directory / str(newest)}")
        if newest is not None and can_generate:
            words = f"{command_line.program_command('decode')} load_parameters_path={folder}"
            if modules := config.run.import_modules:
                words += f" import_modules=[{','.join(map(shlex.quote, modules))}]"
            line(f"Generate:    {words} prompt='The '")
        line(f"Report:      {command_line.program_command('report')} {folder}")
        if problem:
            raise TrainingDivergedError(f"{problem}. Lower learning_rate, or inspect the data.")
        if diverged := run_logger.trend.diverged:
            raise TrainingDivergedError(
                f"{diverged}: the run diverged. Its checkpoints are kept. Lower learning_rate, or "
                "inspect the data."
            )


@dataclasses.dataclass
class End:
    """The end of a run."""

    reason: str = "error"
    exit_code: int = exit_codes.SUCCESS
    message: str = ""  # for stderr


@contextlib.contextmanager
def recorded_end(
    run_logger: RunLogger, metric_logger: MetricLogger, watchdog: Watchdog
) -> Iterator[End]:
    """Records how the block ended the run.

    A diverged run ends normally, with its exit code. After any other failure, one process of
    several exits here, because the others may wait for it forever.
    """
    end = End()
    failure = None
    try:
        yield end
    except TrainingDivergedError as error:
        end.reason = "diverged"
        end.exit_code = exit_codes.DIVERGED
        end.message = f"error: {error}"
    except BaseException as error:
        end.reason = "interrupted" if isinstance(error, KeyboardInterrupt) else "error"
        failure = error
        raise
    finally:
        seconds = metric_logger.idle_seconds if end.reason == COMPLETED else 0.0
        step = metric_logger.newest_step
        run_logger.events.emit("stop", step=step, seconds=seconds, reason=end.reason)
        if failure is not None:
            processes.fail(failure, watchdog)


@contextlib.contextmanager
def _optional(what: str, line: Callable[[str], None]) -> Iterator[None]:
    """Logs a failure of an optional output as a warning."""
    try:
        yield
    except Exception as error:
        line(f"WARNING: cannot write the {what}: {error}")
