"""check_part.py: a right part passes, and each seeded fault is found by the check for it."""

import importlib
import re

import jax
import optax
import pytest

from MaxText.config import registry
from MaxText.config.loading import load_config
from MaxText.conformance.checks import CHECKS, OPTIMIZER_CHECKS, SOURCE_CHECKS, find_problem
from MaxText.conformance.source_checks import SOURCE_KEYS, SourceSubject
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
        problem = find_problem(updates, subject)
        assert problem is not None
        assert "the loss goes from" in problem.description
        assert problem.remedy == updates.remedy
    finally:
        registry.forget(__file__)


def test_an_exception_has_a_remedy_of_its_own(tmp_path, monkeypatch, capsys):
    """It is none of the check that happens to meet it first, and is told once."""
    file = tmp_path / "broken.py"
    source = (REPOSITORY / PART).read_text(encoding="utf-8")
    file.write_text(source.replace("    def _output(self", "    def output(self"))
    line = next(
        number
        for number, text in enumerate(file.read_text().splitlines(), 1)
        if "._output(" in text
    )
    monkeypatch.setattr("MaxText.conformance.checks.CHECKS", CHECKS[2:6])
    try:
        assert run_main("check_part.py", [str(file)]) == 1
    finally:
        registry.forget(str(file))
    results = capsys.readouterr().out
    assert [text for text in results.splitlines() if "FAILED" in text or "raised" in text] == [
        "  causality       FAILED: AttributeError: 'RunningMean' object has no attribute '_output'",
        f"{'':18}raised at broken.py:{line}, before anything was compared",
        "  documents       FAILED: as causality",
        "  padding         FAILED: as causality",
        "  gradients       FAILED: as causality",
    ]


def assert_all_ok(results):
    num_parts = len(re.findall(r"^\w+ \w+ \(", results, re.MULTILINE))
    assert results.count(" ok\n") == max(num_parts, 1) * len(CHECKS), results


# Fault of tests/input_pipeline/registered_sources/numbered.py -> source, the check that finds it.
SOURCE_FAULTS = {
    "floats": ("numbered", "token ids"),
    "random": ("numbered", "deterministic"),
    "wrong lengths": ("numbered", "lengths"),
    "forgets": ("stateful", "resume"),
}


@pytest.mark.parametrize("fault", ["none", *SOURCE_FAULTS])
def test_the_check_of_a_data_source(fault, monkeypatch):
    module = importlib.import_module("tests.input_pipeline.registered_sources.numbered")
    registry.forget(module.__file__)
    importlib.reload(module)
    monkeypatch.setattr(module, "FAULT", fault)
    names = ["numbered", "masked", "numbered_records", "stateless", "stateful"]
    if fault != "none":
        names = [SOURCE_FAULTS[fault][0]]
    for name in names:
        keys = SOURCE_KEYS | {"dataset_type": name, "max_target_length": 16, "vocab_size": 50_000}
        subject = SourceSubject(load_config(**keys))
        failed = [check.name for check in SOURCE_CHECKS if find_problem(check, subject)]
        assert failed[:1] == ([] if fault == "none" else [SOURCE_FAULTS[fault][1]])
    registry.forget(module.__file__)


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
        "examples/deltanet.py",
        "examples/differential_attention.py",
        "examples/sigmoid_attention.py",
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
