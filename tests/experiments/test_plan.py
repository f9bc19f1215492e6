"""comparison.json: resuming the same comparison, and refusing another one."""

import dataclasses
import json

import pytest

from MaxText.errors import UserError
from MaxText.experiments.comparison_plan import (
    FILE,
    SolvedConfig,
    SolvedStage,
    chains_of,
    load_or_create_plan,
    run_config,
)
from tests.experiments.small_comparison import plan_of, variants
from tests.small_models import tiny_config

STAGE = SolvedStage({"steps": 6}, 1000, 128.0, 64, 6)


@pytest.fixture
def begun(configs):
    """(solved plan of which a run has begun, its configurations, its question)."""
    plan, variants, question = plan_of("a.yml", "b.yml", "match=tokens", seeds=(0, 1))
    unchanged = dataclasses.replace(STAGE, changes={})
    plan.budget = 64.0
    plan.planned = {"a": SolvedConfig((STAGE,), 0.01), "b": SolvedConfig((unchanged,), 0.01)}
    plan.save()
    events = plan.folder / "a" / "seed_0" / "events.jsonl"
    events.parent.mkdir(parents=True)
    events.touch()
    return plan, variants, question


def test_the_same_question_finds_the_plan_and_more_seeds_add_runs(begun):
    plan, planned_variants, question = begun
    loaded = load_or_create_plan(plan.folder, planned_variants, question, (0, 1, 2))
    assert (loaded.planned, loaded.budget) == (plan.planned, 64.0)
    assert json.loads((plan.folder / FILE).read_text())["groups"] == {
        "a": ["a/seed_0", "a/seed_1"],
        "b": ["b/seed_0", "b/seed_1"],
    }
    assert loaded.groups["b"] == ["b/seed_0", "b/seed_1", "b/seed_2"]
    assert [run.name for (run,) in chains_of(loaded, planned_variants)] == [
        "a seed 0",
        "b seed 0",
        "a seed 1",
        "b seed 1",
        "a seed 2",
        "b seed 2",
    ]
    # Names and folders may differ.
    moved = variants("a.yml", "b.yml", "base_output_directory=elsewhere")
    assert load_or_create_plan(plan.folder, moved, question, (0,)).planned == plan.planned


def test_another_comparison_is_refused(begun):
    plan, planned_variants, question = begun

    def refusal(planned_variants, **change):
        with pytest.raises(UserError, match="output=") as caught:
            load_or_create_plan(
                plan.folder, planned_variants, dataclasses.replace(question, **change), (0, 1)
            )
        return [line.strip() for line in str(caught.value).splitlines()]

    for change, line in [
        ({"match": "flops"}, "match: tokens -> flops"),
        (
            {"solve_for": {"a": "steps", "b": "width"}},
            "solve_for: {a: steps, b: steps} -> {a: steps, b: width}",
        ),
        ({"tolerance": 0.01}, "tolerance: 0.02 -> 0.01"),
        ({"num_devices": 8}, "num_devices: 1 -> 8"),
    ]:
        assert line in refusal(planned_variants, **change)
    assert any(line.endswith("-> 1000.0") for line in refusal(planned_variants, budget=1000.0))
    changed = variants("a.yml", "b.yml", "learning_rate=3e-2")
    assert "a: learning_rate: 0.01 -> 0.03" in refusal(changed)
    assert "configurations: [a, b] -> [b, a]" in refusal(variants("b.yml", "a.yml"))


def test_a_plan_of_which_no_run_has_begun_gives_way(begun):
    plan, variants, question = begun
    (plan.folder / "a" / "seed_0" / "events.jsonl").unlink()
    plan = load_or_create_plan(
        plan.folder, variants, dataclasses.replace(question, budget=9.0), (0,)
    )
    assert (plan.budget, plan.planned) == (None, {})


def test_measurements_outlive_another_budget_but_not_other_configurations(configs):
    plan, planned_variants, question = plan_of("a.yml", "b.yml", "match=time", "budget=5")
    plan.measurements = {"a": [[0.5, 0.6]], "b": [[0.7]]}
    plan.save()
    other = dataclasses.replace(question, budget=6.0)
    assert (
        load_or_create_plan(plan.folder, planned_variants, other, (0,)).measurements
        == plan.measurements
    )
    changed = variants("a.yml", "b.yml", "per_device_batch_size=8")
    assert load_or_create_plan(plan.folder, changed, other, (0,)).measurements == {}


@pytest.mark.parametrize("text", ["", "{}", '{"format": 99}', "[1]"])
def test_a_damaged_file_is_refused(begun, text):
    plan, variants, question = begun
    (plan.folder / FILE).write_text(text)
    with pytest.raises(UserError, match=FILE):
        load_or_create_plan(plan.folder, variants, question, (0,))


def test_the_configuration_of_a_run(tmp_path):
    config = tiny_config(metrics_file="shared.jsonl", run_name="mine")
    changed = run_config(config, {"steps": 33}, tmp_path / "label" / "seed_7", seed=7)
    assert (changed.run.steps, changed.run.run_name) == (33, "seed_7")
    assert changed.run.base_output_directory == str(tmp_path / "label")
    assert changed.data.data_shuffle_seed == changed.model.initialization.init_weights_seed == 7
    assert changed.monitoring.metrics_file == ""
    # A compared run ends with a validation loss, and keeps the interval of its own.
    assert changed.evaluation.eval_interval == 33
    assert run_config(tiny_config(eval_interval=5), {}, tmp_path, 0).evaluation.eval_interval == 5
