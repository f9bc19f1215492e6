"""Sweeps, labels, and differences that nobody asked for."""

import pytest

from MaxText.comparison import variants
from MaxText.comparison.request import Request, read
from MaxText.comparison.variants import expand, expand_sweep, other_differences
from MaxText.configuration import values
from MaxText.configuration.catalogue import flat
from MaxText.configuration.problems import ConfigurationError


def asked(*arguments: str) -> Request:
    request, problems = read(arguments)
    assert not problems
    return request


def labels(*arguments: str) -> list[str]:
    return [variant.label for variant in expand(asked(*arguments))]


def refusal(*arguments: str) -> str:
    with pytest.raises(ConfigurationError) as caught:
        expand(asked(*arguments))
    return str(caught.value)


def test_a_mapping_is_a_product_with_the_last_key_fastest():
    assert expand_sweep({"a": ["1", "2"], "b": ["x", "y"], "c": "z"}) == [
        {"a": "1", "b": "x", "c": "z"},
        {"a": "1", "b": "y", "c": "z"},
        {"a": "2", "b": "x", "c": "z"},
        {"a": "2", "b": "y", "c": "z"},
    ]


def test_a_list_of_mappings_is_one_after_the_other():
    assert expand_sweep([{"a": ["1", "2"]}, {"b": "3"}]) == [{"a": "1"}, {"a": "2"}, {"b": "3"}]


@pytest.mark.parametrize("sweep", [[], {}, "word", ["word"], {"a": []}, [{}]])
def test_what_is_no_sweep(sweep):
    with pytest.raises(values.WrongValue):
        expand_sweep(sweep)


def test_swept_values_have_the_types_of_their_keys(configs):
    sweep = "sweep={learning_rate: [1e-3, 3e-3], mlp_activations: [[gelu], [silu, linear]]}"
    found = expand(asked("a.yml", sweep))
    config = [flat(variant.config) for variant in found]
    assert [one["learning_rate"] for one in config] == [1e-3, 1e-3, 3e-3, 3e-3]
    assert [one["mlp_activations"] for one in config] == [("gelu",), ("silu", "linear")] * 2
    assert found[1].label == "learning_rate=1e-3,silu+linear"
    assert found[1].swept == ("learning_rate", "mlp_activations")


def test_words_label_themselves_and_numbers_name_their_key(configs):
    assert labels("a.yml", "b.yml") == ["a", "b"]
    assert labels("a.yml", "sweep={position_embedding: [rotary, learned]}") == ["rotary", "learned"]
    assert labels("a.yml", "b.yml", "sweep={qkv_bias: [true, false]}") == [
        "a,qkv_bias=true", "a,qkv_bias=false", "b,qkv_bias=true", "b,qkv_bias=false",
    ]  # fmt: skip
    assert labels("a.yml", "a.yml") == [f"{configs.name}-a", f"{configs.name}-a_2"]


def test_the_same_configuration_twice_is_noted(configs, capsys):
    labels("a.yml", "a.yml", "b.yml")
    name = configs.name
    line = f"note: {name}-a and {name}-a_2 are the same configuration\n"
    assert capsys.readouterr().err.count(line) == 1


def test_files_of_the_same_name_are_told_apart_by_their_folder(configs):
    for folder in ("one", "two"):
        (configs / folder).mkdir()
        (configs / folder / "c.yml").write_text("base_config: ../a.yml\n")
    assert labels("one/c.yml", "two/c.yml") == ["one-c", "two-c"]


def test_a_file_may_hold_its_sweep_and_the_command_line_another(configs):
    text = "base_config: a.yml\nsweep:\n  learning_rate: [1.0e-3, 2.0e-3]\n"
    (configs / "swept.yml").write_text(text)
    (configs / "on.yml").write_text("base_config: swept.yml\nsteps: 7\n")
    assert labels("swept.yml") == ["learning_rate=1.0e-3", "learning_rate=2.0e-3"]
    assert len(labels("on.yml")) == 2
    assert labels("swept.yml", "sweep={steps: [1, 2, 3]}") == ["steps=1", "steps=2", "steps=3"]
    assert labels("a.yml", "swept.yml") == [
        "a", "swept,learning_rate=1.0e-3", "swept,learning_rate=2.0e-3",
    ]  # fmt: skip


def test_the_environment_ranks_below_a_sweep(configs, monkeypatch):
    monkeypatch.setenv("M_LEARNING_RATE", "5e-3")
    monkeypatch.setenv("M_STEPS", "9")
    found = expand(asked("a.yml", "sweep={learning_rate: [1e-3, 2e-3]}"))
    assert [one.config.schedule.learning_rate for one in found] == [1e-3, 2e-3]
    assert [one.config.run.steps for one in found] == [9, 9]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no configurations are named"),
        (["a.yml"], "nothing to compare it with"),
        (["a.yml", "none.yml"], "config file 'none.yml' not found"),
        (["a.yml", "b.yml", "stepz=1"], "1 problem in the configuration"),
        (["a.yml", "sweep={stepz: [1, 2]}"], "nearest:  steps"),
        (["a.yml", "sweep={steps: [x, 2]}"], "'x' is not an integer"),
        (["a.yml", "steps=3", "sweep={steps: [1, 2]}"], "swept as well"),
        (["a.yml", "sweep={data_shuffle_seed: [1, 2]}"], "cannot be swept; seeds= sets it"),
        (["a.yml", "sweep={run_name: [x, y]}"], "cannot be swept; output= sets it"),
        (["a.yml", "sweep=[{steps: 1}, steps]"], "'steps' is no mapping"),
        (["a.yml", "b.yml", "dataset_type=grain"], "no data set is named"),
    ],
)
def test_mistakes(configs, arguments, message):
    assert message in refusal(*arguments)


def test_a_mistake_in_the_sweep_of_a_file_is_placed_there(configs):
    (configs / "swept.yml").write_text("base_config: a.yml\nsweep: {steps: [x], run_name: [y]}\n")
    assert "swept.yml:2" in refusal("swept.yml", "a.yml")
    (configs / "swept.yml").write_text("base_config: a.yml\nsweep: {steps: [x, 3]}\n")
    message = refusal("swept.yml")
    assert "swept.yml:2, steps=x" in message
    assert "command line" not in message


def test_notices_of_many_configurations_are_shown_once(configs, monkeypatch, capsys):
    monkeypatch.setenv("M_LERNING_RATE", "5e-3")
    expand(asked("a.yml", "b.yml", "sweep={steps: [1, 2, 3]}"))
    assert capsys.readouterr().err.count("M_LERNING_RATE has no effect") == 1


def test_differences_outside_the_model_are_named(configs):
    text = "base_config: a.yml\nlearning_rate: 2.0e-2\nvocab_size: 128\nbase_emb_dim: 48\n"
    (configs / "c.yml").write_text(text + "run_name: own\nlog_period: 7\nsteps: 5\n")
    found = expand(asked("a.yml", "c.yml"))
    lines = other_differences(found, {})
    assert [line.partition(":")[0] for line in lines] == [
        "steps", "vocab_size", "learning_rate", "learning_rate_schedule_steps",
    ]  # fmt: skip
    assert "learning_rate: 0.01 (a); 0.02 (c)" in lines
    assert "vocab_size: 64 (a); 128 (c): losses may not be of the same thing" in lines
    solved = {"c": {"steps", "learning_rate_schedule_steps"}}
    left = [line.partition(":")[0] for line in other_differences(found, solved)]
    assert left == ["vocab_size", "learning_rate"]


def test_swept_keys_differ_on_purpose(configs):
    assert not other_differences(expand(asked("a.yml", "sweep={learning_rate: [1, 2]}")), {})
    (line,) = other_differences(expand(asked("a.yml", "sweep={vocab_size: [64, 128]}")), {})
    assert line.endswith("losses may not be of the same thing")


def test_the_lists_of_keys_name_keys():
    known = set(flat(variants.Config()))
    assert known >= variants._UNLIKE_LOSSES | variants._WITHOUT_EFFECT | set(variants._PLACE)
