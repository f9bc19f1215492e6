"""Chains of runs: how they are written, planned, run, judged and drawn."""

import csv
import json
import os
import shutil
import signal
import threading
import time

import numpy as np
import pytest

from MaxText.comparison import outcome, running
from MaxText.comparison.costs import cost
from MaxText.comparison.plan import Question, chains_of, open_plan
from MaxText.comparison.planning import solve_plan
from MaxText.comparison.request import read
from MaxText.comparison.variants import expand, other_differences
from MaxText.configuration.problems import ConfigurationError
from MaxText.monitoring.report.curves import Axes
from tests.comparison.small_comparison import compare

TOKENFORMER = """
base_config: a.yml
decoder_block: tokenformer
head_dim: -1
"""


def variants(*arguments: str):
    request, problems = read(arguments)
    assert not problems
    return expand(request)


def refusal(configs, stages: str, *arguments: str, more: str = "") -> str:
    (configs / "d.yml").write_text(f"base_config: a.yml\n{more}stages: {stages}\n")
    with pytest.raises(ConfigurationError) as caught:
        variants("a.yml", "d.yml", *arguments)
    return str(caught.value)


def test_each_stage_lays_its_keys_over_the_file(configs):
    a, c = variants("a.yml", "c.yml")
    assert len(a.stages) == 1
    assert [stage.run.steps for stage in c.stages] == [3, 2]
    assert [stage.schedule.learning_rate for stage in c.stages] == [1e-2, 2e-2]
    # A schedule is as long as its stage.
    assert [stage.schedule.learning_rate_schedule_steps for stage in c.stages] == [3, 2]
    assert c.config == c.stages[1]
    assert (c.identity["steps"], c.identity["steps of stage 1"]) == (5, 3)


def test_a_sweep_is_laid_over_every_stage(configs):
    (configs / "d.yml").write_text("base_config: c.yml\nsweep: {base_emb_dim: [32, 48]}\n")
    found = variants("d.yml")
    widths = [[stage.model.shape.base_emb_dim for stage in one.stages] for one in found]
    assert widths == [[32, 32], [48, 48]]


def test_keys_about_growth_belong_to_the_stages_that_grow(configs):
    stages = "[{slot_num: 16}, {slot_num: 32, growth_data: continue}]\n"
    (configs / "d.yml").write_text(
        TOKENFORMER.replace("head_dim", "stages: " + stages + "head_dim")
    )
    (_, grown) = variants("a.yml", "d.yml")
    assert [stage.checkpoint.growth_data for stage in grown.stages] == ["restart", "continue"]


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ("3", "'3' is no list of mappings"),
        ("[{steps: 3}, steps]", "is no list of mappings"),
        ("[{steps: 3}]", "a chain has two stages or more"),
        ("[{steps: 3}, {stepz: 3}]", "d.yml:2, stage 2, stepz=3"),
        ("[{steps: x}, {steps: 3}]", "d.yml:2, stage 1, steps=x"),
        ("[{steps: 3}, {run_name: x}]", "run_name cannot be set by a stage; output= sets it"),
        ("[{steps: 3}, {init_weights_seed: 1}]", "seeds= sets it"),
        ("[{steps: 3}, {load_parameters_path: x}]", "the stage before is where a stage begins"),
    ],
)
def test_mistakes_name_the_stage(configs, stages, message):
    assert message in refusal(configs, stages)


def test_what_is_given_twice(configs):
    two = "[{steps: 3}, {steps: 2}]"
    message = refusal(configs, two, "steps=7")
    assert "steps: given for all runs and set by a stage as well" in message
    assert "command line" in message
    assert "set by a stage as well" in refusal(configs, two, more="sweep: {steps: [1, 2]}\n")


def test_the_shipped_chain_grows_to_the_size_of_the_shipped_model():
    names = ("tokenformer_grown", "tokenformer_scratch", "transformer_for_tokenformer")
    grown, scratch, transformer = variants(*(f"configs/comparisons/{name}.yml" for name in names))
    assert grown.config.model == scratch.config.model
    flops = [cost(stage, 1).flops for stage in grown.stages]
    assert max(flops) == pytest.approx(min(flops), rel=0.05)
    outside_tables = [
        cost(one.config, 1).parameters
        - one.config.model.shape.vocab_size * one.config.model.shape.base_emb_dim
        for one in (scratch, transformer)
    ]
    assert outside_tables[0] == pytest.approx(outside_tables[1], rel=0.02)
    lines = other_differences([grown, scratch, transformer], {})
    assert [line.partition(":")[0] for line in lines] == ["steps", "learning_rate"]


def test_only_the_lengths_of_whole_chains_are_compared(configs):
    lines = other_differences(variants("a.yml", "c.yml"), {})
    assert lines == ["steps: 4 (a); 5 (c)"]


def plan_of(configs, *arguments: str):
    request, _ = read(arguments)
    found = expand(request)
    free = {one.label: "steps" for one in found}
    (configs / "out").mkdir()
    question = Question(request.match, request.budget, free, 0.02, 1)
    plan = open_plan(configs / "out", found, question, (0, 1))
    solve_plan(plan, found, request)
    return plan, found, question


def test_a_chain_of_runs(configs):
    plan, found, question = plan_of(configs, "a.yml", "c.yml", "match=tokens", "budget=640")
    assert plan.planned["c"].steps == 10
    assert plan.planned["c"].tokens == plan.planned["a"].tokens == 640
    chains = chains_of(plan, found)
    assert [[run.name for run in chain] for chain in chains[:2]] == [
        ["a seed 0"], ["c seed 0 stage 1", "c seed 0 stage 2"],
    ]  # fmt: skip
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
    assert open_plan(plan.folder, found, question, (0, 1)).planned == plan.planned


def test_other_stages_are_refused_once_a_run_has_begun(configs):
    plan, _, question = plan_of(configs, "a.yml", "c.yml", "match=tokens")
    plan.save()
    (plan.folder / "c" / "seed_0" / "stage_1").mkdir(parents=True)
    (plan.folder / "c" / "seed_0" / "stage_1" / "events.jsonl").touch()
    text = (configs / "c.yml").read_text()
    (configs / "c.yml").write_text(text.replace("steps: 3", "steps: 4"))
    with pytest.raises(Exception, match="c: steps of stage 1: 3 -> 4"):
        open_plan(plan.folder, variants("a.yml", "c.yml"), question, (0, 1))


def test_stages_follow_one_another_and_the_last_is_judged(trained, configs):
    lines = compare("a.yml", "c.yml", "match=tokens", "budget=640", "seeds=2")
    names = ["seed_0/stage_1", "seed_0/stage_2"]
    assert trained[:3] == ["a/seed_0", *names]
    assert "  c stage 2: steps 2 -> 4, learning_rate_schedule_steps 2 -> 4" in lines
    assert any(line.startswith("c is lower than a by 0.1000 nats/token") for line in lines)
    with (configs / "out" / "runs.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["config"] == "c"]
    assert [(row["seed"], row["steps"], row["folder"]) for row in rows] == [
        ("0", "10", "c/seed_0"), ("1", "10", "c/seed_1"),
    ]  # fmt: skip
    assert float(rows[0]["tokens"]) == 640
    assert float(rows[0]["flops"]) == 100
    assert float(rows[0]["train_seconds"]) == pytest.approx(1.0)
    assert float(rows[0]["validation_loss"]) == pytest.approx(3.9)
    trained.clear()
    assert compare("a.yml", "c.yml", "match=tokens", "budget=640", "seeds=2")[-2:] == lines[-2:]
    assert trained == []
    shutil.rmtree(configs / "out" / "c" / "seed_1" / "stage_1")
    compare("a.yml", "c.yml", "match=tokens", "budget=640", "seeds=2", "launch=print")
    with (configs / "out" / "runs.csv").open() as file:
        seeds = [row["seed"] for row in csv.DictReader(file) if row["config"] == "c"]
    assert seeds == ["0"]


def test_a_chain_is_drawn_over_what_was_spent_since_its_beginning(trained, configs):
    compare("a.yml", "c.yml", "match=tokens", "budget=640")
    request, _ = read(["a.yml", "c.yml", "match=tokens", "budget=640"])
    found = expand(request)
    free = {one.label: "steps" for one in found}
    question = Question(request.match, request.budget, free, 0.02, 1)
    plan = open_plan(configs / "out", found, question, (0,))
    _, chain = chains_of(plan, found)
    record = outcome.record_of_chain(chain)
    assert record is not None
    assert record.name == "seed_0"
    assert (record.tokens, record.flops, record.last_step) == (640, 100, 9)
    assert (record.facts["num_steps"], record.inherited_flops) == (10, 0)
    places = Axes([record]).places(record, record.steps)
    assert places["flops"].tolist() == [10.0 * (step + 1) for step in range(10)]
    assert places["step"].tolist() == list(range(10))
    assert (np.diff(places["time"]) > 0).all()
    assert [row["step"] for row in record.evaluations] == [5, 9]
    assert len(record.goodput.attempts) == 2
    assert sum(row["event"] == "start" for row in record.marks) == 1


def test_a_stage_that_was_stopped_is_gone_on_with(trained, configs, ctrl_c_counts, monkeypatch):
    events = configs / "out" / "c" / "seed_0" / "stage_2" / "events.jsonl"
    command = running.train_command

    def stopping(config):
        if config.stem == "stage_2":
            (configs / "stop").touch()
        return command(config)

    def interrupt() -> None:
        while not (events.exists() and '"step"' in events.read_text()):
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(running, "train_command", stopping)
    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        compare("a.yml", "c.yml", "match=tokens")
    monkeypatch.setattr(running, "train_command", command)
    (configs / "stop").unlink()
    trained.clear()
    lines = compare("a.yml", "c.yml", "match=tokens")
    assert trained == ["seed_0/stage_2"]
    assert "[3/3] c seed 0 stage 2: goes on" in lines


def test_a_stage_that_diverged_ends_its_chain(trained, configs):
    text = (configs / "c.yml").read_text().replace("{steps: 3}", "{steps: 3, learning_rate: 2}")
    (configs / "c.yml").write_text(text)
    lines = compare("a.yml", "c.yml", "match=tokens")
    assert trained == ["a/seed_0", "seed_0/stage_1"]
    text = "\n".join(lines)
    assert "c seed 0 stage 1: diverged at step 0" in text
    assert "c seed 0 stage 2: not begun, as an earlier stage diverged" in text
    assert "c: 1 diverged, in no mean." in text
    trained.clear()
    compare("a.yml", "c.yml", "match=tokens")
    assert trained == []


def test_printed_lines_keep_the_order_of_stages(trained, configs):
    lines = compare("a.yml", "c.yml", "match=tokens", "launch=print")
    (line,) = [one for one in lines if "stage_1" in one]
    first, second = line.split(" && ")
    assert first.endswith("out/c/seed_0/stage_1.yml")
    assert second.endswith("out/c/seed_0/stage_2.yml")


def test_a_step_of_every_stage_is_measured(trained, configs):
    lines = compare("a.yml", "c.yml", "match=time", "budget=2s", "launch=print")
    assert trained[:3] == ["measuring/a_0", "measuring/c stage 1_0", "measuring/c stage 2_0"]
    assert any(line.startswith("# c ") and "12+8" in line and "2.0" in line for line in lines)
