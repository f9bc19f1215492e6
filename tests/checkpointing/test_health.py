"""The rule for healthy states, how steps are counted, and the file of healthy checkpoints."""

import errno
import json
import math

import pytest
from etils import epath

from MaxText.checkpointing.health import HealthEvidence, HealthyCheckpoints
from MaxText.checkpointing.manager import CheckpointManager
from MaxText.config.training_sections import CheckpointingConfig
from MaxText.errors import UserError


def healthy_checkpoints(folder, healthy_steps=3, lines=None):
    return HealthyCheckpoints(
        epath.Path(folder), healthy_steps, [].append if lines is None else lines.append
    )


@pytest.mark.parametrize(
    ("num_accepted", "problems", "expected"),
    [(2, (), False), (3, (), True), (3, ("the loss diverged",), False), (float("inf"), (), True)],
)
def test_the_rule(tmp_path, num_accepted, problems, expected):
    evidence = HealthEvidence(7, num_accepted, problems, {7: 3.0})
    assert healthy_checkpoints(tmp_path).is_healthy(evidence) == expected


def test_the_rule_decides_about_checkpoints_and_the_newest_state(tmp_path):
    """Here one that looks at the newest validation loss up to the state."""

    class WithGoodLosses(HealthyCheckpoints):
        def is_healthy(self, evidence):
            losses = evidence.validation_losses
            newest = max((step for step in losses if step <= evidence.step), default=None)
            return newest is not None and losses[newest] < 3.0

    health = WithGoodLosses(epath.Path(tmp_path), 3, pytest.fail)
    health.observe_evaluation(3, 2.5)
    health.observe_evaluation(5, 3.5)
    for step in (2, 4, 6):
        health.add_candidate(step)
    assert health.steps == {4}
    for step, expected in ((4, True), (5, False), (6, False)):
        health.observe_steps(step, last_skipped=-1)
        assert health.is_newest_healthy() == expected
    assert health.steps == {4}
    for first_step, expected in ((5, True), (3, False)):  # rollbacks: what came after is gone
        health.begin(first_step, last_skipped=-1)
        health.observe_steps(5, last_skipped=-1)
        assert health.is_newest_healthy() == expected


def test_validation_losses_come_back_exactly(tmp_path):
    health = healthy_checkpoints(tmp_path)
    for step, loss in ((9, 1 / 3), (19, math.inf), (4, 2.5)):
        health.observe_evaluation(step, loss)
    stored = json.loads(json.dumps(health.evaluations, allow_nan=False))
    assert stored == [[4, 2.5], [9, 1 / 3], [19, None]]
    resumed = healthy_checkpoints(tmp_path)
    resumed.restore_evaluations(stored)
    assert resumed.evaluations == health.evaluations
    # At most 1,000, the newest ones.
    for step in range(20, 1_100):
        health.observe_evaluation(step, 1.0)
    assert [step for step, _ in health.evaluations] == list(range(100, 1_100))


def test_retention_protects_the_first_candidate_that_is_not_refused_for_good(tmp_path):
    class EvenSteps(HealthyCheckpoints):
        def is_healthy(self, evidence):
            return evidence.step % 2 == 0 and super().is_healthy(evidence)

    health = EvenSteps(epath.Path(tmp_path), 3, pytest.fail)
    assert health.steps_to_preserve(range(20)) == set()
    for step in (5, 7):
        health.add_candidate(step)
    assert health.steps_to_preserve(range(20)) == set()
    for step in (8, 10):
        health.add_candidate(step)
    assert health.steps_to_preserve(range(20)) == {8}
    health.observe_steps(11, last_skipped=-1)
    assert health.steps_to_preserve(range(20)) == {8, 10}
    health.observe_steps(13, last_skipped=-1)
    health.add_candidate(13)
    assert health.steps_to_preserve(range(20)) == {10}
    assert health.steps_to_preserve(range(10)) == {8}  # 10 is marked, but not on disk


@pytest.mark.parametrize(
    ("first_step", "skipped_before", "last_step", "last_skipped", "expected"),
    [
        (0, -1, 0, -1, True),  # never skipped
        (0, -1, 9, 7, False),
        (0, -1, 10, 7, True),
        (40, 38, 40, 38, False),
        (40, 38, 41, 38, True),  # skipped before the restart
    ],
)
def test_the_newest_state(tmp_path, first_step, skipped_before, last_step, last_skipped, expected):
    health = healthy_checkpoints(tmp_path)
    health.begin(first_step, skipped_before)
    health.observe_steps(last_step, last_skipped)
    assert health.is_newest_healthy() == expected
    assert not health.is_newest_healthy(["the loss diverged"])


def test_accepted_steps_in_a_row_make_a_checkpoint_healthy(tmp_path):
    health = healthy_checkpoints(tmp_path)
    health.add_candidate(10)
    health.observe_steps(12, last_skipped=-1)  # those up to 10 say nothing about it
    health.add_candidate(12)
    assert health.steps == set()
    health.observe_steps(13, last_skipped=13)  # the count starts again
    for step in (14, 15):
        health.observe_steps(step, last_skipped=13)
        assert health.steps == set()
    health.observe_steps(16, last_skipped=13)
    assert health.steps == {10, 12}
    at_once = healthy_checkpoints(tmp_path, healthy_steps=0)
    at_once.add_candidate(4)
    assert at_once.steps == {4}


def test_steps_between_two_reports_are_known_by_the_later_one(tmp_path):
    health = healthy_checkpoints(tmp_path)
    health.add_candidate(2)
    health.observe_steps(4, last_skipped=-1)
    # Any of 5, 6 and 7 may have been skipped, so that none counts.
    health.observe_steps(9, last_skipped=7)
    assert health.steps == set()
    health.observe_steps(10, last_skipped=7)
    assert health.steps == {2}


# --- A checkpoint that was saved but not yet healthy when the run was interrupted -----------------


def resumed(run):
    """A manager that has resumed from step 4, with no step known to be healthy."""
    (run / "checkpoints" / "healthy.json").unlink(missing_ok=True)
    section = CheckpointingConfig()
    checkpoints = CheckpointManager(run / "checkpoints", section, healthy_after_steps=3)
    assert checkpoints.last_healthy() is None
    checkpoints.resume_from(4)
    checkpoints.health.begin(5, last_skipped=-1)
    return checkpoints


def test_it_becomes_healthy_after_as_many_steps_as_others(run):
    checkpoints = resumed(run)
    for step, expected in ((5, None), (6, None), (7, 4), (8, 4)):
        checkpoints.observe_steps(step, last_skipped=-1)
        assert checkpoints.last_healthy() == expected
    assert checkpoints.last_healthy(before_step=4) is None
    assert checkpoints.last_healthy(before_step=5) == 4


def test_a_skipped_step_starts_the_count_again(run):
    checkpoints = resumed(run)
    for step, last_skipped in ((5, -1), (6, -1), (7, 7), (8, 7), (9, 7)):
        checkpoints.observe_steps(step, last_skipped)
        assert checkpoints.last_healthy() is None
    checkpoints.observe_steps(10, last_skipped=7)
    assert checkpoints.last_healthy() == 4


def test_the_step_that_it_holds_does_not_count(run):
    """Its metrics are of the state before it."""
    checkpoints = resumed(run)
    checkpoints.health.begin(2, last_skipped=-1)
    checkpoints.observe_steps(6, last_skipped=-1)
    assert checkpoints.last_healthy() is None
    checkpoints.observe_steps(7, last_skipped=-1)
    assert checkpoints.last_healthy() == 4


# --- The file -----------------------------------------------------------------------------------


def test_the_file(tmp_path, monkeypatch):
    def full_disk(descriptor):
        raise OSError(errno.ENOSPC, "full")

    health, file = healthy_checkpoints(tmp_path), tmp_path / "healthy.json"
    assert not health.changed
    for step in (2, 9, 5):
        health.promote(step)
    assert health.changed
    health.write()
    assert not health.changed
    assert [path.name for path in tmp_path.iterdir()] == ["healthy.json"]
    assert json.loads(file.read_text())["healthy"] == [2, 5, 9]
    again = healthy_checkpoints(tmp_path)
    assert again.steps == {2, 5, 9}
    assert not again.changed
    again.begin_save(5)  # the next past has a step of the same number
    assert again.steps == {2, 9}
    before, lines = file.read_bytes(), []
    file.write_bytes(before.replace(b"5", b"6"))
    assert healthy_checkpoints(tmp_path, lines=lines).steps == set()
    assert "healthy.json" in lines[0]
    file.write_bytes(before)
    # What cannot be written stays as it is; what cannot be read is an error.
    health.promote(11)
    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full_disk)
        with pytest.raises(OSError, match="full"):
            health.write()
        assert not health.try_write()
    assert file.read_bytes() == before
    assert list(tmp_path.iterdir()) == [file]
    assert health.changed
    file.unlink()
    file.mkdir()
    with pytest.raises(UserError, match=r"healthy\.json"):
        healthy_checkpoints(tmp_path).steps  # noqa: B018
