"""What a run and those it descends from have spent."""

import pytest

from MaxText.checkpointing.starting_point import Start
from MaxText.input_pipeline.rows.batch_plan import BatchPlan
from MaxText.layers.model import Model
from MaxText.monitoring.lineage import Lineage
from MaxText.monitoring.peak_flops import PeakFlops
from MaxText.monitoring.quantities import Quantities
from tests.small_models import tiny_config

TOKENS = 4 * 16  # of an update


@pytest.fixture(scope="module")
def quantities():
    config = tiny_config()
    plan = BatchPlan.constant(4, config.model.shape.max_target_length)
    return Quantities(Model(config.model), config.batch, plan, 1, 100, PeakFlops(1.0, ""))


def begun(how, first_step, metadata, stored_step=9):
    return Start(None, first_step, None, "", how, metadata, f"/runs/old/{stored_step}", stored_step)


def saved(lineage, step, run_name):
    """The metadata of a checkpoint, as far as it is read here."""
    return {"config": {"run_name": run_name}, **lineage.metadata(step)}


def test_what_a_run_has_spent(quantities):
    new = Lineage.of(begun("scratch", 0, {}), quantities)
    assert new.spent_before(0) == (0, 0.0)
    assert new.progress(9)["progress/tokens"] == 10 * TOKENS
    assert new.progress(9)["progress/flops"] == pytest.approx(10 * quantities.flops_before(1))
    # The batch may have changed since a checkpoint; what was spent is what was spent.
    kept = saved(Lineage(quantities), 9, "first") | {"spent": {"tokens": 5, "flops": 7.0}}
    resumed = Lineage.of(begun("resume", 10, kept), quantities)
    assert resumed.spent_before(10) == (5, 7.0)
    assert resumed.spent_before(12).tokens == 5 + 2 * TOKENS
    assert new.facts() == resumed.facts() == []
    # A checkpoint that does not say is counted by the plan.
    silent = Lineage.of(begun("resume", 10, {}), quantities)
    assert silent.spent_before(10) == (10 * TOKENS, quantities.flops_before(10))


@pytest.mark.parametrize(("how", "first_step"), [("parameters", 0), ("full_state", 10)])
def test_totals_are_cumulative_over_generations(quantities, how, first_step):
    grandparent = saved(Lineage(quantities), 9, "grandparent")
    parent = Lineage.of(begun(how, first_step, grandparent), quantities)
    assert parent.spent_before(first_step) == (0, 0.0)
    child = Lineage.of(begun(how, 0, saved(parent, first_step + 4, "parent"), 4), quantities)
    old, young = child.facts()
    assert (old["run_name"], old["how"], old["tokens"]) == ("grandparent", how, 10 * TOKENS)
    assert (young["run_name"], young["step"], young["tokens"]) == ("parent", 4, 15 * TOKENS)
    assert young["flops"] == pytest.approx(quantities.flops_before(15))
    # A restart of the child keeps them.
    again = Lineage.of(begun("resume", 3, saved(child, 2, "child")), quantities)
    assert again.facts() == child.facts()


def test_weights_that_say_nothing_have_unknown_totals(quantities):
    lineage = Lineage.of(begun("parameters", 0, {}, None), quantities)
    (parent,) = lineage.facts()
    assert (parent["run_name"], parent["step"], parent["tokens"]) == (None, None, None)
    (_, parent) = Lineage.of(begun("parameters", 0, saved(lineage, 3, "x")), quantities).facts()
    assert parent["tokens"] is None
