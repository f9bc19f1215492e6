"""Every key of MaxText's base.yml is a key here, an alias, or refused with a reason."""

from pathlib import Path

import pytest
import yaml

from MaxText.config import maxtext_keys
from MaxText.config.loading import load, load_config, review_file
from MaxText.config.problems import ConfigurationError
from MaxText.config.schema import all_keys, flatten

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
    for (name, value), found in maxtext_keys.TRANSLATIONS.items():
        # Latent attention has one input; keys of connections need several to have an effect.
        decoder_block = "llama2" if value == "mla" else "muddformer_prepost"
        common = ["run_name=r", f"decoder_block={decoder_block}"]
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


MODELS = yaml.safe_load((Path(__file__).parent / "maxtext_models.yml").read_text(encoding="utf-8"))
# Families of MODELS that are not here: the beginnings of names, and what the message says.
ABSENT = {
    ("deepseek3.2", "deepseek-custom"): "DeepSeek V3.2 and variants",
    ("deepseek3-671b-",): "DeepSeek V3 with a mesh of MaxText: its axes",
    ("deepseek4",): "DeepSeek V4: hyper-connections",
    ("envy",): "Envy: routing to one expert",
    ("gemma4-26b",): "Gemma 4 with experts",
    ("gemma4-e",): "Gemma 4 E2B and E4B: embeddings of their own for each layer",
    ("llama4",): "Llama 4: attention in chunks",
    ("qwen3-vl", "qwen3-omni", "weaver"): "models read text only",
    ("qwen3.5-35b-a3b-fp8", "qwen3.5-397b-a17b-fp8"): "Qwen3.5 in 8 bits",
    ("qwen3-custom",): "Qwen3 with experts of another width",
}
REFUSED = {
    name: reason
    for beginnings, reason in ABSENT.items()
    for name in MODELS
    if name.startswith(beginnings)
}
# Models of MaxText's own tests, of no preset.
FILES_ALONE = {"deepseek3-test", "deepseek3-tiny"}
# In these, a preset is as the model was published, and MaxText's file of its name is not.
AS_PUBLISHED = {
    "vocab_size",  # MaxText pads Gemma's
    "max_target_length",
    "rope_type",  # Llama 3.1's, which MaxText's files leave out
    "enable_dropout",
    "tokenizer_type",
    "attention",
    "logical_axis_rules",
    "moe_mlp_dim",  # of all layers: it is base_mlp_dim
    "normalize_embedding_logits",  # without effect: not tied
    "rope_truncate",  # without effect: not yarn
    # Gemma 4: without effect, both kinds have their own. Qwen3 with experts: MaxText's files have
    # those of July 2025.
    "rope_max_timescale",
    "n_routing_groups",  # DeepSeek and Kimi: MaxText's files leave them out
    "topk_routing_group",
    "dataset_path",
    "eval_per_device_batch_size",
    "checkpoint_period",
    "target_eval_loss",
}


def write_model(write, name):
    """Writes MaxText's model file of a name."""
    return write(yaml.safe_dump(MODELS[name], default_flow_style=None), f"{name}.yml")


def test_most_models_of_maxtext_are_here():
    assert len(MODELS) == 82
    assert len(REFUSED) == 24


@pytest.mark.parametrize("name", sorted(MODELS.keys() - REFUSED))
def test_a_model_of_maxtext_works_by_name_and_as_config_file(name, write):
    model = flatten(load([write_model(write, name), "run_name=r"]).config)
    if name in FILES_ALONE:
        return
    preset = flatten(load([f"model_name={name}", "run_name=r"]).config)
    differing = {key for key in model if model[key] != preset[key]} - {"model_name"}
    if name in ("olmo3-7b", "olmo3-32b"):
        # MaxText scales the rotary frequencies of all layers, the published model those without
        # a window.
        assert model["rope_type"] == "yarn"
        differing -= {"layer_kinds"}
    assert differing <= AS_PUBLISHED


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_other_families_of_maxtext_are_refused_in_one_line(name, write):
    for arguments in ([f"model_name={name}"], [write_model(write, name)]):
        with pytest.raises(ConfigurationError) as caught:
            load(arguments, "train.py")
        (problem,) = caught.value.problems
        assert REFUSED[name] in problem.message


@pytest.mark.parametrize("name", ["deepseek2-16b", "gemma3-4b", "gpt3-6b"])
def test_the_report_says_what_a_run_says(name, write):
    path = write_model(write, name)
    review = review_file(path, ["dataset_type=synthetic"], "train.py")
    if name in REFUSED:
        assert len(review.problems) == 1
        assert not review.settings
        return
    assert not review.problems
    assert not review.missing
    assert {setting.name for setting in review.settings} >= {"decoder_block", "base_emb_dim"}


def test_a_block_that_does_not_exist_supports_no_key(write):
    review = review_file(write("decoder_block: nothing\nsteps: 5\nhead_dim: 8\n"), [], "train.py")
    assert [setting.name for setting in review.settings] == ["steps"]
    (problem,) = review.problems
    assert problem.message.startswith("decoder_block: there is no")


def test_what_maxtexts_blocks_stand_for(write):
    def layers(name, **keys):
        path = write(yaml.safe_dump(MODELS[name] | keys, default_flow_style=None))
        return load([path]).config.model.layers

    gemma2 = layers("gemma2-2b")
    assert len(gemma2) == 26  # MaxText counts pairs
    assert [layer.config.block.mixer for layer in gemma2[:2]] == ["local_attention", "attention"]
    gemma3 = layers("gemma3-4b", local_rope_max_timescale=20_000, rope_linear_scaling_factor=4.0)
    assert [
        index for index, layer in enumerate(gemma3) if layer.config.block.mixer == "attention"
    ] == [5, 11, 17, 23, 29]
    assert gemma3[0].config.position.rope_max_timescale == 20_000
    assert gemma3[0].config.position.rope_type == "default"
    assert (gemma3[5].config.position.rope_type, gemma3[5].config.position.rope_factor) == (
        "linear",
        4,
    )
    olmo3 = layers("olmo3-7b", inhomogeneous_layer_cycle_interval=2)
    assert [layer.config.block.mixer for layer in olmo3[:2]] == ["local_attention", "attention"]
    assert olmo3[0].config.position.rope_type == "yarn"
    gemma4 = layers("gemma4-31b")
    assert gemma4[5].config.position.rotary_pct == 0.25
    deepseek = layers("deepseek3-671b", n_routing_groups=8, topk_routing_group=4)
    assert [layer.config.mixture_of_experts.num_experts for layer in deepseek[2:4]] == [1, 256]
    routing = deepseek[3].config.mixture_of_experts
    assert (routing.routed_score_func, routing.topk_routing_group) == ("sigmoid", 4)
    assert deepseek[3].config.position.rope_attention_factor == 1
    assert layers("deepseek3-671b")[3].config.mixture_of_experts.n_routing_groups == -1
    gpt_oss = layers("gpt-oss-20b")
    assert [layer.config.block.mixer for layer in gpt_oss[:2]] == ["local_attention", "attention"]
    assert gpt_oss[0].config.feed_forward.mlp_activations == ("quick_gelu", "linear_plus_one")
    assert gpt_oss[0].config.mixture_of_experts.router_bias
    assert not layers("gpt-oss-20b", routed_bias=False)[0].config.mixture_of_experts.router_bias
    config = load([write(yaml.safe_dump(MODELS["gpt3-52k"]))]).config
    assert config.model.position.position_embedding == "learned"
    config = load([write(yaml.safe_dump(MODELS["qwen2.5-7b"] | {"attention_bias": False}))]).config
    assert not config.model.attention.qkv_bias


def test_names_of_our_own_form_are_not_rewritten(write):
    text = "decoder_block: gemma2\nbase_num_decoder_layers: 13\n"
    assert len(load([write(text)]).config.model.layers) == 13


def test_an_unknown_preset_without_a_relative_lists_all():
    with pytest.raises(ConfigurationError) as caught:
        load(["model_name=zzz"])
    known = [text for label, text in caught.value.problems[0].context if label == "known"]
    assert "gpt2: gpt2-1.5b, gpt2-124m, gpt2-355m, gpt2-774m" in known
    assert len(known) > 20
