"""A checkpoint that was saved but not yet healthy when the run was interrupted."""

from MaxText.checkpointing.manager import CheckpointManager
from MaxText.config.training_sections import CheckpointingConfig


def resumed(run):
    """A manager that has resumed from step 4, with no step known to be healthy."""
    (run / "checkpoints" / "healthy.json").unlink(missing_ok=True)
    section = CheckpointingConfig()
    checkpoints = CheckpointManager(run / "checkpoints", section, healthy_after_steps=3)
    assert checkpoints.last_healthy() is None
    checkpoints.resume_from(4)
    return checkpoints


def test_it_becomes_healthy_after_as_many_steps_as_others(run):
    checkpoints = resumed(run)
    for step, expected in ((5, None), (6, None), (7, 4), (8, 4)):
        checkpoints.update_health(step, True)
        assert checkpoints.last_healthy() == expected
    assert checkpoints.last_healthy(before=4) is None
    assert checkpoints.last_healthy(before=5) == 4


def test_an_unhealthy_step_starts_the_count_again(run):
    checkpoints = resumed(run)
    for step, healthy in ((5, True), (6, True), (7, False), (8, True), (9, True)):
        checkpoints.update_health(step, healthy)
        assert checkpoints.last_healthy() is None
    checkpoints.update_health(10, True)
    assert checkpoints.last_healthy() == 4


def test_the_step_that_it_holds_does_not_count(run):
    """Its metrics are of the state before it."""
    checkpoints = resumed(run)
    for step in (2, 3, 4, 5, 6):
        checkpoints.update_health(step, True)
    assert checkpoints.last_healthy() is None
    checkpoints.update_health(7, True)
    assert checkpoints.last_healthy() == 4
