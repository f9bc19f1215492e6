"""The tables of the families: numbers, config.json, and what they refuse."""

import numpy as np
import pytest

from MaxText.configuration.catalogue import all_keys
from MaxText.configuration.loading import configure
from MaxText.conversion.config_json import find_family, our_values, to_config_json
from MaxText.conversion.families.known import FAMILIES
from MaxText.conversion.importing import FolderWeights
from MaxText.conversion.layouts import Layout
from MaxText.conversion.settings import family_of, to_keys
from MaxText.conversion.tensor_map import TensorMap
from MaxText.conversion.weights import model_of
from MaxText.errors import UserError
from tests.conversion.small_folders import (
    DESCENDANTS,
    GOLDEN_FAMILIES,
    golden,
    random,
    same_bits,
    tokenformer,
    write,
)

OTHER_ANGLES = {"rope_factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow",
                "original_max_position_embeddings"}  # fmt: skip
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
SIZES = {"D": 10, "N": 4, "K": 2, "H": 3, "F": 7, "V": 11, "P": 5, "Q": 6, "O": 8, "S": 9,
         "C": 4, "L": 13, "W": 12, "E": 14}  # fmt: skip


def exported(weights: FolderWeights) -> dict[str, np.ndarray]:
    """All tensors of theirs, made from all arrays of ours."""
    return {
        tensor.name: weights.map.whole(tensor, [weights.read(name) for name in tensor.ours])
        for tensor in weights.map.tensors
    }


@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_layout_has_its_inverse(model_type):
    generator = np.random.default_rng(0)
    for row in FAMILIES[model_type].rows:
        tensor = generator.random(row.layout.shape(SIZES, len(row.ours)))
        arrays = row.layout.split(tensor, SIZES, len(row.ours))
        assert len(arrays) == len(row.ours)
        np.testing.assert_array_equal(row.layout.join(arrays, SIZES), tensor)


def test_a_fused_projection_grouped_by_head():
    # Two heads of one dimension, inputs of one: rows q0 k0 v0 q1 k1 v1.
    layout = Layout("(N J H) D", "D N H")
    rows = np.array([[0], [1], [2], [10], [11], [12]])
    query, key, value = layout.split(rows, {"N": 2, "H": 1, "D": 1}, 3)
    assert query.ravel().tolist() == [0, 10]
    assert key.ravel().tolist() == [1, 11]
    assert value.ravel().tolist() == [2, 12]


@pytest.mark.parametrize("name", GOLDEN_FAMILIES)
def test_golden_models_come_back_bit_for_bit(name, tmp_path):
    config, tensors, _ = golden(name)
    weights = FolderWeights(write(tmp_path, config, tensors))
    found = exported(weights)
    if name == "gptneox":
        found["lm_head.weight"] = found.pop("embed_out.weight")
    if config["tie_word_embeddings"]:
        tensors.pop("lm_head.weight", None)  # a copy of the token table, which nobody needs
    same_bits(found, tensors)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model_type", DESCENDANTS)
def test_descendants_of_llama_come_back_bit_for_bit(model_type, dtype, tmp_path):
    config, tensors = random(model_type, dtype)
    same_bits(exported(FolderWeights(write(tmp_path, config, tensors))), tensors)


def test_names_without_the_prefix_and_buffers_are_read(tmp_path):
    # As in the first GPT-2 on the hub.
    config, tensors, _ = golden("gpt2")
    del tensors["lm_head.weight"]
    bare = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    mask = {"h.0.attn.bias": np.ones((1, 1, 4, 4), np.float32)}
    same_bits(exported(FolderWeights(write(tmp_path, config, bare | mask))), tensors)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_key_of_the_model_is_decided(model_type):
    # A new key that a family neither fixes nor writes would be lost on export.
    only_how = {"attention", "attention_block_size", "context_parallel_load_balance",
                "context_parallel_strategy", "dense_kept_sums", "dense_mixing",
                "logits_dot_in_fp32", "linear_attention_chunk"}  # fmt: skip
    only_training = {"capacity_factor", "moe_group_size", "moe_second_policy",
                     "moe_second_threshold", "router_z_loss_weight"}  # fmt: skip
    family = FAMILIES[model_type]
    settled = {*family.parts, *(name for setting in family.settings for name in setting.ours)}
    parts = {"embedding", "block", "position", "attention", "feed_forward", "pattention",
             "dense_connections", "head", "mixture_of_experts"}  # fmt: skip
    keys = {
        key.name: key
        for key in all_keys().values()
        if key.section[0] == "model" and key.section[-1] in parts
    }
    # What the family's parts leave without effect.
    possible = {name: [value] for name, value in family.parts.items()}
    for setting in family.settings:
        if setting.values is not None:
            ours = [ours for _, ours in setting.values]
            possible |= dict.fromkeys(setting.ours, ours)
    switched_off = {
        name
        for name, key in keys.items()
        for group in key.conditions
        if all(
            other in possible and not any(value in wanted for value in possible[other])
            for other, wanted in group.items()
        )
    }
    # No layer is linear or none, so what such layers read has no effect either.
    switched_off |= {"none_doubles_residual", "linear_attention_epsilon"}
    if "attention_types" in family.parts:
        switched_off |= {"sliding_window_size"}
    if "num_experts" in family.parts:
        switched_off |= {name for name, key in keys.items() if "experts" in key.section[-1]}
    if family.parts["dense_conn"]:
        # What other values of dense_sources and rope_type would ask for.
        switched_off |= {"dense_dilation", "dense_window", "dense_source_list", *OTHER_ANGLES}
    if family.parts["attention_projections"] != "dense":
        # Numbers of slots follow slot_num, and rope_type=default has no other keys.
        switched_off |= {"mlp_activations", "qkv_slot_num", *OTHER_ANGLES}
    assert keys.keys() - settled - only_how - only_training <= switched_off


@pytest.mark.parametrize("name", dict.fromkeys([*GOLDEN_FAMILIES, *DESCENDANTS, "tokenformer"]))
def test_config_json_there_and_back(name):
    if name == "tokenformer":
        config = tokenformer()[0]
    else:
        config = random(name)[0] if name in DESCENDANTS else golden(name)[0]
    family = family_of(config, "here")
    ours = configure(**to_keys(family, config, "here", {}))
    written = to_config_json(family, ours)
    again = configure(**to_keys(family, written, "there", {}))
    assert our_values(again) == our_values(ours)
    assert find_family(ours, family.model_type) is family
    assert to_config_json(family, again) == written


def test_newer_and_older_spellings_mean_the_same():
    config, _ = random("llama")
    del config["rope_theta"]
    family = FAMILIES["llama"]
    newer = {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    for spelling in (newer, {"rope_theta": 5e5, "rope_scaling": None}):
        keys = to_keys(family, config | spelling, "here", {})
        assert keys["rope_max_timescale"] == 5e5
    silent = to_keys(family, config, "here", {})
    assert silent["rope_max_timescale"] == 10_000.0  # what transformers takes


@pytest.mark.parametrize(
    ("model_type", "change", "message"),
    [
        (
            "llama",
            {"rope_scaling": {"type": "dynamic"}},
            "rope_type=dynamic: only default or llama3",
        ),
        ("llama", {"rope_scaling": {"rope_type": "llama3"}}, "rope_scaling.factor is missing"),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 0.5}}, "factor=0.5 is not >= 1"),
        (
            "llama",
            {"rope_scaling": {"type": "linear", "factor": [2]}},
            "factor: .2. is not a finite",
        ),
        ("qwen3", {"rope_scaling": YARN | {"mscale": 1.0}}, "mscale=1.0: only null can be"),
        ("qwen3", {"rope_scaling": YARN | {"truncate": False}}, "truncate=False: only True"),
        ("llama", {"hidden_act": "xielu"}, "hidden_act=xielu: only silu or"),
        ("llama", {"hidden_size": None}, "hidden_size is missing"),
        ("qwen2", {"use_sliding_window": True}, "use_sliding_window=True: only False"),
        ("llama", {"num_attention_heads": 0}, "imported:\n  num_attention_heads=0 is not >= 1$"),
        ("llama", {"num_attention_heads": "x"}, "\n  num_attention_heads: 'x' is not an integer$"),
        ("gpt2", {"n_embd": "xy"}, "imported:\n  n_embd: 'xy' is not an integer$"),
        ("qwen2", {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "differ by layer"),
        ("llama", {"rope_scaling": "x"}, "rope_scaling=x is no JSON object"),
        ("llama", {"model_type": ["llama"]}, "has no model_type"),
        ("mistral", {"sliding_window": "x"}, "sliding_window=x cannot be imported. It is a number"),
        ("mistral", {"sliding_window": 0}, "sliding_window=0 cannot be imported. It is a number"),
        ("llama", {"model_type": "gemma2"}, "it has norms after its parts as well"),
        ("gptneo", {"attention_types": [[["linear"], 4]]}, "attention_types=.* Layers are global"),
        ("gptneo", {"attention_types": [[["global"], 3]]}, "as many as num_layers says"),
        ("gptneo", {"attention_types": "local"}, "attention_types=local cannot be imported"),
        ("gptneo", {"attention_layers": ["local"] * 4}, "It differs from attention_types"),
        ("gptneo", {"window_size": 0}, "window_size=0 is not >= 1"),
        ("mixtral", {"num_local_experts": 1}, "One expert is an ordinary Mistral"),
        ("mixtral", {"num_experts_per_tok": 1}, "num_experts_per_tok=1 cannot be imported. The"),
        ("mixtral", {"sliding_window": "x"}, "sliding_window=x cannot be imported. It is a number"),
        ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise=0.1: only 0.0"),
        ("gemma", {"hidden_activation": "gelu"}, "hidden_activation=gelu: only gelu_pytorch_tanh"),
        ("gemma", {"use_bidirectional_attention": True}, "attention=True: only False"),
        ("llama", {"model_type": "opt"}, "model_type=opt cannot be converted"),
        ("llama", {"model_type": None}, "has no model_type"),
    ],
)
def test_what_our_parts_cannot_do_is_refused_by_name(model_type, change, message):
    config = (golden if model_type.startswith("gpt") else random)(model_type)[0] | change
    with pytest.raises(UserError, match=message):
        to_keys(family_of(config, "here"), config, "here", {})


@pytest.mark.parametrize("name", ["hidden_size", "num_hidden_layers", "num_key_value_heads",
                                  "max_position_embeddings", "head_dim", "vocab_size"])  # fmt: skip
def test_wrong_sizes_are_named_as_in_config_json(name):
    for value, message in {
        "abc": f"{name}: 'abc' is not an integer",
        -4: f"{name}=-4 is not >= 1",
        0: f"{name}=0 is not >= 1",
        2.5: f"{name}: 2.5 is not an integer",
        True: f"{name}: true is not an integer",
    }.items():
        config = random("mistral")[0] | {name: value}
        with pytest.raises(UserError) as caught:
            to_keys(FAMILIES["mistral"], config, "here", {})
        assert f"\n  {message}" in str(caught.value)
    config = random("mistral")[0] | {name: ["x"], "rms_norm_eps": "tiny", "rope_theta": 0.5}
    with pytest.raises(UserError) as caught:
        to_keys(FAMILIES["mistral"], config, "here", {})
    assert f"{name}: [x] is not an integer" in str(caught.value)
    assert "rms_norm_eps: 'tiny' is not a finite number" in str(caught.value)
    assert "rope_theta=0.5 is not > 1" in str(caught.value)


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "llama3", "factor": 32.0, "original_max_position_embeddings": 16,
         "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16,
         "beta_fast": 8.0, "beta_slow": 2.0},
    ],
    ids=lambda scaling: scaling["rope_type"],
)  # fmt: skip
@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3", "gemma", "gpt_neox"])
def test_rope_scaling_there_and_back(model_type, scaling):
    config = golden("gptneox")[0] if model_type == "gpt_neox" else random(model_type)[0]
    family = FAMILIES[model_type]
    config.pop("rope_parameters", None)
    older = config | {"rope_scaling": scaling}
    ours = configure(**to_keys(family, older, "here", {}))
    assert ours.model.position.rope_factor == scaling["factor"]
    written = to_config_json(family, ours)
    assert written["rope_scaling"] == scaling
    theta = {"rope_theta": ours.model.position.rope_max_timescale}
    newer = config | {"rope_parameters": scaling | theta}
    assert configure(**to_keys(family, newer, "here", {})).model == ours.model
    assert find_family(ours, model_type) is family
    # transformers takes the length itself where the first one is not given.
    if "original_max_position_embeddings" in scaling:
        silent = {k: v for k, v in scaling.items() if k != "original_max_position_embeddings"}
        keys = to_keys(family, config | {"rope_scaling": silent}, "here", {})
        assert keys["original_max_position_embeddings"] == config["max_position_embeddings"]


def test_plain_angles_are_not_written():
    ours = configure(**to_keys(FAMILIES["llama"], random("llama")[0], "here", {}))
    assert "rope_scaling" not in to_config_json(FAMILIES["llama"], ours)


def test_the_first_gemma_files_mean_the_tanh_form_by_gelu():
    config = random("gemma")[0] | {"hidden_act": "gelu", "hidden_activation": None}
    keys = to_keys(FAMILIES["gemma"], config, "here", {})
    assert keys["mlp_activations"] == ("gelu", "linear")
    keys["mlp_activations"] = ("gelu_erf", "linear")
    exact = configure(**keys)
    with pytest.raises(UserError, match="mlp_activations="):
        find_family(exact, "gemma")


def test_the_parts_of_gemma_make_no_other_family():
    ours = configure(**to_keys(FAMILIES["gemma"], random("gemma")[0], "here", {}))
    assert find_family(ours, "").model_type == "gemma"
    with pytest.raises(UserError) as caught:
        find_family(ours, "llama")
    assert "normalization_zero_centered=True, not False" in str(caught.value)
    assert "scale_embedding=True, not False" in str(caught.value)


def test_layers_of_gpt_neo():
    config = golden("gptneo")[0]
    family = FAMILIES["gpt_neo"]
    for types, kinds in (
        ([[["global"], 4]], ["global"] * 4),
        ([[["local"], 1], [["global"], 3]], ["local"] + ["global"] * 3),
    ):
        asked = config | {"attention_types": types, "attention_layers": kinds}
        ours = configure(**to_keys(family, asked, "here", {}))
        assert list(ours.model.attention_kinds) == kinds
        written = to_config_json(family, ours)
        assert (written["attention_types"], written["attention_layers"]) == (types, kinds)
    # As silent as transformers lets it be.
    del config["attention_types"], config["attention_layers"], config["window_size"]
    keys = to_keys(family, config, "here", {})
    assert keys["attention_types"] == ((("global", "local"), 2),)
    assert keys["sliding_window_size"] == 256
    with pytest.raises(UserError, match=r"attention_types=\["):
        find_family(configure(**{**keys, "attention_types": [[["none", "global"], 2]]}), "gpt_neo")


@pytest.mark.parametrize("model_type", ["mistral", "mixtral"])
def test_a_window_of_all_layers(model_type):
    family = FAMILIES[model_type]
    local = ((("local",), 2),)
    for window, types, size in ((None, (), 256), (5, local, 5), (32, (), 256)):
        config = random(model_type)[0] | {"sliding_window": window}
        ours = configure(**to_keys(family, config, "here", {}))
        attention = ours.model.attention
        assert (attention.attention_types, attention.sliding_window_size) == (types, size)
        wanted = window if types else None  # no text reaches beyond it
        assert to_config_json(family, ours)["sliding_window"] == wanted
        assert find_family(ours, model_type) is family
    keys = to_keys(family, config, "here", {})
    keys["attention_types"] = [[["local", "global"], 1]]
    mixed = configure(**keys)
    with pytest.raises(UserError, match=r"attention_types=\["):
        find_family(mixed, model_type)


def test_a_part_that_the_format_does_not_know_is_named():
    model = model_of(configure("gpt2.yml", dataset_type="synthetic", base_num_decoder_layers=1))
    family = FAMILIES["gpt2"]
    with pytest.raises(UserError, match=r"format gpt2 has no place for .*layers/mlp/wo/kernel"):
        TensorMap(family, model, family.rows[:3])


def test_words_for_the_same_experts():
    config = random("mixtral")[0]
    keys = to_keys(FAMILIES["mixtral"], config, "here", {})
    width = {"moe_mlp_dim": config["intermediate_size"], "moe_layers": [0, 1]}
    assert find_family(configure(**keys | width), "").model_type == "mixtral"
    with pytest.raises(UserError, match=r"eval_capacity_factor=1\.0, not -1\.0"):
        find_family(configure(**{**keys, "eval_capacity_factor": 1.0}), "mixtral")
    with pytest.raises(UserError, match="num_experts=3, not 1"):
        find_family(configure(**keys), "llama")


def test_a_window_that_texts_do_not_exceed_is_no_obstacle():
    config = random("mistral")[0] | {"sliding_window": 8}
    keys = to_keys(FAMILIES["mistral"], config, "here", {"max_target_length": 8})
    assert keys["max_target_length"] == 8


def test_all_refusals_come_in_one_message():
    config = random("llama")[0] | {"hidden_act": "xielu", "partial_rotary_factor": 0.5}
    with pytest.raises(UserError) as caught:
        to_keys(FAMILIES["llama"], config, "here", {})
    assert "hidden_act=xielu" in str(caught.value)
    assert "partial_rotary_factor=0.5" in str(caught.value)


def test_a_model_that_no_family_has():
    config = configure(position_embedding="none", vocab_size=64)
    with pytest.raises(UserError) as caught:
        find_family(config, "")
    first, difference, others = str(caught.value).splitlines()
    assert "no family that can be written has the parts of this model" in first
    assert first.endswith("The nearest is llama, but for:")
    assert difference == "  position_embedding=none, not rotary"
    listed = dict(part.split() for part in others.rstrip(".").split(": ")[1].split(", "))
    assert listed.keys() | {"llama"} == FAMILIES.keys()
    numbers = [int(number) for number in listed.values()]
    assert numbers == sorted(numbers)
    assert numbers[0] >= 1
    with pytest.raises(UserError, match=r"family=qwen3 has other parts"):
        find_family(configure(vocab_size=64), "qwen3")


def test_sizes_are_those_after_scaling():
    config = configure(global_parameter_scale=8, vocab_size=64)
    written = to_config_json(FAMILIES["llama"], config)
    assert written["hidden_size"] == 2 * config.model.shape.base_emb_dim
    assert written["num_hidden_layers"] == 2 * config.model.shape.base_num_decoder_layers


@pytest.mark.parametrize(
    ("model_type", "feature"),
    [("olmo2", "norms stand after the parts"), ("qwen2_moe", "shared expert"),
     ("gptj", "neighboring"), ("deepseek_v3", "latent attention"), ("smollm3", "no rotary")],
)  # fmt: skip
def test_what_a_model_type_needs_that_is_not_here_is_named(model_type, feature):
    with pytest.raises(
        UserError, match=f"model_type={model_type} cannot be converted: .*{feature}"
    ):
        family_of({"model_type": model_type}, "hf:folder")
