"""When a run rolls back, and where to; the whole program is in end_to_end/test_recovery.py."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath

from MaxText.checkpointing.health import HealthyCheckpoints
from MaxText.checkpointing.manager import RestoreAttempt, RestoredCheckpoint
from MaxText.config.training_sections import GuardConfig
from MaxText.errors import TrainingDivergedError
from MaxText.monitoring.event_stream import EventLog
from MaxText.run.restore import RestoreResult
from MaxText.run.rollback import RollbackController
from MaxText.training.spike_guard import initial_state
from MaxText.training.state import TrainState

KEYS = {"rollback.after_skips": 3, "rollback.margin": 2, "healthy_after_steps": 4}
SECTION = GuardConfig(**KEYS)


def state_after(step, section=SECTION, last_skipped=-1):
    guard = initial_state(section)
    if guard is not None:
        guard = dataclasses.replace(guard, last_skipped=jnp.int32(last_skipped))
    return TrainState(jnp.int32(step + 1), {"w": jnp.full(3, step)}, (), guard)


class CheckpointManager:
    """Those of `good`; those of `damaged` cannot be read."""

    def __init__(self, good=(), damaged=(), healthy_after_steps=SECTION.healthy_after_steps):
        self.health = HealthyCheckpoints(epath.Path("unused"), healthy_after_steps, pytest.fail)
        self.good, self.damaged = set(good), set(damaged)
        self.observed, self.abandoned, self.lines, self.recorded = [], [], [], []
        self.unhealthy = []
        self.log = self.lines.append

    def observe_steps(self, last_step, last_skipped):
        self.observed.append((last_step, last_skipped))
        self.health.observe_steps(last_step, last_skipped)

    def last_healthy(self, before_step):
        return max((step for step in self.good if step < before_step), default=None)

    def try_restore(self, step, abstract_state):
        if step in self.damaged:
            self.good.remove(step)
            return RestoreAttempt(None, "array w is damaged")
        position = {"step": step + 1, "excluded": []}
        return RestoreAttempt(RestoredCheckpoint(state_after(step), position, {}), "")

    def roll_back_to(self, step):
        # Before the record, or a restart in between would resume in the abandoned past.
        assert len(self.recorded) == len(self.abandoned)
        self.abandoned.append(step)

    def set_aside(self, is_broken):
        broken = sorted(filter(is_broken, self.good))
        self.good -= set(broken)
        self.unhealthy += broken
        return broken

    def record_rollback(self, rollback):
        self.recorded.append(rollback)


class Batches:
    """Four samples a step; the excluded ones are only noted."""

    def __init__(self):
        self.source = self
        self.get_state = lambda: {"step": 0, "excluded": [[4, 8]]}
        self.identity = {"seed": 7}
        self.calls = []

    def differences(self, position):
        return [] if position == self.identity else ["seed"]

    def order_range(self, step):
        return 4 * step, 4 * step + 4

    def set_state(self, position):
        self.calls.append(("set_state", position["step"]))

    def exclude(self, first, end):
        self.calls.append(("exclude", first, end))


def made(
    checkpoints=None, section=SECTION, rollbacks=0, first_step=0, recorded=(), last_skipped=-1
):
    rows = []
    sink = types.SimpleNamespace(write=rows.append, flush=lambda: None, close=lambda: None)
    state = state_after(first_step - 1, section, last_skipped)
    start = RestoreResult(state, first_step, None, "", "resume", {"rollbacks": rollbacks})
    start = start._replace(rollbacks=recorded)
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), start.state
    )
    batches, checkpoints = Batches(), checkpoints or CheckpointManager()
    rollback = RollbackController(
        section, checkpoints, EventLog([sink]).emit, batches, abstract, start
    )
    return rollback, checkpoints, batches, rows


def metrics(num_skipped=0, last=-1, first=-1, recent=0, rise=0.0, began=0, **more):
    skips = {"num_skipped": num_skipped, "last_skipped": last, "skips_began": first}
    skips |= {"recent_skips": recent, "loss_rise": rise, "rise_began": began}
    return {"loss": 3.0, "grad_norm": 1.0, "update_norm": 0.1} | skips | more


def is_healthy(rollback):
    return rollback.checkpoints.health.is_newest_healthy(rollback.problems)


def diverging(rollback):
    for step in range(60):
        rollback.observe(step, metrics(log_z=2.0 if step < 45 else 3.0, param_norm=5.0))
    rollback.observe(60, metrics(num_skipped=3, last=60, first=57, recent=3))
    assert rollback.trigger is not None


def test_updates_between_two_reports_are_known_by_the_later_one():
    rollback, checkpoints, _, rows = made()
    rollback.observe(4, metrics())
    rollback.observe(9, metrics(num_skipped=2, last=7, first=6, recent=2))
    assert checkpoints.observed == [(4, -1), (9, 7)]
    (skip,) = rows
    assert (skip.kind, skip.step, skip.fields["count"]) == ("step_skipped", 7, 2)
    assert rollback.trigger is None
    assert not is_healthy(rollback)
    rollback.observe(11, metrics(num_skipped=2, last=7, first=6, recent=2))
    assert is_healthy(rollback)
    # Skips before a restart are remembered.
    assert is_healthy(made(first_step=40)[0])
    assert not is_healthy(made(first_step=40, last_skipped=38)[0])


@pytest.mark.parametrize(("how", "expected"), [("resume", [(19, 2.5)]), ("parameters", [])])
def test_a_restart_knows_the_validation_losses_of_its_own_training(how, expected):
    evaluations = [[19, 2.5], [29, None]]  # the latter of a step after the restored state
    start = RestoreResult(state_after(24), 25, None, "", how, {"evaluations": evaluations})
    checkpoints = CheckpointManager()
    RollbackController(SECTION, checkpoints, EventLog([]).emit, Batches(), None, start)
    assert checkpoints.health.evaluations == expected


def test_rollback_to_the_newest_healthy_checkpoint_before_the_divergence():
    rollback, checkpoints, batches, rows = made(CheckpointManager(good=(10, 50, 58)))
    diverging(rollback)
    state = rollback.roll_back()
    assert int(state.step) == 51
    assert checkpoints.abandoned == [50]
    # From two updates before the first suspicious one; what was excluded before stays so.
    assert batches.calls == [("set_state", 51), ("exclude", 4, 8), ("exclude", 4 * 55, 4 * 61)]
    row = rows[-1]
    assert (row.kind, row.step) == ("rollback", 51)
    assert "log_z by 50%" in row.fields["reason"]
    assert rollback.num_rollbacks == 1
    assert rollback.trigger is None

    (record,) = checkpoints.recorded
    assert (record.number, record.restored_step, record.samples) == (1, 51, (220, 244))
    other = dataclasses.replace(record, number=2, data={"seed": 8})
    # A restart from a checkpoint before it, whose metadata know of no rollback, tells of it again.
    restarted, _, _, again = made(first_step=41, recorded=(record, other))
    assert [(each.step, each.fields) for each in again] == [(51, row.fields | {"again": True})]
    assert restarted.num_rollbacks == 1
    # From one after it, where its row still stands.
    restarted, _, _, again = made(first_step=60, recorded=(record,), rollbacks=1)
    assert (again, restarted.num_rollbacks) == ([], 1)


@pytest.mark.parametrize(
    ("good", "damaged", "period", "to", "first"),
    [
        ((40, 56), (), 0, 57, 57),  # a margin of two steps would reach further back
        ((10, 50), (50,), 0, 11, 55),
        ((40,), (), 10, 50, 55),  # to a copy in memory, which is nearer
    ],
)
def test_the_nearest_good_state(good, damaged, period, to, first):
    section = GuardConfig(**{**KEYS, "rollback.snapshot_period": period})
    rollback, checkpoints, batches, _ = made(CheckpointManager(good, damaged), section)
    for step in (39, 49, 59):
        rollback.snapshot(step, state_after(step, section), {"step": step + 1})
    diverging(rollback)
    state = rollback.roll_back()
    assert int(state.step) == to
    np.testing.assert_array_equal(state.params["w"], np.full(3, to - 1))
    assert batches.calls[0] == ("set_state", to)
    assert batches.calls[-1] == ("exclude", 4 * first, 4 * 61)
    assert len(checkpoints.lines) == len(damaged)


@pytest.mark.parametrize(
    ("good", "rollbacks", "match", "abandoned"),
    [
        ((58,), 0, "before step 57", []),
        ((), 3, "rollback.maximum", []),
        # A restart must not begin in the divergence.
        ((10, 50), 3, "rollback.maximum.* from step 50", [50]),
    ],
)
def test_where_there_is_no_way_back(good, rollbacks, match, abandoned):
    rollback, checkpoints, _, _ = made(CheckpointManager(good=good), rollbacks=rollbacks)
    diverging(rollback)
    with pytest.raises(TrainingDivergedError, match=match):
        rollback.roll_back()
    assert checkpoints.abandoned == abandoned


def skipping(rollback, first_step, count=3):
    """Skips every step from the first one after a rollback on, until the next one is due."""
    before = rollback._num_skipped
    for index in range(count):
        step = first_step + index
        rollback.observe(
            step,
            metrics(num_skipped=before + index + 1, last=step, first=first_step, recent=index + 1),
        )
    assert rollback.trigger is not None


def test_a_target_that_fails_at_once_is_given_up_for_the_one_before_it():
    rollback, checkpoints, _, _ = made(CheckpointManager(good=(10, 30, 50)))
    diverging(rollback)
    assert int(rollback.roll_back().step) == 51
    skipping(rollback, 51)
    assert int(rollback.roll_back().step) == 31
    assert checkpoints.unhealthy == [50]
    skipping(rollback, 31)
    assert int(rollback.roll_back().step) == 11
    assert checkpoints.unhealthy == [50, 30]
    # Nothing is before the last one, which stays: a restart tries it again.
    skipping(rollback, 11)
    with pytest.raises(TrainingDivergedError, match=r"rollback\.maximum.* from step 10"):
        rollback.roll_back()
    assert (checkpoints.abandoned, checkpoints.unhealthy) == ([50, 30, 10, 10], [50, 30])


def test_a_target_whose_steps_were_accepted_at_first_is_not_given_up():
    """A learning rate that breaks each state must not use up the checkpoints."""
    rollback, checkpoints, _, _ = made(CheckpointManager(good=(10, 50)))
    diverging(rollback)
    rollback.roll_back()
    rollback.observe(51, metrics())
    skipping(rollback, 52)
    assert int(rollback.roll_back().step) == 51
    assert checkpoints.unhealthy == []


@pytest.mark.parametrize(("first_step", "num_rollbacks"), [(51, 1), (51, 3), (53, 1)])
def test_a_restart_gives_up_the_target_that_failed_before(first_step, num_rollbacks):
    """Also if it resumes after some skipped steps, or had rolled back as often as allowed."""
    rollback, checkpoints, _, _ = made(CheckpointManager(good=(10, 50)))
    diverging(rollback)
    rollback.roll_back()
    (record,) = checkpoints.recorded
    record = dataclasses.replace(record, number=num_rollbacks)
    checkpoints = CheckpointManager(good=(10, 50))
    rollback, *_ = made(checkpoints, first_step=first_step, recorded=(record,))
    for step in range(first_step, first_step + 3):
        skipped = step - first_step + 1
        rollback.observe(step, metrics(num_skipped=skipped, last=step, first=51, recent=skipped))
    assert int(rollback.roll_back().step) == 11
    assert (checkpoints.unhealthy, checkpoints.abandoned) == ([50], [10])


def test_a_snapshot_that_fails_at_once_is_given_up():
    section = GuardConfig(**{**KEYS, "rollback.snapshot_period": 10})
    rollback, checkpoints, _, _ = made(CheckpointManager(good=(10,)), section)
    for step in (39, 49):
        rollback.snapshot(step, state_after(step, section), {"step": step + 1})
    diverging(rollback)
    assert int(rollback.roll_back().step) == 50
    skipping(rollback, 50)
    assert int(rollback.roll_back().step) == 40
    skipping(rollback, 40)
    assert int(rollback.roll_back().step) == 11
    assert checkpoints.unhealthy == []


def test_a_rise_and_skipped_steps_alone():
    rollback, _, _, _ = made()
    rollback.observe(60, metrics(rise=0.2, began=40))
    assert rollback.trigger is None
    rollback.observe(61, metrics(rise=0.3, began=40))
    assert rollback.trigger.onset_step == 40
    assert "30%" in rollback.trigger.reason
    # Without rollbacks, a run whose steps are all skipped ends.
    rollback, *_ = made(section=GuardConfig(**{**KEYS, "rollback.after_skips": 0}))
    with pytest.raises(TrainingDivergedError, match="128"):
        rollback.observe(127, metrics(num_skipped=128, last=127, first=0, recent=128))


def test_without_the_guard_all_updates_are_sound():
    rollback, checkpoints, _, rows = made(section=GuardConfig(skip_step_on_spikes=False))
    rollback.observe(3, {"loss": 3.0})
    assert checkpoints.observed == [(3, -1)]
    assert rollback.trigger is None
    assert is_healthy(rollback)
    assert rows == []
