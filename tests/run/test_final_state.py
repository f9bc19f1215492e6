"""The state after the last step: one more step shows whether it is broken."""

import dataclasses
import math

import jax.numpy as jnp
import pytest

from MaxText.config.training_sections import GuardConfig
from MaxText.run import loop as loop_module
from MaxText.run.final_state import broken_state_reason, skipped_at_end
from MaxText.training.spike_guard import initial_state
from tests.run.small_loop import SmallLoop


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


# --- What a run says about its final state ------------------------------------------------------


def judged_run(monkeypatch, last_skipped, *, skipped_at_the_end=0, diverged=""):
    """The problem that ends a run of 10 steps, and its lines; healthy takes 3 accepted steps."""
    small = SmallLoop(monkeypatch, last_step=9)
    small.run()
    small.run_logger.trend.diverged = diverged
    small.checkpoints.health.observe_steps(9, last_skipped)
    monkeypatch.setattr(loop_module, "skipped_at_end", lambda guard, step: skipped_at_the_end)
    return small.loop.judge_final_state(), small.lines


@pytest.mark.parametrize("last_skipped", [-1, 6])
def test_a_healthy_final_state_needs_no_words(monkeypatch, last_skipped):
    assert judged_run(monkeypatch, last_skipped) == ("", [])


def test_a_final_state_that_is_not_promoted_is_a_warning_and_no_failure(monkeypatch):
    problem, (line,) = judged_run(monkeypatch, last_skipped=7)
    assert problem == ""
    assert line.startswith(
        "WARNING: the state after step 9 is not promoted as healthy: 2 steps were accepted since "
        "step 7 was skipped, fewer than healthy_after_steps=3."
    )


def test_a_failure_says_no_more_than_is_known(monkeypatch):
    problem, lines = judged_run(monkeypatch, last_skipped=9, skipped_at_the_end=3)
    assert problem == (
        "the last 3 steps, up to step 9, were all skipped; the state before them is not broken"
    )
    assert lines == []  # the error is enough
    assert judged_run(monkeypatch, -1, diverged="the loss rose") == ("", [])
