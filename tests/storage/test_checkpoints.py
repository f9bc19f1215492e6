"""Checkpoints in a bucket: whole or not there, whatever it answers meanwhile."""

import contextlib
import errno
import gc

import pytest

from MaxText.checkpointing import checkpoint_files
from MaxText.checkpointing.checkpoint_files import CheckpointCorruptedError
from MaxText.checkpointing.manager import CheckpointManager
from MaxText.config.schema import unflatten
from MaxText.config.training_sections import CheckpointingConfig
from MaxText.growth.resolve import resolve_growth
from MaxText.run.restore import restore_or_initialize
from MaxText.storage.errors import ObjectStoreError
from MaxText.storage.paths import parse_path
from tests.checkpointing.small_state import CONFIG, abstract, assert_bit_equal, fresh_state
from tests.checkpointing.test_manager import save_steps
from tests.refusals import refused
from tests.storage.emulator import Fault

pytestmark = pytest.mark.usefixtures("clients", "no_waits")


@pytest.fixture
def folder(bucket):
    return parse_path(f"{bucket}/run/checkpoints", "base_output_directory")


@pytest.fixture
def opened(folder):
    """Makes the manager of a start of the run; all are closed at the end."""
    with contextlib.ExitStack() as stack:

        def open_it(log=print, **keys):
            checkpoints = CheckpointManager(folder, CheckpointingConfig(**keys), 0, log=log)
            stack.callback(checkpoints.wait)
            return checkpoints

        yield open_it


def test_a_save_that_was_killed_is_not_there(folder, opened):
    state, kept = save_steps(opened(), fresh_state(), [0, 1])
    # What a kill leaves: everything but the mark, which is written last.
    (folder / "1" / "commit_success.txt").unlink()
    again = opened()
    assert again.steps() == [0]
    assert checkpoint_files.resolve_checkpoint(str(folder.parent), "load_parameters_path").step == 0
    restored, *_ = again.restore(0, abstract(state))
    again.resume_from(0)
    _, second = save_steps(again, restored, [1])
    assert_bit_equal(second[1], kept[1])
    assert opened().latest_step() == 1


@pytest.mark.slow
# Where one array fails, Orbax drops the reads of the others when they are collected.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_damage_is_found_and_set_aside(folder, opened, emulator, bucket):
    state, kept = save_steps(opened(), fresh_state(), [0, 1])
    for file in emulator.names(f"{bucket}/run/checkpoints/1/items/ocdbt.process_0/d/"):
        content = parse_path(f"{bucket}/{file}", "x").read_bytes()
        # Every byte: half of such a file is parts that later ones of it have replaced.
        emulator.write(f"{bucket}/{file}", bytes(byte ^ 1 for byte in content))
    again = opened()
    with pytest.raises(CheckpointCorruptedError):
        again.restore(1, abstract(state))
    gc.collect()
    again.mark_corrupted(1)
    restored, *_ = again.restore(0, abstract(state))
    assert_bit_equal(restored, kept[0])
    save_steps(again, restored, [1])
    assert again.steps() == [0, 1]
    assert (folder / "1.unreadable" / "items").is_dir()
    assert_bit_equal(again.restore(1, abstract(state))[0], kept[1])


def test_a_bucket_that_fails_is_no_damage(opened, emulator):
    state, kept = save_steps(opened(), fresh_state(), [0])
    again = opened()
    for status, where in ((503, "metadata"), (403, "metadata"), (403, "ocdbt|manifest|/d/")):
        with emulator.failing(Fault(status, where)), pytest.raises(ObjectStoreError) as caught:
            again.restore(0, abstract(state))
        assert (caught.value.errno == errno.EIO) == (status == 503)
    with emulator.failing(Fault(503)), pytest.raises(ObjectStoreError):
        again.steps()
    # TensorStore tries again for a quarter of an hour.
    with emulator.failing(Fault(503, "ocdbt|manifest", times=1)):
        assert_bit_equal(again.restore(0, abstract(state))[0], kept[0])


def test_a_rollback_unfinalizes_before_it_deletes(opened, emulator):
    checkpoints = opened()
    save_steps(checkpoints, fresh_state(), [0, 1, 2])
    # Killed in the midst, here: the bucket refuses to delete anything but the mark.
    with emulator.failing(Fault(403, "DELETE (?!.*2%2Fcommit_success)")):
        refused("checkpoints/2", checkpoints.roll_back_to, 1)
    assert opened().steps() == [0, 1]
    again = opened()
    again.roll_back_to(0)
    assert again.steps() == [0]


# Orbax closes its loop while other arrays of the failed save are in flight.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_save_fails_and_the_next_one_does_not(folder, opened, emulator):
    lines = []
    checkpoints = opened(lines.append, max_to_keep=1)
    state, _ = save_steps(checkpoints, fresh_state(), [0])
    # 503 would be tried again by TensorStore, for a quarter of an hour.
    with emulator.failing(Fault(403, "POST /upload.*checkpoints.*items")):
        refused("step 1 ", save_steps, checkpoints, state, [1])
        assert checkpoints.steps() == [0]
    save_steps(checkpoints, fresh_state(), [2])
    assert checkpoints.steps() == [2]
    assert not [path.name for path in folder.iterdir() if path.name == "1"]
    with emulator.failing(Fault(503)):
        # Without waiting for the end, as a run does.
        checkpoints.wait = lambda: None
        save_steps(checkpoints, fresh_state(), [3])
        refused("step 4 ", save_steps, checkpoints, fresh_state(), [4])
        del checkpoints.wait
    assert sum("step 3 " in line for line in lines) == 1
    assert opened().latest_step() == 2


@pytest.mark.slow
def test_old_ones_that_cannot_be_deleted_cost_no_new_one(folder, opened, emulator):
    lines = []
    checkpoints = opened(lines.append, max_to_keep=1)
    state, _ = save_steps(checkpoints, fresh_state(), [0])
    with emulator.failing(Fault(503, "DELETE")):
        state, _ = save_steps(checkpoints, state, [1])
    assert len(lines) == 1
    assert checkpoints.steps()[-1] == 1
    save_steps(checkpoints, state, [2])
    assert checkpoints.steps() == [2]
    assert not {path.name for path in folder.iterdir()} & {"0", "1"}


def test_requests_of_a_resume_and_of_its_saves(opened, emulator):
    """One listing and one read of metadata; then what is known is not asked for again."""
    steps = range(100, 104)
    state, _ = save_steps(opened(), fresh_state(), steps)
    before = emulator.requests

    def asked() -> dict[str, int]:
        nonlocal before
        earlier, before = before, emulator.requests
        new = {name: n - earlier.get(name, 0) for name, n in before.items()}
        return {name.replace("%2F", "/"): n for name, n in new.items() if n}

    checkpoints = opened()
    stored = [checkpoints.stored(step) for step in reversed(checkpoints.steps_to_resume())]
    resolved = resolve_growth(unflatten(CONFIG), stored)
    assert checkpoints.latest_step() == steps[-1]
    start = restore_or_initialize(
        checkpoints,
        CheckpointingConfig(),
        abstract(state),
        pytest.fail,
        CONFIG,
        log=[].append,
        resolved=resolved,
    )
    counts = asked()
    assert counts["LIST run/checkpoints/"] == 1
    reads = {name: n for name, n in counts.items() if name.endswith("/metadata/metadata")}
    assert sum(n for name, n in reads.items() if "/download/" in name) == 1
    assert all(f"/{steps[-1]}/" in name for name in reads)
    state, _ = save_steps(checkpoints, start.state, [200])
    first = asked()
    assert any("/200/" in name for name in first)
    assert not [name for name in first for step in steps if f"/{step}/" in name]
    save_steps(checkpoints, state, [201])
    later = asked()
    assert any("/201/" in name for name in later)
    assert not [name for name in later for step in (*steps, 200) if f"/{step}/" in name]
    assert "LIST run/checkpoints/" not in later
