"""The state that a rollback takes is older than the first suspicious step."""

import dataclasses

import numpy as np
import pytest

from MaxText.config.training_sections import GuardConfig
from MaxText.errors import TrainingDivergedError
from tests.run.test_rollback import KEYS, CheckpointManager, diverging, made, state_after

ONSET = 57  # of `diverging`


@pytest.mark.parametrize(
    ("copies", "checkpoints", "expected"),
    [
        ((ONSET - 1,), (), ONSET - 1),
        ((ONSET - 5, ONSET), (), ONSET - 5),
        ((ONSET - 5, ONSET + 1), (40,), ONSET - 5),
        ((ONSET,), (ONSET - 2,), ONSET - 2),
        ((ONSET - 9, ONSET - 4), (ONSET - 6,), ONSET - 4),
        ((), (ONSET, ONSET - 1), ONSET - 1),
        ((ONSET,), (ONSET,), None),
        ((), (ONSET,), None),
    ],
)
def test_the_newest_state_before_the_onset(copies, checkpoints, expected):
    section = GuardConfig(**{**KEYS, "rollback.snapshot_period": 1})
    rollback, _, batches, _ = made(CheckpointManager(checkpoints), section)
    for step in copies:
        rollback.snapshot(step, state_after(step, section), {"step": step + 1})
    diverging(rollback)
    assert rollback.trigger.onset_step == ONSET
    if expected is None:
        with pytest.raises(TrainingDivergedError):
            rollback.roll_back()
        return
    state = rollback.roll_back()
    np.testing.assert_array_equal(state.params["w"], np.full(3, expected))
    assert batches.calls[0] == ("set_state", expected + 1)
    assert dataclasses.asdict(rollback.checkpoints.recorded[-1])["restored_step"] == expected + 1
