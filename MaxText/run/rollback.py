"""Rollback: restores the last healthy state after skips or a rise.

Data since the first suspicious step are excluded, and training continues bit for bit like a run
whose data never contained them.
"""

import collections
import dataclasses
import math
import statistics
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from MaxText.checkpointing.history import Rollback
from MaxText.checkpointing.manager import CheckpointManager
from MaxText.config.training_sections import GuardConfig
from MaxText.errors import TrainingDivergedError
from MaxText.input_pipeline.iterator import TrainIterator
from MaxText.run.restore import RestoreResult, active_rollbacks

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
    """A state in host memory, by addressable shards of each leaf."""

    step: int
    shards: Any
    position: Mapping[str, Any]


@dataclasses.dataclass
class RollbackController:
    """Detects from metrics of reported steps when to roll back, and does so.

    `emit` is EventLog.emit. Rollbacks of earlier starts count.
    """

    config: GuardConfig
    checkpoints: CheckpointManager
    emit: Callable[..., None]
    batches: TrainIterator
    abstract_state: Any
    restored: dataclasses.InitVar[RestoreResult]

    def __post_init__(self, restored: RestoreResult) -> None:
        self.trigger: RollbackTrigger | None = None  # set when the run should roll back
        recorded = active_rollbacks(restored, self.batches)
        saved = restored.metadata.get("rollbacks", 0)
        # Over all restarts of the run.
        self.num_rollbacks = max(int(saved), *(rollback.number for rollback in recorded), 0)
        self._snapshots: collections.deque[_Snapshot] = collections.deque(maxlen=2)
        self._history: collections.deque[dict[str, float]] = collections.deque(
            maxlen=_LATE_STEPS + _EARLY_STEPS + 2 * self.config.skip_step_interval
        )
        # The first step after the last rollback, also of an earlier start.
        self._restored_step = recorded[-1].restored_step if recorded else None
        self._begin(restored.state)
        for rollback in recorded:
            # Its row was removed with those of the steps to repeat.
            if rollback.restored_step >= restored.first_step:
                self.emit(
                    "rollback", step=rollback.restored_step, again=True, **rollback.event_fields()
                )

    def _begin(self, state: Any) -> None:
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

        Raises TrainingDivergedError if training cannot continue and rollback is disabled.
        """
        skipped = int(metrics.get("num_skipped", 0)) - self._num_skipped
        if skipped:
            self._num_skipped += skipped
            self._last_skipped = int(metrics["last_skipped"])
            reason = "an outlier or not finite"
            if self._last_skipped == step:
                names = ("loss", "grad_norm", "update_norm")
                reason = ", ".join(f"{name} {metrics[name]:.4g}" for name in names)
            at = self._last_skipped
            self.emit("step_skipped", step=at, count=skipped, reason=reason)
        self.checkpoints.observe_steps(step, self._last_skipped)
        self._history.append({"step": step, **metrics})
        self.trigger = self._find_trigger(step, metrics)

    def _find_trigger(self, step: int, metrics: Mapping[str, float]) -> RollbackTrigger | None:
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

    def snapshot(self, step: int, state: Any, position: Mapping[str, Any]) -> None:
        """Copies a healthy state to host memory when due.

        The metrics of `step` may be unseen; `position` is that of the next step.
        """
        period = self.config.rollback.snapshot_period
        is_due = period > 0 and (step + 1) % period == 0
        if is_due and self.checkpoints.health.is_newest_healthy(self.problems):
            self._snapshots.append(_Snapshot(step, copy_to_host(state), position))

    def roll_back(self) -> Any:
        """Rolls back to the last healthy state and excludes the suspicious data.

        Returns the restored state. Raises TrainingDivergedError without a healthy one, or at
        rollback.maximum.
        """
        trigger = self.trigger
        batches = self.batches
        assert trigger is not None
        signs = self._warning_signs(trigger.onset_step)
        maximum = self.config.rollback.maximum
        before = trigger.onset_step
        failed = self._failed_target(trigger)
        if failed is not None:
            # Without its data the same state failed again, so the state is at fault. Such a
            # rollback goes to another state each time, and so may exceed the maximum.
            maximum = 2 * maximum
            before = min(failed, before)
            self.checkpoints.log(
                f"The state of step {failed} failed at once after a rollback to it: rolling back "
                "to an earlier one."
            )
        if self.num_rollbacks >= maximum:
            healthy = self.checkpoints.last_healthy(before=before)
            if healthy is not None:
                # A restart takes the newest checkpoint, which must predate the divergence.
                self._abandon(healthy, failed)
                signs = f"{signs} A restart resumes from step {healthy}."
            raise TrainingDivergedError(
                f"step {trigger.detected_step}: {trigger.reason}, and the run has rolled back "
                f"{self.num_rollbacks} times (rollback.maximum): stopped. {signs} Lower the "
                "learning rate, inspect the data, or start again from an earlier checkpoint."
            )
        target, source, state, position = self._last_healthy(before, trigger, signs)
        excluded = batches.get_state().get("excluded", ())
        began = max(target + 1, trigger.onset_step - self.config.rollback.margin)
        data = batches.source
        first = data.order_range(began)[0]
        end = data.order_range(trigger.detected_step)[1]
        rollback = Rollback(
            number=self.num_rollbacks + 1,
            restored_step=target + 1,
            detected_step=trigger.detected_step,
            onset_step=trigger.onset_step,
            samples=(first, end),
            source=source,
            reason=f"{trigger.reason}. {signs}".strip(),
            data=batches.identity,
        )
        self._abandon(target, failed)
        self.checkpoints.record_rollback(rollback)
        if position is None:
            batches.seek(target + 1)
        else:
            batches.set_state(position)
        for samples in (*excluded, (first, end)):
            batches.exclude(*samples)
        while self._snapshots and self._snapshots[-1].step > target:
            self._snapshots.pop()
        while self._history and self._history[-1]["step"] > target:
            self._history.pop()
        self.num_rollbacks = rollback.number
        self.trigger = None
        self._restored_step = rollback.restored_step
        self._begin(state)
        self.emit("rollback", step=rollback.restored_step, **rollback.event_fields())
        return state

    def _failed_target(self, trigger: RollbackTrigger) -> int | None:
        """Returns the target of the last rollback if it failed at once, else None.

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
        if not has_snapshot and self.checkpoints.last_healthy(before=target) is None:
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

    def _last_healthy(
        self, before: int, trigger: RollbackTrigger, signs: str
    ) -> tuple[int, str, Any, Any]:
        """Returns step, source, state and position of the healthy state before a step."""
        snapshot = next((s for s in reversed(self._snapshots) if s.step < before), None)
        while True:
            healthy = self.checkpoints.last_healthy(before=before)
            if snapshot is not None and (healthy is None or snapshot.step >= healthy):
                state = copy_to_devices(snapshot.shards, self.abstract_state)
                source = f"copy of step {snapshot.step} in memory"
                return snapshot.step, source, state, snapshot.position
            if healthy is None:
                raise TrainingDivergedError(
                    f"step {trigger.detected_step}: {trigger.reason}, and there is no healthy "
                    f"state before step {before} to roll back to: stopped. {signs} "
                    "Lower the learning rate, inspect the data, or save more often "
                    "(checkpoint_period, rollback.snapshot_period)."
                )
            restored, reason = self.checkpoints.try_restore(healthy, self.abstract_state)
            if restored is not None:
                return healthy, f"checkpoint of step {healthy}", restored[0], restored[1]
            self.checkpoints.log(
                f"WARNING: cannot restore the checkpoint of step {healthy}: {reason}. Trying an "
                "earlier one."
            )

    def _warning_signs(self, began: int) -> str:
        """Describes metrics with a rise shortly before a step."""
        rows = [row for row in self._history if row["step"] < began]
        late = rows[-_LATE_STEPS:]
        early = rows[-_LATE_STEPS - _EARLY_STEPS : -_LATE_STEPS]
        if len(early) < _LATE_STEPS // 2:
            return ""
        risen = []
        for name in _WATCHED:
            values = [[row.get(name, math.nan) for row in part] for part in (early, late)]
            before, after = map(statistics.median, values)
            if before > 0 and after > _RISE_FACTOR * before:
                risen.append(f"{name} by {after / before - 1:.0%}")
        if not risen:
            return f"No watched metric rose in the {len(late)} steps before."
        return f"Metrics that rose in the {len(late)} steps before: {', '.join(risen)}."


def copy_to_host(state: Any) -> Any:
    """Returns each array as a list of (device, NumPy shard)."""
    return jax.tree.map(
        lambda x: [(shard.device, np.array(shard.data)) for shard in x.addressable_shards], state
    )


def copy_to_devices(shards: Any, abstract_state: Any) -> Any:
    """Restores the result of `copy_to_host` as `abstract_state`."""

    def place(leaf: jax.ShapeDtypeStruct, parts: list[tuple[Any, np.ndarray]]) -> jax.Array:
        # Copies, because a CPU device may alias the buffer and then donate it.
        kind = leaf.sharding.memory_kind  # type: ignore[union-attr]
        arrays = [
            jax.device_put(part.copy(), SingleDeviceSharding(device, memory_kind=kind))
            for device, part in parts
        ]
        return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, arrays)

    return jax.tree.map(place, abstract_state, shards)
