"""Storage that fails while a checkpoint is read is no damage: nothing is passed over or renamed."""

import errno
import os

import orbax.checkpoint as ocp
import pytest

from MaxText.buckets.failures import BucketFailure
from MaxText.checkpointing import reading
from MaxText.checkpointing.description import Unreadable
from MaxText.checkpointing.manager import Checkpoints
from MaxText.checkpointing.starting_point import restore_or_initialize
from MaxText.configuration.training_sections import Checkpoint
from tests.checkpointing.small_state import CONFIG, abstract, fresh_state
from tests.checkpointing.test_manager import save_steps

FAILURES = [
    OSError(errno.ESTALE, os.strerror(errno.ESTALE)),
    OSError(errno.EMFILE, os.strerror(errno.EMFILE)),
    PermissionError(errno.EACCES, os.strerror(errno.EACCES)),
    ValueError('INTERNAL: Error reading "d/1": [OS error 5: EIO Input/output error]'),
]


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run with checkpoints of steps 0 and 1."""
    monkeypatch.setattr(reading, "_WAITS", (0.0, 0.0))
    checkpoints = Checkpoints(tmp_path / "checkpoints", Checkpoint())
    save_steps(checkpoints, fresh_state(), [0, 1])
    checkpoints.close()
    return Checkpoints(tmp_path / "checkpoints", Checkpoint())


def failing(monkeypatch, errors):
    restore, waiting = ocp.Checkpointer.restore, list(errors)

    def sometimes(*args, **kwargs):
        if waiting:
            raise waiting.pop(0)
        return restore(*args, **kwargs)

    monkeypatch.setattr(ocp.Checkpointer, "restore", sometimes)


def resume(checkpoints, lines):
    return restore_or_initialize(
        checkpoints, Checkpoint(), abstract(fresh_state()), pytest.fail, CONFIG, lines.append
    )


@pytest.mark.parametrize("error", FAILURES, ids=str)
def test_storage_that_fails_for_a_while_is_asked_again(run, monkeypatch, error):
    failing(monkeypatch, [error, error])
    assert resume(run, []).first_step == 2


@pytest.mark.parametrize("error", FAILURES, ids=str)
def test_storage_that_fails_for_long_ends_the_program_and_changes_nothing(run, monkeypatch, error):
    failing(monkeypatch, [error] * 9)
    with pytest.raises(BucketFailure, match=r"cannot be read now: .*\. Nothing was changed"):
        resume(run, [])
    assert run.steps() == [0, 1]
    assert not run._unreadable


@pytest.mark.parametrize(
    "error",
    [
        FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT)),
        ValueError("DATA_LOSS: Error decoding chunk"),
        ValueError("NOT_FOUND: [OS error 2: ENOENT No such file or directory]"),
    ],
    ids=str,
)
def test_damage_is_not_read_again(monkeypatch, error):
    calls = []

    def read():
        calls.append(error)
        with reading.damage_is_unreadable():
            raise error

    with pytest.raises(Unreadable):
        reading.read_again(read)
    assert len(calls) == 1
