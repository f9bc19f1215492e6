"""Keys of named sections: dotted, or nested as YAML allows."""

import pytest
import yaml

from MaxText.config import registry, schema
from MaxText.config.command_line import explain_value
from MaxText.config.config_files import BASE_YML
from MaxText.config.keys import NamedSection, Section, key
from MaxText.config.loading import load, load_config
from MaxText.config.problems import ConfigurationError
from MaxText.config.registry import RegistrationError
from MaxText.config.schema import all_keys, dotted, flatten, named_sections, unflatten
from MaxText.config.serialization import resolved_yaml


def test_keys_of_stronger_layers_replace_only_themselves(write, monkeypatch):
    path = write("opt_type: adafactor\nadafactor: {momentum: 0.1, decay_exponent: 0.5}\n")
    monkeypatch.setenv("M_ADAFACTOR", "{decay_exponent: 0.6, epsilon_gradient: 1}")
    monkeypatch.setenv("M_ADAFACTOR__EPSILON_PARAMETER", "0.7")
    arguments = [path, "adafactor.momentum=0.2", "adafactor={clipping_threshold: 3}"]
    adafactor = load(arguments).config.optimizer.adafactor
    assert (adafactor.momentum, adafactor.decay_exponent) == (0.2, 0.6)
    assert (adafactor.epsilon_gradient, adafactor.epsilon_parameter) == (1, 0.7)
    assert adafactor.clipping_threshold == 3
    assert adafactor.min_dim_size_to_factor == 128


def test_each_nested_key_has_a_line_and_an_origin(write):
    path = write("opt_type: adafactor\nadafactor:\n  momentum: 0.1\n  decay_exponent: 0.5\n")
    loaded = load([path, "adafactor.momentum=0.2"])
    assert f"{path}:4, adafactor.decay_exponent: 0.5" in explain_value(
        loaded, "adafactor.decay_exponent"
    )
    first, *beaten = explain_value(loaded, "adafactor.momentum").splitlines()
    assert first == "adafactor.momentum=0.2"
    assert [line.split(":", 1)[1].strip() for line in beaten] == [
        "command line, adafactor.momentum=0.2",
        f"config file, {path}:3, adafactor.momentum: 0.1",
        "schema default, 0.0",
    ]


def test_nested_and_dotted_settings_are_the_same():
    nested = load_config(run_name="r", opt_type="adafactor", adafactor={"momentum": 0.5})
    assert nested == load_config(run_name="r", opt_type="adafactor", **{"adafactor.momentum": 0.5})
    keys = {"steps": 3, "adafactor": {"momentum": 0.5}, "layer_kinds": {"A": {"mixer": "none"}}}
    assert dotted(keys) == {
        "steps": 3,
        "adafactor.momentum": 0.5,
        "layer_kinds": {"A": {"mixer": "none"}},
    }


def test_what_is_written_is_flat_and_reads_back():
    config = load_config(run_name="r", **{"dropout_rates.residual": 0.5})
    flat = flatten(config)
    assert list(flat) == list(all_keys())
    assert flat["dropout_rates.residual"] == 0.5
    assert unflatten(flat) == config
    for text in (resolved_yaml(config), BASE_YML.read_text(encoding="utf-8")):
        written = yaml.safe_load(text)
        assert set(all_keys()) <= set(written)
        assert not set(named_sections()) & set(written)


def test_conditions_of_the_sections_around_a_key_hold_for_it():
    conditions = all_keys()["moe_second.threshold"].conditions
    assert [name for group in conditions for name in group] == [
        "num_experts",
        "num_experts_per_tok",
    ]
    assert not all_keys()["bad_records.action"].conditions  # only_if={} drops those


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("adafactor.momentum=1", "adafactor.momentum: 1.0 is not < 1"),
        ("adafactor={momentum: 1}", "adafactor.momentum: 1.0 is not < 1"),
        ("adafactor={momentun: 0.1}", "adafactor.momentun: unknown key"),
        ("adafactor={momentun: 0.1}", "nearest:  adafactor.momentum\n"),
        ("dropout_rates.foo=0.1", "dropout_rates.embedding, dropout_rates.attention, dropout_rate"),
        ("adafactor=3", "adafactor: '3' is not {key: value}"),
        ("adafactor=3", "accepted: {key: value}, of decay_exponent, "),
        ("growth.mode=zeros", "nearest:  zero"),
    ],
)
def test_mistakes(word, said):
    with pytest.raises(ConfigurationError) as caught:
        load([word])
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("adafactor: {momentum: 0.1, momentum: 0.1}\n", "adafactor.momentum: given twice in one"),
        ("adafactor: {momentum: 0.1}\nadafactor.momentum: 0.2\n", "given twice with different"),
        ("adafactor: {momentum: &a [*a]}\n", "adafactor.momentum: is nested"),
        ("adafactor:\n", "adafactor: '' is not {key: value}"),
    ],
)
def test_mistakes_in_files(text, said, write):
    with pytest.raises(ConfigurationError) as caught:
        load([write(text)])
    assert said in str(caught.value)


class Gate(NamedSection):
    """Gate of a part."""

    bias: float = key(0.0, "Its bias.", ge=0)


class GatedKeys(Section):
    """A part with a section inside."""

    gate: Gate = Gate()
    width_of_gate: int = key(1, "Its width.")


class KeysThatTakeASection(Section):
    """A part with a key in the name of a section."""

    adafactor: int = key(1, "Not allowed.")


@pytest.fixture
def _restored_parts():
    parts = registry.registrations()
    yield
    registry.keep_only(parts)


@pytest.mark.usefixtures("_restored_parts")
def test_sections_in_the_keys_of_a_part():
    registry.register("mixer", "gated", keys=GatedKeys)(object)
    config = load_config(run_name="r", gate={"bias": 2})
    part = config.model.parts.named("mixer.gated")
    assert part.gate.bias == flatten(config)["gate.bias"] == 2
    assert "gate.bias" in schema.keys_of_layers()
    changed = config.model.with_values({"gate.bias": 3.0, "width_of_gate": 5})
    assert changed.parts.values_by_key() == {"width_of_gate": 5, "gate.bias": 3.0}


@pytest.mark.usefixtures("_restored_parts")
def test_a_key_cannot_have_the_name_of_a_section():
    registry.register("mixer", "named", keys=KeysThatTakeASection)(object)
    with pytest.raises(RegistrationError, match="there is a section 'adafactor'"):
        all_keys()
