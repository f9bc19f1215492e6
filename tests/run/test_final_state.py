"""The state after the last step: one more step shows whether it is broken."""

import dataclasses
import math

import jax.numpy as jnp
import pytest

from MaxText.config.training_sections import GuardConfig
from MaxText.run.final_state import broken_state_reason, skipped_at_end
from MaxText.training.spike_guard import initial_state


def guard_after(skipped, window=8):
    """A guard after the steps of `skipped`, the last of which may be beyond the window."""
    guard = initial_state(GuardConfig(skip_step_interval=window))
    skipped_W = guard.skipped_W
    for step, is_skipped in enumerate(skipped):
        skipped_W = skipped_W.at[step % window].set(is_skipped)
    return dataclasses.replace(guard, skipped_W=skipped_W)


@pytest.mark.parametrize(
    ("skipped", "expected"),
    [
        ([False], 0),
        ([True], 1),
        ([True, True], 2),
        ([True, False], 0),
        ([False, True], 1),
        ([False] * 20 + [True] * 3, 3),
        ([True] * 20, 8),
        ([True] * 20 + [False], 0),
        ([True] * 9 + [False] + [True] * 5, 5),
    ],
)
def test_skipped_steps_at_the_end(skipped, expected):
    assert skipped_at_end(guard_after(skipped), len(skipped) - 1) == expected


def test_without_a_guard_no_step_is_skipped():
    assert skipped_at_end(None, 7) == 0


def judged(batches, limit=math.inf, **changes):
    """The verdict and the batches it took; a batch is the loss it has and whether it is skipped."""
    used = []

    def train_step(state, batch):
        used.append(batch)
        loss, skipped = batch
        metrics = {"loss": loss, "grad_norm": 1.0, "param_norm": 2.0, **changes}
        if skipped is not None:
            metrics["skipped"] = int(skipped)
        return state + 1, {name: jnp.asarray(value) for name, value in metrics.items()}

    return broken_state_reason(train_step, 0, batches, limit), len(used)


def test_a_state_is_not_broken_if_a_step_on_any_batch_would_be_accepted():
    assert judged([(3.0, False), (3.0, False)]) == ("", 1)
    assert judged([(9.0, True), (3.0, False)]) == ("", 2)
    assert judged([]) == ("", 0)
    reason, count = judged([(9.0, True), (8.0, True)])
    assert (reason, count) == ("loss 9, grad_norm 1", 2)


def test_without_a_guard_the_limit_and_finite_numbers_decide():
    assert judged([(4.0, None)], limit=4.5) == ("", 1)
    assert judged([(5.0, None)], limit=4.5)[0]
    assert judged([(math.nan, None)])[0]
    assert judged([(3.0, None)], grad_norm=math.inf)[0]
    # Parameters that the batch does not use can be broken, too.
    assert judged([(3.0, False)], param_norm=math.nan)[0]
