"""The first sample that a run reads, for each way to begin."""

import itertools
import pathlib
import shutil

import pytest

from MaxText.checkpointing.history import Rollback
from MaxText.checkpointing.manager import CheckpointManager
from MaxText.config.loading import load_config
from MaxText.config.training_sections import CheckpointingConfig
from MaxText.input_pipeline.loader import make_train_iterator
from MaxText.input_pipeline.sequences.batch_schedule import BatchSchedule
from MaxText.run.restore import RestoreResult, restore_data_position
from tests.checkpointing.small_state import start


def batches(batch_size=4):
    config = load_config(dataset_type="synthetic", max_target_length=8, vocab_size=1000)
    return make_train_iterator(config, BatchSchedule.constant(batch_size, 8))


def rows(iterator, count=2):
    found = [batch.tokens_BT.tolist() for batch in itertools.islice(iterator, count)]
    iterator.close()
    return found


@pytest.mark.parametrize("first_step", [0, 1, 7])
@pytest.mark.parametrize("how", ["scratch", "resume", "full_state", "parameters"])
def test_without_a_position_data_begin_at_the_first_step(how, first_step):
    iterator, whole = batches(), rows(batches(), 10)
    result = RestoreResult(None, first_step, None, "", how)
    assert restore_data_position(result, iterator, 20, pytest.fail) == 19
    assert iterator.get_state()["step"] == first_step
    assert rows(iterator) == whole[first_step : first_step + 2]


def test_with_a_position_data_begin_at_its_sample():
    iterator, samples = batches(batch_size=3), [row for (row,) in rows(batches(1), 40)]
    saved = {"step": 4, "samples": 16, "excluded": [[19, 21]], **iterator.identity}
    result = RestoreResult(None, 4, saved, "", "resume")
    restore_data_position(result, iterator, 20, lambda line: None)
    assert rows(iterator) == [samples[16:19], samples[21:24]]


def test_a_full_state_without_a_position_begins_at_its_step(saved_run, tmp_path):
    run = shutil.copytree(saved_run[0], tmp_path / "old")
    shutil.rmtree(run / "checkpoints" / "2" / "iter")
    path = str(run / "checkpoints" / "2")
    result, lines = start(tmp_path / "new", CheckpointingConfig(load_full_state_path=path))
    assert (result.first_step, result.position, result.stored_step) == (3, None, 2)
    assert any("no data position" in line for line in lines)
    iterator = batches()
    restore_data_position(result, iterator, 20, lambda line: None)
    assert rows(iterator) == rows(batches(), 5)[3:]


def test_a_moved_full_state_begins_at_the_step_that_it_holds(saved_run, tmp_path):
    """Whatever its folder is called."""
    run = shutil.copytree(saved_run[0], tmp_path / "old")
    moved = (run / "checkpoints" / "2").rename(tmp_path / "77")
    section = CheckpointingConfig(load_full_state_path=str(moved))
    result, _ = start(tmp_path / "new", section)
    assert (result.first_step, result.position["step"]) == (3, 3)


def test_a_checkpoint_under_another_name_is_not_resumed(saved_run, tmp_path):
    """Its data position and its step would be those of another time."""
    run = shutil.copytree(saved_run[0], tmp_path / "old")
    (run / "checkpoints" / "4").rename(run / "checkpoints" / "7")
    result, lines = start(run, initialize=pytest.fail)
    assert (result.first_step, result.position["step"], result.stored_step) == (3, 3, 2)
    assert any("step 7" in line and "step 4" in line for line in lines)


@pytest.mark.parametrize("change", ["swapped", "edited"])
@pytest.mark.parametrize("name", ["iter", "metadata"])
def test_a_position_or_metadata_of_another_step_are_not_resumed(saved_run, tmp_path, name, change):
    """Both are valid JSON: only their checksums say that they are not what was saved."""
    run = shutil.copytree(saved_run[0], tmp_path / "old")
    place = pathlib.Path(name) / "metadata"
    file = run / "checkpoints" / "4" / place
    if change == "swapped" and name == "iter":
        shutil.copy(run / "checkpoints" / "2" / place, file)
    else:
        text = file.read_text()
        edited = text.replace('"seed": 5', '"seed": 6').replace('"steps": 10', '"steps": 12')
        assert edited != text
        file.write_text(edited)
    result, lines = start(run, initialize=pytest.fail)
    assert (result.first_step, result.position["step"], result.stored_step) == (3, 3, 2)
    assert any("WARNING" in line and "step 4" in line for line in lines)


@pytest.mark.parametrize("key", ["", "load_full_state_path", "load_parameters_path"])
def test_every_start_knows_the_rollbacks_of_its_run(saved_run, tmp_path, key):
    """Else a run that was killed after a rollback would train on the excluded samples."""
    run = shutil.copytree(saved_run[0], tmp_path / "old")
    folder = tmp_path / "new" if key else run
    iterator = batches()
    rollback = Rollback(1, 3, 9, 8, (41, 45), "checkpoint", "a spike", iterator.identity)
    CheckpointManager(folder / "checkpoints", CheckpointingConfig()).record_rollback(rollback)
    result, _ = start(folder, CheckpointingConfig(**{key: str(run)} if key else {}))
    assert result.how == {"": "resume", "load_full_state_path": "full_state"}.get(key, "parameters")
    assert result.rollbacks == (rollback,)
    # That of the small state is of no data.
    restore_data_position(result._replace(position=None), iterator, 20, lambda line: None)
    assert iterator.get_state()["excluded"] == [[41, 45]]
