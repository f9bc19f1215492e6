"""Text, YAML and Python values become values of the right type, and are saved and read again."""

import json
import time
import tracemalloc
from pathlib import PurePosixPath
from typing import Annotated

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import AfterValidator, Field

from MaxText.config import values
from MaxText.config.keys import Count
from MaxText.config.loading import load, load_config
from MaxText.config.problems import ConfigurationError
from MaxText.config.schema import all_keys, flatten
from MaxText.config.serialization import diff_configs, resolved_yaml


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("steps=1_000", 1000),
        ("steps=3.0", 3),
        ("steps=1e3", 1000),
        ("learning_rate=3e-5", 3e-5),
        ("learning_rate=1", 1.0),
        ("packing=False", False),
        ("packing=0", False),
        ("reuse_example_batch=1", True),
        ("max_to_keep=none", None),
        ("max_to_keep=null", None),
        ("max_to_keep=3", 3),
        ("scan_layers=auto", "auto"),
        ("scan_layers=true", True),
        ("position_embedding=none", "none"),
        ("profiler=none", ""),
        ("run_name=007", "007"),
        ("prompt=yes", "yes"),
        ("prompt=[hello]", "[hello]"),
        ("prompt=Note: a=b", "Note: a=b"),
        ("prompt=1e3 # 2", "1e3 # 2"),
        ("prompt='none'", "none"),
        ("metrics_file=", ""),
        ("load_parameters_path=gs://b/x=1/items", "gs://b/x=1/items"),
        ("load_parameters_path=none", ""),
        ("mlp_activations=[silu, linear]", ("silu", "linear")),
        ("adamw_mask=['.*norm','bias$']", (".*norm", "bias$")),
        ("weight_decay_overrides=[[norm, 0],[bias,1e-2]]", (("norm", 0.0), ("bias", 0.01))),
        ("base_num_decoder_layers=10000", 10_000),
        ("dropout_rate=0", 0.0),  # the bounds
    ],
)
def test_command_line_values(argument, value):
    result = flatten(load([argument]).config)[argument.partition("=")[0]]
    assert result == value
    assert type(result) is type(value)


@pytest.mark.parametrize(
    "argument",
    [
        "steps=x",
        "steps=1.5",
        "steps=true",
        "steps=",
        "steps=none",
        "steps=[1]",
        "steps=[4, 5]",
        "steps='3'",
        f"steps={'9' * 400}",
        "learning_rate=fast",
        "learning_rate=nan",
        "learning_rate=inf",
        "learning_rate=-1",
        f"learning_rate={'9' * 400}",
        "packing=maybe",
        "packing=2",
        "dtype=bf16",
        "dtype=none",
        "mlp_activations=gelu",
        "mlp_activations=[gelu, gelo]",
        "weight_decay_overrides=[[norm]]",
        "dropout_rate=1",
        "max_to_keep=0",
        "base_num_decoder_layers=10001",
        "global_parameter_scale=1048577",
        "vocab_size=2147483648",
        f"adamw_mask={'[' * 3000}",
        "adamw_mask=&a [*a]",
        "run_name=a\udcff",
    ],
)
def test_wrong_values_name_key_place_and_default(argument):
    name, _, raw = argument.partition("=")
    with pytest.raises(ConfigurationError) as caught:
        load([argument])
    (problem,) = caught.value.problems
    assert problem.message.startswith(f"{name}: ")
    assert problem.location[0].startswith(f"command line, {name}=")
    assert raw in problem.location[0] or len(raw) > 300  # what is long is cut
    facts = dict(problem.context)
    assert facts["accepted"]
    assert facts["default"] == values.to_yaml(all_keys()[name].default)


def test_python_values():
    config = load_config(mlp_activations=["gelu"], learning_rate=1, run_name="1", max_to_keep=None)
    assert config.model.feed_forward.mlp_activations == ("gelu",)
    assert config.schedule.learning_rate == 1.0
    for wrong in ({"packing": "true"}, {"steps": "3"}, {"steps": True}, {"run_name": 3}):
        with pytest.raises(ConfigurationError, match=r"load_config\(\)"):
            load_config(**wrong)


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        (
            "mlp_activations=[gelo, gelu, silv]",
            "'gelo' is not among the choices; 'silv' is not among the choices",
        ),
        ("axial_pos_shape=[1.5, 2, x]", "'1.5' is not an integer; 'x' is not an integer"),
        ("adamw_mask=[[1],[2],[3],[4],[5]]", "[1] is not text; [2] is not text; [3] is not text"),
        ("adamw_mask=[[1],[2],[3],[4],[5]]", "; and 2 more\n"),
        (
            "weight_decay_overrides=[[a, x], [b]]",
            "'x' is not a finite number; [b] has too few parts",
        ),
        ("weight_decay_overrides=[[a, 1, 2]]", "[a, 1, 2] has too many parts"),
        ("dropout_rates.embedding=1", "1.0 is not < 1"),
        ("max_to_keep=0", "0 is not >= 1"),
        ("head_dim=0", "0 is not allowed"),
        (
            "layer_kinds={A: {head_dim: 0, mixer: x}, BB: {}, C: {steps: 3}}",
            "A: head_dim: 0 is not allowed; A: mixer: 'x' is not among the choices; "
            "'BB' is not one letter; and 1 more",
        ),
        ("scan_layers=2", "'2' is not one of auto or true or false"),
    ],
)
def test_messages_have_all_that_is_wrong_with_a_value(argument, message):
    with pytest.raises(ConfigurationError) as caught:
        load([argument])
    assert len(caught.value.problems) == 1
    assert message in str(caught.value)


def _even(number: int) -> int:
    if number % 2:
        raise ValueError("is odd")
    return number


@pytest.mark.parametrize(
    ("annotation", "text", "value"),
    [
        (tuple[Count, ...], "[1, 2e3]", (1, 2000)),
        (tuple[Count | None, ...], "[1, none]", (1, None)),
        (Annotated[int, AfterValidator(_even)], "4", 4),
        (Annotated[str, Field(min_length=3)], "007", "007"),
        (PurePosixPath, "a/b", PurePosixPath("a/b")),
        (dict[str, int], "{a: 1}", {"a": 1}),
    ],
)
def test_types_of_users_parts(annotation, text, value):
    converted = values.convert(values.from_text(text), annotation)
    assert converted == value
    assert type(converted) is type(value)


@pytest.mark.parametrize(
    ("annotation", "text", "message"),
    [
        (tuple[Count, ...], "[0, 1, x]", "0 is not >= 1; 'x' is not an integer"),
        (Annotated[int, AfterValidator(_even)], "3", "3 is odd"),
        (Annotated[str, Field(min_length=3)], "{}", "{} is not text"),
        (Annotated[str, Field(min_length=3)], "07", "'07' is refused: String should have at least"),
        (dict[str, int], "{a: x}", "'x' is refused: Input should be a valid integer"),
    ],
)
def test_wrong_values_of_users_types(annotation, text, message):
    with pytest.raises(values.InvalidValueError) as caught:
        values.convert(values.from_text(text), annotation)
    assert str(caught.value).startswith(message)


def test_file_values(write):
    path = write("steps: 1e3\nrun_name: 0123\nprompt: no\nmax_to_keep:\nmetrics_file: ''\n")
    config = load_config(path)
    assert (config.run.steps, config.run.run_name) == (1000, "0123")
    assert config.decoding.prompt == "no"
    assert config.checkpoint.max_to_keep is None


@given(st.text() | st.sampled_from(["none", "yes", "3", "x: y", "'q'", "[a]", "~", "a" * 300]))
@settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck))
def test_text_survives_writing_and_reading(write, value):
    if "\0" not in value:  # which no key takes
        assert load_config(write(f"prompt: {values.to_yaml(value)}\n")).decoding.prompt == value


def test_what_is_given_over_a_saved_configuration_counts(write):
    path = write(resolved_yaml(load_config(model_name="gpt2-124m", base_emb_dim=1536)), "old.yml")
    config = load_config(write("base_config: old.yml\nsteps: 3\n"))
    assert (config.run.steps, config.model.shape.base_emb_dim) == (3, 1536)
    other = load_config(path, model_name="gpt2-355m")
    assert (other.model.shape.base_emb_dim, other.model.shape.base_mlp_dim) == (1024, 4096)
    # A bundle cannot reach through a saved configuration.
    path = write(resolved_yaml(load_config()))
    with pytest.raises(ConfigurationError, match="decoder_block"):
        load_config(path, decoder_block="gpt2")
    load_config(path, decoder_block="llama2")


def test_differences():
    old, new = flatten(load_config(run_name="a")), flatten(load_config(run_name="a", steps=3))
    changed = ("150001", "3")
    assert diff_configs(old, new) == {"steps": changed, "learning_rate_schedule_steps": changed}
    stored = json.loads(json.dumps(new))  # which turns tuples into lists
    assert diff_configs(stored, new) == {}
    del stored["steps"]
    none = "(no such key)"
    assert diff_configs(stored | {"gone": 1}, new) == {"steps": (none, "3"), "gone": ("1", none)}


TEXT = "x" * 100_000
BOMBS = {
    "scalars": f'run_name: &a "{TEXT}"\nadamw_mask: [{",".join(["*a"] * 100_000)}]\n',
    "plain scalars": f"run_name: &a {TEXT}\nadamw_mask: [{','.join(['*a'] * 90_000)}]\n",
    "names": f'run_name: &a "{TEXT}"\nlayer_kinds: '
    f"{{{','.join(f'k{number}: *a' for number in range(9999))}}}\n",
    "lists": "a0: &a0 [x, x]\n"
    + "".join(f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 9)),
    "merge keys": "m0: &m0 {x: 1}\n"
    + "".join(f"m{i}: &m{i} {{<<: [*m{i - 1}, *m{i - 1}], y: *m{i - 1}}}\n" for i in range(1, 30)),
    "itself": "adamw_mask: &a [*a]\nlayer_kinds: &b {A: *b}\n",
    "the document": "&a {layer_kinds: *a}\n",
    "brackets": f"adamw_mask: {'[' * 400_000}\n",
    "braces": f"adamw_mask: {'{a: ' * 100_000}\n",
    "dashes": "- " * 400_000,
    "question marks": "? " * 400_000,
    "indentation": "".join(" " * i + "a:\n" for i in range(1300)),
    "integer": f"steps: {'9' * 900_000}\n",
    "float": f"learning_rate: 1e{'9' * 900_000}\n",
    "sexagesimal": f"steps: {'1:' * 400_000}1\n",
    "items": f"adamw_mask: [{'a,' * 490_000}]\n",
    "wrong items": f"ici_data_parallelism: [{'a,' * 49_000}]\n",
    "keys": "".join(f"k{i}: 1\n" for i in range(90_000)),
    "key": f"{'k' * 900}: 1\n",
    "name twice": "checkpoint_storage: {use_ocdbt: true, use_ocdbt: false}\n",
}


@pytest.mark.parametrize("text", BOMBS.values(), ids=BOMBS)
def test_hostile_yaml_is_refused_in_bounded_time(text, write):
    path = write(text)
    began = time.process_time()
    with pytest.raises(ConfigurationError) as caught:
        load([path])
    assert time.process_time() - began < 30
    assert len(str(caught.value)) < 20_000


def test_hostile_yaml_is_refused_in_bounded_memory(write):
    path = write(BOMBS["plain scalars"])
    tracemalloc.start()
    try:
        with pytest.raises(ConfigurationError):
            load([path])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 300e6


def test_a_few_aliases_and_anchors_are_read(write):
    path = write("adamw_mask: &a [bias, scale]\ntrainable_parameters_mask: *a\n")
    assert load([path]).config.optimizer.adamw_mask == ("bias", "scale")
    assert load([path]).config.optimizer.trainable_parameters_mask == ("bias", "scale")
