"""What follows a step, and in which order."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from MaxText.errors import UserError, WaitCancelledError
from MaxText.run.hooks import CHECKPOINT, EVALUATION, Hook
from MaxText.run.loop import COMPLETED, PREEMPTED, STORAGE_FAILED, TARGET_REACHED, actions_after
from tests.run.small_loop import SmallLoop


@given(st.integers(0, 40), st.integers(0, 40), st.integers(-1, 9), st.booleans(), st.booleans())
def test_actions_after_a_step(step, later, interval, checkpoint_due, stop_requested):
    last_step = step + later
    hooks = [Hook(print, every=interval, name=EVALUATION)] if interval > 0 else []
    hooks.append(Hook(print, when=lambda step: checkpoint_due, name=CHECKPOINT))
    due = [hook.name for hook in hooks if hook.is_due(step, last_step)]
    actions = actions_after(step, last_step, due=["mine", *due], stop_requested=stop_requested)
    # The last step ends the run as if no signal had asked it to stop.
    assert actions.stop == (stop_requested and step < last_step)
    saves = CHECKPOINT in actions.hooks
    assert saves == (checkpoint_due or actions.stop)
    assert actions.evaluation_due == (interval > 0 and (not later or (step + 1) % interval == 0))
    assert (EVALUATION in actions.hooks) == (actions.evaluation_due and not actions.stop)
    assert "mine" in actions.hooks
    # No checkpoint and no end of a run without the rows of all steps before it.
    assert actions.report == (saves or step == last_step)


def test_the_order_of_a_step(monkeypatch):
    calls = []
    hooks = [Hook(lambda info: calls.append(("hook", info.step)), every=3, name="mine")]
    small = SmallLoop(monkeypatch, hooks=hooks, checkpoints_after={2, 4, 5}, eval_interval=3)
    calls = small.calls
    assert small.run() == COMPLETED
    with_all = ["report", "hook", "evaluate", "snapshot", "save"]
    assert small.after(2) == with_all
    assert small.after(3) == ["snapshot", "report"]  # one step late
    assert small.after(4) == ["report", "snapshot", "save"]
    assert small.after(5) == with_all
    assert [metadata["evaluation_is_due"] for metadata in small.checkpoints.saved.values()] == [
        False
    ] * 3


def test_a_checkpoint_has_the_validation_losses_up_to_its_step(monkeypatch):
    small = SmallLoop(
        monkeypatch, checkpoints_after={2, 3, 5}, eval_interval=3, eval_losses={2: 7.0}
    )
    small.run()
    saved = {step: metadata["evaluations"] for step, metadata in small.checkpoints.saved.items()}
    assert saved == {2: [(2, 7.0)], 3: [(2, 7.0)], 5: [(2, 7.0), (5, 9.0)]}


def test_a_stop_request_saves_and_leaves_the_evaluation_to_the_next_start(monkeypatch):
    small = SmallLoop(monkeypatch, eval_interval=3, stop_after={2})
    assert small.run() == PREEMPTED
    assert small.after(2) == ["report", "snapshot", "save"]
    assert small.checkpoints.saved[2]["evaluation_is_due"]
    assert small.lines == ["Stopping after step 2: preempted"]
    resumed = SmallLoop(monkeypatch, first_step=3, eval_interval=3)
    assert resumed.run(evaluation_due=True) == COMPLETED
    assert resumed.calls[0] == ("evaluate", 2)


def test_a_stop_request_during_an_evaluation_saves(monkeypatch):
    small = SmallLoop(monkeypatch, eval_interval=3, eval_losses={2: None})
    assert small.run() == PREEMPTED
    assert small.after(2) == ["report", "evaluate", "snapshot", "save"]
    assert small.checkpoints.saved[2]["evaluation_is_due"]


def test_a_stop_request_while_waiting_for_data_saves_the_step_before(monkeypatch):
    small = SmallLoop(monkeypatch)
    small.batches.errors[3] = WaitCancelledError()
    assert small.run() == PREEMPTED
    assert list(small.checkpoints.saved) == [2]


def test_the_last_step_is_not_interrupted(monkeypatch):
    small = SmallLoop(monkeypatch, last_step=2, eval_interval=9, stop_after={2})
    assert small.run() == COMPLETED
    assert small.after(2) == ["report", "evaluate", "snapshot"]


def test_a_reached_target_ends_the_run_with_a_checkpoint(monkeypatch):
    small = SmallLoop(
        monkeypatch, eval_interval=2, eval_losses={1: 3.0, 3: 1.9}, target_eval_loss=2.0
    )
    assert small.run() == TARGET_REACHED
    assert small.calls[-1] == ("save", 3)
    assert not small.checkpoints.saved[3]["evaluation_is_due"]


def test_failed_storage_of_records_saves_and_ends_the_run(monkeypatch):
    small = SmallLoop(monkeypatch, stop_after={1})
    small.run_logger.events.failure = "events.jsonl: no space"
    assert small.run() == STORAGE_FAILED
    assert list(small.checkpoints.saved) == [1]


@pytest.mark.parametrize("error", [UserError("damaged"), OSError("gone")])
def test_unreadable_data_end_the_run_after_a_checkpoint_of_the_last_step(monkeypatch, error):
    small = SmallLoop(monkeypatch, eval_interval=3)
    small.batches.errors[3] = error
    with pytest.raises(type(error)):
        small.run()
    assert list(small.checkpoints.saved) == [2]
    assert small.checkpoints.waits == 1


def test_a_rollback_goes_before_everything_else_of_the_step(monkeypatch):
    small = SmallLoop(monkeypatch, checkpoints_after={3})
    small.rollback.restored_step = 2

    def trigger():
        del small.checks[3]
        small.rollback.trigger = "skipped steps"

    small.checks[3] = trigger
    assert small.run() == COMPLETED
    # The second time, the step is healthy.
    assert small.after(3) == ["report", "report", "snapshot", "save"]
    assert [number for name, number in small.calls if name == "snapshot"] == [0, 1, 2, 2, 3, 4, 5]
    assert small.loop.state.params == {"w": 6}
