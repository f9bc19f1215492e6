"""A whole comparison with a stand-in for train.py: order, resuming, measuring, printing."""

import csv
import shlex

import pytest

from MaxText.config.loading import load_config
from MaxText.config.problems import ConfigurationError
from MaxText.errors import UserError
from MaxText.experiments import execution
from MaxText.experiments.compare_args import parse_args
from MaxText.experiments.variants import expand_variants, folder_of, solve_key_by_label
from tests.experiments.small_comparison import compare, plan_of, variants


def test_runs_go_seed_by_seed_and_the_same_command_runs_nothing_twice(trained, configs):
    lines = compare("a.yml", "b.yml", "match=tokens", "seeds=2")
    assert trained == ["a/seed_0", "b/seed_0", "a/seed_1", "b/seed_1"]
    assert "match=tokens: 256 tokens each, as a has; 1 device" in lines
    text = "\n".join(lines)
    assert "[1/4] a seed 0: validation loss 4.0000" in text
    result = "b is lower than a by 0.5000 nats/token (95 % interval 0.5000 to 0.5000"
    assert result in text
    page = (configs / "out" / "report.html").read_text()
    # The page leads with the result.
    assert -1 < page.find(result) < page.find("Command: python ") < page.find("off the budget")
    assert {path.name for path in (configs / "out").iterdir()} >= {
        "comparison.json",
        "runs.csv",
        "summary.csv",
        "a",
        "b",
    }
    trained.clear()
    second_log = compare("a.yml", "b.yml", "match=tokens", "seeds=2")
    assert not trained
    assert any("All 4 runs in out are already complete" in line for line in second_log)
    assert [line for line in second_log if result in line]
    compare("a.yml", "b.yml", "match=tokens", "seeds=3")
    assert trained == ["a/seed_2", "b/seed_2"]


def test_time_is_measured_in_turns_and_kept(trained, configs):
    command = ("a.yml", "b.yml", "c.yml", "match=time", "budget=6s")
    lines = compare(*command)
    names = ("a", "b", "c stage 1", "c stage 2")
    assert trained[:8] == [f"measuring/{name}_{turn}" for turn in (0, 1) for name in names]
    assert "  a: steps 4 -> 60, learning_rate_schedule_steps 4 -> 60" in lines
    assert "  b: steps 4 -> 30, learning_rate_schedule_steps 4 -> 30" in lines
    assert any(line.startswith("c ") and "36+24" in line and "6.0" in line for line in lines)
    assert not (configs / "out" / "measuring").exists()
    trained.clear()
    compare(*command, "seeds=2")
    assert trained == ["a/seed_1", "b/seed_1", "seed_1/stage_1", "seed_1/stage_2"]


def test_a_measured_run_only_trains(configs):
    config = variants("a.yml", "b.yml", "eval_interval=2", "target_eval_loss=1")[0].config
    short = execution.short_config(config, configs / "m")
    assert (short.evaluation.eval_interval, short.evaluation.target_eval_loss) == (-1, 0)
    assert short.monitoring.step_log_period == 1
    assert not short.checkpoint.enable_checkpointing


def test_rounds_of_different_seconds_are_reported(configs):
    plan, variants, _ = plan_of("a.yml", "b.yml", "match=time", "budget=6s")
    plan.measurements = {"a": [[0.1] * 3, [0.2] * 3], "b": [[0.1] * 3, [0.1] * 3]}
    lines = []
    execution.time_steps(plan, variants, lines.append)
    assert ["0.1 and 0.2" in line for line in lines] == [True, False]


def test_printed_lines_are_a_script(trained, configs, monkeypatch):
    monkeypatch.setenv("M_STEPS", "8")
    (configs / "b.yml").write_text("base_config: a.yml\nwarmup_steps_fraction: 0.5\n")
    arguments = ("a.yml", "b.yml", "c.yml", "match=flops", "solve_for=steps", "launch=print")
    lines = compare(*arguments, "num_devices=4")
    assert not trained
    *commands, chain, gather = [line for line in lines if not line.startswith("#")]
    assert [shlex.split(line)[:3] for line in commands] == [["env", "-u", "M_STEPS"]] * 2
    assert [shlex.split(line)[-1] for line in commands] == ["out/a/seed_0.yml", "out/b/seed_0.yml"]
    # Stages are started one after another.
    assert [line.split("/")[-1] for line in chain.split(" && ")] == ["stage_1.yml", "stage_2.yml"]
    assert shlex.split(gather)[1:] == ["compare.py", *arguments, "num_devices=4"]
    differences = [line for line in lines if line.startswith("# warning: ")]
    assert any("warmup_steps_fraction: " in line and "0.5 (b)" in line for line in differences)
    monkeypatch.delenv("M_STEPS")
    config = load_config("out/a/seed_0.yml")
    assert (config.run.steps, config.run.run_name) == (8, "seed_0")


def solved_for(*arguments: str) -> list[str]:
    """What is solved for of a.yml and b.yml."""
    request, problems = parse_args(["a.yml", "b.yml", *arguments])
    assert not problems
    return list(solve_key_by_label(request, expand_variants(request)).values())


def test_what_is_solved_for(configs):
    assert solved_for() == ["width", "width"]
    for match in ("flops", "tokens", "time"):
        assert solved_for(f"match={match}") == ["steps", "steps"]
    by_file = solved_for("sweep={qkv_bias: [true, false]}", "solve_for=[width,depth]")
    assert by_file == ["width", "width", "depth", "depth"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["solve_for=[width,depth,width]"], "solve_for: 3 names for 2 configurations"),
        (["solve_for=steps"], "solve_for=steps"),
        (["match=time", "solve_for=width"], "solve_for=width: match=time"),
        (["match=tokens", "sweep={steps: [1, 2]}"], "match=tokens"),
        (["sweep={base_emb_dim: [32, 64]}"], "width is swept"),
    ],
)
def test_what_cannot_be_solved_for(configs, arguments, message):
    with pytest.raises(ConfigurationError, match=message):
        solved_for(*arguments)


def test_a_budget_shorter_than_the_warmup_is_a_warning_and_no_verdict(trained, configs):
    """Also of a configuration that names the warm-up in steps, and of a fraction of few steps."""
    (configs / "warm.yml").write_text("base_config: a.yml\nsteps: 40\n")
    command = ("warm.yml", "b.yml", "match=tokens", "budget=128", "seeds=2")
    lines = compare(*command)
    problem = "warm: a run of 2 steps is too short for a warm-up (10% of the steps)"
    assert f"warning: {problem}, so there will be no verdict" in lines
    assert f"{problem}." in lines
    text = "\n".join(lines)
    assert "No verdict: such losses say nothing about longer runs." in text
    assert "nats/token (" not in text
    page = (configs / "out" / "report.html").read_text()
    assert "No verdict" in page
    with (configs / "out" / "summary.csv").open() as file:
        assert [row["difference"] for row in csv.DictReader(file)] == ["", ""]
    second_log = compare(*command, "output=other", "warmup_steps=2")
    assert any(
        "b: a run of 2 steps ends within its warm-up of 2 steps." in line for line in second_log
    )
    longer = compare(*command[:3], "budget=768", "seeds=2", "output=longer")
    assert not any("warm-up" in line for line in longer)
    assert "nats/token (" in "\n".join(longer)


def test_two_comparisons_with_another_budget_do_not_meet(trained, configs):
    compare("a.yml", "b.yml", "match=tokens", "budget=256", "output=one")
    with pytest.raises(UserError, match=r"budget: 256.0 -> 512.0"):
        compare("a.yml", "b.yml", "match=tokens", "budget=512", "output=one")
    for arguments, message in (
        (["name=x", "output=y"], "name=x and output=y name two folders"),
        (["name=../x"], "name=../x is not a folder in base_output_directory"),
        (["name=/x"], "name=/x is not a folder in base_output_directory"),
    ):
        request, problems = parse_args(["a.yml", "b.yml", *arguments])
        with pytest.raises(ConfigurationError, match=message):
            expand_variants(request, problems)


def test_the_folder_is_named_after_what_is_compared(configs):
    for arguments, folder in (
        (["a.yml", "b.yml"], "maxtext_output/compare_a_b_params"),
        (
            ["a.yml", "sweep={qkv_bias: [true, false]}", "base_output_directory=o"],
            "o/compare_a_qkv_bias_params",
        ),
        (
            ["a.yml", "b.yml", "match=flops", "budget=1e15"],
            "maxtext_output/compare_a_b_flops_1e+15",
        ),
        (["a.yml", "b.yml", "match=time", "budget=10m"], "maxtext_output/compare_a_b_time_600"),
        (["a.yml", "b.yml", "name=x/y", "base_output_directory=o"], "o/x/y"),
        (["a.yml", "b.yml", "output=z"], "z"),
    ):
        request, _ = parse_args(arguments)
        assert str(folder_of(request, expand_variants(request))) == folder


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tpu.yml"], "hardware: .*cpu and tpu"),
        (["num_devices=8"], r"num_devices=8, but this machine has 1"),
        (["output=file/x"], "folder file/x"),
        (["dataset_type=grain", "grain_train_files=x/*.tfrecord"], "grain"),
        (["match=time", "sequence_length_stages=[[0,8],[2,16]]"], "sequence_length_stages"),
    ],
    ids=["devices", "machine", "folder", "rules of train.py", "batches change"],
)
def test_refused_before_anything_runs(trained, configs, arguments, message):
    (configs / "tpu.yml").write_text("base_config: a.yml\nhardware: tpu\n")
    (configs / "file").touch()
    with pytest.raises(UserError, match=message):
        compare("a.yml", "b.yml", *arguments)
    assert not trained


def test_probes_are_compared_by_accuracy(trained, configs):
    probe = ("dataset_type=probe", "probe=mqar", "probe_size=4", "eval_interval=4")
    lines = compare("a.yml", "b.yml", "match=tokens", "seeds=3", *probe)
    text = "\n".join(lines)
    assert "[1/6] a seed 0: validation loss 4.0000, accuracy 0.2500" in text
    (sentence,) = [line for line in lines if "95 % interval" in line]
    assert sentence.startswith("b is higher than a by 0.6500 in accuracy")
    assert sentence in (configs / "out" / "report.html").read_text()
    with (configs / "out" / "summary.csv").open(encoding="utf-8") as file:
        by_label = {row["config"]: row for row in csv.DictReader(file)}
    assert {label: row["probe"] for label, row in by_label.items()} == {
        "a": "failed",
        "b": "solved",
    }
