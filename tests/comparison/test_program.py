"""compare.py as a user runs it."""

import csv
import shutil
import subprocess
import sys

import pytest

from MaxText.monitoring.run_record import read_run
from tests.house.sources import REPOSITORY

PROGRAM = str(REPOSITORY / "MaxText" / "compare.py")


@pytest.fixture
def run(configs, users_environment):
    def start(*arguments: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            [sys.executable, PROGRAM, *arguments], cwd=configs, env=users_environment,
            capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip

    return start


def losses(path) -> dict[tuple[str, str], str]:
    with path.open() as file:
        return {
            (row["config"], row["seed"]): row["validation_loss"] for row in csv.DictReader(file)
        }


def test_two_configurations(run, configs):
    done = run("a.yml", "b.yml", "match=params", "output=out")
    assert done.returncode == 0, done.stderr
    assert "  a: nothing changed" in done.stdout
    assert "base_emb_dim 32 -> " in done.stdout
    assert "nats/token with one seed" in done.stdout
    found = losses(configs / "out" / "runs.csv")
    assert sorted(found) == [("a", "0"), ("b", "0")]
    assert (configs / "out" / "report.html").exists()


@pytest.mark.slow
def test_seeds_differ_and_a_run_that_is_gone_is_repeated_to_the_last_digit(run, configs):
    command = ("a.yml", "b.yml", "match=params", "seeds=2", "output=out")
    done = run(*command)
    assert done.returncode == 0, done.stderr
    assert "95 % interval" in done.stdout
    found = losses(configs / "out" / "runs.csv")
    assert sorted(found) == [("a", "0"), ("a", "1"), ("b", "0"), ("b", "1")]
    assert len(set(found.values())) == 4
    shutil.rmtree(configs / "out" / "b" / "seed_1")
    done = run(*command)
    assert done.returncode == 0, done.stderr
    assert "4 runs in out, 3 finished before" in done.stdout
    assert done.stdout.count(": started") == 1
    assert losses(configs / "out" / "runs.csv") == found


@pytest.mark.slow
def test_a_tokenformer_that_grows_against_one_that_does_not(run, configs):
    large = "decoder_block: tokenformer\nhead_dim: -1\nslot_num: 48\neval_interval: 1\n"
    (configs / "large.yml").write_text(f"base_config: a.yml\n{large}")
    # So small a rate that the second stage is what the growth made of the first.
    second = "{slot_num: 48, steps: 3, growth_data: continue, learning_rate: 1.0e-9}"
    stages = f"stages: [{{slot_num: 16, steps: 6}}, {second}]\n"
    (configs / "grown.yml").write_text(f"base_config: large.yml\n{stages}")
    done = run("grown.yml", "large.yml", "match=flops", "tolerance=0.1", "output=out")
    assert done.returncode == 0, done.stderr
    assert sorted(losses(configs / "out" / "runs.csv")) == [("grown", "0"), ("large", "0")]
    small, grown = (
        read_run(configs / "out" / "grown" / "seed_0" / f"stage_{number}") for number in (1, 2)
    )
    assert small.flops == grown.inherited_flops > 0
    (growth,) = [row for row in grown.marks if row["event"] == "growth"]
    assert growth["slots"] == "16 -> 48 (attention), 64 -> 192 (feed-forward)"
    assert grown.final_loss == pytest.approx(small.final_loss, abs=1e-4)
    assert '"growth"' in (configs / "out" / "report.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "no configurations are named"),
        (("a.yml",), "nothing to compare it with"),
        (("a.yml", "b.yml", "match=parms", "seeds=x", "stepz=1"), "3 problems"),
        (("a.yml", "nowhere.yml"), "'nowhere.yml' not found"),
        (("a.yml", "b.yml", "--seeds", "3"), "write:    seeds=3"),
        (("a.yml", "sweep={learning_rate: 1e-3"), "cannot be read"),
    ],
)
def test_mistakes_exit_with_2_and_leave_nothing(run, configs, arguments, message):
    before = sorted(configs.iterdir())
    done = run(*arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert sorted(configs.iterdir()) == before


def test_a_budget_that_cannot_be_met_exits_with_2(run):
    done = run("a.yml", "b.yml", "budget=1", "num_devices=1")
    assert done.returncode == 2
    assert "a: a budget of 1 parameters cannot be met" in done.stderr
    assert "Traceback" not in done.stderr


def test_mistakes_are_found_without_jax(configs):
    program = f"""
import sys
sys.path.insert(0, {str(REPOSITORY)!r})
from MaxText.comparison import comparing, request
from MaxText.errors import UserError
try:
    comparing.compare(*request.read(["a.yml", "b.yml", "stepz=1"]), [], print)
except UserError:
    sys.exit(len({{"jax", "numpy", "scipy", "flax"}} & set(sys.modules)))
sys.exit(99)
"""
    assert subprocess.run([sys.executable, "-c", program], cwd=configs).returncode == 0


def test_help_and_the_shared_options(run):
    done = run("--help")
    assert done.returncode == 0
    assert "match=WHAT" in done.stdout
    assert "\n  steps=" in done.stdout
    done = run("b.yml", "a.yml", "match=flops", "--why", "steps")
    assert done.returncode == 0, done.stderr
    assert "base_config, a.yml:4, steps: 4" in done.stdout


def test_train_refuses_a_sweep(configs, users_environment):
    (configs / "swept.yml").write_text("base_config: a.yml\nsweep:\n  steps: [1, 2]\n")
    done = subprocess.run(
        [sys.executable, str(REPOSITORY / "MaxText" / "train.py"), "swept.yml"],
        cwd=configs, env=users_environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "swept.yml:2" in done.stderr
    assert "which only compare.py expands" in done.stderr
