"""The declaration of keys and sections, and the files that are generated from it: by `python -m
MaxText.config.documentation`, and with UPDATE_RESOLVED=1 by the tests of this folder."""

import os
from pathlib import Path

import pytest
import yaml

from MaxText.config import documentation, registry
from MaxText.config.config_files import BASE_YML, read
from MaxText.config.loading import load, load_config
from MaxText.config.problems import ConfigurationError
from MaxText.config.schema import Config, all_keys, flatten, keys_by_section, unflatten

PUBLIC_KEYS = Path(__file__).parent / "public_keys.txt"


def test_generated_files_are_up_to_date():
    assert BASE_YML.read_text(encoding="utf-8") == documentation.base_yml()
    assert registry.BUILT_IN.read_text(encoding="utf-8") == documentation.built_in_yml()
    text = documentation.CONFIGURATION_MD.read_text(encoding="utf-8")
    assert text == documentation.configuration_md()


def test_base_yml_holds_exactly_the_defaults(write):
    entries, problems = read(BASE_YML)
    assert not problems
    assert [entry.name for entry in entries] == list(all_keys())
    assert load_config("base.yml", run_name="r") == load_config(run_name="r")
    # A copy under another name is an ordinary config file: every value counts, and is the default.
    copy = write(BASE_YML.read_text(encoding="utf-8"), "copy.yml")
    assert load_config(copy, run_name="r") == load_config(run_name="r")


def test_the_default_configuration_is_the_schema():
    config = Config()
    assert unflatten(flatten(config)) == config
    assert list(flatten(config)) == list(all_keys())
    defaults = flatten(config)
    changed = {name for name, value in flatten(load_config()).items() if value != defaults[name]}
    assert changed == {"run_name", "base_output_directory", "learning_rate_schedule_steps"}


def test_public_keys():
    names = "".join(f"{name}\n" for name in sorted(all_keys()))
    if os.environ.get("UPDATE_RESOLVED"):
        PUBLIC_KEYS.write_text(names, encoding="utf-8")
    assert PUBLIC_KEYS.read_text(encoding="utf-8") == names


def test_every_key_is_documented():
    for keys in keys_by_section().values():
        assert keys[0].title
    for key in all_keys().values():
        assert key.help, key.name
        assert key.help.endswith("."), key.name
        for group in key.conditions:
            for other, effective in group.items():
                assert other in all_keys(), f"{key.name} depends on the unknown key {other}"
                assert effective, key.name


def test_sections_are_frozen_and_refuse_unknown_fields():
    with pytest.raises(ValueError, match="frozen"):
        Config().run.steps = 3
    with pytest.raises(ValueError, match="stepz"):
        Config.model_validate({"run": {"stepz": 3}})


OWN_KEYS = """
from MaxText.config.keys import Section, key

class Keys(Section):
    "Mine."
    my_width: int = key(3, "How wide it is.", ge=1)
"""
OWN_PART = """
from MaxText.layers.part import Mixer, register
from own_keys import Keys

@register("mixer", "mine", keys=Keys)
class Mine(Mixer):
    "The input, once more."

    def __call__(self, x_BTD, context):
        return x_BTD, {}
"""


def test_a_built_in_part_with_keys_of_its_own(tmp_path, monkeypatch):
    (tmp_path / "own_keys.py").write_text(OWN_KEYS)
    (tmp_path / "own_part.py").write_text(OWN_PART)
    path = tmp_path / "own_part.py"
    [(kind, name, text)] = documentation._registered_in(path, module="own_part")
    assert (kind, name) == ("mixer", "mine")
    assert text == "own_part:Mine own_keys:Keys"

    parts = yaml.safe_load(registry.BUILT_IN.read_text(encoding="utf-8"))
    parts["mixer"]["mine"] = text
    (tmp_path / "built_in.yml").write_text(yaml.safe_dump(parts))
    monkeypatch.setattr(registry, "BUILT_IN", tmp_path / "built_in.yml")
    monkeypatch.syspath_prepend(tmp_path)
    before = registry.registrations()
    try:
        registry.read_built_in()
        model = load_config(mixer="mine", my_width=7).model
        part = registry.lookup("mixer", "mine")
        assert part.__module__ == "own_part"
        assert part.config_of(model.layers[0]).my_width == 7
        with pytest.raises(ConfigurationError, match="mixer=mine has no decode state"):
            load(["mixer=mine"], "decode.py")
    finally:
        registry.keep_only(before)
