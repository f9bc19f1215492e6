"""The tables of the families: tensors and config.json, there and back."""

from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import load_file

from MaxText.config.layer_sections import MIXERS
from MaxText.config.loading import load_config
from MaxText.conversion.families import FAMILIES
from MaxText.conversion.hf_config import (
    config_from_hf,
    drop_unused_keys,
    find_family,
    model_config_values,
    resolve_family,
    to_config_json,
)
from MaxText.conversion.hf_export import write_folder
from MaxText.conversion.hf_import import HFWeights, TensorMap
from MaxText.errors import UserError
from MaxText.training.backend_defaults import abstract_model
from tests.conversion.golden_models import hugging_face
from tests.conversion.small_folders import (
    DESCENDANTS,
    muddformer,
    of_family,
    random,
    same_bits,
    tokenformer,
    write,
)

SIZES = {
    "D": 10,
    "N": 4,
    "K": 2,
    "H": 5,
    "F": 7,
    "V": 11,
    "P": 5,
    "Q": 6,
    "O": 8,
    "S": 9,
    "C": 4,
    "L": 13,
    "W": 12,
    "E": 14,
    "G": 3,
    "M": 2,
    "R": 6,
}


def exported(weights: HFWeights, folder) -> dict[str, np.ndarray]:
    """The tensors of the same family again."""
    folder.mkdir()
    return load_file(folder / write_folder(folder, weights, weights.family, {})[-1])


@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_layout_has_its_inverse(model_type):
    generator = np.random.default_rng(0)
    for row in FAMILIES[model_type].rows:
        patterns = row.param_axes.split("|")
        shapes = [[SIZES[letter] for letter in pattern.split()] for pattern in patterns]
        tensor = generator.random(row.hf_shape(shapes))
        arrays = row.split(tensor, shapes, rotary_dims=4)
        assert len(arrays) == len(row.param_names)
        np.testing.assert_array_equal(row.join(arrays, rotary_dims=4), tensor)


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        *((name, {}) for name in DESCENDANTS),
        ("tokenformer", {"num_layers": 2}),
        # After 15 layers four ways of 16 states are 64 wide, and the reference makes that 128.
        ("muddformer", {"n_layer": 16}),
        ("muddformer", {"expand_last": False, "round64": False, "use_qk_norm": False}),
        ("muddpythia", {"use_parallel_residual": False, "use_linear_bias": False}),
        ("muddpythia", {"round64": False, "rotary_pct": 0.5, "rope_base": 500000}),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_a_folder_comes_back(name, fields, tmp_path):
    config, tensors = of_family(name, **fields)
    weights = HFWeights(write(tmp_path, config, tensors))
    same_bits(exported(weights, tmp_path / "out"), tensors)
    family = weights.family
    assert find_family(weights.config, family.model_type) is family
    written = to_config_json(family, weights.config)
    again = load_config(**config_from_hf(family, written, "there", {}))
    assert model_config_values(again) == model_config_values(weights.config)
    assert to_config_json(family, again) == written
    assert {field: written[field] for field in fields} == fields


@pytest.mark.parametrize("name", ["gpt2", "muddformer"])
def test_other_names_and_buffers_are_read(name, tmp_path):
    if name == "gpt2":  # as in the first one on the hub
        config, tensors = hugging_face("gpt2").config_json, dict(hugging_face("gpt2").parameters)
        del tensors["lm_head.weight"]
        stored = {key.removeprefix("transformer."): tensor for key, tensor in tensors.items()}
        buffers = ("h.0.attn.bias",)
    else:
        config, tensors = muddformer(name)
        stored = tensors
        buffers = ("layers.0.attention.kv_cache.k_cache", "layer_cache.layer_cache")
    stored = stored | {key: np.ones((1, 1, 4, 4), np.float32) for key in buffers}
    weights = HFWeights(write(tmp_path, dict(config), stored))
    same_bits(exported(weights, tmp_path / "out"), tensors)


# Short, so that the 64 tokens that are compared with transformers reach into every band.
SCALINGS = {
    "linear": {"factor": 3.0},
    "llama3": {
        "factor": 8.0,
        "original_max_position_embeddings": 16,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    },
    "yarn": {
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "beta_fast": 4.0,
        "beta_slow": 0.5,
    },
}


@pytest.mark.parametrize(
    ("model_type", "kind"),
    [
        ("llama", "linear"),
        ("llama", "llama3"),
        ("llama", "yarn"),
        ("gpt_neox", "yarn"),
        ("mistral", "llama3"),
        ("qwen2", "yarn"),
        ("qwen3", "linear"),
        ("gemma", "linear"),
    ],
)
def test_rope_scaling_there_and_back(model_type, kind):
    scaling = {"rope_type": kind, **SCALINGS[kind]}
    neox = model_type == "gpt_neox"
    config = dict(hugging_face("gptneox").config_json if neox else random(model_type)[0])
    family = FAMILIES[model_type]
    config.pop("rope_parameters", None)
    keys = config_from_hf(family, config | {"rope_scaling": scaling}, "here", {})
    converted = load_config(**keys)
    assert converted.model.position.rope_factor == scaling["factor"]
    theta = {"rope_theta": converted.model.position.rope_max_timescale}
    fraction = {"partial_rotary_factor": converted.model.position.rotary_pct} if neox else {}
    assert to_config_json(family, converted)["rope_parameters"] == scaling | theta | fraction
    newer = config | {"rope_parameters": scaling | theta}
    assert load_config(**config_from_hf(family, newer, "here", {})).model == converted.model
    assert find_family(converted, model_type) is family
    # transformers takes the length itself where the first one is not given.
    if "original_max_position_embeddings" in scaling:
        silent = {k: v for k, v in scaling.items() if k != "original_max_position_embeddings"}
        keys = config_from_hf(family, config | {"rope_scaling": silent}, "here", {})
        assert keys["original_max_position_embeddings"] == config["max_position_embeddings"]


def test_the_first_gemma_files_mean_the_tanh_form_by_gelu():
    config = random("gemma")[0] | {"hidden_act": "gelu", "hidden_activation": None}
    keys = config_from_hf(FAMILIES["gemma"], config, "here", {})
    assert keys["mlp_activations"] == ("gelu", "linear")
    keys["mlp_activations"] = ("gelu_erf", "linear")
    with pytest.raises(UserError, match=r"(?s)scale_embedding=True, .*zero_centered=True, "):
        find_family(load_config(**keys), "llama")
    exact = load_config(**keys)
    with pytest.raises(UserError, match="mlp_activations="):
        find_family(exact, "gemma")


def test_layers_of_gpt_neo():
    config = dict(hugging_face("gptneo").config_json)
    family = FAMILIES["gpt_neo"]
    for types, kinds in (
        ([[["global"], 4]], ["global"] * 4),
        ([[["local"], 1], [["global"], 3]], ["local"] + ["global"] * 3),
    ):
        asked = config | {"attention_types": types, "attention_layers": kinds}
        converted = load_config(**config_from_hf(family, asked, "here", {}))
        assert list(converted.model.mixers) == [MIXERS[kind] for kind in kinds]
        written = to_config_json(family, converted)
        assert (written["attention_types"], written["attention_layers"]) == (types, kinds)
    # As silent as transformers lets it be.
    del config["attention_types"], config["attention_layers"], config["window_size"]
    keys = config_from_hf(family, config, "here", {})
    assert keys["attention_types"] == ((("global", "local"), 2),)
    assert keys["sliding_window_size"] == 256
    keys["attention_types"] = [[["none", "global"], 2]]
    with pytest.raises(UserError, match=r"attention_types=\["):
        find_family(load_config(**keys), "gpt_neo")


@pytest.mark.parametrize("model_type", ["mistral", "mixtral"])
def test_a_window_of_all_layers(model_type):
    family = FAMILIES[model_type]
    for window, mixer in ((None, "attention"), (5, "local_attention"), (32, "attention")):
        config = random(model_type)[0] | {"sliding_window": window}
        converted = load_config(**config_from_hf(family, config, "here", {}))
        assert set(converted.model.mixers) == {mixer}
        wanted = window if mixer == "local_attention" else None  # no text reaches beyond it
        assert to_config_json(family, converted)["sliding_window"] == wanted
        assert find_family(converted, model_type) is family
    # The same layers in other words.
    keys = config_from_hf(family, config, "here", {}) | {"sliding_window_size": 5}
    keys["attention_types"] = [[["local"], 2]]
    local = load_config(**keys)
    assert find_family(local, model_type) is family
    assert to_config_json(family, local)["sliding_window"] == 5
    keys["attention_types"] = [[["local", "global"], 1]]
    mixed = load_config(**keys)
    with pytest.raises(UserError, match="some layers have a window and others have none"):
        find_family(mixed, model_type)


def test_a_part_that_the_format_does_not_know_is_named():
    config = load_config("gpt2.yml", dataset_type="synthetic", base_num_decoder_layers=1)
    model = abstract_model(config.model)
    family = FAMILIES["gpt2"]
    with pytest.raises(UserError, match=r"format gpt2 has no tensors for .*layers/mlp/wo/kernel"):
        TensorMap(family, model, family.rows[:3])


HYBRID = {
    "layer_pattern": "MG",
    "layer_kinds": {"M": {"mixer": "moving_average", "average_tokens": 4}, "G": {}},
}


@pytest.mark.parametrize("keys", [{"mixer": "moving_average", "average_tokens": 16.0}, HYBRID])
def test_a_llama_with_a_mixer_of_ones_own_comes_back(keys, tmp_path):
    given = keys | {"import_modules": ["examples/moving_average.py"]}
    config = load_config(**config_from_hf(FAMILIES["llama"], random("llama")[0], "here", given))
    model = abstract_model(config.model)
    arrays = {
        name: np.random.default_rng(0).random(info.shape, np.float32)
        for name, info in model.parameters.items()
    }
    formats = {name: array.dtype for name, array in arrays.items()}
    weights = SimpleNamespace(config=config, model=model, formats=formats, read=arrays.get)
    family = find_family(config, "")
    assert family.model_type == "llama"
    write_folder(tmp_path, weights, family, {})
    again = HFWeights(tmp_path)
    assert again.config.model == config.model
    same_bits({name: again.read(name) for name in again.model.parameters}, arrays)
    stored, row = model.stored(0, "self_attention/into/kernel")
    into = arrays[stored] if row is None else arrays[stored][row]
    exported = again.files.read("model.layers.0.mixer.in_proj.weight")
    np.testing.assert_array_equal(exported, into.reshape(16, 32).T)  # [outputs, inputs]


@pytest.mark.parametrize("name", ["import_modules", "base_output_directory"])
def test_config_json_sets_no_key_but_those_of_parts(name):
    config = random("llama")[0] | {"maxtext": {name: "elsewhere"}}
    with pytest.raises(UserError, match=rf"maxtext\.{name} is not a key of a registered part"):
        config_from_hf(FAMILIES["llama"], config, "here", {})


def test_words_for_the_same_experts():
    config = random("mixtral")[0]
    keys = config_from_hf(FAMILIES["mixtral"], config, "here", {})
    width = {"moe_mlp_dim": config["intermediate_size"], "moe_layers": [0, 1]}
    assert find_family(load_config(**keys | width), "").model_type == "mixtral"
    with pytest.raises(UserError, match=r"eval_capacity_factor=1\.0, not -1\.0"):
        find_family(load_config(**{**keys, "eval_capacity_factor": 1.0}), "mixtral")
    with pytest.raises(UserError, match="num_experts=3, not 1"):
        find_family(load_config(**keys), "llama")


def test_a_model_that_no_family_has():
    with pytest.raises(UserError) as caught:
        find_family(load_config(position_embedding="alibi", vocab_size=64), "")
    first, difference = str(caught.value).splitlines()
    assert "nearest is llama," in first
    assert difference == "  position_embedding=alibi, not rotary"


TOKENFORMER = {
    "decoder_block": "tokenformer_pytorch",
    "base_emb_dim": 64,
    "base_num_query_heads": 4,
    "base_num_kv_heads": 4,
    "head_dim": -1,
}
MUDDFORMER = {
    "base_emb_dim": 16,
    "base_num_query_heads": 2,
    "base_num_kv_heads": 2,
    "head_dim": -1,
    "base_mlp_dim": 256,
    "base_num_decoder_layers": 3,
    "decoder_block": "muddformer",
    "rope_table_dtype": "bfloat16",
}


@pytest.mark.parametrize(
    ("family", "keys", "differences"),
    [
        ("qwen3", {"vocab_size": 64}, ["use_qk_norm=False"]),
        ("tokenformer", TOKENFORMER | {"decoder_block": "tokenformer"}, ["gelu_approximate=True"]),
        ("tokenformer", TOKENFORMER | {"slot_num": 24, "zoom_dim": 20.0}, ["zoom_dims.ffn=80.0"]),
        (
            "tokenformer",
            TOKENFORMER | {"normalize_type": "gelu", "logits_via_embedding": False},
            ["normalize_type=gelu", "logits_via_embedding=False"],
        ),
        (
            "muddformer",
            MUDDFORMER | {"dense_first_layer_norms": "each", "rope_table_dtype": "float32"},
            ["dense_first_layer_norms=each", "rope_table_dtype=float32"],
        ),
        (
            "muddformer",
            MUDDFORMER | {"dense_streams": ("q", "k", "r"), "dense_sparsity": "window"},
            ["dense_streams=['q', 'k', 'r']", "dense_sparsity=window"],
        ),
        (
            "muddformer",
            MUDDFORMER
            | {"dynamic_dense_last_layer_expand": 2, "base_num_kv_heads": 1, "head_dim": 4},
            ["dynamic_dense_last_layer_expand=2", "base_num_kv_heads=1", "head_dim=4"],
        ),
        (
            "muddpythia",
            MUDDFORMER | {"decoder_block": "muddpythia", "qkv_bias": False},
            ["qkv_bias=False", "rope_table_dtype=bfloat16"],
        ),
        ("fattorib", {"decoder_block": "fattorib", "static_sgu": True}, ["static_sgu=True"]),
        ("muddformer", MUDDFORMER | {"decoder_block": "muddformer_prepost"}, ["mudd_prenorm=True"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_a_family_does_not_have_is_named(family, keys, differences):
    config = load_config(**keys)
    with pytest.raises(UserError) as caught:
        find_family(config, family)
    for difference in differences:
        assert f"\n  {difference}" in str(caught.value)


@pytest.mark.parametrize("name", ["tokenformer", "muddformer", "muddpythia"])
def test_a_model_that_was_trained_here_becomes_a_folder(name):
    if name == "tokenformer":
        config = load_config("tokenformer-150m.yml")
        wanted = {
            "num_layers": 12,
            "qkv_slot_num": 768,
            "proj_slot_num": 768,
            "rotary_pct": 0.25,
            "ffn_slot_num": 3072,
            "seq_length": 2048,
            "pos_emb": "rotary",
            "norm": "layernorm_nonparam",
        }
    else:
        table = {"muddformer": "bfloat16", "muddpythia": "float16"}[name]
        block = {"decoder_block": name, "rope_table_dtype": table, "vocab_size": 64}
        config = load_config(**(MUDDFORMER | block))
        told = (
            "model_type",
            "architectures",
            "auto_map",
            "dense",
            "dense_type",
            "sepln",
            "round64",
            "head_dim",
            "expand_last",
            "n_local_heads",
            "intermediate_size",
        )
        wanted = {field: muddformer(name)[0][field] for field in told}
    family = find_family(config, "")
    assert family is FAMILIES[name]
    written = to_config_json(family, config)
    assert {field: written[field] for field in wanted} == wanted
    assert ("model_type" in written) == (name != "tokenformer")
    again = load_config(**config_from_hf(family, written, "there", {}))
    assert to_config_json(family, again) == written


def test_keys_of_released_models():
    config, _ = muddformer("muddformer")
    sizes = {"dim": 2560, "n_head": 32, "n_layer": 32, "n_local_heads": -1}
    excluded = ("head_dim", "intermediate_size")
    config = {name: value for name, value in config.items() if name not in excluded} | sizes
    keys = config_from_hf(FAMILIES["muddformer"], config, "here", {})
    wanted = {
        "decoder_block": "muddformer",
        "rope_table_dtype": "bfloat16",
        "head_dim": 80,
        "base_mlp_dim": 6912,
        "base_num_kv_heads": 32,
        "dense_first_layer_norms": "one",
        "dynamic_dense_hidden_round": "reference",
        "dynamic_dense_last_layer_expand": 4,
    }
    assert keys.items() >= wanted.items()
    # What transformers takes where nothing is said.
    config = {name: value for name, value in random("llama")[0].items() if name != "rope_theta"}
    assert config_from_hf(FAMILIES["llama"], config, "here", {})["rope_max_timescale"] == 10_000.0
    # The published TokenFormers do not say how many ids their tokenizer has.
    config = {name: value for name, value in tokenformer()[0].items() if name != "vocab_size"}
    assert config_from_hf(FAMILIES["tokenformer"], config, "here", {})["vocab_size"] == 50_304


def test_tensors_of_a_released_model():
    # MUDDPythia-1.4B.
    config = muddformer("muddpythia")[0] | {"vocab_size": 50_432, "block_size": 2048, "n_layer": 24}
    config |= {"n_head": 16, "dim": 2048, "intermediate_size": 8192, "n_local_heads": -1}
    del config["head_dim"]
    family = FAMILIES["muddpythia"]
    tensors = TensorMap(
        family, abstract_model(load_config(**config_from_hf(family, config, "", {})).model)
    ).tensors
    assert len({tensor.name for tensor in tensors}) == 600
    assert sum(int(np.prod(tensor.shape)) for tensor in tensors) == 1_419_950_149
    widths = [t.shape[0] for t in tensors if t.row.hf_name == "dynamic_dense.{layer}.w1.weight"]
    assert widths == [64] * 14 + [128] * 10


def test_a_folder_may_be_known_by_its_class_alone():
    config = muddformer("muddpythia")[0]
    for name in (None, "MUDDPythia", "mudd"):
        assert resolve_family(config | {"model_type": name}, "here") is FAMILIES["muddpythia"]
    both = random("llama")[0] | {"architectures": tokenformer()[0]["architectures"]}
    assert resolve_family(both, "here") is FAMILIES["llama"]


def test_an_entry_that_no_key_has_is_left_to_the_configuration():
    names = {"dropout_rates.foo": 0.1, "no_such_key": 1}
    assert drop_unused_keys(names, names) == names
