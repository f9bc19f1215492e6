"""Where a run went back, beside its checkpoints: found by a restart, whole or not at all."""

import pytest
from etils import epath

from MaxText.checkpointing.manager import Checkpoints
from MaxText.checkpointing.rewinds import Rewind, read_rewinds
from MaxText.checkpointing.starting_data import begin_data
from MaxText.checkpointing.starting_point import Start
from MaxText.configuration.data_sections import Data
from MaxText.configuration.training_sections import Checkpoint
from MaxText.errors import UserError
from MaxText.input_pipeline.loader import train_loader
from MaxText.input_pipeline.rows.batch_plan import BatchPlan


def batches(seed=0):
    data = Data(dataset_type="synthetic", data_shuffle_seed=seed)
    return train_loader(data, plan=BatchPlan.constant(4, 8), vocab_size=50)


def rewind(number=1, to=6, samples=(28, 36)):
    return Rewind(number, to, 8, 7, samples, "checkpoint", "bad text", batches().identity)


def recorded(folder, *rewinds, **keys):
    checkpoints = Checkpoints(folder, Checkpoint(**keys))
    for each in rewinds:
        checkpoints.record_rewind(each)
    return Checkpoints(folder, Checkpoint(**keys)).rewinds()


def test_a_restart_finds_them_all(tmp_path):
    first, second = rewind(), rewind(2, samples=(40, 44))
    assert recorded(tmp_path / "checkpoints") == ()
    assert recorded(tmp_path / "checkpoints", first, second) == (first, second)
    third = rewind(3)
    assert recorded(tmp_path / "checkpoints", third) == (first, second, third)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["rewinds.json"]


def test_without_checkpoints_nothing_is_left_behind(tmp_path):
    assert recorded(tmp_path, rewind(), enable_checkpointing=False) == ()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "change", [lambda t: t[:-9], lambda t: t.replace("28", "29"), lambda t: "[]", lambda t: "é"]
)
def test_a_damaged_file_is_said_and_counts_as_none(tmp_path, change):
    recorded(tmp_path, rewind())
    file = tmp_path / "rewinds.json"
    file.write_text(change(file.read_text()))
    lines = []
    assert read_rewinds(epath.Path(tmp_path), lines.append) == ()
    assert "rewinds.json CANNOT BE READ" in lines[0]


def test_a_file_that_cannot_be_read_is_no_empty_one(tmp_path):
    (tmp_path / "rewinds.json").mkdir()
    with pytest.raises(UserError, match="cannot be read"):
        read_rewinds(epath.Path(tmp_path), print)


def test_a_disk_without_room_costs_a_warning(tmp_path):
    (tmp_path / "file").write_text("")
    lines = []
    checkpoints = Checkpoints(tmp_path / "file" / "in", Checkpoint(), show=lines.append)
    checkpoints.record_rewind(rewind())
    assert "could not be noted" in lines[0]


def test_a_restart_from_before_leaves_out_the_same_at_the_same_step():
    went_back, restarted, later = batches(), batches(), batches()
    went_back.seek(6)
    went_back.exclude(28, 36)
    lines = []
    start = Start(None, 2, {"step": 2, "samples": 8, **restarted.identity}, "", "resume")
    start = start._replace(rewinds=(rewind(),))
    assert begin_data(start, restarted, 20, lines.append) == 19
    assert lines == [
        "Samples 28 to 35 of the training data are left out, because the run went back at step 8 "
        "(rewinds.json): bad text"
    ]
    rows = [next(restarted).tokens_BT.tolist() for _ in range(2, 12)]
    assert [next(went_back).tokens_BT.tolist() for _ in range(6, 12)] == rows[4:]
    assert went_back.position == restarted.position
    later.seek(2)
    assert [next(later).tokens_BT.tolist() for _ in range(2, 7)] == rows[:5]
    # A checkpoint from after it says so itself.
    start = start._replace(first_step=12, position=went_back.position)
    assert begin_data(start, later, 20, lines.append) == 19
    assert later.position == went_back.position
    assert len(lines) == 1


def test_samples_of_other_data_are_others():
    other = batches(seed=1)
    start = Start(None, 0, None, "", "scratch", rewinds=(rewind(),))
    begin_data(start, other, 20, pytest.fail)
    assert other.position["excluded"] == []
