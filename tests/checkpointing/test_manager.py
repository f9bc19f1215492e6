"""Saving while training goes on, and retention."""

import os
from types import SimpleNamespace

import jax
import orbax.checkpoint.experimental.v1 as ocp
import pytest
from etils import epath

from MaxText.checkpointing import verified_save
from MaxText.checkpointing.checkpoint_files import CheckpointCorruptedError
from MaxText.checkpointing.compatibility import checkpoint_metadata
from MaxText.checkpointing.manager import CheckpointManager
from MaxText.checkpointing.retention import Retention
from MaxText.config.training_sections import CheckpointingConfig
from MaxText.errors import UserError
from tests.checkpointing.small_state import (
    CONFIG,
    abstract,
    assert_bit_equal,
    fresh_state,
    on_host,
    update,
)


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


_FORMAT = {"use_zarr3": True, "use_ocdbt": False, "concurrent_gb": 1, "timeout": 60}


@pytest.mark.parametrize("storage", [None, _FORMAT])
def test_what_was_saved_comes_back(tmp_path, storage):
    section = CheckpointingConfig.model_validate(
        {"checkpoint_storage": storage or {}, "async_checkpointing": storage is None}
    )
    checkpoints = CheckpointManager(tmp_path, section)
    assert checkpoints.latest_step() is None
    state, kept = save_steps(checkpoints, fresh_state(), [9, 10])
    assert checkpoints.steps() == [9, 10]
    for step in (9, 10):
        restored, position, metadata = checkpoints.restore(step, abstract(state))
        assert_bit_equal(restored, kept[step])
        assert position == {"step": step + 1}
        assert metadata["config"]["base_emb_dim"] == 8
        assert metadata["num_parameters"] == 3 * 16 * 8 + 8 + 32 * 8
    assert any(tmp_path.rglob("zarr.json")) == (storage is not None)
    # A step on disk is not written again.
    assert checkpoints.save(10, state, None, {}) is False
    assert checkpoints.restore(10, abstract(state))[1] == {"step": 11}
    checkpoints.wait()
    folders = sorted(path.name for path in (tmp_path / "10").iterdir() if path.is_dir())
    assert folders == ["items", "iter", "metadata"]
    off = CheckpointManager(tmp_path, CheckpointingConfig(enable_checkpointing=False))
    assert off.latest_step() is None
    assert off.save(0, state, None, {}) is False
    off.wait()


def test_donating_steps_right_after_an_asynchronous_save_do_not_disturb_it(tmp_path):
    checkpoints = CheckpointManager(tmp_path, CheckpointingConfig())
    state = update(fresh_state(rows=50_000))  # 5 MB with moments
    expected = on_host(state)
    checkpoints.save(0, state, None, {})
    for _ in range(10):
        state = update(state)
    jax.block_until_ready(state)
    checkpoints.wait()
    restored, position, _ = checkpoints.restore(0, abstract(state))
    assert_bit_equal(restored, expected)
    assert position is None


def test_when_a_checkpoint_is_due():
    def due(last_step=25, **keys):
        checkpoints = CheckpointManager("unused", CheckpointingConfig(checkpoint_period=10, **keys))
        return [step for step in range(last_step + 1) if checkpoints.should_save(step, last_step)]

    assert due() == [0, 10, 20, 25]
    assert due(save_checkpoint_on_start=False) == [10, 20, 25]
    assert due(save_checkpoint_on_completion=False) == [0, 10, 20]
    assert due(last_step=20) == [0, 10, 20]
    assert due(enable_checkpointing=False) == []


def test_retention_keeps_the_newest_and_every_keep_period(tmp_path):
    checkpoints = CheckpointManager(tmp_path, CheckpointingConfig(max_to_keep=2, keep_period=4))
    save_steps(checkpoints, fresh_state(), [2, 4, 6, 7])
    assert checkpoints.steps() == [4, 6, 7]


def test_an_error_after_the_commit_is_told_as_what_it_is(tmp_path, monkeypatch):
    lines = []
    checkpoints = CheckpointManager(tmp_path, CheckpointingConfig(max_to_keep=1), log=lines.append)
    state, _ = save_steps(checkpoints, fresh_state(), [0])
    save = ocp.save_checkpointables_async

    def save_and_fail(*arguments, **options):
        response = save(*arguments, **options)
        return SimpleNamespace(result=lambda: [response.result(), os.listdir(tmp_path / "none")])

    def fail_to_delete(retention, steps):
        raise PermissionError("in use")

    with monkeypatch.context() as patch:
        patch.setattr(ocp, "save_checkpointables_async", save_and_fail)
        state, _ = save_steps(checkpoints, state, [1])
    assert checkpoints.steps() == [0, 1]
    with monkeypatch.context() as patch:
        patch.setattr(Retention, "delete", fail_to_delete)
        state, _ = save_steps(checkpoints, state, [2])
    assert checkpoints.steps() == [0, 1, 2]
    save_steps(checkpoints, state, [3])
    assert checkpoints.steps() == [3]
    after_commit, deletion = lines
    assert after_commit.startswith(
        "WARNING: the save of step 1 failed after its checkpoint was complete: [Errno 2] No such"
    )
    assert deletion.startswith("WARNING: cannot delete old checkpoints after saving step 2: in use")


# --- Paths, and what was written ----------------------------------------------------------------


@pytest.mark.parametrize("name", ["a[1]", "a[!b]*?", "{b} c", "**", "100%#'\"~:", "ü\nö"])
def test_any_legal_name_of_a_folder(tmp_path, name):
    """Brackets and stars are no patterns; only one process's files are merged into a checkpoint."""
    # For a pattern, this folder matches, too.
    other = tmp_path / "ab" / "0.orbax-checkpoint-tmp" / "items.orbax-checkpoint-tmp"
    (other / "ocdbt.process_9").mkdir(parents=True)
    checkpoints = CheckpointManager(tmp_path / name, CheckpointingConfig())
    state, kept = save_steps(checkpoints, fresh_state(), [0, 1])
    for step in (0, 1):
        assert_bit_equal(checkpoints.restore(step, abstract(state))[0], kept[step])


def damage_before_commit(monkeypatch, damage):
    """Changes the files that Orbax has written before it commits them."""
    verify = verified_save.verify_arrays

    def damage_and_verify(directory):
        damage(directory)
        verify(directory)

    monkeypatch.setattr(verified_save, "verify_arrays", damage_and_verify)
    monkeypatch.setattr(verified_save, "RETRY_SECONDS", (0.0,))


def shorten(path):
    os.truncate(path, path.stat().length // 2)


DAMAGES = {
    "manifest": lambda items: (items / "manifest.ocdbt").unlink(),
    "tree": lambda items: (items / "_METADATA").unlink(),
    "tree cut": lambda items: shorten(items / "_METADATA"),
    "index": lambda items: (items / "d").rmtree(),
    "values": lambda items: (items / "ocdbt.process_0").rmtree(),
    "values cut": lambda items: [shorten(path) for path in items.glob("ocdbt.process_0/d/*")],
}


@pytest.mark.parametrize("what", DAMAGES)
@pytest.mark.parametrize("is_async", [True, False])
def test_a_save_that_cannot_be_restored_is_a_failed_save(tmp_path, monkeypatch, what, is_async):
    section, lines = CheckpointingConfig(async_checkpointing=is_async), []
    checkpoints = CheckpointManager(tmp_path, section, log=lines.append)
    state, _ = save_steps(checkpoints, fresh_state(rows=500), [0])
    with monkeypatch.context() as patch:
        damage_before_commit(patch, DAMAGES[what])
        try:
            save_steps(checkpoints, state, [1])
        except UserError as error:  # from the wait for a background save
            lines.append(str(error))
    assert "step 1 could not be written" in "\n".join(lines)
    assert checkpoints.steps() == [0]
    assert CheckpointManager(tmp_path, CheckpointingConfig()).steps() == [0]


def test_a_lost_array_is_found_in_either_format(tmp_path, monkeypatch):
    for use_ocdbt, use_zarr3 in ((False, False), (False, True), (True, True)):
        storage = {"use_ocdbt": use_ocdbt, "use_zarr3": use_zarr3}
        section = CheckpointingConfig.model_validate({"checkpoint_storage": storage})
        folder = tmp_path / f"{use_ocdbt}{use_zarr3}"
        save_steps(CheckpointManager(folder, section), fresh_state(), [0])
        verified_save.verify_arrays(epath.Path(folder / "0" / "items"))
        if not use_ocdbt:
            monkeypatch.setattr(verified_save, "RETRY_SECONDS", (0.0,))
            chunk = next(
                path
                for path in (folder / "0" / "items" / "params.token_embedder").rglob("*")
                if path.is_file() and path.name not in (".zarray", "zarr.json")
            )
            chunk.unlink()
            with pytest.raises(CheckpointCorruptedError, match="token_embedder has 0 of 1 chunks"):
                verified_save.verify_arrays(epath.Path(folder / "0" / "items"))
