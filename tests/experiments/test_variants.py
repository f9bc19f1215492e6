"""Sweeps, labels, and unintended differences."""

import shlex

import pytest

from MaxText.config import values
from MaxText.config.schema import flatten
from MaxText.experiments import variants as module
from MaxText.experiments.compare_args import expand_sweep
from MaxText.experiments.variants import confounding_keys
from tests.experiments.small_comparison import refusals, variants


def labels(*arguments: str) -> list[str]:
    return [variant.label for variant in variants(*arguments)]


def test_a_mapping_is_a_product_and_a_list_is_one_after_the_other():
    assert expand_sweep({"a": ["1", "2"], "b": ["x", "y"], "c": "z"}) == [
        {"a": "1", "b": "x", "c": "z"},
        {"a": "1", "b": "y", "c": "z"},
        {"a": "2", "b": "x", "c": "z"},
        {"a": "2", "b": "y", "c": "z"},
    ]
    assert expand_sweep([{"a": ["1", "2"]}, {"b": "3"}]) == [{"a": "1"}, {"a": "2"}, {"b": "3"}]
    by_key = [{"adafactor.momentum": 0}, {"adafactor.momentum": 0.9}]
    assert expand_sweep({"adafactor.momentum": [0, 0.9]}) == by_key
    assert expand_sweep({"adafactor": {"momentum": [0, 0.9]}}) == by_key
    assert expand_sweep({"adafactor": [{"momentum": 0}, {"momentum": 0.9}]}) == by_key
    for wrong in ([], {}, "word", ["word"], {"a": []}, [{}]):
        with pytest.raises(values.InvalidValueError):
            expand_sweep(wrong)


def test_swept_values_have_the_types_of_their_keys(configs):
    sweep = "sweep={learning_rate: [1e-3, 3e-3], mlp_activations: [[gelu], [silu, linear]]}"
    swept = variants("a.yml", sweep)
    config = [flatten(variant.config) for variant in swept]
    assert [keys["learning_rate"] for keys in config] == [1e-3, 1e-3, 3e-3, 3e-3]
    assert [keys["mlp_activations"] for keys in config] == [("gelu",), ("silu", "linear")] * 2
    assert swept[1].label == "learning_rate=1e-3,silu+linear"
    assert swept[1].swept == ("learning_rate", "mlp_activations")


def test_labels(configs, capsys):
    """Words label themselves, numbers name their key, and files of one name their folder."""
    assert labels("a.yml", "b.yml") == ["a", "b"]
    assert labels("a.yml", "sweep={position_embedding: [rotary, learned]}") == ["rotary", "learned"]
    assert labels("a.yml", "b.yml", "sweep={qkv_bias: [true, false]}") == [
        "a,qkv_bias=true",
        "a,qkv_bias=false",
        "b,qkv_bias=true",
        "b,qkv_bias=false",
    ]
    (configs / "other").mkdir()
    (configs / "other" / "a.yml").write_text("base_config: ../b.yml\n")
    label = f"{configs.name}-a"
    capsys.readouterr()
    assert labels("a.yml", "a.yml", "other/a.yml") == [label, f"{label}_2", "other-a"]
    (note,) = capsys.readouterr().err.splitlines()  # the same configuration twice
    assert label in note
    assert f"{label}_2" in note


def test_a_file_may_hold_its_sweep_and_the_command_line_another(configs):
    text = "base_config: a.yml\nsweep:\n  learning_rate: [1.0e-3, 2.0e-3]\n"
    (configs / "swept.yml").write_text(text)
    (configs / "on.yml").write_text("base_config: swept.yml\nsteps: 7\n")
    assert labels("on.yml") == ["learning_rate=1.0e-3", "learning_rate=2.0e-3"]
    assert labels("swept.yml", "sweep={steps: [1, 2, 3]}") == ["steps=1", "steps=2", "steps=3"]
    assert labels("a.yml", "swept.yml") == [
        "a",
        "swept,learning_rate=1.0e-3",
        "swept,learning_rate=2.0e-3",
    ]


def test_the_environment_ranks_below_a_sweep(configs, monkeypatch, capsys):
    monkeypatch.setenv("M_LEARNING_RATE", "5e-3")
    monkeypatch.setenv("M_STEPS", "9")
    monkeypatch.setenv("M_LERNING_RATE", "5e-3")
    swept = variants("a.yml", "sweep={learning_rate: [1e-3, 2e-3]}")
    assert [variant.config.schedule.learning_rate for variant in swept] == [1e-3, 2e-3]
    assert [variant.config.run.steps for variant in swept] == [9, 9]
    # Notices of many configurations are shown once.
    assert capsys.readouterr().err.count("M_LERNING_RATE") == 1


MISTAKES = [
    "",
    "a.yml",
    "a.yml b.yml stepz=1",
    "a.yml 'sweep={stepz: [1, 2]}'",
    "a.yml 'sweep={steps: [x, 2]}'",
    "a.yml steps=3 'sweep={steps: [1, 2]}'",
    "a.yml 'sweep={data_shuffle_seed: [1, 2]}'",
    "a.yml 'sweep={run_name: [x, y]}'",
    "a.yml b.yml dataset_type=grain",
    "swept.yml",
]


def test_mistakes(configs, told):
    (configs / "swept.yml").write_text("base_config: a.yml\nsweep: {steps: [x, 3]}\n")
    told(refusals(MISTAKES, lambda line: variants(*shlex.split(line))))


def test_unintended_differences(configs):
    text = "base_config: a.yml\nlearning_rate: 2.0e-2\nvocab_size: 128\nbase_emb_dim: 48\n"
    (configs / "c.yml").write_text(text + "run_name: own\nlog_period: 7\nsteps: 5\n")
    compared = variants("a.yml", "c.yml")
    lines = dict(line.split(": ", 1) for line in confounding_keys(compared, {}))
    assert list(lines) == [
        "steps",
        "vocab_size",
        "learning_rate",
        "learning_rate_schedule_steps",
    ]
    assert lines["learning_rate"] == "0.01 (a); 0.02 (c)"
    # Losses over other vocabularies are not of the same thing.
    assert lines["vocab_size"].startswith("64 (a); 128 (c): ")
    solved = {"c": {"steps", "learning_rate_schedule_steps"}}
    reported = [line.partition(":")[0] for line in confounding_keys(compared, solved)]
    assert reported == ["vocab_size", "learning_rate"]
    # Swept keys differ on purpose.
    assert not confounding_keys(variants("a.yml", "sweep={learning_rate: [1, 2]}"), {})
    (line,) = confounding_keys(variants("a.yml", "sweep={vocab_size: [64, 128]}"), {})
    assert line.startswith("vocab_size: ")


def test_the_lists_of_keys_name_keys():
    key_names = set(flatten(module.Config()))
    assert key_names >= module._UNLIKE_LOSSES | module._WITHOUT_EFFECT | set(module._PLACE)
