"""A step compiled ahead of time: its memory, and the run that takes it from a file."""

import re
import shutil

import jax
import numpy as np
import pytest

from MaxText.compilation import ahead_of_time, compilation_cache, saved_step, targets
from MaxText.compilation.hlo import HloModule
from MaxText.compilation.lowering import compile_lowered, lower_train_step
from MaxText.config.schema import flatten, unflatten
from MaxText.errors import UserError
from MaxText.layers.batch import batch_shapes
from tests.small_models import made_for_training, random_batch, tiny_config

ROWS = 2


@pytest.fixture(scope="module")
def planned():
    return lower_train_step(tiny_config(per_device_batch_size=ROWS), jax.devices()[:1])


@pytest.fixture(scope="module")
def compiled(planned):
    return compile_lowered(planned)[0]


@pytest.fixture(scope="module", autouse=True)
def serialized(compiled):
    """XLA serializes a CPU program only before it runs."""
    serialized = saved_step.serialize_executable.serialize(compiled)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saved_step.serialize_executable, "serialize", lambda _: serialized)
        yield


@pytest.fixture(scope="module")
def saved(planned, compiled, tmp_path_factory):
    path = str(tmp_path_factory.mktemp("saved") / "step")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv(saved_step.KEY_VARIABLE, f"{path}.key")
        saved_step.save_compiled(path, planned, compiled)
        yield path


def steps_with(planned, **keys):
    config = unflatten(flatten(planned.config) | keys)
    growth = planned.growth._replace(config=config)
    return saved_step.saved_steps(growth, planned.model.config, planned.sharding, planned.state)


def open_with(planned, **keys):
    return steps_with(planned, **keys).load


def test_the_saved_step_does_what_the_compiled_one_does(planned, compiled, saved):
    step_for = open_with(planned, compiled_trainstep_file=saved, run_name="another", steps=10)
    assert_same_steps(planned, compiled, step_for(planned.batch))


def assert_same_steps(planned, compiled, loaded):
    section = planned.config
    *_, initialize = made_for_training(section, planned.model, section.guard)
    batch = planned.sharding.to_global_batch(
        jax.tree.map(np.asarray, random_batch(section, ROWS)), ROWS
    )
    results = []
    for step in (compiled, loaded):
        state = planned.sharding.init_state(initialize, planned.state, 0)
        for _ in range(2):
            state, metrics = step(state, batch)
        results.append((state.params, metrics))
    jax.tree.map(np.testing.assert_array_equal, *results)
    assert float(results[0][1]["loss"]) > 1


def test_another_batch_is_left_to_the_compiler(planned, saved):
    step_for = open_with(planned, compiled_trainstep_file=saved)
    length = planned.plan.stages[-1].length
    assert step_for(planned.sharding.abstract_batch(batch_shapes(ROWS + 1, length, False))) is None
    assert step_for(planned.sharding.abstract_batch(batch_shapes(ROWS, length, True))) is None


@pytest.mark.parametrize(
    ("key", "value"), [("learning_rate", 0.5), ("adam_b1", 0.8), ("skip_step_scaling_factor", 3.0)]
)
def test_the_step_of_another_configuration_is_refused(planned, saved, key, value, monkeypatch):
    monkeypatch.setattr(saved_step.serialize_executable, "deserialize_and_load", None)
    with pytest.raises(UserError, match=f"{key}: .*, {value} in this run"):
        open_with(planned, compiled_trainstep_file=saved, **{key: value})


def test_the_step_of_other_sources_is_refused(planned, saved, tmp_path, monkeypatch):
    monkeypatch.setenv(saved_step.KEY_VARIABLE, f"{tmp_path}/key")
    shutil.copy(f"{saved}.key", tmp_path / "key")
    facts, content = saved_step.read_signed(saved)
    facts["run"]["sources of the step"]["hash"] = "another"
    saved_step.write_signed(str(tmp_path / "step"), facts, content)
    with pytest.raises(UserError, match="sources of the step, hash: another in the file"):
        open_with(planned, compiled_trainstep_file=str(tmp_path / "step"))


def test_the_step_of_another_scale_of_grown_slots_is_refused(planned, saved):
    config = unflatten(flatten(planned.config) | {"compiled_trainstep_file": saved})
    record = {"slots": {"a": (8, 16)}, "existing_slots_lr_scale": 0.1}
    growth = planned.growth._replace(config=config, record=record)
    with pytest.raises(UserError, match=r"scaled: none in the file, \{'a': 8\} x 0.1 in this run"):
        saved_step.saved_steps(growth, planned.model.config, planned.sharding, planned.state)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv(saved_step.KEY_VARIABLE, f"{tmp_path}/key")
    monkeypatch.setattr(compilation_cache, "folder_in_use", lambda: f"{tmp_path}")
    return tmp_path


def test_a_later_run_loads_the_step_of_the_cache(planned, compiled, cache):
    assert open_with(planned)(planned.batch) is None
    steps_with(planned, run_name="first").save(planned.batch, compiled, False)
    steps = steps_with(planned, run_name="second")
    assert steps.source == "cache"
    assert_same_steps(planned, compiled, steps.load(planned.batch))
    assert open_with(planned, learning_rate=0.5)(planned.batch) is None


@pytest.mark.parametrize("change", ["all sources", "options of jax", "damage", "key"])
def test_a_step_of_other_code_is_compiled_and_replaced(
    planned, compiled, cache, monkeypatch, change
):
    steps = steps_with(planned)
    steps.save(planned.batch, compiled, False)
    (file,) = cache.glob("train_step-*")
    if change == "damage":
        file.write_bytes(file.read_bytes()[:-1])
    elif change == "key":
        monkeypatch.setenv(saved_step.KEY_VARIABLE, f"{cache}/other_key")
    else:
        facts, content = saved_step.read_signed(str(file))
        facts["run"][change] |= {"hash": "other"}
        saved_step.write_signed(str(file), facts, content)
    monkeypatch.setattr(saved_step.serialize_executable, "deserialize_and_load", lambda *_, **__: 1)
    assert steps.load(planned.batch) is None
    steps.save(planned.batch, compiled, False)
    assert steps.load(planned.batch) == 1
    assert list(cache.glob("train_step-*")) == [file]


def test_an_edit_that_keeps_the_program_keeps_the_file(planned, compiled, cache):
    steps = steps_with(planned)
    steps.save(planned.batch, compiled, False)
    (file,) = cache.glob("train_step-*")
    facts, content = saved_step.read_signed(str(file))
    facts["run"]["all sources"] = {"hash": "other"}
    for program, expected in (("another", False), (facts["program"], True)):
        saved_step.write_signed(str(file), facts | {"program": program}, content)
        steps.save(planned.batch, compiled, True)
        assert (steps.load(planned.batch) is not None) == expected


def test_steps_of_changed_code_or_without_a_cache_are_not_kept(planned, cache, monkeypatch):
    assert steps_with(planned, import_modules=("mine",)) is None
    monkeypatch.setattr(compilation_cache, "folder_in_use", lambda: None)
    assert steps_with(planned) is None


def test_what_the_runtime_refuses_is_a_message(planned, saved, monkeypatch):
    step_for = open_with(planned, compiled_trainstep_file=saved)

    def fail(*arguments, **keys):
        raise RuntimeError("INVALID_ARGUMENT: other version\nmore")

    monkeypatch.setattr(saved_step.serialize_executable, "deserialize_and_load", fail)
    with pytest.raises(UserError, match="INVALID_ARGUMENT: other version\n"):
        step_for(planned.batch)


def test_memory_adds_up(planned, compiled):
    found = ahead_of_time.memory_breakdown(planned, compiled)
    assert found["parameters"] == 4 * planned.model.num_parameters
    assert found["optimizer state and counters"] > 2 * found["parameters"]  # two moments
    assert found["batch"] == 3 * 4 * ROWS * planned.plan.stages[-1].length
    assert found["temporaries: gradients, activations"] > found["parameters"]


def test_the_report_names_all_costs(planned, compiled):
    program = HloModule(compiled.as_text())
    target = targets.find_target("v5e-1")
    found = ahead_of_time.memory_breakdown(planned, compiled)
    text = "\n".join(
        ahead_of_time.describe_memory(target, found, program)
        + ahead_of_time.cost_lines(planned, compiled, program)
    )
    # Layers are scanned, and on one device nothing is sent.
    for words in ("optimizer state", "15.8 GiB", "by formula", "counted once", "no estimate"):
        assert words in text
    assert "nothing" in text.partition("communication in a step")[2]


def test_too_much_memory_is_a_message_with_remedies(planned, compiled, monkeypatch):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "1.0")
    program = HloModule(compiled.as_text())
    found = ahead_of_time.memory_breakdown(planned, compiled)
    target = targets.find_target("h100-1")._replace(memory=found["parameters"])
    with pytest.raises(UserError) as caught:
        ahead_of_time.check_fits(target, found, program)
    for words in ("h100-1", "remat_policy=full", "hardware=h100-1 --fit", "f32["):
        assert words in str(caught.value)
    ahead_of_time.check_fits(targets.find_target("h100-1"), found, program)


def test_the_compilers_own_list_of_arrays_is_shown(planned, monkeypatch):
    arrays = "Ran out of memory (31.38G of 15.75G)\n  1. Size: 16G"

    def fail(_):
        raise jax.errors.JaxRuntimeError(f"RESOURCE_EXHAUSTED: {arrays}")

    monkeypatch.setattr(ahead_of_time, "lower_train_step", lambda *_: planned)
    monkeypatch.setattr(ahead_of_time, "compile_lowered", fail)
    with pytest.raises(UserError, match=re.escape(f"cpu-1 has too little memory: {arrays}\n")):
        ahead_of_time.train_compile(planned.config, targets.find_target("cpu-1"), print)


def test_gpus_are_not_given_whole(monkeypatch):
    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION", raising=False)
    target = targets.find_target("h100-8")
    assert ahead_of_time.usable_bytes(target) == int(0.75 * target.memory)
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", ".9")
    assert ahead_of_time.usable_bytes(target) == int(0.9 * target.memory)
