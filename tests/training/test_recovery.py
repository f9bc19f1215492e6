"""When a run goes back, and where to; the whole program is in end_to_end/test_recovery.py."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from MaxText.checkpointing.description import Unreadable
from MaxText.checkpointing.starting_point import Start
from MaxText.configuration.training_sections import Guard
from MaxText.errors import Diverged
from MaxText.monitoring.event_stream import EventStream
from MaxText.training.recovery import Recovery
from MaxText.training.spike_guard import initial_state
from MaxText.training.state import TrainState

SECTION = Guard(rewind_after_skips=3, rewind_margin=2, guard_healthy_steps=4)


def state_after(step, section=SECTION):
    return TrainState(jnp.int32(step + 1), {"w": jnp.full(3, step)}, (), initial_state(section))


class Checkpoints:
    """Those of `good`; those of `damaged` cannot be read."""

    def __init__(self, good=(), damaged=()):
        self.good, self.damaged = set(good), set(damaged)
        self.observed, self.given_up, self.lines, self.recorded = [], [], [], []
        self.show = self.lines.append

    def observe(self, step, healthy):
        self.observed.append((step, healthy))

    def latest_good(self, before):
        return max((step for step in self.good if step < before), default=None)

    def restore(self, step, abstract_state):
        if step in self.damaged:
            raise Unreadable("array w is damaged")
        return state_after(step), {"step": step + 1, "excluded": []}, {}

    def mark_unreadable(self, step):
        self.good.remove(step)

    def go_back_to(self, step):
        assert not self.recorded  # or a restart in between would resume in the past given up
        self.given_up.append(step)

    def record_rewind(self, rewind):
        self.recorded.append(rewind)


class Batches:
    """Four samples a step; holes are only noted."""

    def __init__(self):
        self.position = {"step": 0, "excluded": [[4, 8]]}
        self.identity = {"seed": 7}
        self.calls = []

    def differences(self, position):
        return [] if position == self.identity else ["seed"]

    def sample_range(self, step):
        return 4 * step, 4 * step + 4

    def resume(self, position):
        self.calls.append(("resume", position["step"]))

    def exclude(self, first, end):
        self.calls.append(("exclude", first, end))


def made(checkpoints=None, section=SECTION, rewinds=0, first_step=0, recorded=()):
    rows = []
    sink = types.SimpleNamespace(write=rows.append, flush=lambda: None, close=lambda: None)
    state = state_after(first_step - 1, section)
    start = Start(state, first_step, None, "", "scratch", {"rewinds": rewinds})
    start = start._replace(rewinds=recorded)
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), start.state
    )
    batches, checkpoints = Batches(), checkpoints or Checkpoints()
    recovery = Recovery(section, checkpoints, EventStream([sink]), batches, abstract, start)
    return recovery, checkpoints, batches, rows


def metrics(num_skipped=0, last=-1, first=-1, recent=0, rise=0.0, began=0, **more):
    return {
        "loss": 3.0,
        "grad_norm": 1.0,
        "update_norm": 0.1,
        "num_skipped": num_skipped,
        "last_skipped": last,
        "skips_began": first,
        "recent_skips": recent,
        "loss_rise": rise,
        "rise_began": began,
    } | more


def test_updates_between_two_reports_are_known_by_the_later_one():
    recovery, checkpoints, _, rows = made()
    recovery.observe(4, metrics())
    recovery.observe(9, metrics(num_skipped=2, last=7, first=6, recent=2))
    assert checkpoints.observed == [(step, step not in (5, 6, 7)) for step in range(10)]
    (skip,) = rows
    assert skip.kind == "skip"
    assert skip.step == 7
    assert skip.facts["count"] == 2
    assert recovery.trouble is None
    assert not recovery.is_healthy
    recovery.observe(11, metrics(num_skipped=2, last=7, first=6, recent=2))
    assert recovery.is_healthy


def in_trouble(recovery):
    for step in range(60):
        recovery.observe(step, metrics())
    recovery.observe(60, metrics(num_skipped=3, last=60, first=57, recent=3))
    assert recovery.trouble is not None


def test_back_to_the_newest_good_checkpoint_before_the_trouble():
    recovery, checkpoints, batches, rows = made(Checkpoints(good=(10, 50, 58)))
    in_trouble(recovery)
    state = recovery.go_back()
    assert int(state.step) == 51
    assert checkpoints.given_up == [50]
    # From two updates before the first suspicious one; earlier holes stay.
    assert batches.calls == [("resume", 51), ("exclude", 4, 8), ("exclude", 4 * 55, 4 * 61)]
    rewind = rows[-1]
    assert rewind.kind == "rewind"
    assert rewind.step == rewind.facts["to"] == 51
    assert rewind.facts["samples"] == [220, 244]
    assert recovery.rewinds == 1
    assert recovery.trouble is None


def test_a_rewind_is_recorded_for_a_restart_that_then_tells_of_it_once_more():
    recovery, checkpoints, _, rows = made(Checkpoints(good=(50,)))
    in_trouble(recovery)
    recovery.go_back()
    (rewind,) = checkpoints.recorded
    assert (rewind.number, rewind.to, rewind.samples) == (1, 51, (220, 244))
    other = dataclasses.replace(rewind, number=2, data={"seed": 8})
    # From a checkpoint before it, whose metadata know of no rewind.
    restarted, _, _, again = made(first_step=41, recorded=(rewind, other))
    (row,) = again
    assert row.step == 51
    assert row.facts == rows[-1].facts | {"again": True}
    assert restarted.rewinds == 1
    # From one after it, where its row still stands.
    restarted, _, _, again = made(first_step=60, recorded=(rewind,), rewinds=1)
    assert again == []
    assert restarted.rewinds == 1


def test_no_further_back_than_the_good_state():
    recovery, _, batches, _ = made(Checkpoints(good=(56,)))
    in_trouble(recovery)
    recovery.go_back()
    assert batches.calls[-1] == ("exclude", 4 * 57, 4 * 61)


def test_a_damaged_checkpoint_is_passed_over():
    recovery, checkpoints, _, _ = made(Checkpoints(good=(10, 50), damaged=(50,)))
    in_trouble(recovery)
    assert int(recovery.go_back().step) == 11
    assert "STEP 50 IS BAD: array w" in checkpoints.lines[0]


def test_a_copy_in_memory_is_nearer():
    section = SECTION.model_copy(update={"rewind_snapshot_period": 10})
    recovery, _, batches, _ = made(Checkpoints(good=(40,)), section)
    for step in (9, 19, 29, 39, 49, 59):
        recovery.snapshot(step, state_after(step, section), {"step": step + 1})
    in_trouble(recovery)
    state = recovery.go_back()
    np.testing.assert_array_equal(state.params["w"], np.full(3, 49))
    assert batches.calls[0] == ("resume", 50)


@pytest.mark.parametrize(
    ("good", "rewinds", "message"),
    [((58,), 0, "no good state before step 57"), ((10,), 3, r"gone back 3 times \(max_rewinds\)")],
)
def test_where_there_is_no_way_back(good, rewinds, message):
    recovery, _, _, _ = made(Checkpoints(good=good), rewinds=rewinds)
    in_trouble(recovery)
    with pytest.raises(Diverged, match=message):
        recovery.go_back()


def test_a_run_that_gives_up_leaves_no_checkpoint_of_the_trouble():
    recovery, checkpoints, _, _ = made(Checkpoints(good=(10, 50)), rewinds=3)
    in_trouble(recovery)
    with pytest.raises(Diverged, match="A restart resumes from step 50"):
        recovery.go_back()
    assert checkpoints.given_up == [50]


def test_skips_before_a_restart_are_remembered():
    recovery, _, _, _ = made(first_step=40)
    assert recovery.is_healthy
    state = state_after(39)
    guard = dataclasses.replace(state.guard, last_skipped=jnp.int32(38))
    recovery._begin(dataclasses.replace(state, guard=guard))
    assert not recovery.is_healthy


def test_a_rise_is_trouble_from_where_it_began():
    recovery, _, _, _ = made()
    recovery.observe(60, metrics(rise=0.2, began=40))
    assert recovery.trouble is None
    recovery.observe(61, metrics(rise=0.3, began=40))
    assert recovery.trouble.began == 40
    assert "30%" in recovery.trouble.reason


def test_nothing_but_updates_left_out_ends_the_run():
    section = SECTION.model_copy(update={"rewind_after_skips": 0})
    recovery, _, _, _ = made(section=section)
    with pytest.raises(Diverged, match="each of the last 128 updates"):
        recovery.observe(127, metrics(num_skipped=128, last=127, first=0, recent=128))


def test_what_rose_before_is_said():
    recovery, _, _, rows = made(Checkpoints(good=(10,)))
    for step in range(60):
        log_z = 2.0 if step < 45 else 3.0
        recovery.observe(step, metrics(log_z=log_z, param_norm=5.0))
    recovery.observe(60, metrics(num_skipped=3, last=60, first=58, recent=3))
    recovery.go_back()
    assert "these had risen: log_z by 50%." in rows[-1].facts["reason"]


def test_without_the_guard_all_updates_are_sound():
    section = Guard(skip_step_on_spikes=False)
    recovery, checkpoints, _, rows = made(section=section)
    recovery.observe(3, {"loss": 3.0})
    assert checkpoints.observed == [(step, True) for step in range(4)]
    assert recovery.trouble is None
    assert recovery.is_healthy
    assert rows == []
