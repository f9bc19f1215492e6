"""A saved configuration gives the same configuration back."""

import pytest

from MaxText.configuration.catalogue import flat
from MaxText.configuration.loading import configure, load
from MaxText.configuration.problems import ConfigurationError
from MaxText.configuration.saved import differences, resolved_yaml

COMMAND_LINES = [
    [],
    ["steps=-1", "learning_rate_schedule_steps=7"],
    ["model_name=gpt2-124m", "base_emb_dim=1536", "learning_rate=1e-4"],
    ["model_name=pythia-70m", "position_embedding=none"],
    ["gpt2.yml", "run_name=gs://bucket/x", "prompt=none: 'é\n"],
    ["decoder_block=gpt_neox", "mlp_activations=[gelu]", "adamw_mask=['.*norm', '\\bb$']"],
    ["logical_axis_rules=[[embed,fsdp]]", "override_logical_axis_rules=true"],
    ["logical_axis_rules=[[embed,null],[mlp,[fsdp,tensor]]]", "max_to_keep=3"],
]


@pytest.mark.parametrize("arguments", COMMAND_LINES)
def test_loading_a_saved_configuration(arguments, write):
    config = load(arguments).config
    text = resolved_yaml(config)
    again = load([write(text)]).config
    assert again == config
    assert resolved_yaml(again) == text


def test_what_is_given_over_a_saved_configuration_counts(write):
    path = write(resolved_yaml(configure(model_name="gpt2-124m", base_emb_dim=1536)))
    assert configure(path, steps=3).run.steps == 3
    other = configure(path, model_name="gpt2-355m")
    assert (other.model.shape.base_emb_dim, other.model.shape.base_mlp_dim) == (1024, 4096)


def test_a_decoder_block_cannot_reach_through_a_saved_configuration(write):
    path = write(resolved_yaml(configure()))
    with pytest.raises(ConfigurationError, match="decoder_block: has no effect over a saved"):
        configure(path, decoder_block="gpt2")
    configure(path, decoder_block="llama2")


def test_a_saved_configuration_may_be_a_base(write):
    write(resolved_yaml(configure(model_name="gpt2-124m", base_emb_dim=1536)), "old.yml")
    config = configure(write("base_config: old.yml\nsteps: 3\n"))
    assert (config.run.steps, config.model.shape.base_emb_dim) == (3, 1536)


def test_differences():
    old, new = flat(configure(run_name="a")), flat(configure(run_name="a", steps=3))
    assert differences(old, new) == {
        "steps": ("150001", "3"),
        "learning_rate_schedule_steps": ("150001", "3"),
    }
    # Storage as JSON turns tuples into lists.
    stored = {
        name: list(value) if isinstance(value, tuple) else value for name, value in new.items()
    }
    assert differences(stored, new) == {}
    del stored["steps"]
    assert differences(stored | {"gone": 1}, new) == {
        "steps": ("(no such key)", "3"),
        "gone": ("1", "(no such key)"),
    }
