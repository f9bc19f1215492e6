"""Values of the learning rate at the places where its pieces meet."""

import math

import optax
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


def test_polynomial():
    values = rates([0, 5, 10, 55, 100, 101], lr_schedule_type="polynomial",
                   lr_polynomial_power=2.0, warmup_steps=10)  # fmt: skip
    assert values == pytest.approx([0.0, 0.5, 1.0, 0.1 + 0.9 * 0.25, 0.1, 0.0], abs=1e-6)
    plain = rates(range(0, 102, 7), lr_schedule_type="polynomial")
    assert plain == pytest.approx(rates(range(0, 102, 7), lr_schedule_type="linear"))


@pytest.mark.parametrize("kind", ["cosine", "linear"])
def test_gpt_neo(kind):
    """The warm-up multiplies a body that counts from step 0 and ends at a tenth of the peak.

    Places: the first two steps, both sides of the end of the warm-up, half way, the end and after.
    """
    end, warmup, peak = 1000, 30, 6e-4
    steps = [0, 1, warmup - 1, warmup, end // 2, end - 1, end, end + 5, 3 * end]

    def expected(step):
        over = min(step, end) / end
        shape = 0.5 * (1 + math.cos(math.pi * over)) if kind == "cosine" else 1 - over
        return peak * (0.9 * shape + 0.1) * min(step / warmup, 1)

    values = rates(
        steps,
        learning_rate=peak,
        learning_rate_schedule_steps=end,
        lr_schedule_type=kind,
        warmup_steps=warmup,
        warmup_multiplies_schedule=True,
        learning_rate_after_schedule="final",
    )
    assert values == pytest.approx([expected(step) for step in steps], rel=1e-5)
    assert values[0] == 0.0


def test_fattorib_cosine_with_its_warm_up_inside_and_its_end_kept():
    keys = {"learning_rate": 8e-4, "learning_rate_schedule_steps": 58_000, "warmup_steps": 2000,
            "learning_rate_after_schedule": "final"}  # fmt: skip
    steps = [0, 1000, 2000, 30_000, 58_000, 60_000]
    theirs = optax.warmup_cosine_decay_schedule(0.0, 8e-4, 2000, 58_000, 8e-5)
    assert rates(steps, **keys) == pytest.approx([float(theirs(s)) for s in steps], rel=1e-5)
    assert rates([60_000], **keys) == pytest.approx([8e-5])


def test_jax_lm_falls_to_zero_without_warm_up():
    keys = {"lr_schedule_type": "linear", "warmup_steps_fraction": 0.0,
            "learning_rate_final_fraction": 0.0}  # fmt: skip
    assert rates([0, 1, 50, 99, 100, 200], **keys) == pytest.approx([1.0, 0.99, 0.5, 0.01, 0, 0])


@pytest.mark.parametrize("multiplies", [False, True])
def test_warm_up_in_steps_of_a_stable_body(multiplies):
    values = rates([0, 4, 8, 50, 80, 90, 100, 101], lr_schedule_type="wsd", warmup_steps=8,
                   wsd_decay_steps_fraction=0.2, warmup_multiplies_schedule=multiplies)  # fmt: skip
    assert values == pytest.approx([0.0, 0.5, 1.0, 1.0, 1.0, 0.55, 0.1, 0.0], abs=1e-6)
