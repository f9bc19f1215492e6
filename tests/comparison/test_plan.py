"""comparison.json: going on with the same comparison, and refusing another one."""

import dataclasses
import json

import pytest

from MaxText.comparison.plan import (
    FILE,
    Plan,
    Planned,
    PlannedStage,
    Question,
    chains_of,
    open_plan,
    run_config,
)
from MaxText.comparison.request import read
from MaxText.comparison.variants import Variant, expand
from MaxText.errors import UserError
from tests.small_models import tiny_config

QUESTION = Question("tokens", None, {"a": "steps", "b": "steps"}, 0.02, 1)
STAGE = PlannedStage({"steps": 6}, 1000, 128.0, 64, 6)
PLANNED = Planned((STAGE,), 0.01)


@pytest.fixture
def variants(configs) -> list[Variant]:
    return expand(read(["a.yml", "b.yml"])[0])


@pytest.fixture
def folder(configs):
    path = configs / "out"
    path.mkdir()
    return path


@pytest.fixture
def begun(folder, variants) -> Plan:
    """A solved plan of which a run has begun."""
    plan = open_plan(folder, variants, QUESTION, (0, 1))
    unchanged = Planned((dataclasses.replace(STAGE, changes={}),), 0.01)
    plan.budget, plan.planned = 64.0, {"a": PLANNED, "b": unchanged}
    plan.save()
    events = folder / "a" / "seed_0" / "events.jsonl"
    events.parent.mkdir(parents=True)
    events.touch()
    return plan


def test_the_same_question_finds_the_plan_again(begun, folder, variants):
    again = open_plan(folder, variants, QUESTION, (0, 1))
    assert again.planned == begun.planned
    assert again.budget == 64.0
    assert json.loads((folder / FILE).read_text())["groups"] == {
        "a": ["a/seed_0", "a/seed_1"], "b": ["b/seed_0", "b/seed_1"],
    }  # fmt: skip


def test_more_seeds_add_runs(begun, folder, variants):
    again = open_plan(folder, variants, QUESTION, (0, 1, 2))
    assert again.planned == begun.planned
    assert again.groups["b"] == ["b/seed_0", "b/seed_1", "b/seed_2"]
    assert [run.name for (run,) in chains_of(again, variants)] == [
        "a seed 0", "b seed 0", "a seed 1", "b seed 1", "a seed 2", "b seed 2",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"match": "flops"}, "match: tokens -> flops"),
        ({"budget": 1000.0}, "budget: what the first has -> 1000.0"),
        ({"free": {"a": "steps", "b": "width"}}, "free: a steps, b steps -> a steps, b width"),
        ({"tolerance": 0.01}, "tolerance: 0.02 -> 0.01"),
        ({"num_devices": 8}, "num_devices: 1 -> 8"),
    ],
)
def test_another_question_is_refused(begun, folder, variants, change, line):
    with pytest.raises(UserError) as caught:
        open_plan(folder, variants, dataclasses.replace(QUESTION, **change), (0, 1))
    assert f"\n  {line}\n" in str(caught.value)
    assert "output=" in str(caught.value)


def test_other_configurations_are_refused(begun, folder, configs):
    changed = expand(read(["a.yml", "b.yml", "learning_rate=3e-2"])[0])
    with pytest.raises(UserError) as caught:
        open_plan(folder, changed, QUESTION, (0, 1))
    assert "a: learning_rate: 0.01 -> 0.03" in str(caught.value)
    fewer = expand(read(["b.yml", "a.yml"])[0])
    with pytest.raises(UserError, match="configurations: a, b -> b, a"):
        open_plan(folder, fewer, QUESTION, (0, 1))


def test_names_and_folders_may_differ(begun, folder, configs):
    words = ["a.yml", "b.yml", "run_name=x", "base_output_directory=elsewhere"]
    assert open_plan(folder, expand(read(words)[0]), QUESTION, (0,)).planned == begun.planned


def test_a_plan_of_which_no_run_has_begun_gives_way(begun, folder, variants):
    (folder / "a" / "seed_0" / "events.jsonl").unlink()
    plan = open_plan(folder, variants, dataclasses.replace(QUESTION, budget=9.0), (0,))
    assert (plan.budget, plan.planned) == (None, {})


def test_measurements_outlive_another_budget_but_not_other_configurations(folder, variants):
    question = dataclasses.replace(QUESTION, match="time", budget=5.0)
    plan = open_plan(folder, variants, question, (0,))
    plan.measurements = {"a": [[0.5, 0.6]], "b": [[0.7]]}
    plan.save()
    other = dataclasses.replace(question, budget=6.0)
    assert open_plan(folder, variants, other, (0,)).measurements == plan.measurements
    changed = expand(read(["a.yml", "b.yml", "per_device_batch_size=8"])[0])
    assert open_plan(folder, changed, other, (0,)).measurements == {}


@pytest.mark.parametrize("text", ["", "{}", '{"format": 99}', "[1]"])
def test_a_damaged_file_is_refused(begun, folder, variants, text):
    (folder / FILE).write_text(text)
    with pytest.raises(UserError, match="cannot be read as the record of a comparison"):
        open_plan(folder, variants, QUESTION, (0,))


def test_the_configuration_of_a_run(tmp_path):
    config = tiny_config(metrics_file="shared.jsonl", run_name="mine")
    made = run_config(config, {"steps": 33}, tmp_path / "label" / "seed_7", seed=7)
    assert (made.run.steps, made.run.run_name) == (33, "seed_7")
    assert made.run.base_output_directory == str(tmp_path / "label")
    assert made.data.data_shuffle_seed == made.model.initialization.init_weights_seed == 7
    assert made.monitoring.metrics_file == ""
    # A compared run ends with a validation loss, and keeps the interval of its own.
    assert made.evaluation.eval_interval == 33
    assert run_config(tiny_config(eval_interval=5), {}, tmp_path, 0).evaluation.eval_interval == 5
