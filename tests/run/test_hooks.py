"""Hooks of users: when they are called, what they see, and what their errors do."""

import re

import pytest

from MaxText.errors import UserError
from MaxText.run.hooks import Hook, hook, user_hooks
from MaxText.run.loop import COMPLETED, PREEMPTED
from tests.run.small_loop import SmallLoop


def recorded(**keywords):
    """A hook and the steps of its calls."""
    steps = []
    return Hook(lambda info: steps.append(info.step), name="recorded", **keywords), steps


@pytest.mark.parametrize(
    ("keywords", "expected"),
    [
        ({}, [0, 1, 2, 3, 4, 5, 6]),
        ({"every": 3}, [2, 5, 6]),  # and after the last step, as eval_interval
        ({"every": 100}, [6]),
        ({"when": lambda step: step in (1, 4)}, [1, 4]),
    ],
)
def test_steps_of_calls(monkeypatch, keywords, expected):
    counted, steps = recorded(**keywords)
    assert SmallLoop(monkeypatch, last_step=6, hooks=[counted]).run() == COMPLETED
    assert steps == expected


def test_intervals_count_from_the_first_step_of_the_run_not_of_the_start(monkeypatch):
    counted, steps = recorded(every=3)
    assert SmallLoop(monkeypatch, last_step=9, first_step=4, hooks=[counted]).run() == COMPLETED
    assert steps == [5, 8, 9]


def test_a_run_that_is_asked_to_stop_calls_them_before_its_checkpoint(monkeypatch):
    counted, steps = recorded(every=2)
    small = SmallLoop(monkeypatch, hooks=[counted], stop_after={3})
    assert small.run() == PREEMPTED
    assert (steps, list(small.checkpoints.saved)) == ([1, 3], [3])


def test_steps_repeated_after_a_rollback_call_them_again(monkeypatch):
    counted, steps = recorded()
    small = SmallLoop(monkeypatch, hooks=[counted])
    small.rollback.restored_step = 2

    def trigger():
        del small.checks[3]
        small.rollback.trigger = "skipped steps"

    small.checks[3] = trigger
    assert small.run() == COMPLETED
    # Never with the state that was rolled back: its metrics are checked before the call.
    assert steps == [0, 1, 2, 2, 3, 4, 5]


def test_what_they_see(monkeypatch):
    seen = []
    small = SmallLoop(monkeypatch, hooks=[Hook(seen.append, every=3)])
    small.run()
    first, _ = seen
    assert (first.step, first.state.step, first.params) == (2, 3, {"w": 3})
    assert first.metrics == {"loss": 8.0, "grad_norm": 1.0, "param_norm": 1.0}
    assert (first.model, str(first.run_folder)) == ("the model", "the run folder")
    assert first.config.run.steps == 6


def test_an_error_names_hook_and_step_and_the_state_is_saved(monkeypatch):
    def fragile(info):
        if info.step == 4:
            raise KeyError("layers")

    small = SmallLoop(monkeypatch, 9, hooks=[Hook(fragile, name="mine")], eval_interval=5)
    with pytest.raises(UserError) as caught:
        small.run()
    pattern = r"hook mine failed after step 4: KeyError: 'layers' \(test_hooks\.py:\d+\)"
    assert re.fullmatch(pattern, str(caught.value))
    assert list(small.checkpoints.saved) == [4]
    # It failed before the evaluation of its step.
    assert small.checkpoints.saved[4]["evaluation_is_due"]


def test_an_interval_has_to_be_positive():
    with pytest.raises(UserError, match=r"hook print: every=0 must be 1 or more"):
        Hook(print, every=0)


def test_hooks_are_selected_by_name():
    @hook(every=10)
    def first(info):
        """A hook."""

    hook(name="second")(print)
    assert first == Hook(first.function, every=10, name="first")
    assert [selected.every for selected in user_hooks(["second", "first"])] == [1, 10]
    with pytest.raises(
        UserError, match=r"hooks: no hook is called 'third' \(registered: .*first, .*second"
    ):
        user_hooks(["third"])


def test_a_name_belongs_to_one_module():
    hook()(recorded)
    hook()(recorded)  # the same module again, as a cell of a notebook
    with pytest.raises(
        UserError, match=r"hook recorded: the name is taken by .*test_hooks\.py:\d+"
    ):
        hook(name="recorded")(print)


def test_every_hook_of_a_run_has_a_name_of_its_own():
    hooks = [lambda info: None, lambda info: None, Hook(print, name="evaluation")]
    names = [selected.name for selected in user_hooks([], hooks)]
    assert names == ["<lambda>", "<lambda>_2", "evaluation_2"]
