"""Chains of runs: how they are written, planned, run, judged and drawn."""

import json
import shutil

import pytest

from MaxText.errors import UserError
from MaxText.experiments.comparison_plan import chains_of, load_or_create_plan
from MaxText.experiments.solver import cost, solve_plan
from MaxText.experiments.variants import confounding_keys
from tests.experiments.small_comparison import compare, plan_of, refusals, rows_of, variants

COMMAND = ("a.yml", "c.yml", "match=tokens", "budget=640")


def test_each_stage_lays_its_keys_over_the_file(configs):
    a, c = variants("a.yml", "c.yml")
    assert len(a.stages) == 1
    assert [stage.run.steps for stage in c.stages] == [3, 2]
    assert [stage.schedule.learning_rate for stage in c.stages] == [1e-2, 2e-2]
    # A schedule is as long as its stage.
    assert [stage.schedule.learning_rate_schedule_steps for stage in c.stages] == [3, 2]
    assert c.config == c.stages[1]
    assert (c.identity["steps"], c.identity["steps of stage 1"]) == (5, 3)
    # Only the lengths of whole chains are compared.
    assert confounding_keys([a, c], {}) == ["steps: 4 (a); 5 (c)"]
    (configs / "d.yml").write_text("base_config: c.yml\nsweep: {base_emb_dim: [32, 48]}\n")
    widths = [
        [stage.model.shape.base_emb_dim for stage in variant.stages]
        for variant in variants("d.yml")
    ]
    assert widths == [[32, 32], [48, 48]]


def test_keys_about_growth_belong_to_the_stages_that_grow(configs):
    stages = "stages: [{slot_num: 16}, {slot_num: 32, growth.data: continue}]\n"
    keys = "base_config: a.yml\ndecoder_block: tokenformer\nhead_dim: -1\n"
    (configs / "d.yml").write_text(keys + stages)
    _, grown = variants("a.yml", "d.yml")
    assert [stage.checkpoint.growth.data for stage in grown.stages] == ["restart", "continue"]


MISTAKES = [
    "stages: 3",
    "stages: [{steps: 3}, steps]",
    "stages: [{steps: 3}]",
    "stages: [{steps: 3}, {stepz: 3}]",
    "stages: [{steps: 3}, {steps: x}]",
    "stages: [{steps: 3}, {run_name: x}]",
    "stages: [{steps: 3}, {init_weights_seed: 1}]",
    "stages: [{steps: 3}, {load_parameters_path: x}]",
    "stages: [{steps: 3}, {qkv_bias: true}]",
    "stages: [{steps: 3}, {steps: 2}]\nsweep: {steps: [1, 2]}",
]


def test_mistakes_name_the_stage(configs, told):
    def act(text):
        (configs / "d.yml").write_text(f"base_config: a.yml\n{text}\n")
        variants("a.yml", "d.yml", "qkv_bias=true")

    told(refusals(MISTAKES, act))


def test_the_shipped_chain_grows_to_the_size_of_the_shipped_model():
    names = ("tokenformer_grown", "tokenformer_scratch", "transformer_for_tokenformer")
    grown, scratch, transformer = variants(*(f"configs/comparisons/{name}.yml" for name in names))
    assert grown.config.model == scratch.config.model
    flops = [cost(stage, 1).flops for stage in grown.stages]
    assert max(flops) == pytest.approx(min(flops), rel=0.05)
    outside_tables = [
        cost(stage_config.config, 1).parameters
        - stage_config.config.model.shape.vocab_size * stage_config.config.model.shape.base_emb_dim
        for stage_config in (scratch, transformer)
    ]
    assert outside_tables[0] == pytest.approx(outside_tables[1], rel=0.02)
    lines = confounding_keys([grown, scratch, transformer], {})
    assert [line.partition(":")[0] for line in lines] == ["steps", "learning_rate"]


def test_a_chain_of_runs(configs):
    plan, planned_variants, question = plan_of(*COMMAND, seeds=(0, 1))
    solve_plan(plan, planned_variants)
    assert plan.planned["c"].total("steps") == 10
    assert plan.planned["c"].total("tokens") == plan.planned["a"].total("tokens") == 640
    chains = chains_of(plan, planned_variants)
    assert [[run.name for run in chain] for chain in chains[:2]] == [
        ["a seed 0"],
        ["c seed 0 stage 1", "c seed 0 stage 2"],
    ]
    first, second = chains[1]
    assert (first.config.run.steps, second.config.run.steps) == (6, 4)
    assert first.config.checkpoint.load_parameters_path == ""
    assert second.config.checkpoint.load_parameters_path == str(first.folder)
    # The file switches checkpoints off; the next stage needs one.
    assert first.config.checkpoint.enable_checkpointing
    assert not second.config.checkpoint.enable_checkpointing
    assert first.weight / second.weight == pytest.approx(1.5)

    plan.save()
    groups = json.loads((plan.folder / "comparison.json").read_text())["groups"]
    assert groups["c stage 2"] == ["c/seed_0/stage_2", "c/seed_1/stage_2"]
    assert (
        load_or_create_plan(plan.folder, planned_variants, question, (0, 1)).planned == plan.planned
    )
    # Other stages are refused once a run has begun.
    first.folder.mkdir(parents=True)
    (first.folder / "events.jsonl").touch()
    (configs / "c.yml").write_text((configs / "c.yml").read_text().replace("steps: 3", "steps: 4"))
    with pytest.raises(UserError, match="c: steps of stage 1: 3 -> 4"):
        load_or_create_plan(plan.folder, variants("a.yml", "c.yml"), question, (0, 1))


def test_stages_follow_one_another_and_the_last_is_judged(trained, configs):
    lines = compare(*COMMAND, "seeds=2")
    assert trained[:3] == ["a/seed_0", "seed_0/stage_1", "seed_0/stage_2"]
    assert "  c stage 2: steps 2 -> 4, learning_rate_schedule_steps 2 -> 4" in lines
    assert any(line.startswith("c is lower than a by 0.1000 nats/token") for line in lines)
    rows = rows_of(configs / "out")["c"]
    assert [(row["seed"], row["steps"], row["folder"]) for row in rows] == [
        ("0", "10", "c/seed_0"),
        ("1", "10", "c/seed_1"),
    ]
    numbers = ("tokens", "flops", "train_seconds", "validation_loss")
    assert [float(rows[0][name]) for name in numbers] == pytest.approx([640, 100, 1.0, 3.9])
    # The report groups the seeds of each stage, as report.py does.
    page = (configs / "out" / "report.html").read_text()
    assert "'c stage 2': ['out/c/seed_0/stage_2', 'out/c/seed_1/stage_2']" in page
    trained.clear()
    assert compare(*COMMAND, "seeds=2")[-2:] == lines[-2:]
    assert not trained
    # A chain counts once all of its stages are over.
    shutil.rmtree(configs / "out" / "c" / "seed_1" / "stage_1")
    compare(*COMMAND, "seeds=2", "launch=print")
    assert [row["seed"] for row in rows_of(configs / "out")["c"]] == ["0"]


def test_a_stage_that_was_interrupted_resumes(trained):
    trained.interrupted = ("stage_2",)
    with pytest.raises(KeyboardInterrupt):
        compare(*COMMAND)
    trained.interrupted = ()
    trained.clear()
    lines = compare(*COMMAND)
    assert trained == ["seed_0/stage_2"]
    assert "[3/3] c seed 0 stage 2: resumed" in lines


def test_a_stage_that_diverged_ends_its_chain(trained, configs):
    text = (configs / "c.yml").read_text().replace("{steps: 3}", "{steps: 3, learning_rate: 2}")
    (configs / "c.yml").write_text(text)
    text = "\n".join(compare(*COMMAND))
    assert trained == ["a/seed_0", "seed_0/stage_1"]
    assert "c seed 0 stage 1: diverged at step 0" in text
    assert "c seed 0 stage 2: skipped" in text
    assert "c: 1 diverged" in text
    trained.clear()
    compare(*COMMAND)
    assert not trained
