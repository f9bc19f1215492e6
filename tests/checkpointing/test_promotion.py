"""The last good checkpoint: what a resume takes, what retention keeps, what is given up."""

import dataclasses
import random
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from MaxText.checkpointing import layout
from MaxText.checkpointing.manager import Checkpoints
from MaxText.checkpointing.matching import checkpoint_metadata
from MaxText.checkpointing.starting_point import restore_or_initialize
from MaxText.configuration.training_sections import Checkpoint
from MaxText.training.state import TrainState
from tests.checkpointing.small_state import CONFIG, abstract, assert_bit_equal, on_host
from tests.small_models import some_quick


def state_after(step, mark=0):
    """A state that tells which update, and which of several pasts, it is of."""
    return TrainState(jnp.int32(step + 1), {"w": jnp.full((4, 8), 100 * mark + step, jnp.float32)},
                      {"m": jnp.zeros(3)})  # fmt: skip


def open_run(folder, healthy_steps=3, lines=None, **keys):
    show = (lines if lines is not None else []).append
    return Checkpoints(folder / "checkpoints", Checkpoint(**keys), healthy_steps, show)


def train(checkpoints, steps, mark=0, unhealthy=(), period=1):
    for step in steps:
        checkpoints.observe(step, step not in unhealthy)
        if step % period == 0:
            state = state_after(step, mark)
            metadata = checkpoint_metadata(CONFIG, state.params)
            checkpoints.save(step, state, {"step": step + 1}, metadata)


def resume(checkpoints, state=None):
    lines = []
    start = restore_or_initialize(
        checkpoints, Checkpoint(), abstract(state or state_after(0)), pytest.fail, CONFIG,
        lines.append,
    )  # fmt: skip
    return start, "\n".join(lines)


@pytest.fixture
def killed(tmp_path):
    """A run killed after update 11: checkpoints 0, 4 and 8 are good or not by what followed."""
    checkpoints = open_run(tmp_path)
    train(checkpoints, range(11), period=4)  # 4 was followed by 6 updates, 8 by 2
    checkpoints.wait()
    checkpoints.observe(11, healthy=False)
    del checkpoints  # not closed: nothing more is written
    return tmp_path


def test_a_resume_takes_the_newest_one_confirmed_or_not(killed):
    checkpoints = open_run(killed)
    assert checkpoints.steps_to_resume() == [8, 4, 0]
    assert checkpoints.latest_good() == 4
    start, _ = resume(checkpoints)
    assert (start.first_step, start.position, start.stored_step) == (9, {"step": 9}, 8)
    assert_bit_equal(start.state, on_host(state_after(8)))
    assert checkpoints.steps() == [0, 4, 8]  # resuming alone changes nothing


def test_the_way_back_stays_until_the_newer_one_is_confirmed(killed):
    checkpoints = open_run(killed, max_to_keep=1)
    resume(checkpoints)
    train(checkpoints, [9, 10], period=10)
    checkpoints.wait()
    assert checkpoints.latest_good() == 4
    train(checkpoints, range(11, 21), period=10)
    checkpoints.close()
    assert open_run(killed, max_to_keep=1).latest_good() == 10
    assert checkpoints.steps() == [10, 20]


def test_checkpoints_of_old_are_resumed_from_the_newest(killed):
    (killed / "checkpoints" / "good.json").unlink()
    checkpoints = open_run(killed)
    assert checkpoints.steps_to_resume() == [8, 4, 0]
    assert resume(checkpoints)[0].first_step == 9
    # What the run goes on from becomes good like any other.
    for step in range(9, 12):
        assert checkpoints.latest_good() is None
        checkpoints.observe(step, healthy=True)
    assert checkpoints.latest_good() == 8
    assert open_run(killed).latest_good() == 8


def test_a_path_to_the_run_means_the_checkpoint_that_a_resume_takes(killed):
    for path in (killed, killed / "checkpoints"):
        assert layout.find(str(path), "test").step == open_run(killed).latest_step() == 8
    assert layout.find(str(killed / "checkpoints" / "4"), "test").step == 4
    for key in ("load_full_state_path", "load_parameters_path"):
        start = restore_or_initialize(
            open_run(killed / "new"), Checkpoint(**{key: str(killed)}), abstract(state_after(0)),
            lambda: state_after(0, 9), CONFIG, [].append,
        )  # fmt: skip
        assert start.stored_step == 8


def test_what_is_newer_goes_with_the_first_save_of_another_step(killed):
    checkpoints = open_run(killed)
    checkpoints.resume_from(4)
    (killed / "checkpoints" / "6.orbax-checkpoint-tmp").mkdir()
    train(checkpoints, [5])
    checkpoints.close()
    assert checkpoints.steps() == [0, 4, 5]
    names = {path.name for path in (killed / "checkpoints").iterdir()}
    assert names == {"0", "4", "5", "good.json"}


def test_a_damaged_one_falls_back_to_the_next_older(killed):
    def damage(step):
        (killed / "checkpoints" / str(step) / "items" / "_METADATA").unlink()

    damage(8)
    start, text = resume(open_run(killed))
    assert start.first_step == 5
    assert "warning: a checkpoint cannot be read" in text
    damage(4)
    checkpoints = open_run(killed)
    start, text = resume(checkpoints)
    assert start.first_step == 1
    train(checkpoints, [1])
    checkpoints.close()
    assert checkpoints.steps() == [0, 1]
    assert {"4.unreadable", "8.unreadable"} <= {p.name for p in (killed / "checkpoints").iterdir()}
    assert open_run(killed).latest_good() == 0


def test_going_back_gives_up_what_came_after(tmp_path):
    checkpoints = open_run(tmp_path, healthy_steps=1)
    train(checkpoints, range(6))
    assert checkpoints.latest_good() == 4
    assert checkpoints.latest_good(before=4) == 3
    checkpoints.go_back_to(2)
    assert checkpoints.steps() == [0, 1, 2]
    assert checkpoints.latest_good() == open_run(tmp_path, 1).latest_good() == 2
    train(checkpoints, range(3, 5), mark=1)
    checkpoints.close()
    restored, _, _ = checkpoints.restore(3, abstract(state_after(0)))
    assert_bit_equal(restored, on_host(state_after(3, mark=1)))
    assert open_run(tmp_path, 1).latest_good() == 3


def test_a_run_that_stops_on_purpose_declares_its_last_one_good(tmp_path):
    checkpoints = open_run(tmp_path, healthy_steps=100)
    train(checkpoints, range(3))
    checkpoints.mark_good(1_000)  # there is none
    assert checkpoints.latest_good() is None
    checkpoints.mark_good(2)
    checkpoints.close()
    assert open_run(tmp_path, 100).steps_to_resume() == [2, 1, 0]
    assert open_run(tmp_path, 100).latest_good() == 2


def test_good_before_it_is_written(tmp_path):
    """A slow save: the list must not name a checkpoint that is not there yet."""
    checkpoints = open_run(tmp_path, healthy_steps=1)
    checkpoints.save(0, state_after(0), None, {})
    checkpoints.observe(1, healthy=True)
    checkpoints.wait()
    assert open_run(tmp_path, 1).latest_good() == 0


@pytest.mark.parametrize("asynchronous", some_quick([True, False], 2))
def test_retention_never_deletes_the_last_good_one(tmp_path, asynchronous):
    """One kept, saved more often than they become good, with troubles and a restart."""
    chance = random.Random(4)
    keys = {"max_to_keep": 1, "async_checkpointing": asynchronous}
    checkpoints = open_run(tmp_path, healthy_steps=4, **keys)
    newest_good, step = None, 0
    while step < 40:
        train(checkpoints, [step], unhealthy=[step] if chance.random() < 0.2 else [])
        good = open_run(tmp_path, healthy_steps=4).latest_good()  # as a restart at this moment
        if good != newest_good:
            assert good is not None
            assert newest_good is None or good > newest_good
            newest_good = good
        step += 1
        if step == 25:
            checkpoints.close()
            checkpoints = open_run(tmp_path, healthy_steps=4, **keys)
            start, _ = resume(checkpoints)
            assert start.stored_step == 24
            step = start.first_step
            chance.seed(5)
            train(checkpoints, [step])
            step += 1
            while step < 30:
                train(checkpoints, [step])
                step += 1
            newest_good = checkpoints.latest_good()
            assert newest_good is not None
    checkpoints.close()
    assert newest_good is not None
    # The newest, the last good one and the next to be good.
    assert len(checkpoints.steps()) <= 3
    assert max(checkpoints.steps()) == 39


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Guard:
    """Of some size; a fresh one holds ones."""

    losses: Any
    place: Any

    def fresh(self):
        return guard(1, self.losses.shape[0])


def guard(value, size=4):
    return Guard(jnp.full(size, value, jnp.float32), jnp.int32(value))


def test_a_guard_comes_back_or_stays_fresh(tmp_path):
    state = dataclasses.replace(state_after(0), guard=guard(7))
    plain = state_after(0)
    for name, saved in (("with", state), ("without", plain)):
        checkpoints = open_run(tmp_path / name, 0)
        checkpoints.save(0, saved, None, {})
        checkpoints.close()

    def restored(name, wanted):
        return resume(open_run(tmp_path / name, 0), wanted)

    start, _ = restored("with", state)
    assert_bit_equal(start.state, on_host(state))
    start, text = restored("without", state)
    assert_bit_equal(start.state, on_host(dataclasses.replace(plain, guard=guard(1))))
    assert "guard " not in text
    start, _ = restored("with", plain)
    assert_bit_equal(start.state, on_host(plain))
    larger = dataclasses.replace(state, guard=guard(7, size=5))
    start, _ = restored("with", larger)
    assert_bit_equal(start.state, on_host(dataclasses.replace(state, guard=guard(1, size=5))))


def test_a_run_that_is_over_keeps_no_more_than_it_was_asked_to(tmp_path):
    checkpoints = open_run(tmp_path, healthy_steps=5, max_to_keep=2)
    train(checkpoints, range(12), period=2)
    checkpoints.wait()
    assert checkpoints.steps() == [4, 6, 8, 10]  # 4 is good, 6 would be next
    checkpoints.mark_good(10)
    assert checkpoints.steps() == [8, 10]
    checkpoints.close()
    assert open_run(tmp_path, 5, max_to_keep=2).latest_good() == 10
