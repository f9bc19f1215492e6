"""Healthy checkpoints: which they are, what a resume takes, what retention keeps and deletes."""

import contextlib
import dataclasses
import random
import shutil
from unittest import mock

import jax.numpy as jnp
import pytest

from MaxText.checkpointing import health, verified_save
from MaxText.checkpointing.checkpoint_files import CheckpointCorruptedError
from MaxText.checkpointing.compatibility import checkpoint_metadata
from MaxText.checkpointing.manager import CheckpointManager
from MaxText.checkpointing.retention import Retention
from MaxText.config.training_sections import CheckpointingConfig, GuardConfig
from MaxText.run.restore import restore_or_initialize
from MaxText.training.spike_guard import initial_state
from MaxText.training.state import TrainState
from tests.checkpointing.small_state import CONFIG, abstract, assert_bit_equal, on_host


def state_after(step, mark=0):
    """A state that tells which update, and which of several pasts, it is of."""
    return TrainState(
        jnp.int32(step + 1),
        {"w": jnp.full((4, 8), 100 * mark + step, jnp.float32)},
        {"m": jnp.zeros(3)},
    )


def open_run(folder, healthy_steps=3, **keys):
    return CheckpointManager(
        folder / "checkpoints", CheckpointingConfig(**keys), healthy_steps, [].append
    )


def observe(checkpoints, step, *, is_accepted):
    last_skipped = checkpoints.health._last_skipped if is_accepted else step
    checkpoints.observe_steps(step, last_skipped)


def train(checkpoints, steps, mark=0, unhealthy=(), period=1):
    for step in steps:
        observe(checkpoints, step, is_accepted=step not in unhealthy)
        if step % period == 0:
            state = state_after(step, mark)
            metadata = checkpoint_metadata(CONFIG, state.params)
            checkpoints.save(step, state, {"step": step + 1}, metadata)


def resume(checkpoints, state=None):
    lines = []
    start = restore_or_initialize(
        checkpoints,
        CheckpointingConfig(),
        abstract(state or state_after(0)),
        pytest.fail,
        CONFIG,
        log=lines.append,
    )
    return start, "\n".join(lines)


@pytest.fixture
def killed(tmp_path):
    """A run killed after update 11: checkpoints 0, 4 and 8 are good or not by what followed."""
    checkpoints = open_run(tmp_path)
    train(checkpoints, range(11), period=4)  # 4 was followed by 6 updates, 8 by 2
    checkpoints.wait()
    observe(checkpoints, 11, is_accepted=False)
    del checkpoints  # not closed: nothing more is written
    return tmp_path


def test_a_resume_takes_the_newest_one_confirmed_or_not(killed):
    checkpoints = open_run(killed)
    assert checkpoints.steps_to_resume() == [8, 4, 0]
    assert checkpoints.last_healthy() == 4
    start, _ = resume(checkpoints)
    assert (start.first_step, start.position, start.stored_step) == (9, {"step": 9}, 8)
    assert_bit_equal(start.state, on_host(state_after(8)))
    assert checkpoints.steps() == [0, 4, 8]  # resuming alone changes nothing


def test_damaged_and_newer_ones_go_with_the_next_save(killed):
    folder = killed / "checkpoints"
    (folder / "8" / "items" / "_METADATA").unlink()
    # What a killed save leaves is not a checkpoint.
    shutil.copytree(folder / "4", folder / "6.orbax-checkpoint-tmp")
    checkpoints = open_run(killed)
    start, text = resume(checkpoints)
    assert start.first_step == 5
    assert "WARNING: " in text
    assert (folder / "8").exists()  # reading alone changes nothing
    train(checkpoints, [5])
    checkpoints.wait()
    assert checkpoints.steps() == [0, 4, 5]
    names = {path.name for path in folder.iterdir()}
    assert names == {"0", "4", "5", "8.unreadable", "healthy.json"}
    checkpoints = open_run(killed)
    checkpoints.resume_from(0)
    train(checkpoints, [1])
    checkpoints.wait()
    assert checkpoints.steps() == [0, 1]
    assert open_run(killed).last_healthy() == 0


def test_a_rollback_deletes_later_checkpoints(tmp_path):
    checkpoints = open_run(tmp_path, healthy_steps=1)
    train(checkpoints, range(6))
    assert checkpoints.last_healthy() == 4
    assert checkpoints.last_healthy(before_step=4) == 3
    checkpoints.roll_back_to(2)
    checkpoints.health.begin(3, last_skipped=-1)
    assert checkpoints.steps() == [0, 1, 2]
    assert checkpoints.last_healthy() == open_run(tmp_path, 1).last_healthy() == 2
    train(checkpoints, range(3, 5), mark=1)
    checkpoints.wait()
    restored, _, _ = checkpoints.restore(3, abstract(state_after(0)))
    assert_bit_equal(restored, on_host(state_after(3, mark=1)))
    assert open_run(tmp_path, 1).last_healthy() == 3


def test_a_run_that_is_over_declares_its_last_one_good(tmp_path):
    checkpoints = open_run(tmp_path, healthy_steps=5, max_to_keep=2)
    train(checkpoints, range(12), period=2)
    checkpoints.wait()
    assert checkpoints.steps() == [4, 6, 8, 10]  # 4 was good when 10 was saved, 6 the next
    assert not checkpoints.promote_final(10, ["the loss diverged"])
    assert checkpoints.promote_final(1_000)  # there is no such checkpoint
    assert checkpoints.last_healthy() == 6
    assert checkpoints.promote_final(10)
    assert checkpoints.steps() == [8, 10]  # no more than it was asked to keep
    checkpoints.wait()
    assert open_run(tmp_path, 5, max_to_keep=2).last_healthy() == 10


def test_broken_states_are_set_aside(tmp_path):
    checkpoints = open_run(tmp_path, healthy_steps=1)
    train(checkpoints, range(6))
    checkpoints.promote_final(5)
    assert checkpoints.set_aside(lambda step: step >= 4) == [4, 5]
    assert checkpoints.set_aside(lambda step: step >= 4) == []
    assert checkpoints.last_healthy() == 3
    again = open_run(tmp_path, 1)
    assert (again.last_healthy(), again.steps_to_resume()[0]) == (3, 3)
    checkpoints.health.begin(4, last_skipped=-1)
    # The next past has a step of the same number, which takes its place.
    train(checkpoints, range(4, 7), mark=1)
    checkpoints.wait()
    assert checkpoints.set_aside(lambda step: step == 4) == [4]
    checkpoints.wait()
    names = {path.name for path in (tmp_path / "checkpoints").iterdir()}
    assert names == {*"012356", "4.unhealthy", "5.unhealthy", "healthy.json"}


def test_retention_never_deletes_the_last_healthy_checkpoint(tmp_path):
    """One kept, saved more often than they become good, with skipped updates and a restart."""
    chance = random.Random(4)

    def opened():
        return open_run(tmp_path, healthy_steps=3, max_to_keep=1)

    newest_good, checkpoints = None, opened()
    for step in range(20):
        if step == 12:
            checkpoints.wait()
            checkpoints = opened()
            assert resume(checkpoints)[0].first_step == step
        train(checkpoints, [step], unhealthy=[step] if chance.random() < 0.2 else [])
        good = opened().last_healthy()  # as a restart at this moment
        if newest_good is not None:
            assert good is not None
            assert good >= newest_good
        newest_good = good
    checkpoints.wait()
    assert newest_good is not None
    # The newest, the last healthy one and the next to be healthy.
    assert len(checkpoints.steps()) <= 3
    assert max(checkpoints.steps()) == 19


class KilledError(BaseException):
    """The process is gone: nothing after it happens."""


def finish_save(checkpoints):
    """Waits for the thread of a save, but not for what the run does after it."""
    with contextlib.suppress(KilledError, OSError, CheckpointCorruptedError):
        checkpoints._saver._completion.result()


@pytest.mark.parametrize("moment", ["before the commit", "before a deletion", "after a deletion"])
@pytest.mark.parametrize("healthy_steps", [0, 1])
def test_a_kill_leaves_the_marks_of_checkpoints_that_exist(
    tmp_path, monkeypatch, moment, healthy_steps
):
    delete = Retention.delete

    def fail_before_commit(directory):
        raise CheckpointCorruptedError("killed")

    def kill_in_deletion(retention, steps):
        if moment == "after a deletion":
            delete(retention, steps)
        raise KilledError

    checkpoints = open_run(tmp_path, healthy_steps, max_to_keep=1)
    train(checkpoints, range(4))
    checkpoints.wait()
    if moment == "before the commit":
        monkeypatch.setattr(verified_save, "verify_arrays", fail_before_commit)
    else:
        monkeypatch.setattr(Retention, "delete", kill_in_deletion)
    train(checkpoints, [4])
    healthy = {2, 3} if healthy_steps else {3, 4}
    finish_save(checkpoints)

    again = open_run(tmp_path, healthy_steps, max_to_keep=1)
    existing = set(again.steps())
    assert (4 in existing) == (moment != "before the commit")
    assert (min(healthy) in existing) == (moment != "after a deletion")
    assert again.health.steps & existing == healthy & existing
    assert again.last_healthy() == max(healthy & existing)


def test_old_checkpoints_stay_until_the_marks_of_others_are_written(tmp_path, monkeypatch):
    checkpoints = open_run(tmp_path, healthy_steps=1, max_to_keep=1)
    train(checkpoints, range(4))
    checkpoints.wait()
    with monkeypatch.context() as patch:
        full_disk = mock.Mock(side_effect=OSError("full"))
        patch.setattr(health, "write_json_with_digest", full_disk)
        train(checkpoints, [4])
        checkpoints.wait()
    assert full_disk.called
    assert checkpoints.steps() == [2, 3, 4]
    assert open_run(tmp_path).last_healthy() == 2
    train(checkpoints, [5])
    checkpoints.wait()
    assert checkpoints.steps() == [4, 5]
    assert open_run(tmp_path).last_healthy() == 4


def test_a_failed_save_leaves_the_marks_of_earlier_checkpoints(tmp_path, monkeypatch):
    checkpoints = open_run(tmp_path, healthy_steps=1, max_to_keep=2)
    train(checkpoints, range(5))
    checkpoints.wait()
    with monkeypatch.context() as patch:
        damage = mock.Mock(side_effect=CheckpointCorruptedError("lost"))
        patch.setattr(verified_save, "verify_arrays", damage)
        train(checkpoints, [5])  # 3 would have been deleted
        assert checkpoints.last_healthy() == 4
    assert checkpoints.steps() == [3, 4]
    assert checkpoints.last_healthy(before_step=4) == 3
    observe(checkpoints, 6, is_accepted=True)
    assert open_run(tmp_path).last_healthy(before_step=4) == 3


def test_a_guard_comes_back_or_stays_fresh(tmp_path):
    def with_guard(value, size=8):
        """As after some steps; of a fresh guard the value is 0."""
        fresh = initial_state(GuardConfig(skip_step_interval=size))
        guard = dataclasses.replace(fresh, num_accepted=jnp.int32(value))
        return dataclasses.replace(state_after(0), guard=guard)

    for row, (saved, wanted, expected) in enumerate([
        (with_guard(7), with_guard(7), with_guard(7)),
        (with_guard(7), state_after(0), state_after(0)),
        (state_after(0), with_guard(7), with_guard(0)),
        (with_guard(7), with_guard(7, size=9), with_guard(0, size=9)),
    ]):  # fmt: skip
        checkpoints = open_run(tmp_path / str(row), 0)
        checkpoints.save(0, saved, None, {})
        checkpoints.wait()
        start, text = resume(open_run(tmp_path / str(row), 0), wanted)
        assert_bit_equal(start.state, on_host(expected))
        assert "num_accepted" not in text
