"""Saving while training goes on, failures, and retention."""

import pathlib
import signal
import subprocess
import sys
import textwrap
import time

import jax
import pytest

from MaxText.checkpointing.manager import Checkpoints
from MaxText.checkpointing.matching import checkpoint_metadata
from MaxText.checkpointing.run_folder import prepare_run_folder
from MaxText.configuration.training_sections import Checkpoint
from MaxText.errors import UserError
from tests.checkpointing.small_state import (
    CONFIG,
    abstract,
    assert_bit_equal,
    fresh_state,
    on_host,
    update,
)

ROOT = pathlib.Path(__file__).parents[2]


def save_steps(checkpoints, state, steps, metadata=None):
    """Updates and saves; returns the state after the last step and host copies by step."""
    kept = {}
    for step in range(int(state.step), max(steps) + 1):
        state = update(state)
        if step in steps:
            kept[step] = on_host(state)
            position = {"step": step + 1}
            checkpoints.save(
                step, state, position, metadata or checkpoint_metadata(CONFIG, state.params)
            )
    checkpoints.wait()
    return state, kept


@pytest.mark.parametrize("asynchronous", [True, False])
def test_what_was_saved_comes_back(tmp_path, asynchronous):
    checkpoints = Checkpoints(tmp_path, Checkpoint(async_checkpointing=asynchronous))
    assert checkpoints.latest_step() is None
    state, kept = save_steps(checkpoints, fresh_state(), [0, 3])
    assert checkpoints.latest_step() == 3
    for step in (0, 3):
        restored, position, metadata = checkpoints.restore(step, abstract(state))
        assert_bit_equal(restored, kept[step])
        assert position == {"step": step + 1}
        assert metadata["config"]["base_emb_dim"] == 8
        assert metadata["num_parameters"] == 3 * 16 * 8 + 8 + 32 * 8
    checkpoints.close()
    checkpoints.close()
    assert sorted(p.name for p in (tmp_path / "3").iterdir() if p.is_dir()) == [
        "items",
        "iter",
        "metadata",
    ]


def test_donating_steps_right_after_an_asynchronous_save_do_not_disturb_it(tmp_path):
    checkpoints = Checkpoints(tmp_path, Checkpoint())
    state = update(fresh_state(rows=100_000))  # 10 MB with moments
    for step in range(3):
        expected = on_host(state)
        checkpoints.save(step, state, None, {})
        for _ in range(10):
            state = update(state)
        jax.block_until_ready(state)
        checkpoints.wait()
        restored, position, _ = checkpoints.restore(step, abstract(state))
        assert_bit_equal(restored, expected)
        assert position is None
        state = jax.tree.map(jax.numpy.asarray, expected)
        state = update(state)
    checkpoints.close()


def test_when_a_checkpoint_is_due():
    def due(last_step=25, **keys):
        checkpoints = Checkpoints("unused", Checkpoint(checkpoint_period=10, **keys))
        return [step for step in range(last_step + 1) if checkpoints.should_save(step, last_step)]

    assert due() == [0, 10, 20, 25]
    assert due(save_checkpoint_on_start=False) == [10, 20, 25]
    assert due(save_checkpoint_on_completion=False) == [0, 10, 20]
    assert due(last_step=20) == [0, 10, 20]
    assert due(enable_checkpointing=False) == []


def test_retention_keeps_the_newest_and_every_keep_period(tmp_path):
    checkpoints = Checkpoints(tmp_path, Checkpoint(max_to_keep=2, keep_period=4))
    save_steps(checkpoints, fresh_state(), range(8))
    checkpoints.close()
    assert checkpoints.steps() == [0, 4, 6, 7]


def test_a_step_on_disk_is_not_written_again(tmp_path):
    checkpoints = Checkpoints(tmp_path, Checkpoint())
    state, kept = save_steps(checkpoints, fresh_state(), [0])
    other = jax.tree.map(lambda x: x + 1, state.params)
    changed = type(state)(state.step, other, state.opt_state)
    assert checkpoints.save(0, changed, None, {}) is False
    restored, _, _ = checkpoints.restore(0, abstract(state))
    assert_bit_equal(restored, kept[0])
    checkpoints.close()


def test_an_unreadable_newest_checkpoint_is_set_aside_by_the_next_save(tmp_path):
    checkpoints = Checkpoints(tmp_path, Checkpoint(max_to_keep=1))
    state, _ = save_steps(checkpoints, fresh_state(), [5])
    (tmp_path / "9").mkdir()
    (tmp_path / "9" / "items").mkdir()
    assert checkpoints.latest_step() == 9
    checkpoints.mark_unreadable(9)
    assert (tmp_path / "9").exists()  # reading alone changes nothing
    save_steps(checkpoints, state, [7])
    checkpoints.close()
    assert checkpoints.steps() == [7]
    assert (tmp_path / "9.unreadable").exists()


def test_checkpointing_switched_off_saves_and_finds_nothing(tmp_path):
    state = update(fresh_state())
    on = Checkpoints(tmp_path, Checkpoint())
    save_steps(on, state, [1])
    on.close()
    off = Checkpoints(tmp_path, Checkpoint(enable_checkpointing=False))
    assert off.latest_step() is None
    assert off.save(0, state, None, {}) is False
    off.close()


def test_run_folder_is_created_and_probed(tmp_path):
    folder = prepare_run_folder(tmp_path / "a" / "b")
    assert folder.is_dir()
    assert list(folder.iterdir()) == []
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError, match=r"file/run.*base_output_directory"):
        prepare_run_folder(tmp_path / "file" / "run")


def test_probing_the_run_folder_touches_no_device(tmp_path):
    """jax.distributed.initialize, which comes later, refuses once a backend is up."""
    process = run_script(
        tmp_path,
        """
        from jax._src import xla_bridge
        from MaxText.checkpointing.run_folder import prepare_run_folder
        assert not xla_bridge.backends_are_initialized()
        prepare_run_folder(checkpoints.directory)
        print(xla_bridge.backends_are_initialized())
        """,
    )
    output, _ = process.communicate(timeout=120)
    assert output == "False\n"


def run_script(tmp_path, body):
    """A process of its own that saves checkpoints into tmp_path."""
    script = textwrap.dedent(
        f"""
        import os, resource, signal, sys, time
        sys.path.insert(0, {str(ROOT)!r})
        from MaxText.checkpointing.manager import Checkpoints
        from MaxText.configuration.training_sections import Checkpoint
        from MaxText.errors import UserError
        from tests.checkpointing.small_state import fresh_state, update
        checkpoints = Checkpoints({str(tmp_path)!r}, Checkpoint())
        """
    ) + textwrap.dedent(body)
    return subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )


def test_killed_in_mid_save_the_older_checkpoint_stays_usable(tmp_path):
    """kill -9 while the temporary folder of step 1 is being filled."""
    process = run_script(
        tmp_path,
        """
        state = update(fresh_state(rows=300_000))  # 90 MB with moments: a save takes a while
        checkpoints.save(0, state, {"step": 1}, {})
        checkpoints.wait()
        state = update(state)
        checkpoints.save(1, state, {"step": 2}, {})
        while not any("tmp" in name for name in os.listdir(checkpoints.directory)):
            time.sleep(0.001)
        print("saving", flush=True)
        time.sleep(60)
        """,
    )
    assert process.stdout is not None
    with process, process.stdout:
        line = process.stdout.readline()
        process.send_signal(signal.SIGKILL)
    assert line == "saving\n"
    assert process.returncode == -signal.SIGKILL
    left = {path.name for path in tmp_path.iterdir()}
    assert "1" not in left, "the save was over before the kill; make the state larger"
    assert any("tmp" in name for name in left)

    checkpoints = Checkpoints(tmp_path, Checkpoint())
    assert checkpoints.latest_step() == 0
    state = fresh_state(rows=300_000)
    restored, position, _ = checkpoints.restore(0, abstract(state))
    assert position == {"step": 1}
    state = update(state)
    assert_bit_equal(restored, on_host(state))
    state = update(restored)
    assert checkpoints.save(1, state, {"step": 2}, {})
    checkpoints.close()
    assert checkpoints.steps() == [0, 1]


def test_a_save_that_fails_in_the_background_is_told_and_the_older_one_kept(tmp_path):
    """A file size limit stands in for a full disk."""
    process = run_script(
        tmp_path,
        """
        state = update(fresh_state(rows=20_000))
        checkpoints.save(0, state, None, {})
        checkpoints.wait()
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, resource.RLIM_INFINITY))
        state = update(state)
        checkpoints.save(1, state, None, {})
        for _ in range(3):
            state = update(state)
        try:
            checkpoints.wait()
        except UserError as error:
            print("TOLD", error)
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        print("latest", checkpoints.latest_step())
        checkpoints.save(4, state, None, {})  # the limit is gone: saving works again
        checkpoints.close()
        print("latest", checkpoints.latest_step())
        """,
    )
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    assert "TOLD the checkpoint of step 1 could not be written" in output
    assert "File too large" in output
    assert "the checkpoint of step 0 is on disk" in output
    assert "latest 0" in output
    assert "latest 4" in output


def test_a_folder_that_vanishes_is_told_at_the_save(tmp_path):
    (tmp_path / "file").write_text("in the way")
    checkpoints = Checkpoints(tmp_path / "file" / "checkpoints", Checkpoint())
    with pytest.raises(UserError, match="could not be written"):
        checkpoints.save(0, update(fresh_state()), None, {})
    checkpoints.close()


@pytest.mark.slow
@pytest.mark.parametrize("delay", [0.0, 0.03, 0.1, 0.2, 0.35, 0.5, 0.8, 1.3])
def test_killed_at_any_moment_the_newest_checkpoint_is_whole(tmp_path, delay):
    """A process that only saves and deletes, killed at random."""
    process = run_script(
        tmp_path,
        """
        checkpoints = Checkpoints(checkpoints.directory, Checkpoint(max_to_keep=1))
        state = fresh_state(rows=20_000)
        for step in range(10_000):
            state = update(state)
            checkpoints.save(step, state, {"step": step + 1}, {})
            if step == 2:
                print("saving", flush=True)
        """,
    )
    assert process.stdout is not None
    with process, process.stdout:
        assert process.stdout.readline() == "saving\n"
        time.sleep(delay)
        process.send_signal(signal.SIGKILL)
    checkpoints = Checkpoints(tmp_path, Checkpoint())
    newest = checkpoints.latest_step()
    assert newest is not None
    state = fresh_state(rows=20_000)
    restored, position, _ = checkpoints.restore(newest, abstract(state))
    for _ in range(newest + 1):
        state = update(state)
    assert_bit_equal(restored, on_host(state))
    assert position == {"step": newest + 1}
