"""Values of the learning rate at the places where its pieces meet."""

import pytest

from MaxText.configuration.training_sections import Schedule
from MaxText.training.schedule import learning_rate_schedule


def rates(steps, **keys):
    keys = {"learning_rate": 1.0, "learning_rate_schedule_steps": 100} | keys
    schedule = learning_rate_schedule(Schedule(**keys))
    return [float(schedule(step)) for step in steps]


def test_cosine_has_warm_up_half_way_end_and_zero_after():
    values = rates([0, 5, 10, 55, 100, 101, 500], warmup_steps_fraction=0.1)
    assert values == pytest.approx([0.0, 0.5, 1.0, 0.55, 0.1, 0.0, 0.0], abs=1e-6)


def test_linear():
    values = rates(
        [10, 55, 100, 101],
        lr_schedule_type="linear",
        warmup_steps_fraction=0.1,
        learning_rate_final_fraction=0.0,
    )
    assert values == pytest.approx([1.0, 0.5, 0.0, 0.0], abs=1e-6)


def test_warm_up_stable_decay():
    values = rates([5, 10, 50, 80, 90, 100, 101], lr_schedule_type="wsd",
                   warmup_steps_fraction=0.1, wsd_decay_steps_fraction=0.2)  # fmt: skip
    assert values == pytest.approx([0.5, 1.0, 1.0, 1.0, 0.55, 0.1, 0.0], abs=1e-6)


def test_constant_goes_on_after_the_schedule():
    values = rates([0, 10, 100, 1000], lr_schedule_type="constant", warmup_steps_fraction=0.1)
    assert values == pytest.approx([0.0, 1.0, 1.0, 1.0])


def test_without_warm_up_the_first_update_has_the_peak():
    for kind in ("cosine", "linear", "wsd", "constant"):
        assert rates([0], lr_schedule_type=kind, warmup_steps_fraction=0.0) == pytest.approx([1.0])
