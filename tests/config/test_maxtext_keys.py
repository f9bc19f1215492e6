"""Every key of MaxText's base.yml is a key here, an alias, or refused with a reason."""

from pathlib import Path

import pytest
import yaml

from MaxText.config import maxtext_keys
from MaxText.config.loading import load, load_config
from MaxText.config.problems import ConfigurationError
from MaxText.config.schema import all_keys

# The keys of MaxText 0.2.5's base.yml and of its documentation, one per line.
MAXTEXT = (Path(__file__).parent / "maxtext_keys.txt").read_text(encoding="utf-8").split()


def test_known_one_way_or_another():
    kinds = (all_keys(), maxtext_keys.ALIASES, maxtext_keys.UNSUPPORTED)
    for name in MAXTEXT:
        assert sum(name in kind for kind in kinds) == 1, name
    for old, new in maxtext_keys.ALIASES.items():
        assert new in all_keys()
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
        pair = maxtext_keys.SANDWICH_KEYS  # of which one alone has no counterpart here
        names = pair if name in pair else [name]
        loaded = load([*(f"{switched}={value}" for switched in names), *common])
        assert f"note: {name}={value} {found.sentence}" in capsys.readouterr().err
        if found.name:
            assert loaded.config == load([f"{found.name}={found.text}", *common]).config
        else:
            assert loaded.config == load(common).config


def test_a_norm_after_one_branch_is_refused():
    with pytest.raises(ConfigurationError, match="use_post_attn_norm=true without use_post_ffw"):
        load(["use_post_attn_norm=true", "use_post_ffw_norm=false"])


def test_python_values_and_files_are_translated_too(write):
    assert load_config(dense_conn=True, mudd_postnorm=True).model.dense_connections.adds
    path = write("dense_conn: true\nmudd_postnorm: true\nddw_gen_chunk_size: null\n")
    assert load_config(path).model.dense_connections.mudd_postnorm == "residual"


def test_keys_of_other_programs_name_the_key_here():
    for name, (_, key) in maxtext_keys.REFERENCE_KEYS.items():
        assert not {name} & {*all_keys(), *maxtext_keys.ALIASES, *maxtext_keys.UNSUPPORTED}
        assert key in all_keys()
    with pytest.raises(ConfigurationError) as caught:
        load([f"{name}=something" for name in maxtext_keys.REFERENCE_KEYS])
    for whose, key in maxtext_keys.REFERENCE_KEYS.values():
        assert f"{whose}; use {key}" in str(caught.value)


def test_values_with_a_note_are_not_accepted():
    for (name, value), note in maxtext_keys.VALUE_NOTES.items():
        with pytest.raises(ConfigurationError) as caught:
            load([f"{name}={value}"])
        assert note in str(caught.value)


def write_base(write, changes=None):
    """Writes a copy of MaxText's base.yml, with changes."""
    defaults = {name: one[0] for name, one in read_defaults().items()}
    defaults["logical_axis_rules"] = read_defaults()["logical_axis_rules"]
    text = yaml.safe_dump(defaults | (changes or {}), default_flow_style=None)
    return write(text, "maxtext_base.yml")


def read_defaults():
    path = Path(maxtext_keys.__file__).with_name("maxtext_defaults.yml")
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def test_every_default_of_maxtext_is_known():
    names = read_defaults()
    assert set(MAXTEXT) <= set(names)
    for name in names:
        assert (
            name in all_keys() or name in maxtext_keys.ALIASES or name in maxtext_keys.UNSUPPORTED
        )


@pytest.mark.parametrize("index", [0, 1, 2])
def test_no_default_of_maxtext_stops_a_run(index):
    """As arguments, where no file says that they are a copy of base.yml."""
    defaults = {
        name: values[min(index, len(values) - 1)] for name, values in read_defaults().items()
    }
    defaults["logical_axis_rules"] = read_defaults()["logical_axis_rules"]
    arguments = [
        f"{name}={yaml.safe_dump(value, default_flow_style=True, width=10**9).splitlines()[0]}"
        for name, value in defaults.items()
        if name != "data_sharding"  # a list in a list in a list
    ]
    load([*arguments, "run_name=r", "strict_config=false"])


def test_a_copy_of_base_yml_resolves(write, capsys):
    path = write_base(write)
    loaded = load([path, "dataset_type=synthetic"], "train.py")
    shown = capsys.readouterr().err
    assert len(shown.splitlines()) == 1
    assert "is a copy of MaxText's base.yml" in shown
    # Values of the file count ...
    assert loaded.config.schedule.learning_rate_schedule_steps == 150_001
    assert loaded.config.model.numerics.dtype == "bfloat16"
    assert loaded.origins["dtype"].source.value == "MaxText's default"
    # ... except for those that are Google's machines and files.
    assert loaded.config.run.hardware == "auto"
    with pytest.raises(ConfigurationError, match="dataset_path: no dataset is set"):
        load([path], "train.py")


def test_what_a_copy_of_base_yml_changes_counts(write):
    changes = {"model_name": "llama3.1-8b", "steps": 7, "add_bos": False, "shard_mode": "explicit"}
    with pytest.raises(ConfigurationError) as caught:
        load([write_base(write, changes)])
    (problem,) = caught.value.problems
    assert problem.message.startswith("shard_mode: not a key here")
    del changes["shard_mode"]
    rules = [["embed", ["fsdp"]], *read_defaults()["logical_axis_rules"]]
    changes["logical_axis_rules"] = rules
    config = load([write_base(write, changes)]).config
    # The preset beats what base.yml says of sizes, as in MaxText.
    assert config.model.shape.base_emb_dim == 4096
    assert (config.run.steps, config.preparation.add_bos) == (7, False)
    assert config.mesh.logical_axis_rules[0] == ("embed", ("fsdp",))
    assert dict(config.mesh.logical_axis_rules)["activation_batch"]


def test_a_copy_of_base_yml_reads_the_data_that_was_named(write):
    path = write_base(write, {"dataset_type": "synthetic"})
    assert load([path]).config.data.dataset_type == "synthetic"
    assert load([path, "dataset_path=folder"]).config.data.dataset_type == "grain"


def test_a_base_file_may_be_a_copy_of_base_yml(write):
    write_base(write, {"steps": 3})
    config = load([write("base_config: maxtext_base.yml\nlearning_rate: 1.0e-3\n")]).config
    assert (config.run.steps, config.schedule.learning_rate) == (3, 1e-3)


def test_a_short_file_is_not_a_copy(write, capsys):
    loaded = load([write("steps: 150_001\nmegablox: true\nhardware: tpu\n")])
    assert loaded.config.run.hardware == "tpu"
    assert "copy" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("decoder_block", "mistral"),
        ("decoder_block", "qwen2"),
        ("decoder_block", "qwen3"),
        ("decoder_block", "gemma2"),
        ("decoder_block", "gemma3"),
        ("decoder_block", "olmo3"),
        ("decoder_block", "deepseek"),
        ("decoder_block", "envy"),
        ("decoder_block", "mixtral"),
        ("decoder_block", "qwen3_moe"),
        ("decoder_block", "gpt_oss"),
        ("decoder_block", "llama4"),
        ("model_name", "mixtral-8x7b"),
        ("model_name", "llama2-70b"),
        ("model_name", "gpt3-175b"),
        ("model_name", "qwen3-0.6b"),
        ("model_name", "qwen2.5-7b"),
        ("model_name", "mistral-7b"),
        ("model_name", "gemma2-2b"),
        ("model_name", "deepseek2-16b"),
        ("model_name", "olmo3-7b"),
    ],
)
def test_a_missing_block_or_preset_names_what_comes_closest(name, value):
    with pytest.raises(ConfigurationError) as caught:
        load([f"{name}={value}", "base_num_kv_heads=3"], "train.py")
    (problem,) = caught.value.problems  # neither consequences nor the names of all presets
    context = dict(problem.context)
    assert "known" not in context
    keys = context["closest"].partition(", with ")[2] or context["closest"]
    load(keys.split())


def test_an_unknown_preset_without_a_relative_lists_all():
    with pytest.raises(ConfigurationError) as caught:
        load(["model_name=zzz"])
    assert "gpt2-124m" in dict(caught.value.problems[0].context)["known"]
