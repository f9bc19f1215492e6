"""Text, YAML and Python values become values of the right type."""

import pytest

from MaxText.configuration import values
from MaxText.configuration.catalogue import all_keys, flat
from MaxText.configuration.loading import configure, load
from MaxText.configuration.problems import ConfigurationError


def typed(argument: str):
    name = argument.partition("=")[0]
    return flat(load([argument]).config)[name]


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("steps=1_000", 1000),
        ("steps=3.0", 3),
        ("steps=1e3", 1000),
        ("learning_rate=3e-5", 3e-5),
        ("learning_rate=1", 1.0),
        ("packing=False", False),
        ("packing=true", True),
        ("packing=0", False),
        ("reuse_example_batch=1", True),
        ("max_to_keep=none", None),
        ("max_to_keep=None", None),
        ("max_to_keep=null", None),
        ("max_to_keep=3", 3),
        ("scan_layers=auto", "auto"),
        ("scan_layers=true", True),
        ("position_embedding=none", "none"),
        ("remat_policy=none", "none"),
        ("profiler=none", ""),
        ("run_name=123", "123"),
        ("run_name=007", "007"),
        ("prompt=yes", "yes"),
        ("prompt=[hello]", "[hello]"),
        ("prompt=Note: a=b", "Note: a=b"),
        ("prompt=1e3 # 2", "1e3 # 2"),
        ("prompt='none'", "none"),
        ("metrics_file=", ""),
        ("dataset_path=DIR/train*", "DIR/train*"),
        ("load_parameters_path=gs://b/x=1/items", "gs://b/x=1/items"),
        ("load_parameters_path=none", ""),
        ("mlp_activations=[gelu]", ("gelu",)),
        ("mlp_activations=[silu, linear]", ("silu", "linear")),
        ("adamw_mask=['.*norm','bias$']", (".*norm", "bias$")),
        ("weight_decay_overrides=[[norm, 0],[bias,1e-2]]", (("norm", 0.0), ("bias", 0.01))),
    ],
)
def test_command_line_values(argument, value):
    result = typed(argument)
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
        "steps='3'",
        "learning_rate=fast",
        "learning_rate=nan",
        "learning_rate=inf",
        "learning_rate=0",
        "packing=maybe",
        "packing=2",
        "dtype=bf16",
        "dtype=none",
        "mlp_activations=gelu",
        "mlp_activations=[gelu, gelo]",
        "weight_decay_overrides=[[norm]]",
        "dropout_rate=1",
        "max_to_keep=0",
    ],
)
def test_wrong_values_name_key_place_and_default(argument):
    name, _, raw = argument.partition("=")
    with pytest.raises(ConfigurationError) as caught:
        load([argument])
    (problem,) = caught.value.problems
    message = str(caught.value)
    assert problem.what.startswith(f"{name}: ")
    assert f"command line, {name}={raw}" in message
    assert "accepted:" in message
    assert f"default:  {values.to_yaml(all_keys()[name].default)}" in message


def test_bounds_and_choices_are_said():
    with pytest.raises(ConfigurationError, match=r"2\.0 is not >= 0 and < 1"):
        load(["dropout_rate=2"])
    with pytest.raises(ConfigurationError, match=r"(?s)auto, bfloat16.*nearest: +bfloat16"):
        load(["dtype=bfloat61"])


def test_python_values():
    config = configure(mlp_activations=["gelu"], learning_rate=1, run_name="123", max_to_keep=None)
    assert config.model.feed_forward.mlp_activations == ("gelu",)
    assert config.schedule.learning_rate == 1.0
    for wrong in ({"packing": "true"}, {"steps": "3"}, {"steps": True}, {"run_name": 3}):
        with pytest.raises(ConfigurationError, match=r"argument of configure\(\)"):
            configure(**wrong)


def test_file_values(write):
    path = write("steps: 1e3\nrun_name: 0123\nprompt: no\nmax_to_keep:\nmetrics_file: ''\n")
    config = configure(path)
    assert config.run.steps == 1000
    assert config.run.run_name == "0123"
    assert config.decoding.prompt == "no"
    assert config.checkpoint.max_to_keep is None


@pytest.mark.parametrize(
    "value",
    [
        "",
        "none",
        "yes",
        "3",
        "a b",
        "x: y",
        "'q'",
        "é\n\t☃",
        "[a]",
        "-x",
        "🙂",
        "a" * 300,
        "#",
        "~",
    ],
)
def test_text_survives_writing_and_reading(value, write):
    path = write(f"prompt: {values.to_yaml(value)}\n")
    assert configure(path).decoding.prompt == value


def test_every_default_survives_writing_and_reading(write):
    text = "".join(f"{key.name}: {values.to_yaml(key.default)}\n" for key in all_keys().values())
    assert flat(configure(write(text), run_name="r")) == flat(configure(run_name="r"))


def test_nested_aliases_end(write):
    path = write("adamw_mask: &a [*a]\n")
    with pytest.raises(ConfigurationError, match="nested more than"):
        configure(path)
