"""Where a run's data begins, and its rollbacks: a file that a restart finds."""

import errno
from types import SimpleNamespace

import pytest
from etils import epath

from MaxText.checkpointing.history import Rollback, read_rollbacks
from MaxText.checkpointing.manager import CheckpointManager
from MaxText.config.loading import load_config
from MaxText.config.training_sections import CheckpointingConfig
from MaxText.errors import UserError
from MaxText.input_pipeline.loader import make_train_iterator
from MaxText.input_pipeline.sequences.batch_schedule import BatchSchedule
from MaxText.run.restore import (
    RestoreResult,
    complete_message,
    restore_data_position,
    restore_or_initialize,
)
from MaxText.storage.atomic import write_json_with_digest
from tests.refusals import refused


def batches(seed=0):
    keys = {"dataset_type": "synthetic", "data_shuffle_seed": seed, "vocab_size": 50}
    config = load_config(max_target_length=8, **keys)
    return make_train_iterator(config, BatchSchedule.constant(4, 8))


def rollback(number=1, to=6, samples=(28, 36)):
    return Rollback(number, to, 8, 7, samples, "checkpoint", "bad text", batches().identity)


def recorded(folder, *rollbacks, **keys):
    checkpoints = CheckpointManager(folder, CheckpointingConfig(**keys))
    for each in rollbacks:
        checkpoints.record_rollback(each)
    return CheckpointManager(folder, CheckpointingConfig(**keys)).rollbacks()


def test_a_restart_finds_them_all(tmp_path):
    folder = tmp_path / "checkpoints"
    first, second = rollback(), rollback(2, samples=(40, 44))
    assert recorded(folder) == ()
    assert recorded(folder, enable_checkpointing=False) == ()
    assert not folder.exists()
    assert recorded(folder, first, second) == (first, second)
    third = rollback(3)
    assert recorded(folder, third) == (first, second, third)
    assert [path.name for path in folder.iterdir()] == ["rollbacks.json"]
    # Also one without a checkpoint.
    section = CheckpointingConfig()
    checkpoints = CheckpointManager(folder, section)
    start = restore_or_initialize(checkpoints, section, None, lambda: None, {}, log=[].append)
    assert (start.how, start.rollbacks) == ("scratch", (first, second, third))


@pytest.mark.parametrize(
    "change", [lambda t: t[:-9], lambda t: t.replace("28", "29"), lambda t: "[]", lambda t: "é"]
)
def test_a_damaged_file_counts_as_none(tmp_path, change):
    recorded(tmp_path, rollback())
    folder, file, lines = epath.Path(tmp_path), tmp_path / "rollbacks.json", []
    file.write_text(change(file.read_text()))
    assert read_rollbacks(folder, lines.append) == ()
    assert "rollbacks.json" in lines[0]
    file.unlink()
    file.mkdir()
    refused(r"rollbacks\.json", read_rollbacks, folder, print)


def test_a_file_of_another_program_counts_as_none(tmp_path):
    write_json_with_digest(epath.Path(tmp_path / "rollbacks.json"), "rollbacks", [{"depth": 3}])
    lines = []
    assert read_rollbacks(epath.Path(tmp_path), lines.append) == ()
    assert "unexpected keyword argument 'depth'" in lines[0]


def test_a_record_that_cannot_be_written_is_a_warning(tmp_path, monkeypatch):
    def full_disk(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    lines = []
    checkpoints = CheckpointManager(tmp_path, CheckpointingConfig(), log=lines.append)
    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full_disk)
        checkpoints.record_rollback(rollback())
    assert "cannot write the record of rollbacks" in lines[0]
    # The run itself goes on with it, and the next one is written with it.
    checkpoints.record_rollback(rollback(2))
    assert recorded(tmp_path) == checkpoints.rollbacks() == (rollback(), rollback(2))


def test_a_restart_from_before_excludes_the_same_data_at_the_same_step():
    rolled_back, restarted, later = batches(), batches(), batches()
    rolled_back.seek(6)
    rolled_back.exclude(28, 36)
    lines = []
    position = {"step": 2, "samples": 8, "excluded": [], **restarted.identity}
    start = RestoreResult(None, 2, position, "", "resume")
    start = start._replace(rollbacks=(rollback(),))
    assert restore_data_position(start, restarted, 20, lines.append) == 19
    (line,) = lines
    assert all(fact in line for fact in ("28 to 35", "step 8", "bad text"))
    rows = [next(restarted).tokens_BT.tolist() for _ in range(2, 12)]
    assert [next(rolled_back).tokens_BT.tolist() for _ in range(6, 12)] == rows[4:]
    assert rolled_back.get_state() == restarted.get_state()
    later.seek(2)
    assert [next(later).tokens_BT.tolist() for _ in range(2, 7)] == rows[:5]
    # A checkpoint from after it says so itself.
    start = start._replace(first_step=12, position=rolled_back.get_state())
    assert restore_data_position(start, later, 20, lines.append) == 19
    assert later.get_state() == rolled_back.get_state()
    assert len(lines) == 1


def test_samples_of_other_data_are_others():
    other = batches(seed=1)
    start = RestoreResult(None, 0, None, "", "scratch", rollbacks=(rollback(),))
    restore_data_position(start, other, 20, pytest.fail)
    assert other.get_state()["excluded"] == []


def test_where_data_begins_and_ends():
    start = RestoreResult(None, 0, None, "", "growth")
    finite = SimpleNamespace(num_steps=7, seek=lambda step: None)
    assert [restore_data_position(start, finite, steps) for steps in (10, 5)] == [6, 4]
    start = start._replace(position={"step": 0, "samples": 12, **batches(seed=1).identity})
    with pytest.raises(UserError, match=r"^growth.data=continue: .*growth.data=restart"):
        restore_data_position(start, batches(), 10)
    refused(r"^(?!growth)", restore_data_position, start._replace(how="resume"), batches(), 10)
    assert "steps=7, num_epoch=-1. Raise steps " in complete_message(start, 7, 6, -1)
    assert "num_epoch=1. Raise num_epoch " in complete_message(start, 9, 6, 1)
