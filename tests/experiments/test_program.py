"""compare.py as a user runs it."""

import shlex
import shutil
import subprocess

import pytest

from MaxText.monitoring.run_record import read_run
from tests import programs
from tests.experiments.small_comparison import rows_of


@pytest.fixture
def environment(users_environment):
    """Without variables that the command lines which compare.py prints would unset."""
    return {name: value for name, value in users_environment.items() if name[:2] != "M_"}


@pytest.fixture
def run(configs, environment):
    def start(*arguments: str) -> subprocess.CompletedProcess:
        return programs.run("compare.py", arguments, configs, environment)

    return start


def losses(folder) -> dict[str, list[str]]:
    return {name: [r["validation_loss"] for r in rows] for name, rows in rows_of(folder).items()}


@pytest.mark.slow
def test_seeds_differ_and_a_run_that_is_gone_is_repeated_to_the_last_digit(
    run, configs, environment
):
    sizes = ("seeds=2", "base_num_decoder_layers=1")
    command = ("a.yml", "b.yml", "match=params", *sizes, "output=out")
    done = run(*command)
    assert done.returncode == 0, done.stderr
    (result,) = [line for line in done.stdout.splitlines() if "95 % interval" in line]
    page = (configs / "out" / "report.html").read_text()
    assert result in page.replace("<wbr>", "")  # where a line may break
    losses_by_name = losses(configs / "out")
    assert {name: len(set(values)) for name, values in losses_by_name.items()} == {"a": 2, "b": 2}
    # One of the two that are gone is trained by the line that is printed, the other by compare.py.
    for name in "ab":
        shutil.rmtree(configs / "out" / name / "seed_1")
    done = run(*command, "launch=print")
    first, *_ = [line for line in done.stdout.splitlines() if not line.startswith("#")]
    _, program, *arguments = shlex.split(first)
    trained = programs.run(program, arguments, configs, environment)
    assert trained.returncode == 0, trained.stderr
    done = run(*command)
    assert done.returncode == 0, done.stderr
    assert "4 runs in out, 3 already complete" in done.stdout
    assert done.stdout.count(": started") == 1
    assert losses(configs / "out") == losses_by_name


@pytest.mark.slow
def test_a_tokenformer_that_grows_against_one_that_does_not(run, configs):
    large = "decoder_block: tokenformer\nhead_dim: -1\nslot_num: 48\neval_interval: 1\n"
    base = "base_config: a.yml\nbase_num_decoder_layers: 1\n"
    (configs / "large.yml").write_text(base + large)
    # So small a rate that the second stage is what the growth made of the first.
    second = "{slot_num: 48, steps: 3, growth.data: continue, learning_rate: 1.0e-9}"
    stages = f"stages: [{{slot_num: 16, steps: 6}}, {second}]\n"
    (configs / "grown.yml").write_text(f"base_config: large.yml\n{stages}")
    done = run("grown.yml", "large.yml", "match=flops", "tolerance=0.1", "output=out")
    assert done.returncode == 0, done.stderr
    losses_by_name = losses(configs / "out")
    assert {name: len(values) for name, values in losses_by_name.items()} == {
        "grown": 1,
        "large": 1,
    }
    small, grown = (
        read_run(configs / "out" / "grown" / "seed_0" / f"stage_{number}") for number in (1, 2)
    )
    assert small.flops == grown.inherited_flops > 0
    (growth,) = [row for row in grown.events if row["event"] == "growth"]
    assert growth["slots"] == "16 -> 48 (attention), 64 -> 192 (feed-forward)"
    assert grown.final_loss == pytest.approx(small.final_loss, abs=1e-4)
    assert "mark growth" in (configs / "out" / "report.html").read_text()


def test_mistakes_are_found_without_jax_and_leave_nothing(configs, users_environment):
    files_before = sorted(configs.iterdir())
    arguments = ["a.yml", "b.yml", "match=parms", "seeds=x", "stepz=1"]
    options = ("-X", "importtime")  # names every module that is imported on stderr
    done = programs.run("compare.py", arguments, configs, users_environment, options=options)
    assert (done.returncode, done.stdout) == (2, "")
    assert "3 problems" in done.stderr
    assert "Traceback" not in done.stderr
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "MaxText.experiments.variants" in imported
    assert imported.isdisjoint({"jax", "numpy", "scipy", "flax"})
    assert sorted(configs.iterdir()) == files_before


def test_help_and_the_shared_options(run):
    done = run("--help")
    assert done.returncode == 0
    assert "match=" in done.stdout
    assert "\n  steps=" in done.stdout
    done = run("b.yml", "a.yml", "match=flops", "--why", "steps")
    assert done.returncode == 0, done.stderr
    assert "base_config, a.yml:4, steps: 4" in done.stdout
