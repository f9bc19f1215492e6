"""What follows a step: no checkpoint and no end of a run without the rows of all steps before."""

from unittest.mock import MagicMock, call

import hypothesis.strategies as st
from hypothesis import given

from MaxText.run.loop import Loop


@given(st.integers(0, 40), st.integers(0, 2), st.integers(-1, 9), st.booleans(), st.booleans())
def test_actions_after_a_step(step, later, interval, is_saved, stop_requested):
    loop = MagicMock(step=step, last_step=step + later, eval_loss=None)
    loop.config.evaluation.eval_interval, loop.rollback.trigger = interval, None
    loop.checkpoints.should_save.return_value = is_saved
    loop.preemption.requested.return_value = stop_requested
    loop.next_batch.side_effect, loop.metric_logger.newest_step = ["batch", None], None
    Loop.run(loop, evaluation_due=False)
    stop = stop_requested and later > 0  # the last step ends the run anyway
    due = interval > 0 and (not later or (step + 1) % interval == 0)
    assert loop.evaluate.called == (due and not stop)
    assert loop.save.mock_calls == [call(step, evaluation_is_due=due and stop)] * (is_saved or stop)
    assert loop.metric_logger.complete.called == (is_saved or stop or not later)
