"""Rollback: restores the last healthy state after skips or a rise.

Data since the first suspicious step are excluded, and training continues bit for bit like a run
whose data never contained them.
"""

import collections
import dataclasses
import math
import statistics
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, NoReturn

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from MaxText.checkpointing.history import Rollback
from MaxText.checkpointing.manager import CheckpointManager
from MaxText.config.training_sections import GuardConfig
from MaxText.errors import TrainingDivergedError
from MaxText.input_pipeline.iterator import TrainIterator
from MaxText.run.restore import RestoreResult, active_rollbacks
from MaxText.training.state import TrainState
from MaxText.value_types import PyTree

# Metrics reported with a rollback: medians over this many steps right before it, and over those
# before them. Gao et al. and others saw such signs before spikes; they need not be the cause.
_LATE_STEPS = 16
_EARLY_STEPS = 64
_WATCHED = ("update_norm", "log_z", "grad_norm", "param_norm", "loss")
_RISE_FACTOR = 1.1


class RollbackTrigger(NamedTuple):
    """Reason for a rollback, its step, and the first suspicious step."""

    detected_step: int
    onset_step: int
    reason: str


class _Snapshot(NamedTuple):
    """A state in host memory."""

    step: int  # it is the state after this step
    shards: PyTree  # of `copy_to_host`
    position: Mapping[str, Any]  # of the data, at the next step


class _Target(NamedTuple):
    """A restored healthy state."""

    step: int  # it is the state after this step
    source: str  # for messages
    state: TrainState
    position: Mapping[str, Any] | None  # of the data; None to start at that of the next step


@dataclasses.dataclass
class RollbackController:
    """Detects from metrics of reported steps when to roll back, and does so.

    Also tells `checkpoints` which steps were skipped, which decides about healthy states. Rollbacks
    of earlier starts count towards `rollback.maximum`.

    Attributes:
      trigger: Set when the run should roll back; the loop then calls `roll_back`.
      num_rollbacks: Over all restarts of the run.
    """

    config: GuardConfig
    checkpoints: CheckpointManager
    emit: Callable[..., None]  # EventLog.emit
    batches: TrainIterator
    abstract_state: TrainState  # with shardings
    restored: dataclasses.InitVar[RestoreResult]  # how the run started

    def __post_init__(self, restored: RestoreResult) -> None:
        self.trigger: RollbackTrigger | None = None
        recorded = active_rollbacks(restored, self.batches)
        num_saved = int(restored.progress.get("rollbacks", 0))
        self.num_rollbacks = max(num_saved, *(rollback.number for rollback in recorded), 0)
        self._snapshots: collections.deque[_Snapshot] = collections.deque(maxlen=2)
        self._history: collections.deque[dict[str, float]] = collections.deque(
            maxlen=_LATE_STEPS + _EARLY_STEPS + 2 * self.config.skip_step_interval
        )
        # The first step after the last rollback, also of an earlier start.
        self._restored_step = recorded[-1].restored_step if recorded else None
        self.checkpoints.health.restore_evaluations(restored.progress.get("evaluations", ()))
        self._begin(restored.state)
        for rollback in recorded:
            # Its row was removed with those of the steps to repeat.
            if rollback.restored_step >= restored.first_step:
                self.emit(
                    "rollback", step=rollback.restored_step, again=True, **rollback.event_fields()
                )

    def _begin(self, state: TrainState) -> None:
        """Begins to observe a run at a restored state."""
        self._first_step = int(state.step)
        self._num_skipped = 0 if state.guard is None else int(state.guard.num_skipped)
        self._skipped_before = self._num_skipped
        self._last_skipped = -1 if state.guard is None else int(state.guard.last_skipped)
        self.checkpoints.health.begin(self._first_step, self._last_skipped)

    @property
    def problems(self) -> list[str]:
        """What speaks against the newest state: the reason of a rollback that is due."""
        return [] if self.trigger is None else [self.trigger.reason]

    def observe(self, step: int, metrics: Mapping[str, float]) -> None:
        """Processes the metrics of a report, of all steps since the last one.

        Sets `trigger` if the run should roll back.

        Args:
          step: The newest step of the report.
          metrics: Of that step, with those of the spike guard.

        Raises:
          TrainingDivergedError: If training cannot continue and rollback is disabled.
        """
        num_skipped = int(metrics.get("num_skipped", 0)) - self._num_skipped
        if num_skipped:
            self._num_skipped += num_skipped
            self._last_skipped = int(metrics["last_skipped"])
            reason = "an outlier or not finite"
            if self._last_skipped == step:
                names = ("loss", "grad_norm", "update_norm")
                reason = ", ".join(f"{name} {metrics[name]:.4g}" for name in names)
            self.emit("step_skipped", step=self._last_skipped, count=num_skipped, reason=reason)
        self.checkpoints.observe_steps(step, self._last_skipped)
        self._history.append({"step": step, **metrics})
        self.trigger = self._find_trigger(step, metrics)

    def _find_trigger(self, step: int, metrics: Mapping[str, float]) -> RollbackTrigger | None:
        """Returns why to roll back after a report; None if there is no reason."""
        config = self.config
        if "recent_skips" not in metrics:
            return None
        recent = int(metrics["recent_skips"])
        rise = metrics["loss_rise"]
        window = config.skip_step_interval
        if config.rollback.after_skips and recent >= config.rollback.after_skips:
            reason = f"{recent} of the last {window} steps were skipped"
            return RollbackTrigger(step, int(metrics["skips_began"]), reason)
        if config.rollback.on_rise and rise > config.rollback.on_rise:
            reason = f"the loss rose to {rise:.0%} above its lowest median"
            return RollbackTrigger(step, int(metrics["rise_began"]), reason)
        if recent == window:
            raise TrainingDivergedError(
                f"all of the last {window} steps were skipped, up to step {step}: stopped. Lower "
                "the learning rate, or inspect the data."
            )
        return None

    def snapshot(self, step: int, state: TrainState, position: Mapping[str, Any]) -> None:
        """Copies a healthy state to host memory when due.

        Args:
          step: The step before the state. Its metrics may not have been observed yet.
          position: The data position of the next step.
        """
        period = self.config.rollback.snapshot_period
        is_due = period > 0 and (step + 1) % period == 0
        if is_due and self.checkpoints.health.is_newest_healthy(self.problems):
            self._snapshots.append(_Snapshot(step, copy_to_host(state), position))

    def roll_back(self) -> TrainState:
        """Rolls back to the last healthy state and excludes the suspicious data.

        Returns:
          The restored state.

        Raises:
          TrainingDivergedError: Without a healthy state, or at rollback.maximum.
        """
        trigger = self.trigger
        assert trigger is not None
        signs = self._warning_signs(trigger.onset_step)
        failed = self._failed_target(trigger)
        target_before = trigger.onset_step
        maximum = self.config.rollback.maximum
        if failed is not None:
            # Without its data the same state failed again, so the state is at fault. Such a
            # rollback goes to another state each time, and so may exceed the maximum.
            maximum = 2 * maximum
            target_before = min(failed, target_before)
            self.checkpoints.log(
                f"The state of step {failed} failed at once after a rollback to it: rolling back "
                "to an earlier one."
            )
        if self.num_rollbacks >= maximum:
            self._stop(trigger, signs, target_before, failed)
        target = self._find_target(target_before, trigger, signs)
        excluded = self.batches.get_state().get("excluded", ())
        rollback = self._describe(trigger, target, signs)
        self._abandon(target.step, failed)
        self.checkpoints.record_rollback(rollback)
        if target.position is None:
            self.batches.seek(target.step + 1)
        else:
            self.batches.set_state(target.position)
        for samples in (*excluded, rollback.samples):
            self.batches.exclude(*samples)
        while self._snapshots and self._snapshots[-1].step > target.step:
            self._snapshots.pop()
        while self._history and self._history[-1]["step"] > target.step:
            self._history.pop()
        self.num_rollbacks = rollback.number
        self.trigger = None
        self._restored_step = rollback.restored_step
        self._begin(target.state)
        self.emit("rollback", step=rollback.restored_step, **rollback.event_fields())
        return target.state

    def _stop(
        self, trigger: RollbackTrigger, signs: str, target_before: int, failed: int | None
    ) -> NoReturn:
        """Ends a run that has rolled back as often as allowed.

        Its newest checkpoint becomes the last healthy one before `target_before`, if there is any:
        a restart resumes from the newest, which must predate the divergence.
        """
        healthy = self.checkpoints.last_healthy(before_step=target_before)
        if healthy is not None:
            self._abandon(healthy, failed)
            signs = f"{signs} A restart resumes from step {healthy}."
        raise TrainingDivergedError(
            f"step {trigger.detected_step}: {trigger.reason}, and the run has rolled back "
            f"{self.num_rollbacks} times (rollback.maximum): stopped. {signs} Lower the "
            "learning rate, inspect the data, or start again from an earlier checkpoint."
        )

    def _describe(self, trigger: RollbackTrigger, target: _Target, signs: str) -> Rollback:
        """Returns the record of a rollback, with the samples that it excludes.

        They begin `rollback.margin` steps before the first suspicious step, but not before the
        target, and end with the step that triggered the rollback.
        """
        data = self.batches.source
        margin = self.config.rollback.margin
        first_excluded_step = max(target.step + 1, trigger.onset_step - margin)
        first_sample, _ = data.order_range(first_excluded_step)
        _, end_sample = data.order_range(trigger.detected_step)
        return Rollback(
            number=self.num_rollbacks + 1,
            restored_step=target.step + 1,
            detected_step=trigger.detected_step,
            onset_step=trigger.onset_step,
            samples=(first_sample, end_sample),
            source=target.source,
            reason=f"{trigger.reason}. {signs}".strip(),
            data=self.batches.identity,
        )

    def _failed_target(self, trigger: RollbackTrigger) -> int | None:
        """Returns the step of the last rollback's target if that failed at once, else None.

        It did if every step since was skipped, also those of earlier starts. None as well if there
        is no earlier state to roll back to.
        """
        first_step = self._restored_step
        if first_step is None:
            return None
        num_steps = trigger.detected_step + 1 - self._first_step
        all_skipped = self._num_skipped - self._skipped_before == num_steps
        # A start from a later checkpoint knows the steps before it by their skips in the guard.
        since_rollback = min(self._first_step, trigger.onset_step) <= first_step
        if not (all_skipped and since_rollback):
            return None
        target = first_step - 1
        has_snapshot = any(snapshot.step < target for snapshot in self._snapshots)
        if not has_snapshot and self.checkpoints.last_healthy(before_step=target) is None:
            return None
        return target

    def _abandon(self, target: int, failed: int | None) -> None:
        """Removes the checkpoints after `target`; those since `failed` are kept by another name."""
        if failed is not None and failed > target:
            names = self.checkpoints.set_aside(lambda step: step >= failed)
            if names:
                steps = ", ".join(map(str, names))
                self.checkpoints.log(
                    f"Renamed the checkpoints of broken states: {steps} (to <step>.unhealthy)"
                )
        self.checkpoints.roll_back_to(target)

    def _find_target(self, target_before: int, trigger: RollbackTrigger, signs: str) -> _Target:
        """Restores the newest healthy state before step `target_before`.

        It is a snapshot in memory or a checkpoint, whichever is newer. Checkpoints that cannot be
        restored are passed over.

        Raises:
          TrainingDivergedError: If there is none.
        """
        earlier_snapshots = (
            snapshot for snapshot in reversed(self._snapshots) if snapshot.step < target_before
        )
        snapshot = next(earlier_snapshots, None)
        while True:
            healthy = self.checkpoints.last_healthy(before_step=target_before)
            if snapshot is not None and (healthy is None or snapshot.step >= healthy):
                return _Target(
                    step=snapshot.step,
                    source=f"copy of step {snapshot.step} in memory",
                    state=copy_to_devices(snapshot.shards, self.abstract_state),
                    position=snapshot.position,
                )
            if healthy is None:
                raise TrainingDivergedError(
                    f"step {trigger.detected_step}: {trigger.reason}, and there is no healthy "
                    f"state before step {target_before} to roll back to: stopped. {signs} "
                    "Lower the learning rate, inspect the data, or save more often "
                    "(checkpoint_period, rollback.snapshot_period)."
                )
            restored, reason = self.checkpoints.try_restore(healthy, self.abstract_state)
            if restored is not None:
                return _Target(
                    step=healthy,
                    source=f"checkpoint of step {healthy}",
                    state=restored.state,
                    position=restored.position,
                )
            self.checkpoints.log(
                f"WARNING: cannot restore the checkpoint of step {healthy}: {reason}. Trying an "
                "earlier one."
            )

    def _warning_signs(self, onset_step: int) -> str:
        """Describes metrics with a rise shortly before a step."""
        earlier_rows = [row for row in self._history if row["step"] < onset_step]
        late_rows = earlier_rows[-_LATE_STEPS:]
        early_rows = earlier_rows[-_LATE_STEPS - _EARLY_STEPS : -_LATE_STEPS]
        if len(early_rows) < _LATE_STEPS // 2:
            return ""
        rises = []
        for name in _WATCHED:
            early_median = statistics.median(row.get(name, math.nan) for row in early_rows)
            late_median = statistics.median(row.get(name, math.nan) for row in late_rows)
            if early_median > 0 and late_median > _RISE_FACTOR * early_median:
                rises.append(f"{name} by {late_median / early_median - 1:.0%}")
        if not rises:
            return f"No watched metric rose in the {len(late_rows)} steps before."
        return f"Metrics that rose in the {len(late_rows)} steps before: {', '.join(rises)}."


def copy_to_host(state: PyTree) -> PyTree:
    """Returns a tree with each array as a list of (device, NumPy shard)."""
    return jax.tree.map(
        lambda x: [(shard.device, np.array(shard.data)) for shard in x.addressable_shards], state
    )


def copy_to_devices(shards: PyTree, abstract_state: PyTree) -> PyTree:
    """Returns arrays on the devices that `copy_to_host` copied them from.

    Args:
      shards: The result of `copy_to_host`.
      abstract_state: Their shapes and shardings.
    """

    def to_devices(
        leaf: jax.ShapeDtypeStruct, device_shards: list[tuple[Any, np.ndarray]]
    ) -> jax.Array:
        # Copies, because a CPU device may alias the buffer and then donate it.
        kind = leaf.sharding.memory_kind  # type: ignore[union-attr]
        arrays = [
            jax.device_put(shard.copy(), SingleDeviceSharding(device, memory_kind=kind))
            for device, shard in device_shards
        ]
        return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, arrays)

    return jax.tree.map(to_devices, abstract_state, shards)
