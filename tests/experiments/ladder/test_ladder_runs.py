"""Whole ladders with a stand-in for train.py: order, resuming, predictions, sweeps, printing."""

import json
import math
import re
import sys
from pathlib import Path

import pytest

from MaxText.config.schema import flatten
from MaxText.errors import UserError
from MaxText.experiments import execution
from MaxText.experiments.compare_args import parse_args
from MaxText.experiments.ladder import hardware_estimates, ladder_execution, ladder_plan
from MaxText.experiments.variants import expand_variants
from tests.experiments import stand_in
from tests.experiments.small_comparison import compare

LADDER = (
    "ladder=5",
    "from=8e8",
    "to=8e10",
    "tokens_per_parameter=1",
    "per_device_batch_size=8",
    "warmup_steps_fraction=0",
    "tolerance=0.05",
    "eval_interval=1000000",
    "head_dim=8",
    "base_num_query_heads=4",
    "base_num_kv_heads=4",
)
RUNGS = ("rung_1", "rung_2", "rung_3", "rung_4", "rung_5")


def loss_of(keys) -> float:
    """A law of compute with a rate that is best at twice that of the file, and noise by seed."""
    steps = keys["steps"] * keys["per_device_batch_size"]
    compute = keys["base_emb_dim"] ** 2 * keys["base_num_decoder_layers"] * steps
    noise = 0.003 * ((keys["data_shuffle_seed"] * 7919 + keys["base_emb_dim"]) % 5 - 2)
    variant = 1.2 if len(keys["mlp_activations"]) > 1 else 1.0
    return 1.5 + 4.0 * (variant * compute) ** -0.1 + noise


@pytest.fixture
def trained(one_device, monkeypatch):
    """Trains by the stand-in with losses of a law; the names of the runs in order."""
    names = []

    def train(run):
        execution.write_config(run)
        run.folder.mkdir(exist_ok=True)
        names.append(str(run.folder.relative_to("out")))
        return stand_in.train(flatten(run.config), loss_of=loss_of)

    monkeypatch.setattr(execution, "train", train)
    monkeypatch.setattr(ladder_execution, "find_local_hardware", lambda request, variants: None)
    # A second each, and tested on its own.
    monkeypatch.setattr(ladder_plan, "smallest_speedup", lambda computes, num_seeds: 1.1)

    def write_report(runs, folder, **contents):
        (folder / "report.html").write_text(str(contents))
        return folder / "report.html"

    monkeypatch.setattr(ladder_execution, "write_report", write_report)
    return names


def climb(*arguments: str) -> list[str]:
    """What compare.py shows of a ladder in out/."""
    lines: list[str] = []
    request, problems = parse_args([*arguments, "output=out"])
    variants = expand_variants(request, problems)
    ladder_execution.run_ladder(request, variants, ["compare.py", *arguments], lines.append)
    return lines


def test_the_top_rung_runs_after_its_prediction_and_nothing_runs_twice(trained):
    command = ("a.yml", "b.yml", *LADDER, "timings=0")
    lines = climb(*command)
    order = [f"{rung}/{arm}/seed_{s}" for rung in RUNGS for s in (0, 1) for arm in "ab"]
    assert trained == order
    text = "\n".join(lines)
    prediction = text.index("Prediction of the top rung, a at")
    assert text.index("[16/16]") < prediction < text.index("[1/4]")
    record = json.loads(Path("out/preregistration.json").read_text())
    assert f"SHA-256 {record['sha256']}" in text
    assert re.search(
        r"a at [0-9.]+e\+10 FLOPs: predicted .*; measured .*, inside the interval", text
    )
    assert "b against a: " in text
    files = {path.name for path in Path("out").iterdir()}
    assert files >= {"ladder.json", "ladder.csv", "runs.csv", "report.html", *RUNGS}
    # One row per run, in its folder.
    assert len(Path("out/runs.csv").read_text().splitlines()) == 21
    trained.clear()
    again = climb(*command)
    assert not trained
    assert f"SHA-256 {record['sha256']}" in "\n".join(again)
    climb(*command, "seeds=3")
    assert trained == [f"{rung}/{arm}/seed_2" for rung in RUNGS for arm in "ab"]


def test_one_arm_gives_its_law_and_prediction(trained):
    text = "\n".join(climb("a.yml", *LADDER))
    assert len(trained) == 10
    assert "Power" not in text
    assert re.search(r"a: exponent .*, asymptote", text)
    assert "inside the interval" in text


def test_a_swept_learning_rate_is_that_of_other_seeds(trained, monkeypatch):
    law = loss_of

    def with_rate(keys):
        width_rule = (keys["base_emb_dim"] / 32) ** -1
        return law(keys) + 0.2 * math.log(keys["learning_rate"] / (0.02 * width_rule)) ** 2

    monkeypatch.setitem(globals(), "loss_of", with_rate)
    lines = climb("a.yml", *LADDER, "lr_sweep=1", "opt_type=adamw")
    swept = trained[:5]
    assert [name.split("_x")[1].split("/")[0] for name in swept] == ["0.25", "0.5", "1", "2", "4"]
    assert all(name.endswith("seed_10000") for name in swept)
    (line,) = [line for line in lines if "all rungs get" in line]
    (factor,) = map(float, re.findall(r"learning_rate of a: all rungs get ([\d.]+) times", line))
    assert factor == pytest.approx(2.0, rel=0.05)
    assert len(trained) == 5 + 10


def test_a_run_that_diverges_is_shown_and_does_not_end_the_ladder(trained, monkeypatch):
    Path("sizes.yml").write_text(
        "\n".join(
            f"- {{base_num_decoder_layers: {depth}, learning_rate: {rate}}}"
            for depth, rate in ((1, 0.1), (2, 0.1), (4, 2.0), (8, 0.1), (12, 0.1))
        )
    )
    text = "\n".join(climb("a.yml", "sizes=sizes.yml", *LADDER[3:]))
    assert "diverged at step 0" in text
    assert "a: 2 of 2 runs at" in text


def test_a_grid_of_sizes_and_computes_gives_the_best_sizes(trained, monkeypatch):
    widths = (16, 24, 32, 48, 64)
    Path("sizes.yml").write_text("\n".join(f"- {{base_emb_dim: {width}}}" for width in widths))

    def of_size_and_data(keys):
        sequences = keys["steps"] * keys["per_device_batch_size"]
        return 1.0 + 8 * keys["base_emb_dim"] ** -0.5 + 40 * sequences**-0.5

    monkeypatch.setitem(globals(), "loss_of", of_size_and_data)
    command = ("a.yml", "sizes=sizes.yml", "ladder=5", "from=5e8", "to=4e9", "seeds=1")
    command += (*LADDER[4:8], "batch_exponent=0")
    lines = climb(*command)
    assert len(trained) == 25
    text = "\n".join(lines)
    assert re.search(r"a at 1.41e\+09 FLOPs: best size .* 5 sizes", text)
    assert re.search(r"a: E \+ A/N\^alpha \+ B/D\^beta with E [01]\.", text)
    assert "a, no best size at 4e+09 FLOPs: " in text  # as its best size lies above them all
    record = json.loads(Path("out/sizes.json").read_text())
    assert len(record["cells"]) == 25
    low, _, high = record["configurations"]["a"]["law"]["beta"]
    assert low <= 0.5 <= high
    files = {path.name for path in Path("out").iterdir()}
    assert files >= {"sizes.csv", "sizes_a.png", "runs.csv", "report.html"}
    trained.clear()
    assert text.splitlines()[-3:] == climb(*command)[-3:]
    assert not trained


def test_printed_ladders_stop_below_the_top(trained):
    command = ("a.yml", *LADDER, "launch=print", "num_devices=1")
    lines = climb(*command)
    runs = [line for line in lines if not line.startswith("#")]
    assert len(runs) == 8 + 1  # and the command that goes on
    assert not any("rung_5" in line for line in runs)
    assert not trained
    climb("a.yml", *LADDER)
    assert all(line.startswith("#") for line in climb(*command))


def test_runs_train_at_the_same_time_on_shares(one_device, monkeypatch):
    command = [sys.executable, stand_in.__file__]
    pinned = []
    monkeypatch.setattr(execution, "train_command", lambda config: [*command, str(config)])
    monkeypatch.setattr(
        execution, "find_devices", lambda hardware: execution.DeviceCount(1, "cpu", "cpu")
    )
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0, 1})
    monkeypatch.setattr("os.sched_setaffinity", lambda process, cores: pinned.append(cores))
    lines = compare("a.yml", "b.yml", "match=tokens", "jobs=2")
    assert sorted(pinned) == [(0,), (1,)]
    begun = [index for index, line in enumerate(lines) if line.endswith("started")]
    ended = [index for index, line in enumerate(lines) if "validation loss" in line and "[" in line]
    assert max(begun) < min(ended)
    assert sum("seed 0: validation loss" in line for line in lines) == 2
    Path("fail").touch()
    with pytest.raises(UserError, match="exited with code 1"):
        compare("a.yml", "b.yml", "match=tokens", "jobs=2", "seeds=2")


@pytest.mark.slow
def test_a_tiny_ladder_end_to_end(configs, monkeypatch):
    """Two arms, five rungs, real training; the second call trains nothing."""
    # So slow a rate that the losses of all rungs fall with their compute.
    rate = "learning_rate=1e-3"
    command = ["a.yml", "b.yml", *LADDER, "eval_steps=1", "seeds=1", "timings=0", rate]
    text = "\n".join(climb(*command))
    assert len(list(Path("out").glob("rung_*/*/seed_0/events.jsonl"))) == 10
    assert "b against a: " in text
    assert "Predictions: SHA-256" in text
    page = Path("out/report.html").read_text(encoding="utf-8")
    assert "Prediction against outcome" in page

    def fail(run):
        raise AssertionError(f"{run.name} runs twice")

    monkeypatch.setattr(execution, "train", fail)
    climb(*command)


@pytest.mark.slow
def test_a_step_is_estimated_from_its_compiled_program(configs):
    """In a process of its own, twice as many layers take longer."""
    seconds = []
    for depth in (2, 4):
        path = configs / f"depth_{depth}.yml"
        path.write_text(f"base_config: a.yml\nbase_num_decoder_layers: {depth}\n")
        estimate = hardware_estimates.estimate_in_process(path, "cpu-1")
        assert estimate.source == "FLOPs and bytes of the compiled program"
        seconds.append(estimate.seconds)
    assert 1.2 < seconds[1] / seconds[0] < 2.2
    with pytest.raises(UserError, match="target=v5p-7"):
        hardware_estimates.estimate_in_process(path, "v5p-7")
