"""check_part.py: a right part passes, and each seeded fault is found by the check for it."""

import importlib

import jax
import optax
import pytest

from MaxText.config import registry
from MaxText.config.loading import load_config
from MaxText.conformance.checks import CHECKS, OPTIMIZER_CHECKS, find_problem
from MaxText.conformance.subject import SIZES, TRAINED, Subject
from tests.house.sources import REPOSITORY, run_main
from tests.programs import run

PART = "tests/experiments/running_mean.py"
# Fault -> the check that finds it.
QUICK = {
    "random initialization": "initialization",
    "unknown axis": "logical axes",
    "FLOPs": "FLOPs",
    "document leak": "documents",
    "stale position": "decode state",
    "softmax over slots": "growth",
}
SLOW = {
    "future leak": "causality",
    "padding leak": "padding",
    "dropped gradient": "gradients",
    "counts its calls": "scan and remat",
    "padding in the state": "decode state",
    "float32 output": "formats",
    "one device": "8 devices",
}


@pytest.fixture
def faulty(monkeypatch):
    """Imports the part with a fault."""

    def load(fault):
        module = importlib.import_module("tests.experiments.running_mean")
        registry.forget(module.__file__)
        monkeypatch.setenv("FAULT", fault)
        importlib.reload(module)
        return Subject(
            lambda **keys: load_config(**TRAINED | SIZES | {"mixer": "running_mean"} | keys)
        )

    yield load
    registry.forget(importlib.import_module("tests.experiments.running_mean").__file__)


def slow(fault):
    mark = pytest.mark.multi_device if fault == "one device" else pytest.mark.slow
    return pytest.param(fault, marks=mark)


@pytest.mark.parametrize("fault", [*QUICK, *map(slow, SLOW)])
def test_the_check_for_it_finds(fault, faulty):
    subject = faulty(fault)
    check = next(check for check in CHECKS if check.name == (QUICK | SLOW)[fault])
    assert find_problem(check, subject)


def test_an_optimizer_that_goes_up_is_found():
    registry.register("optimizer", "up")(lambda keys, parameters: optax.sgd(1.0))
    try:
        subject = Subject(
            lambda **other_keys: load_config(**TRAINED | SIZES | {"opt_type": "up"} | other_keys)
        )
        updates = next(check for check in OPTIMIZER_CHECKS if check.name == "updates")
        assert "the loss goes from" in (find_problem(updates, subject) or "")
    finally:
        registry.forget(__file__)


def assert_all_ok(results):
    assert results.count(" ok\n") == len(CHECKS), results


@pytest.mark.slow
def test_the_program(users_environment):
    """docs/tutorials/add_an_architecture.md runs it for a mixer and an optimizer of examples/."""
    process = run("check_part.py", [PART], REPOSITORY, users_environment)
    assert process.returncode == 0, process.stdout + process.stderr
    assert_all_ok(process.stdout)


@pytest.mark.slow
@pytest.mark.parametrize(
    "part",
    [
        "examples/gated_deltanet.py",
        "examples/differential_attention.py",
        "examples/hidden_layer_loss.py",
        "examples/value_residual.py:ValueResidualAttention connection_type=value_residual",
    ],
)
def test_other_examples_on_one_device(part, monkeypatch, capsys):
    """In process; tests/examples/test_runs.py trains them on 8 devices."""
    monkeypatch.chdir(REPOSITORY)
    assert jax.device_count() == 1  # jax has started: the program's XLA_FLAGS come too late
    assert run_main("check_part.py", part.split()) == 0, capsys.readouterr().out
    assert_all_ok(capsys.readouterr().out)
