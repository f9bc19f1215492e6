"""compare.py tune=: values found, other seeds for the verdict, resuming, printing, bad input."""

import csv
import math
from pathlib import Path

import pytest
import yaml

from MaxText.config.problems import ConfigurationError
from MaxText.config.schema import flatten
from MaxText.errors import UserError
from MaxText.experiments import execution
from MaxText.experiments.compare_args import parse_args
from MaxText.experiments.ladder.learning_rate_sweep import run_sweeps
from MaxText.experiments.variants import check_tunable, expand_variants, solve_key_by_label
from tests.experiments import stand_in

COMMAND = ("a.yml", "b.yml", "match=tokens", "opt_type=adamw")


def loss_of(keys) -> float:
    """Best at a rate of 0.02 (0.005 for gated MLPs) and at a decay of 0.05."""
    best_rate = 0.005 if len(keys["mlp_activations"]) > 1 else 0.02
    rate = math.log(keys["learning_rate"] / best_rate)
    decay = math.log(keys["adam_weight_decay"] / 0.05)
    return 3.0 + 0.1 * rate**2 + 0.01 * decay**2 + 0.01 * (keys["data_shuffle_seed"] % 7)


@pytest.fixture
def trained(one_device, monkeypatch):
    """Trains by the stand-in; the names of the runs in order."""
    names = []

    def train(run):
        execution.write_config(run)
        run.folder.mkdir(parents=True, exist_ok=True)
        names.append(str(run.folder.relative_to("out")))
        return stand_in.train(flatten(run.config), loss_of=loss_of)

    monkeypatch.setattr(execution, "train", train)
    return names


def compare(*arguments: str) -> list[str]:
    """What compare.py shows of a comparison in out/."""
    request, problems = parse_args([*arguments, "output=out"])
    variants = expand_variants(request, problems)
    check_tunable(request, variants)
    tuned_at = expand_variants(request.at_tuning_size) if request.tune_at else variants
    solve_for = solve_key_by_label(request, variants)
    lines: list[str] = []
    execution.run_comparison(
        request, variants, solve_for, ["compare.py"], lines.append, tuned_at=tuned_at
    )
    return lines


def keys_of_run(folder: str):
    return yaml.safe_load(Path(f"out/{folder}.yml").read_text())


def test_each_configuration_gets_its_own_values_from_other_seeds(trained):
    command = (*COMMAND, "tune=learning_rate,weight_decay", "seeds=2")
    lines = compare(*command)
    swept = [name for name in trained if name.startswith("tuning/")]
    # Five rates and five decays of each; the first configuration is best within them.
    assert len(swept) == 20
    assert trained[:20] == swept
    assert all(name.endswith("/seed_10000") for name in swept)
    assert trained[20:] == ["a/seed_0", "b/seed_0", "a/seed_1", "b/seed_1"]
    for label, rate in (("a", 0.02), ("b", 0.005)):
        for seed in (0, 1):
            keys = keys_of_run(f"{label}/seed_{seed}")
            assert keys["learning_rate"] == pytest.approx(rate, rel=1e-3)
            assert keys["adam_weight_decay"] == pytest.approx(0.05, rel=1e-3)
    # The decay is swept at the rate that was found.
    keys = keys_of_run("tuning/b,adam_weight_decay_x4/seed_10000")
    assert keys["learning_rate"] == pytest.approx(0.005, rel=1e-3)
    text = "\n".join(lines)
    assert "learning_rate of b: best at 0.005, 0.5 times 0.01" in text
    assert "Before the comparison, at least 20 runs with the seed 10000" in text
    assert "differ in learning_rate" not in text  # on purpose
    page = Path("out/report.html").read_text()
    assert "How hyper-parameters were tuned" in page
    assert "0.0025: 3." in page  # values that were tried, with their losses
    with Path("out/tuning.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 20
    assert {row["config"] for row in rows} == {"a", "b"}
    trained.clear()
    assert compare(*command)[-1] == lines[-1]
    assert not trained


def test_tuning_at_a_smaller_size(trained):
    lines = compare(*COMMAND, "tune=learning_rate", "tune_at={base_emb_dim: 16, head_dim: 8}")
    assert keys_of_run("tuning/a,learning_rate_x1/seed_10000")["base_emb_dim"] == 16
    keys = keys_of_run("a/seed_0")
    assert keys["base_emb_dim"] == 32
    assert keys["learning_rate"] == pytest.approx(0.02, rel=1e-3)
    assert any("with {base_emb_dim: 16, head_dim: 8} and equal tokens" in line for line in lines)


def test_printed_sweeps_end_before_the_comparison(trained):
    command = (*COMMAND, "tune=learning_rate", "launch=print", "num_devices=1")
    script = [line for line in compare(*command) if not line.startswith("#")]
    assert len(script) == 10 + 1
    assert not trained
    compare(*COMMAND, "tune=learning_rate", "num_devices=1")
    trained.clear()
    assert any(line.startswith("Report: ") for line in compare(*command))
    assert not trained


def test_a_decay_may_be_best_at_the_edge_and_a_rate_may_not():
    def losses(key):
        sweeps = {"a": lambda factor: factor}
        return run_sweeps(sweeps, lambda runs: None, lambda factor: 1.0 + factor, key)

    assert min(losses("adam_weight_decay")["a"]) == 2.0**-6
    with pytest.raises(UserError, match=r"smallest one, 0.015625 times.*Multiply learning_rate="):
        losses("learning_rate")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("tune=momentum",), "tune.*'momentum' cannot be tuned"),
        (("tune_at={base_emb_dim: 16}",), "tune_at.*nothing is tuned"),
        (("tune=learning_rate", "tune_at={learning_rate: 1}"), "learning_rate is set by tune="),
        (("tune=learning_rate", "tune_at={run_name: x}"), "run_name is set by output="),
        (("tune=learning_rate", "tune_at=3"), "tune_at.*'3' is not a mapping"),
        (("tune=learning_rate", "tune_at={base_emb_dmi: 16}"), "base_emb_dmi.*base_emb_dim"),
        (("tune=learning_rate", "seeds=[0,10000]"), "10000 is the seed with which"),
        (("tune=weight_decay", "adam_weight_decay=0"), "adam_weight_decay of a is 0"),
        (("tune=weight_decay", "opt_type=muonh"), "opt_type=muonh, which keeps the norms"),
        (("tune=weight_decay", "lr_sweep=2", "ladder=5", "from=1e8", "to=1e10"), "leaves it out"),
    ],
)
def test_bad_input(configs, arguments, message):
    with pytest.raises(ConfigurationError, match=f"(?s){message}"):
        compare("a.yml", "b.yml", *arguments)
