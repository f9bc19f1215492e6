"""Ramp-up and stages of length: shapes, samples and steps."""

import numpy as np
import pytest

from MaxText.configuration.training_sections import Batch
from MaxText.input_pipeline.rows.batch_plan import BatchPlan, Stage, plan_batches
from MaxText.input_pipeline.rows.row_batches import fold


def test_constant_batches():
    plan = plan_batches(Batch(per_device_batch_size=3), 64, lambda size: int(size * 4))
    assert plan == BatchPlan.constant(12, 64)
    assert plan.samples_before(1000) == 12_000
    assert plan.steps_for(25) == 3
    assert not plan.has_stages


def test_rampup_sees_its_samples_in_equal_shares():
    section = Batch(
        per_device_batch_size=8,
        enable_rampup_batch_size=True,
        per_device_batch_size_start=2,
        per_device_batch_size_increment=2,
        global_rampup_samples=300,
    )
    plan = plan_batches(section, 64, lambda size: int(size * 2))
    # 100 samples each by 4, 8 and 12: 25, 13 and 9 steps.
    assert plan.stages == (
        Stage(0, 4, 64), Stage(25, 8, 64), Stage(38, 12, 64), Stage(47, 16, 64),
    )  # fmt: skip
    assert plan.samples_before(25) == 100
    assert plan.samples_before(47) == 100 + 104 + 108
    assert plan.samples_before(50) == 312 + 48


@pytest.mark.parametrize("samples", [1, 99, 100, 101, 204, 205, 500])
def test_steps_for_samples_is_the_first_step_that_has_them_all(samples):
    plan = BatchPlan((Stage(0, 4, 8), Stage(25, 8, 8), Stage(38, 12, 8)), 8)
    steps = plan.steps_for(samples)
    assert plan.samples_before(steps - 1) < samples <= plan.samples_before(steps)


def test_stages_of_length_see_as_many_tokens():
    section = Batch(per_device_batch_size=4, sequence_length_stages=((0, 8), (10, 16), (30, 64)))
    plan = plan_batches(section, 64, int)
    assert [(stage.first_step, plan.rows(stage), stage.length) for stage in plan.stages] == [
        (0, 32, 8), (10, 16, 16), (30, 4, 64),
    ]  # fmt: skip
    assert plan.samples_before(40) == 160
    assert plan.steps_of(plan.stages[1], 100) == (10, 30)
    assert plan.steps_of(plan.stages[1], 20) == (10, 20)
    assert plan.steps_of(plan.stages[2], 20) == (30, 30)


def test_folded_rows_hold_the_same_tokens_with_positions_from_zero():
    arrays = {
        "tokens": np.arange(8).reshape(1, 8),
        "segments": np.array([[1, 1, 1, 1, 1, 2, 2, 0]]),
        "positions": np.array([[0, 1, 2, 3, 4, 0, 1, 0]]),
    }
    folded = fold(arrays, 4)
    assert folded["tokens"].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert folded["positions"].tolist() == [[0, 1, 2, 3], [0, 0, 1, 0]]
    assert folded["segments"].tolist() == [[1, 1, 1, 1], [1, 2, 2, 0]]
