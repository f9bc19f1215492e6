"""Every key of MaxText's base.yml is a key here, an alias, or refused with a reason."""

from pathlib import Path

import pytest

from MaxText.config import maxtext_keys
from MaxText.config.loading import load, load_config
from MaxText.config.problems import ConfigurationError
from MaxText.config.schema import all_keys, all_names

# The keys of MaxText 0.2.5's base.yml and of its documentation, one per line.
MAXTEXT = (Path(__file__).parent / "maxtext_keys.txt").read_text(encoding="utf-8").split()


def test_known_one_way_or_another():
    kinds = (all_keys(), maxtext_keys.ALIASES, maxtext_keys.UNSUPPORTED)
    for name in MAXTEXT:
        assert sum(name in kind for kind in kinds) == 1, name
    for old, new in maxtext_keys.ALIASES.items():
        assert new in all_names()
        assert old not in all_keys()


def test_absent_keys_are_explained(capsys):
    for name, reason in maxtext_keys.UNSUPPORTED.items():
        assert name not in all_keys(), f"{name} is a key now: remove it from maxtext_keys.yml"
        assert reason.why
        assert not reason.replacement or reason.replacement in all_keys()
    kinds = {reason.accepts: name for name, reason in maxtext_keys.UNSUPPORTED.items()}
    for name in kinds.values():
        reason = maxtext_keys.UNSUPPORTED[name]
        if reason.accepts == "any":
            load([f"{name}=something"])
            shown = capsys.readouterr().err
            assert f"{name}=something" in shown
        else:
            with pytest.raises(ConfigurationError) as caught:
                load([f"{name}=something"])  # some values hold here anyway
            shown = str(caught.value)
        assert reason.sentence in shown
    # Of a family of keys.
    assert "attention=flash" in maxtext_keys.find_unsupported("sa_block_kv_dq").why
    assert maxtext_keys.find_unsupported("lerning_rate") is None


@pytest.mark.parametrize("off", ["false", "0", "", "null", "[]"])
def test_what_is_not_here_can_be_switched_off(off, capsys):
    names = [
        name
        for name, reason in maxtext_keys.UNSUPPORTED.items()
        if reason.accepts != "nothing" and (name, off or "null") not in maxtext_keys.TRANSLATIONS
    ]
    load([f"{name}={off}" for name in names])
    shown = capsys.readouterr().err
    assert all(f"note: {name}={off} " in shown for name in names)
    with pytest.raises(ConfigurationError):
        load([f"lerning_rate={off}"])


def test_translated_values_are_accepted(capsys):
    common = ["run_name=r", "decoder_block=muddformer_prepost"]  # where its keys have an effect
    for (name, value), found in maxtext_keys.TRANSLATIONS.items():
        loaded = load([f"{name}={value}", *common])
        assert f"note: {name}={value} {found.sentence}" in capsys.readouterr().err
        if found.name:
            assert loaded.config == load([f"{found.name}={found.text}", *common]).config
        else:
            assert name not in all_keys()


def test_python_values_and_files_are_translated_too(write):
    assert load_config(dense_conn=True, mudd_postnorm=True).model.dense_connections.adds
    path = write("dense_conn: true\nmudd_postnorm: true\nddw_gen_chunk_size: null\n")
    assert load_config(path).model.dense_connections.mudd_postnorm == "residual"


def test_keys_of_other_programs_name_the_key_here():
    for name, (_, key) in maxtext_keys.REFERENCE_KEYS.items():
        assert not {name} & {*all_keys(), *maxtext_keys.ALIASES, *maxtext_keys.UNSUPPORTED}
        assert key in all_names()
    with pytest.raises(ConfigurationError) as caught:
        load([f"{name}=something" for name in maxtext_keys.REFERENCE_KEYS])
    for whose, key in maxtext_keys.REFERENCE_KEYS.values():
        assert f"{whose}; use {key}" in str(caught.value)


def test_values_with_a_note_are_not_accepted():
    for (name, value), note in maxtext_keys.VALUE_NOTES.items():
        with pytest.raises(ConfigurationError) as caught:
            load([f"{name}={value}"])
        assert note in str(caught.value)
