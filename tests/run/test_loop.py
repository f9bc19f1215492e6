"""What follows a step."""

from hypothesis import given
from hypothesis import strategies as st

from MaxText.run.loop import actions_after


@given(st.integers(0, 40), st.integers(0, 40), st.integers(-1, 9), st.booleans(), st.booleans())
def test_actions_after_a_step(step, later, interval, checkpoint_due, stop_requested):
    last_step = step + later
    keys = {"eval_interval": interval, "checkpoint_due": checkpoint_due}
    actions = actions_after(step, last_step, stop_requested=stop_requested, **keys)
    # The last step ends the run as if no signal had asked it to stop.
    assert actions.stop == (stop_requested and step < last_step)
    assert actions.save == (checkpoint_due or actions.stop)
    assert actions.evaluation_due == (interval > 0 and (not later or (step + 1) % interval == 0))
    assert actions.evaluate == (actions.evaluation_due and not actions.stop)
    # No checkpoint and no end of a run without the rows of all steps before it.
    assert actions.report == (actions.save or step == last_step)
