"""A run with checkpoints, saved once."""

import shutil

import pytest

from MaxText.checkpointing.compatibility import checkpoint_metadata
from MaxText.checkpointing.manager import CheckpointManager
from MaxText.config.training_sections import CheckpointingConfig
from tests.checkpointing.small_state import CONFIG, fresh_state, on_host, update


@pytest.fixture(scope="session")
def saved_run(tmp_path_factory):
    """A finished run with checkpoints of steps 0, 2 and 4: (its folder, host copies by step)."""
    folder = tmp_path_factory.mktemp("saved") / "run"
    checkpoints = CheckpointManager(folder / "checkpoints", CheckpointingConfig())
    state, kept = fresh_state(seed=1), {}
    for step in range(5):
        state = update(state)
        if step % 2 == 0:
            kept[step] = on_host(state)
            metadata = checkpoint_metadata(CONFIG, state.params)
            checkpoints.save(step, state, {"step": step + 1, "seed": 5}, metadata)
    checkpoints.wait()
    return folder, kept


@pytest.fixture
def run(saved_run, tmp_path):
    """A copy of its folder, to be changed."""
    return shutil.copytree(saved_run[0], tmp_path / "run")


@pytest.fixture
def kept(saved_run):
    """Host copies of its states, by step."""
    return saved_run[1]
