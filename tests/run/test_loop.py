"""What follows a step."""

from unittest.mock import MagicMock

from hypothesis import given
from hypothesis import strategies as st

from MaxText.run.loop import Loop


@given(st.integers(0, 40), st.integers(0, 40), st.integers(-1, 9), st.booleans(), st.booleans())
def test_actions_after_a_step(step, later, interval, checkpoint_due, stop_requested):
    loop = MagicMock(step=step, last_step=step + later, eval_loss=None)
    loop.config.evaluation.eval_interval, loop.rollback.trigger = interval, None
    loop.checkpoints.should_save.return_value = checkpoint_due
    loop.preemption.requested.return_value = stop_requested
    loop.next_batch.side_effect, loop.metric_logger.newest_step = ["batch", None], None
    Loop.run(loop, evaluation_due=False)
    stop = stop_requested and later > 0  # the last step ends the run anyway
    due = interval > 0 and (not later or (step + 1) % interval == 0)
    saved = [call.kwargs["evaluation_is_due"] for call in loop.save.call_args_list]
    assert loop.evaluate.called == (due and not stop)
    assert saved == [due and stop] * (checkpoint_due or stop)
    # No checkpoint and no end of a run without the rows of all steps before it.
    assert loop.metric_logger.complete.called == (bool(saved) or not later)
