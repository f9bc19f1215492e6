"""Values of the learning rate at the steps where its parts meet."""

import math

import pytest

from MaxText.config.training_sections import ScheduleConfig
from MaxText.training.schedule import learning_rate_schedule


def rates(steps, **keys):
    keys = {"learning_rate": 1.0, "learning_rate_schedule_steps": 100} | keys
    schedule = learning_rate_schedule(ScheduleConfig(**keys))
    return [float(schedule(step)) for step in steps]


WARMUP = {"warmup_steps_fraction": 0.1}
NONE = {"warmup_steps_fraction": 0.0}


@pytest.mark.parametrize(
    ("kind", "keys", "expected"),
    [
        ("cosine", WARMUP, {0: 0.0, 5: 0.5, 10: 1.0, 55: 0.55, 100: 0.1, 101: 0.0, 500: 0.0}),
        # Of jax_lm.
        ("linear", NONE | {"learning_rate_final_fraction": 0.0}, {0: 1.0, 1: 0.99, 99: 0.01}),
        ("wsd", WARMUP | {"wsd_decay_steps_fraction": 0.2},
         {5: 0.5, 10: 1.0, 50: 1.0, 80: 1.0, 90: 0.55, 100: 0.1, 101: 0.0}),
        *(("wsd", {"warmup_steps": 8, "wsd_decay_steps_fraction": 0.2,
                   "learning_rate_decay.multiplies_warmup": multiplies},
           {0: 0.0, 4: 0.5, 8: 1.0, 50: 1.0, 80: 1.0, 90: 0.55, 100: 0.1, 101: 0.0})
          for multiplies in (False, True)),
        ("constant", WARMUP, {0: 0.0, 10: 1.0, 100: 1.0, 1000: 1.0}),
        ("polynomial", {"learning_rate_decay.power": 2.0, "warmup_steps": 10},
         {0: 0.0, 5: 0.5, 10: 1.0, 55: 0.1 + 0.9 * 0.25, 100: 0.1, 101: 0.0}),
        # Of fattorib: the warm-up inside, the end kept.
        ("cosine", {"warmup_steps": 20, "learning_rate_decay.after": "final"},
         {10: 0.5, 20: 1.0, 60: 0.55, 100: 0.1, 500: 0.1}),
        *((kind, NONE, {0: 1.0}) for kind in ("cosine", "wsd", "constant", "polynomial")),
    ],
)  # fmt: skip
def test_values(kind, keys, expected):
    for peak in (1.0, 3e-4):
        found = rates(expected, lr_schedule_type=kind, learning_rate=peak, **keys)
        shares = [rate / peak for rate in found]
        assert shares == pytest.approx(list(expected.values()), abs=1e-6), peak


@pytest.mark.parametrize("kind", ["cosine", "linear"])
def test_gpt_neo(kind):
    """The warm-up multiplies a body that counts from step 0 and ends at a tenth of the peak."""
    end, warmup, peak = 1000, 30, 6e-4
    steps = [0, 1, warmup - 1, warmup, end // 2, end - 1, end, end + 5, 3 * end]

    def expected(step):
        over = min(step, end) / end
        shape = 0.5 * (1 + math.cos(math.pi * over)) if kind == "cosine" else 1 - over
        return peak * (0.9 * shape + 0.1) * min(step / warmup, 1)

    keys = {"learning_rate": peak, "learning_rate_schedule_steps": end, "warmup_steps": warmup}
    keys |= {"learning_rate_decay.multiplies_warmup": True, "learning_rate_decay.after": "final"}
    values = rates(steps, lr_schedule_type=kind, **keys)
    assert values == pytest.approx([expected(step) for step in steps], rel=1e-5)
    assert values[0] == 0.0
