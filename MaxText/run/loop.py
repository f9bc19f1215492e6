"""The training loop: batch, step, hooks, checkpoint, end.

After each step, `actions_after` decides all that follows, and `Loop` does it in a fixed order:
report, rollback, hooks (run/hooks.py), checkpoint, stop.
"""

import collections
import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from etils import epath

from MaxText import exit_codes
from MaxText.checkpointing.manager import CheckpointManager
from MaxText.compilation.compiled_steps import ShapeSpecializedStep
from MaxText.config.schema import Config
from MaxText.errors import TrainingDivergedError, UserError, WaitCancelledError
from MaxText.evaluation.downstream import DownstreamTasks
from MaxText.evaluation.validation import evaluate
from MaxText.input_pipeline.iterator import EvalBatches, TrainIterator
from MaxText.input_pipeline.sequences.batch_schedule import BatchSchedule
from MaxText.layers.assembly.model import Model
from MaxText.layers.batch import Batch
from MaxText.parallelism.mesh import ShardingPlan
from MaxText.run.final_outputs import optional_output
from MaxText.run.final_state import MAX_SKIPPED_AT_END, broken_state_reason, skipped_at_end
from MaxText.run.hooks import (
    CHECKPOINT,
    EVALUATION,
    GRADIENT_CHECK,
    SNAPSHOT,
    Hook,
    StepInfo,
    call_user_hook,
)
from MaxText.run.learning_checks import LearningChecks
from MaxText.run.records import MetricLogger, RunLogger
from MaxText.run.restore import final_step
from MaxText.run.rollback import RollbackController
from MaxText.runtime import processes
from MaxText.runtime.preemption import PreemptionHandler
from MaxText.runtime.watchdog import Watchdog
from MaxText.training.parameter_average import averaged_params
from MaxText.training.state import TrainState

_JUDGING_BATCHES = 3  # newest batches that are kept on the devices

COMPLETED = "completed"
PREEMPTED = "preempted"
TARGET_REACHED = "target_eval_loss is reached"
STORAGE_FAILED = "storage failed"


class Actions(NamedTuple):
    """The actions after a step, all decided before the first of them.

    Attributes:
      report: Whether to report the metrics of this step now, and not one step late: no row before a
        checkpoint or the end of the run may be missing.
      hooks: Names of the hooks to call.
      evaluation_due: Whether an evaluation is due, even if it is left to a later start.
      stop: Whether the run stops after the step because it was asked to.
    """

    report: bool
    hooks: tuple[str, ...]
    evaluation_due: bool
    stop: bool


def actions_after(
    step: int, last_step: int, *, due: Sequence[str], stop_requested: bool
) -> Actions:
    """Decides the actions after a step.

    Args:
      step: The step that was just done.
      last_step: The last step of the run, which ends it as if nothing had asked it to stop.
      due: Names of the hooks that are due by their intervals, in the order of their calls.
      stop_requested: Whether a signal or failed storage asks to save and stop.

    Returns:
      The actions. A run that stops saves a checkpoint, and leaves a due evaluation to the run that
      resumes it.
    """
    is_last = step == last_step
    stop = stop_requested and not is_last
    hooks = list(due)
    if stop:
        hooks = [name for name in due if name not in (EVALUATION, CHECKPOINT)]
        hooks.append(CHECKPOINT)
    return Actions(
        report=CHECKPOINT in hooks or is_last,
        hooks=tuple(hooks),
        evaluation_due=EVALUATION in due,
        stop=stop,
    )


@dataclasses.dataclass
class StepSchedule:
    """The steps of a run.

    Attributes:
      step: The next step, from 0.
      last_step: The last step; a rollback may change it, because it excludes data.
      batch_schedule: Batch size and sequence length of each step.
    """

    step: int
    last_step: int
    batch_schedule: BatchSchedule


@dataclasses.dataclass(frozen=True)
class RunData:
    """The batches of a run.

    Attributes:
      train: This process's part of the training batches.
      evaluation: Its part of the evaluation batches; None if the run does not evaluate.
      eval_batch_size: Sequences of an evaluation batch over all processes.
      downstream: Questions that are scored at each evaluation; None without any.
    """

    train: TrainIterator
    evaluation: EvalBatches | None
    eval_batch_size: int
    downstream: DownstreamTasks | None = None


@dataclasses.dataclass(frozen=True)
class CompiledModel:
    """The model and its steps, compiled for the devices of the run.

    Attributes:
      model: The model.
      sharding: Mesh and shardings.
      train_step: (state, batch) -> (state, metrics); it uses up (donates) the state.
      eval_step: (params, batch) -> sums over the batch.
    """

    model: Model
    sharding: ShardingPlan
    train_step: ShapeSpecializedStep
    eval_step: Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Records:
    """What a run stores.

    Attributes:
      run_folder: The folder of the run.
      run_logger: Its events.
      metric_logger: Converts the metrics of steps to events.
      checkpoints: Its checkpoints.
      metadata: Stored with every checkpoint: configuration and parameters.
    """

    run_folder: epath.Path
    run_logger: RunLogger
    metric_logger: MetricLogger
    checkpoints: CheckpointManager
    metadata: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Supervision:
    """What watches a run, and may change its course.

    Attributes:
      rollback: Decides when to go back to a healthy state.
      learning_checks: Warn of a run that cannot learn.
      watchdog: Ends a run that hangs.
      preemption: Says whether the machine is about to be preempted.
    """

    rollback: RollbackController
    learning_checks: LearningChecks
    watchdog: Watchdog
    preemption: PreemptionHandler

    def observe(self, step: int, metrics: Mapping[str, float]) -> None:
        """Passes the metrics of a report on; TrainingDivergedError if training cannot continue."""
        self.learning_checks.observe(step, metrics)
        self.rollback.observe(step, metrics)


class Loop:
    """The training loop of a run.

    Attributes:
      state: The train state. Each step donates it.
      schedule: The next and the last step.
      eval_loss: Loss of the last evaluation; None without one, or if it was interrupted.
      hooks: All hooks except the checkpoint, in the order of their calls after a step.
    """

    def __init__(
        self,
        *,
        config: Config,
        compiled: CompiledModel,
        state: TrainState,
        schedule: StepSchedule,
        data: RunData,
        records: Records,
        supervision: Supervision,
        hooks: Sequence[Hook] = (),
    ):
        """Assembles a loop; nothing runs yet.

        Args:
          config: The configuration of the run.
          compiled: The model and its steps.
          state: The state before `schedule.step`.
          schedule: The steps of the run.
          data: Its batches.
          records: Its events and checkpoints.
          supervision: What watches it.
          hooks: Those of the user, of `user_hooks`.
        """
        self.config = config
        self.compiled = compiled
        self.state: TrainState = state
        self.schedule = schedule
        self.data = data
        self.records = records
        self.supervision = supervision
        self.eval_loss: float | None = None
        self.hooks = self._hooks_in_order(hooks)
        self._user_hooks = frozenset(hook.name for hook in hooks)
        self.checkpoint = Hook(self._save_step, when=self._checkpoint_due, name=CHECKPOINT)
        # Batches that can judge the final state: the first one of this start, and the newest ones.
        self._first_batch: Batch | None = None
        self._newest_batches = collections.deque[Batch](maxlen=_JUDGING_BATCHES)
        self._evaluation_interrupted = False
        self._is_saving = False  # also after a save that failed

    def _hooks_in_order(self, user_hooks: Sequence[Hook]) -> list[Hook]:
        """Returns the hooks of a step; those of the user see a state that no check refused."""
        checks = self.supervision.learning_checks
        hooks = [Hook(self._check_gradients, when=checks.gradients_due, name=GRADIENT_CHECK)]
        for user_hook in user_hooks:
            call = functools.partial(self._call_user_hook, user_hook)
            hooks.append(dataclasses.replace(user_hook, function=call))
        # After the hooks, so that a run that one of them ends has an evaluation to make up for. And
        # before the checkpoint, so that a run resumed from that has none.
        if self.config.evaluation.eval_interval > 0:
            interval = self.config.evaluation.eval_interval
            hooks.append(Hook(self._evaluate_step, every=interval, name=EVALUATION))
        # Last, so that the decision whether the state is healthy knows what the others found out:
        # its validation loss, and the metrics of the step if one of them has reported those.
        hooks.append(Hook(self._take_snapshot, every=1, name=SNAPSHOT))
        return hooks

    def run(self, evaluation_due: bool) -> str:
        """Trains to the end.

        If data or records cannot be read or written, or a hook of the user fails, it saves the
        state first.

        Args:
          evaluation_due: Whether to make up for the evaluation of the previous step first.

        Returns:
          COMPLETED, PREEMPTED, TARGET_REACHED or STORAGE_FAILED.
        """
        try:
            return self._run(evaluation_due)
        except (UserError, OSError):
            self._save_before_exit()
            raise

    def _run(self, evaluation_due: bool) -> str:
        schedule = self.schedule
        metric_logger = self.records.metric_logger
        if evaluation_due and self.data.evaluation is not None:
            completed = self.evaluate(schedule.step - 1)
            if not completed:
                return PREEMPTED
        metric_logger.start(schedule.step)
        while schedule.step <= schedule.last_step:
            batch = self.next_batch()
            if batch is None:
                if metric_logger.newest_step is not None:
                    self.save(schedule.step - 1)
                return PREEMPTED
            metrics = self.update(batch)
            stop_reason = self._after_step(metrics)
            if stop_reason is not None:
                return stop_reason
        return COMPLETED

    def _after_step(self, metrics: Mapping[str, jax.Array]) -> str | None:
        """Performs the actions after a step, and moves on to the next one.

        Args:
          metrics: The scalars of the step, on the devices.

        Returns:
          Why the run ends, or None if it continues.
        """
        step = self.schedule.step
        last_step = self.schedule.last_step
        metric_logger = self.records.metric_logger
        run_logger = self.records.run_logger
        all_hooks = [*self.hooks, self.checkpoint]
        actions = actions_after(
            step,
            last_step,
            due=[hook.name for hook in all_hooks if hook.is_due(step, last_step)],
            stop_requested=self._stop_requested(step),
        )
        if actions.report:
            metric_logger.complete()
        elif self._user_hooks.intersection(actions.hooks):
            metric_logger.flush()  # no hook of the user sees a state that a report refuses
        if self.supervision.rollback.trigger:
            self.roll_back()
            return None
        info = StepInfo(
            step=step,
            state=self.state,
            config=self.config,
            model=self.compiled.model,
            run_folder=self.records.run_folder,
            device_metrics=metrics,
        )
        for hook in self.hooks:
            if hook.name in actions.hooks:
                hook(info)
        stopping = actions.stop or self._evaluation_interrupted
        target_loss = self.config.evaluation.target_eval_loss
        reached = self.eval_loss is not None and self.eval_loss < target_loss
        if stopping:
            self.save(step, evaluation_is_due=actions.evaluation_due)
        elif reached or self.checkpoint.name in actions.hooks:
            self.checkpoint(info)
        if stopping or reached:
            stop_reason = PREEMPTED if stopping else TARGET_REACHED
            if stopping and run_logger.events.failure:
                stop_reason = STORAGE_FAILED
            run_logger.terminal.line(f"Stopping after step {step}: {stop_reason}")
            return stop_reason
        self.schedule.step += 1
        return None

    def _stop_requested(self, step: int) -> bool:
        """Returns whether to save and stop after `step`. Collective."""
        if self.records.run_logger.events.failure:
            # Only process 0 has records; its request reaches the others.
            self.supervision.preemption.request()
        return self.supervision.preemption.requested(step)

    def _checkpoint_due(self, step: int) -> bool:
        return self.records.checkpoints.should_save(step, self.schedule.last_step)

    def _take_snapshot(self, info: StepInfo) -> None:
        position = self.data.train.get_state()
        self.supervision.rollback.snapshot(info.step, info.state, position)

    def _check_gradients(self, info: StepInfo) -> None:
        with self.records.metric_logger.exclude_time():
            self.supervision.learning_checks.check_gradients(info.state)

    def _call_user_hook(self, user_hook: Hook, info: StepInfo) -> None:
        self.supervision.watchdog.enter("hook", info.step)
        with self.records.metric_logger.exclude_time():
            call_user_hook(user_hook, info)

    def _evaluate_step(self, info: StepInfo) -> None:
        self._evaluation_interrupted = not self.evaluate(info.step)

    def _save_step(self, info: StepInfo) -> None:
        self.save(info.step)

    def _save_before_exit(self) -> None:
        """Saves the state of the last step after an error that says nothing against it.

        Of several processes the others could not take part.
        """
        step = self.records.metric_logger.newest_step
        if step is None or self._is_saving or jax.process_count() > 1:
            return
        with optional_output("last state", self.records.run_logger.terminal.line):
            if int(self.state.step) != step + 1:
                return
            if self.data.train.get_state()["step"] != step + 1:
                self.data.train.seek(step + 1)
            evaluation_is_due = any(
                hook.is_due(step, self.schedule.last_step)
                for hook in self.hooks
                if hook.name == EVALUATION
            )
            self.save(step, evaluation_is_due=evaluation_is_due)
            self.records.checkpoints.wait()

    def next_batch(self) -> Batch | None:
        """Returns the next step's batch on the devices; None on a stop request."""
        step = self.schedule.step
        batches = self.data.train
        batch_schedule = self.schedule.batch_schedule
        batch = None
        self.supervision.watchdog.enter("data", step)
        with (
            contextlib.suppress(WaitCancelledError),
            self.records.metric_logger.waiting_for_data(),
        ):
            batch_size = batch_schedule.batch_size(batch_schedule.at(step))
            host_batch = next(batches)
            if self._first_batch is None:
                self.supervision.learning_checks.check_first_batch(host_batch)
            batch = self.compiled.sharding.to_global_batch(host_batch, batch_size)
        self.records.run_logger.log_data_events(batches, step)
        return batch

    def update(self, batch: Batch) -> Mapping[str, jax.Array]:
        """Runs one train step, compiled first if the batch has a new shape.

        Args:
          batch: The batch of the step, on the devices.

        Returns:
          The scalars of the step, which the devices may still be computing.
        """
        step = self.schedule.step
        train_step = self.compiled.train_step
        run_logger = self.records.run_logger
        metric_logger = self.records.metric_logger
        if not train_step.fits(batch):
            self.supervision.watchdog.enter("compile", step)
            with (
                metric_logger.exclude_time(),
                run_logger.events.timed("compile", step=step) as fields,
            ):
                fields |= train_step.prepare(batch)
        self.supervision.watchdog.enter("step", step)
        # The profiler is no hook: its trace starts right before a step, and marks each one.
        with run_logger.profiler.step(step):
            self.state, metrics = train_step(self.state, batch)
        if self._first_batch is None:
            self._first_batch = batch
        self._newest_batches.appendleft(batch)
        metric_logger.add(step, metrics)
        run_logger.profiler.finished(step, metrics)
        return metrics

    def roll_back(self) -> None:
        """Goes back to the last healthy state, and continues with the step after it."""
        schedule = self.schedule
        del self.state  # frees memory for the healthy state
        self.state = self.supervision.rollback.roll_back()
        schedule.step = int(self.state.step)
        schedule.last_step = final_step(self.data.train, self.config.run.steps)
        self.records.metric_logger.start(schedule.step)

    def evaluate(self, step: int) -> bool:
        """Evaluates the state after `step`; False if a stop request interrupted it.

        Sets `eval_loss`.
        """
        self.eval_loss = None
        data = self.data
        sharding = self.compiled.sharding
        run_logger = self.records.run_logger
        batches = self.supervision.watchdog.watch_iterator(
            data.evaluation or (), "evaluation", step
        )
        with (
            contextlib.suppress(WaitCancelledError),
            self.records.metric_logger.exclude_time(),
            run_logger.events.timed("evaluation", step=step) as fields,
        ):
            global_batches = (
                sharding.to_global_batch(batch, data.eval_batch_size) for batch in batches
            )
            report = evaluate(self.compiled.eval_step, self.state.params, global_batches, step=step)
            fields |= {**report.row(), **run_logger.lineage.progress(step)}
            run_logger.terminal.line(report.line())
            if self.state.average is not None:
                fields |= self._evaluate_average(step)
            if data.downstream is not None:
                on_batch = functools.partial(self.supervision.watchdog.enter, "evaluation", step)
                fields |= data.downstream.score(
                    self.state.params, run_logger.terminal.line, on_batch
                )
            run_logger.log_data_events(data.evaluation, step)
            self.eval_loss = report.loss
            self.records.checkpoints.health.observe_evaluation(step, report.loss)
        return self.eval_loss is not None

    def _evaluate_average(self, step: int) -> dict[str, float]:
        """Evaluates the average of the parameters; returns its loss for the metrics."""
        data = self.data
        assert self.state.average is not None
        params = averaged_params(self.state.average, self.state.params)
        batches = self.supervision.watchdog.watch_iterator(
            data.evaluation or (), "evaluation", step
        )
        global_batches = (
            self.compiled.sharding.to_global_batch(batch, data.eval_batch_size) for batch in batches
        )
        report = evaluate(self.compiled.eval_step, params, global_batches, step=step)
        self.records.run_logger.terminal.line(
            f"  average of the parameters: loss={report.loss:.3f}"
        )
        return {"eval/average_loss": report.loss}

    def save(self, step: int, *, evaluation_is_due: bool = False) -> None:
        """Saves a checkpoint, after all events before it.

        Its metadata hold what a restart needs besides the state and the data position:
        `RollbackController` reads "rollbacks" and "evaluations", `open_run_logger` reads
        "loss_trend", `train` "evaluation_is_due", `scale_lines` "num_processes" and
        "global_batch_size", and `Lineage` what it has added.

        Args:
          step: The step after which the state is saved.
          evaluation_is_due: Whether a run that resumes from it has to evaluate it first.
        """
        run_logger = self.records.run_logger
        metric_logger = self.records.metric_logger
        batch_schedule = self.schedule.batch_schedule
        self._is_saving = True
        self.supervision.watchdog.enter("checkpoint", step)
        metric_logger.complete()
        with metric_logger.exclude_time():
            run_logger.events.flush()
            metadata = {
                **self.records.metadata,
                **run_logger.lineage.metadata(step),
                "evaluation_is_due": evaluation_is_due,
                "rollbacks": self.supervision.rollback.num_rollbacks,
                "evaluations": self.records.checkpoints.health.evaluations,
                "loss_trend": run_logger.trend.state,
                "num_processes": jax.process_count(),
                "global_batch_size": batch_schedule.batch_size(batch_schedule.at(step)),
            }
            position = self.data.train.get_state()
            with run_logger.events.timed("checkpoint", step=step):
                self.records.checkpoints.save(step, self.state, position, metadata)
        self._is_saving = False

    def judge_final_state(self) -> str:
        """Promotes the final checkpoint if it is healthy; sets it aside if its state is broken.

        Uses up the state.

        Returns:
          What is wrong with the end of the run: a broken state, or too many skipped steps; else "",
          also if the final checkpoint was not promoted.
        """
        trend = self.records.run_logger.trend
        state = self.state
        last_step = int(state.step) - 1
        self.supervision.learning_checks.finish(state)
        num_skipped = skipped_at_end(state.guard, last_step)
        del self.state  # the step that judges it donates it
        reason = broken_state_reason(
            self.compiled.train_step, state, self._judging_batches(last_step), trend.outlier_limit
        )
        skipped = ""
        if num_skipped > MAX_SKIPPED_AT_END or num_skipped == last_step + 1:
            skipped = f"the last {num_skipped} steps, up to step {last_step}, were all skipped"
        if not reason:
            problems = [*self.supervision.rollback.problems, skipped, trend.diverged]
            self._promote_final(
                last_step,
                list(filter(None, problems)),
                ends_with_error=bool(skipped or trend.diverged),
            )
            return f"{skipped}; the state before them is not broken" if skipped else ""
        broken_since = last_step - num_skipped  # no later step changed the parameters
        problem = f"the state after step {broken_since} is broken ({reason})"
        if skipped:
            problem = f"{skipped}: {problem}"
        return problem + self._set_aside(broken_since)

    def _promote_final(
        self, last_step: int, problems: Sequence[str], *, ends_with_error: bool
    ) -> None:
        """Promotes the final checkpoint if its state is healthy; else logs why it is not.

        That alone is no failure: the state is not broken, and its checkpoint can be used.

        Args:
          last_step: The last step of the run.
          problems: What speaks against the state.
          ends_with_error: Whether the run ends with an error that names the problems.
        """
        checkpoints = self.records.checkpoints
        if checkpoints.promote_final(last_step, problems) or ends_with_error:
            return
        if self.config.checkpoint.enable_checkpointing:
            self.records.run_logger.terminal.line(
                f"WARNING: the state after step {last_step} is not promoted as healthy: "
                f"{checkpoints.health.why_newest_is_not_healthy(problems)}. It can be used; if "
                "more steps follow, a rollback takes an earlier checkpoint until it is."
            )

    def _judging_batches(self, last_step: int) -> Iterator[Batch]:
        """Yields batches for the final state, the newest first.

        A start after the last step has trained on none, and reads the batch of that step again.
        """
        batches = [*self._newest_batches, self._first_batch]
        if self._first_batch is None:
            self.data.train.seek(last_step)
            self.schedule.step = last_step
            batches = [self.next_batch()]
        for batch in batches:
            if batch is not None and self.compiled.train_step.fits(batch):
                yield batch

    def _set_aside(self, broken_since: int) -> str:
        """Renames the checkpoints of a broken state if there is one of an earlier state.

        Returns what became of them, for a message.
        """
        checkpoints = self.records.checkpoints
        earlier_steps = [step for step in checkpoints.steps() if step < broken_since]
        if not earlier_steps:
            return ""
        try:
            renamed_steps = checkpoints.set_aside(lambda step: step >= broken_since)
        except OSError as error:
            return f". Its checkpoints could not be renamed: {error}"
        if not renamed_steps:
            return ""
        names = ", ".join(f"{step}.unhealthy" for step in renamed_steps)
        return (
            f". Renamed its checkpoints to {names}; a restart resumes from step {earlier_steps[-1]}"
        )


@dataclasses.dataclass
class End:
    """The end of a run.

    Attributes:
      reason: COMPLETED, PREEMPTED, "diverged", "interrupted" or "error"; recorded.
      exit_code: That of the program.
      message: A line for stderr; "" for none.
    """

    reason: str = "error"
    exit_code: int = exit_codes.SUCCESS
    message: str = ""


@contextlib.contextmanager
def recorded_end(run_logger: RunLogger, metric_logger: MetricLogger) -> Iterator[End]:
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
            processes.fail(failure)
