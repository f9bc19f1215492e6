"""Keys with entries."""

import pytest

from MaxText.config.loading import load, load_config
from MaxText.config.problems import ConfigurationError
from MaxText.config.schema import flatten
from MaxText.config.serialization import diff_configs, renamed, with_current_names
from MaxText.config.values import to_yaml


def test_entries_of_stronger_layers_replace_only_themselves(write, monkeypatch):
    path = write("opt_type: adafactor\nadafactor: {momentum: 0.1, decay_exponent: 0.5}\n")
    monkeypatch.setenv("M_ADAFACTOR", "{decay_exponent: 0.6}")
    arguments = [path, "adafactor.momentum=0.2", "adafactor_clipping_threshold=3"]
    found = load(arguments).config.optimizer.adafactor
    assert (found.momentum, found.decay_exponent, found.clipping_threshold) == (0.2, 0.6, 3)
    assert found.min_dim_size_to_factor == 128


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("adafactor.momentum=1", "adafactor: momentum: 1.0 is not >= 0 and < 1"),
        ("adafactor={momentun: 0.1}", "no entry momentun; nearest: momentum"),
        ("adafactor=3", "is not {entry: value}"),
        ("growth.mode=zeros", "nearest:  zero"),
    ],
)
def test_mistakes(word, said):
    with pytest.raises(ConfigurationError) as caught:
        load([word])
    assert said in str(caught.value)


def test_older_saved_configurations_load_silently(write, capsys):
    old = {"adafactor_momentum": 0.5, "max_rewinds": 7, "load_parameters_zero_init": False}
    lines = "".join(f"{name}: {str(value).lower()}\n" for name, value in old.items())
    config = load([write(f"schema_version: 1\n{lines}run_name: r\n")]).config
    assert (config.optimizer.adafactor.momentum, config.guard.rollback.maximum) == (0.5, 7)
    assert capsys.readouterr().err == ""
    current = flatten(load_config(run_name="r"))
    assert with_current_names(old, "x").keys() == {"adafactor", "rollback"}
    rate, rest = {"old_slots_learning_rate": 0.5}, {"moments": "reused", "allow_shrinking": True}
    growth = {"growth": rate | rest, "dense_hidden_rounding": "ceil"}
    path = write(f"schema_version: 1\ngrowth: {to_yaml(rate | rest)}\nrun_name: r\n")
    new = {"existing_slots_lr_scale": 0.5, "opt_state": "reused", "allow_truncation": True}
    assert new.items() <= dict(load_config(path).checkpoint.growth).items()
    assert with_current_names(growth, "x") == {"growth": new, "dynamic_dense_hidden_round": "ceil"}
    assert diff_configs(current | {"adafactor_momentum": 0.5}, current).keys() == {"adafactor"}
    # As a comparison identifies a stage of its arms.
    stage = {f"{name} of stage 1": value for name, value in growth.items()}
    assert renamed(stage) == {f"{name} of stage 1": v for name, v in renamed(growth).items()}


@pytest.mark.parametrize("given", ["-1", "0, existing_slots_lr_scale: 0.5"])
def test_mistakes_under_an_earlier_name_of_an_entry(write, given, capsys):
    path = write(f"growth: {{old_slots_learning_rate: {given}}}\n")
    with pytest.raises(ConfigurationError, match=r"existing_slots_lr_scale: (-1\.0 is|given twi)"):
        load([path])
    assert "growth.old_slots_learning_rate is called" in capsys.readouterr().err
