"""A training loop whose parts write down what they are called for; its train step adds 1."""

import contextlib
import math
from types import SimpleNamespace

from etils import epath

from MaxText.checkpointing.health import HealthyCheckpoints
from MaxText.config.training_sections import CheckpointingConfig, EvaluationConfig, RunConfig
from MaxText.errors import WaitCancelledError
from MaxText.run import loop as loop_module
from MaxText.run.loop import CompiledModel, Loop, Records, RunData, StepSchedule, Supervision


class TrainStep:
    """(state, batch) -> (state, metrics); the loss of step s is 10 - s."""

    def fits(self, batch):
        return True

    def __call__(self, state, batch):
        metrics = {"loss": 10.0 - state.step, "grad_norm": 1.0, "param_norm": 1.0}
        params = {"w": state.params["w"] + 1}
        return SimpleNamespace(
            step=state.step + 1, params=params, guard=None, average=None
        ), metrics


class Batches:
    """Batch s is the number s; raises the exceptions of `errors` (step -> exception)."""

    num_steps = None

    def __init__(self, first_step=0):
        self.step, self.errors = first_step, {}

    def __next__(self):
        if self.step in self.errors:
            raise self.errors[self.step]
        self.step += 1
        return self.step - 1

    def get_state(self):
        return {"step": self.step}

    def seek(self, step):
        self.step = step


class MetricLogger:
    """Reports every step, one step late; `checks` (step -> function) sees the reports."""

    def __init__(self, calls, checks):
        self.calls, self.checks, self.newest_step, self.pending = calls, checks, None, None

    def start(self, step):
        self.newest_step = self.pending = None

    def add(self, step, metrics):
        self.flush()
        self.newest_step = self.pending = step

    def flush(self):
        step, self.pending = self.pending, None
        if step is not None:
            self.calls.append(("report", step))
            self.checks.get(step, lambda: None)()

    complete = flush

    @contextlib.contextmanager
    def exclude_time(self):
        self.flush()
        yield

    waiting_for_data = staticmethod(contextlib.nullcontext)


class Rollback:
    """Goes back to `restored_step` once `trigger` is set."""

    num_rollbacks = 0
    problems = ()

    def __init__(self, calls, batches):
        self.calls, self.batches = calls, batches
        self.trigger = self.restored_step = None

    def snapshot(self, step, state, position):
        assert position["step"] == state.step == step + 1
        self.calls.append(("snapshot", step))

    def roll_back(self):
        self.calls.append(("roll back", self.restored_step))
        self.trigger = None
        self.batches.seek(self.restored_step)
        return state_before(self.restored_step)


class Checkpoints:
    """Due after the steps of `due`; healthy after 3 accepted steps."""

    def __init__(self, calls, due):
        self.calls, self.due, self.saved, self.waits = calls, due, {}, 0
        self.health = HealthyCheckpoints(epath.Path("unused"), 3, calls.append)

    def should_save(self, step, last_step):
        return step in self.due

    def save(self, step, state, position, metadata):
        assert position["step"] == state.step == step + 1
        self.calls.append(("save", step))
        self.saved[step] = metadata

    def promote_final(self, last_step, problems):
        return self.health.is_newest_healthy(problems)

    def wait(self):
        self.waits += 1


def state_before(step):
    return SimpleNamespace(step=step, params={"w": step}, guard=None, average=None)


class SmallLoop:
    """A loop of steps 0 to `last_step`, and `calls`: what it did, in order."""

    def __init__(
        self,
        monkeypatch,
        last_step=5,
        *,
        first_step=0,
        hooks=(),
        checkpoints_after=(),
        eval_interval=-1,
        eval_losses=None,
        target_eval_loss=0.0,
        stop_after=(),
    ):
        self.calls, self.checks, self.lines = [], {}, []
        self.batches = Batches(first_step)
        self.rollback = Rollback(self.calls, self.batches)
        self.checkpoints = Checkpoints(self.calls, checkpoints_after)
        losses = eval_losses or {}

        def evaluate(eval_step, params, batches, *, step):
            self.calls.append(("evaluate", step))
            if losses.get(step, 0) is None:
                raise WaitCancelledError
            loss = losses.get(step, 9.0)
            return SimpleNamespace(row=dict, line=lambda: f"loss {loss}", loss=loss)

        monkeypatch.setattr(loop_module, "evaluate", evaluate)
        events = SimpleNamespace(
            failure=None,
            flush=lambda: None,
            timed=lambda kind, **fields: contextlib.nullcontext(fields),
        )
        profiler = SimpleNamespace(
            step=lambda step: contextlib.nullcontext(), finished=lambda step, metrics: None
        )
        self.run_logger = SimpleNamespace(
            events=events,
            profiler=profiler,
            terminal=SimpleNamespace(line=self.lines.append),
            lineage=SimpleNamespace(progress=lambda step: {}, metadata=lambda step: {}),
            trend=SimpleNamespace(state={}, diverged="", outlier_limit=math.inf),
            log_data_events=lambda batches, step: None,
        )
        evaluation = EvaluationConfig(
            eval_interval=eval_interval, target_eval_loss=target_eval_loss
        )
        self.loop = Loop(
            config=SimpleNamespace(
                evaluation=evaluation,
                run=RunConfig(steps=last_step + 1),
                checkpoint=CheckpointingConfig(),
            ),
            state=state_before(first_step),
            schedule=StepSchedule(
                step=first_step,
                last_step=last_step,
                batch_schedule=SimpleNamespace(at=lambda step: step, batch_size=lambda stage: 1),
            ),
            data=RunData(
                train=self.batches,
                evaluation=[] if eval_interval > 0 else None,
                eval_batch_size=1,
            ),
            compiled=CompiledModel(
                model="the model",
                sharding=SimpleNamespace(to_global_batch=lambda batch, size: batch),
                train_step=TrainStep(),
                eval_step=None,
            ),
            records=Records(
                run_folder=epath.Path("the run folder"),
                run_logger=self.run_logger,
                metric_logger=MetricLogger(self.calls, self.checks),
                checkpoints=self.checkpoints,
                metadata={},
            ),
            supervision=Supervision(
                rollback=self.rollback,
                learning_checks=SimpleNamespace(
                    gradients_due=lambda step: False,
                    check_first_batch=lambda batch: None,
                    finish=lambda state: None,
                ),
                watchdog=SimpleNamespace(
                    enter=lambda phase, step: None,
                    watch_iterator=lambda batches, phase, step: batches,
                ),
                preemption=SimpleNamespace(
                    requested=lambda step: step in stop_after, request=lambda: None
                ),
            ),
            hooks=hooks,
        )

    def run(self, evaluation_due=False):
        return self.loop.run(evaluation_due)

    def after(self, step):
        """What was done after a step, without the report of the step before it."""
        return [name for name, number in self.calls if number == step]
