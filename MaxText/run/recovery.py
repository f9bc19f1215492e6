"""Rollback: restore the last healthy state when steps are skipped or the loss rises.

Data since the first suspicious step are excluded, and training continues bit for bit like a run
whose data never contained them.
"""

import collections
import dataclasses
import math
import statistics
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from MaxText.checkpointing.description import Unreadable
from MaxText.checkpointing.manager import Checkpoints
from MaxText.checkpointing.rewinds import Rewind
from MaxText.config.training_sections import Guard
from MaxText.errors import Diverged
from MaxText.input_pipeline.iterator import BatchIterator
from MaxText.run.starting_data import standing_rewinds
from MaxText.run.starting_point import Start
from MaxText.runtime.agreement import on_all_processes

# Metrics reported with a rollback: medians over this many steps right before it, and over those
# before them. Gao et al. and others saw such signs before spikes; they need not be the cause.
_SHORTLY_BEFORE, _BEFORE_THAT = 16, 64
_WATCHED = ("update_norm", "log_z", "grad_norm", "param_norm", "loss")
_ROSE = 1.1


@dataclasses.dataclass(frozen=True)
class Trouble:
    """Reason for a rollback: step at which it was noticed, first suspicious step."""

    noticed: int
    began: int
    reason: str


@dataclasses.dataclass(frozen=True)
class _Snapshot:
    """A state in host memory; `shards` has the addressable shards of each leaf."""

    step: int
    shards: Any
    position: Mapping[str, Any]


class Recovery:
    """Detects trouble in the metrics of reported steps, and rolls back.

    Attributes:
      trouble: Set when the run should roll back; cleared by `go_back`.
      rewinds: Rollbacks over all restarts of the run.
    """

    def __init__(
        self,
        section: Guard,
        checkpoints: Checkpoints,
        emit: Callable[..., None],
        batches: BatchIterator,
        abstract_state: Any,
        start: Start,
    ):
        """Reads the rollbacks of earlier starts; `emit` is EventStream.emit."""
        self.trouble: Trouble | None = None
        recorded = standing_rewinds(start, batches)
        known = [int(start.metadata.get("rewinds", 0)), *(rewind.number for rewind in recorded)]
        self.rewinds = max(known)
        self._batches = batches
        self._abstract_state = abstract_state
        self._section = section
        self._checkpoints = checkpoints
        self._emit = emit
        self._snapshots: collections.deque[_Snapshot] = collections.deque(maxlen=2)
        self._history: collections.deque[dict[str, float]] = collections.deque(
            maxlen=_SHORTLY_BEFORE + _BEFORE_THAT + 2 * section.skip_step_interval
        )
        self._begin(start.state)
        for rewind in recorded:
            # Its row was removed with those of the steps to repeat.
            if rewind.to >= start.first_step:
                emit("rewind", step=rewind.to, again=True, **rewind.facts())

    def _begin(self, state: Any) -> None:
        self._seen = int(state.step) - 1
        self._num_skipped = 0 if state.guard is None else int(state.guard.num_skipped)
        self._last_skipped = -1 if state.guard is None else int(state.guard.last_skipped)

    @property
    def is_healthy(self) -> bool:
        """Whether the last `guard_healthy_steps` steps were all applied."""
        if self.trouble is not None:
            return False
        return self._last_skipped < 0 or (
            self._seen - self._last_skipped >= self._section.guard_healthy_steps
        )

    def observe(self, step: int, metrics: Mapping[str, float]) -> None:
        """Processes the metrics of a report, which cover all steps since the last one.

        Raises Diverged if training cannot continue and rollback is disabled.
        """
        skipped = int(metrics.get("num_skipped", 0)) - self._num_skipped
        if skipped:
            self._num_skipped += skipped
            self._last_skipped = int(metrics["last_skipped"])
            numbers = ", ".join(
                f"{name} {metrics[name]:.4g}" for name in ("loss", "grad_norm", "update_norm")
            )
            self._emit(
                "skip",
                step=self._last_skipped,
                what="update",
                count=skipped,
                reason=numbers if self._last_skipped == step else "an outlier, or not finite",
            )
        for each in range(self._seen + 1, step + 1):
            # Between reports only the last skip is known; any earlier step may be one, too.
            self._checkpoints.observe(each, each > self._last_skipped)
        self._seen = step
        self._history.append({"step": step, **metrics})
        self.trouble = self._trouble(step, metrics)

    def _trouble(self, step: int, metrics: Mapping[str, float]) -> Trouble | None:
        section = self._section
        if "recent_skips" not in metrics:
            return None
        recent, rise = int(metrics["recent_skips"]), metrics["loss_rise"]
        window = section.skip_step_interval
        if section.rewind_after_skips and recent >= section.rewind_after_skips:
            reason = f"{recent} of the last {window} steps were skipped"
            return Trouble(step, int(metrics["skips_began"]), reason)
        if section.rewind_on_rise and rise > section.rewind_on_rise:
            reason = f"the loss rose to {rise:.0%} above its lowest median"
            return Trouble(step, int(metrics["rise_began"]), reason)
        if recent == window:
            raise Diverged(
                f"each of the last {window} updates was left out, the newest is step {step}: "
                "stopped. Lower the learning rate, or look at the data."
            )
        return None

    def snapshot(self, step: int, state: Any, position: Mapping[str, Any]) -> None:
        """Copies a healthy state to host memory when due.

        The host must have seen the metrics of `step`; `position` is that of the next step.
        """
        period = self._section.rewind_snapshot_period
        if period and (step + 1) % period == 0 and self.is_healthy:
            self._snapshots.append(_Snapshot(step, copied(state), position))

    def go_back(self) -> Any:
        """Rolls back to the last healthy state and excludes the suspicious data.

        Returns the restored state. Raises Diverged without a healthy one, or at max_rewinds.
        """
        trouble, batches = self.trouble, self._batches
        assert trouble is not None
        signs = self._signs(trouble.began)
        if self.rewinds >= self._section.max_rewinds:
            healthy = self._checkpoints.latest_good(before=trouble.began)
            if healthy is not None:
                # A restart takes the newest checkpoint, which must predate the trouble.
                self._checkpoints.go_back_to(healthy)
                signs = f"{signs} A restart resumes from step {healthy}."
            raise Diverged(
                f"step {trouble.noticed}: {trouble.reason}, and the run has gone back "
                f"{self.rewinds} times (max_rewinds): stopped. {signs} Lower the learning rate, "
                "look at the data, or begin again from an earlier checkpoint."
            )
        target, source, state, position = self._last_good(trouble, signs)
        holes = batches.position.get("excluded", ())
        began = max(target + 1, trouble.began - self._section.rewind_margin)
        first, end = batches.sample_range(began)[0], batches.sample_range(trouble.noticed)[1]
        rewind = Rewind(
            number=self.rewinds + 1,
            to=target + 1,
            noticed=trouble.noticed,
            began=trouble.began,
            samples=(first, end),
            source=source,
            reason=f"{trouble.reason}. {signs}".strip(),
            data=batches.identity,
        )
        self._checkpoints.go_back_to(target)
        self._checkpoints.record_rewind(rewind)
        if position is None:
            batches.seek(target + 1)
        else:
            batches.resume(position)
        for hole in (*holes, (first, end)):
            batches.exclude(*hole)
        while self._snapshots and self._snapshots[-1].step > target:
            self._snapshots.pop()
        while self._history and self._history[-1]["step"] > target:
            self._history.pop()
        self.rewinds = rewind.number
        self.trouble = None
        self._begin(state)
        self._emit("rewind", step=rewind.to, **rewind.facts())
        return state

    def _last_good(self, trouble: Trouble, signs: str) -> tuple[int, str, Any, Any]:
        """Returns step, source, state and data position of the newest usable healthy state."""
        snapshot = next((s for s in reversed(self._snapshots) if s.step < trouble.began), None)
        while True:
            good = self._checkpoints.latest_good(before=trouble.began)
            if snapshot is not None and (good is None or snapshot.step >= good):
                state = placed(snapshot.shards, self._abstract_state)
                source = f"copy of step {snapshot.step} in memory"
                return snapshot.step, source, state, snapshot.position
            if good is None:
                raise Diverged(
                    f"step {trouble.noticed}: {trouble.reason}, and there is no good state before "
                    f"step {trouble.began} to go back to: stopped. {signs} Lower the learning "
                    "rate, look at the data, or save more often (checkpoint_period, "
                    "rewind_snapshot_period)."
                )
            restored, reason = None, "another process could not read it"
            try:
                restored = self._checkpoints.restore(good, self._abstract_state)
            except Unreadable as error:
                reason = str(error)
            if on_all_processes(restored is not None):
                assert restored is not None
                return good, f"checkpoint of step {good}", restored[0], restored[1]
            self._checkpoints.mark_unreadable(good)
            self._checkpoints.show(f"!!! WARNING: THE CHECKPOINT OF STEP {good} IS BAD: {reason}")

    def _signs(self, began: int) -> str:
        """Describes metrics that rose shortly before a step."""
        rows = [row for row in self._history if row["step"] < began]
        late = rows[-_SHORTLY_BEFORE:]
        early = rows[-_SHORTLY_BEFORE - _BEFORE_THAT : -_SHORTLY_BEFORE]
        if len(early) < _SHORTLY_BEFORE // 2:
            return ""
        risen = []
        for name in _WATCHED:
            values = [[row.get(name, math.nan) for row in part] for part in (early, late)]
            before, after = (statistics.median(part) for part in values)
            if before > 0 and after > _ROSE * before:
                risen.append(f"{name} by {after / before - 1:.0%}")
        if not risen:
            return f"Nothing that is watched had risen in the {len(late)} updates before."
        return f"In the {len(late)} updates before, these had risen: {', '.join(risen)}."


def copied(state: Any) -> Any:
    """Returns each array as a list of (device, NumPy shard)."""
    return jax.tree.map(
        lambda x: [(shard.device, np.array(shard.data)) for shard in x.addressable_shards], state
    )


def placed(shards: Any, abstract_state: Any) -> Any:
    """Restores the result of `copied` with the shardings of `abstract_state`."""

    def place(leaf: jax.ShapeDtypeStruct, parts: list[tuple[Any, np.ndarray]]) -> jax.Array:
        # Copies, because a CPU device may alias the buffer and then donate it.
        kind = leaf.sharding.memory_kind  # type: ignore[union-attr]
        arrays = [
            jax.device_put(part.copy(), SingleDeviceSharding(device, memory_kind=kind))
            for device, part in parts
        ]
        return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, arrays)

    return jax.tree.map(place, abstract_state, shards)
