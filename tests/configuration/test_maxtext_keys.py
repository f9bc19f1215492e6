"""Every key that MaxText documents as much used is a key here, an alias, or explained."""

from pathlib import Path

import pytest

from MaxText.configuration.catalogue import all_keys
from MaxText.configuration.loading import load
from MaxText.configuration.maxtext_keys import (
    ALIASES,
    TRANSLATIONS,
    UNAVAILABLE,
    VALUE_NOTES,
    absent,
)
from MaxText.configuration.problems import ConfigurationError
from MaxText.configuration.reference_keys import REFERENCE_KEYS

# The keys that MaxText's base.yml and its documentation lead people to use, one per line.
MUCH_USED = (Path(__file__).parent / "maxtext_keys.txt").read_text(encoding="utf-8").split()


@pytest.mark.parametrize("name", MUCH_USED)
def test_known_one_way_or_another(name):
    assert (name in all_keys()) + (name in ALIASES) + (name in UNAVAILABLE) == 1


def test_aliases_lead_to_keys():
    for old, new in ALIASES.items():
        assert new in all_keys()
        assert old not in all_keys()


@pytest.mark.parametrize("name", UNAVAILABLE)
def test_absent_keys_are_explained(name, capsys):
    reason = UNAVAILABLE[name]
    assert name not in all_keys(), f"{name} is a key now: remove it from UNAVAILABLE"
    assert reason.why
    assert not reason.instead or reason.instead in all_keys()
    if reason.accepts == "any":
        load([f"{name}=something"])
        assert f"{name}=something has no effect here: {reason.sentence}" in capsys.readouterr().err
        return
    with pytest.raises(ConfigurationError) as caught:
        load([f"{name}=something"])  # some values hold here anyway
    assert reason.sentence in str(caught.value)


@pytest.mark.parametrize("off", ["false", "0", "", "null", "[]"])
def test_what_is_not_here_can_be_switched_off(off, capsys):
    names = [
        name
        for name, reason in UNAVAILABLE.items()
        if reason.accepts != "nothing" and (name, off or "null") not in TRANSLATIONS
    ]
    load([f"{name}={off}" for name in names])
    shown = capsys.readouterr().err
    assert all(f"note: {name}={off} " in shown for name in names)
    with pytest.raises(ConfigurationError):
        load([f"lerning_rate={off}"])


@pytest.mark.parametrize(("name", "value"), TRANSLATIONS)
def test_translated_values_are_accepted(name, value, capsys):
    found = TRANSLATIONS[name, value]
    common = ["run_name=r", "decoder_block=muddformer_prepost"]  # where its keys have an effect
    loaded = load([f"{name}={value}", *common])
    assert f"note: {name}={value} {found.sentence}" in capsys.readouterr().err
    if found.name:
        assert loaded.config == load([f"{found.name}={found.text}", *common]).config
    else:
        assert name not in all_keys()


@pytest.mark.parametrize("name", REFERENCE_KEYS)
def test_keys_of_other_programs_name_ours(name):
    whose, ours = REFERENCE_KEYS[name]
    assert name not in all_keys()
    assert name not in {**ALIASES, **UNAVAILABLE}
    assert ours in all_keys()
    with pytest.raises(ConfigurationError, match=f"{whose}; use {ours}"):
        load([f"{name}=something"])


def test_families():
    found = absent("sa_block_kv_dq")
    assert found is not None
    assert "attention=flash" in found.why
    assert absent("lerning_rate") is None
    # A near miss of one of our keys is a typing mistake, not a member of a family.
    with pytest.raises(ConfigurationError, match=r"nearest: +ici_fsdp_parallelism"):
        load(["ici_fsdp_paralelism=2"])


def test_values_with_a_note_are_not_accepted():
    for (name, value), note in VALUE_NOTES.items():
        with pytest.raises(ConfigurationError) as caught:
            load([f"{name}={value}"])
        assert note in str(caught.value)
