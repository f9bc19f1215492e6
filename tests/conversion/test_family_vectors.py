"""Families of transformers: numbers of tiny random models, and their folders there and back.

tests/golden/families/README.md says what the vectors hold.
"""

import json
import math
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from MaxText.config.loading import load_config
from MaxText.conversion.families import FAMILIES
from MaxText.conversion.hf_config import (
    config_from_hf,
    find_family,
    model_config_values,
    resolve_family,
    to_config_json,
)
from MaxText.conversion.hf_import import HFWeights
from MaxText.errors import UserError
from MaxText.layers.capture import capturing
from MaxText.training.objective import loss_sums
from tests.conversion.golden_models import of_family_vectors
from tests.conversion.running import model_in_run, parameters_in_run, run
from tests.conversion.small_folders import same_bits, write
from tests.golden.families.make import CASES, GLOBAL, LOCAL
from tests.layers.test_golden import RECURRENT, TRANSFORMERS, close, close_gradients
from tests.small_models import tiny_config

# In config.json of transformers, and no part of the model.
NOT_OF_MODEL = {"transformers_version", "initializer_range", "use_cache", "attention_dropout"}
# What is written in other words: the factor of sines and cosines instead of what it comes from, the
# base that `alpha` means, and nothing for a length without effect.
_MINISTRAL3 = CASES["ministral3"]["rope_parameters"]
_MSCALES = {"mscale", "mscale_all_dim"}
_HUNYUAN = CASES["hunyuan_v1_dense"]["rope_parameters"]
_DEEPSEEK_V2 = CASES["deepseek_v2-groups"]["rope_parameters"]
# Layers of multi-token prediction are not written.
_NO_PREDICTION_LAYERS = {"num_nextn_predict_layers": 0}
REWRITTEN: dict[str, dict[str, Any]] = {
    "ministral3": {
        "rope_parameters": {
            **{name: value for name, value in _MINISTRAL3.items() if name not in _MSCALES},
            "attention_factor": (0.1 * math.log(4) + 1) / (0.05 * math.log(4) + 1),
        }
    },
    "hunyuan_v1_dense": {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": _HUNYUAN["rope_theta"] * _HUNYUAN["alpha"] ** (8 / 6),
        }
    },
    "deepseek_v2-groups": {
        "rope_parameters": {
            **{name: value for name, value in _DEEPSEEK_V2.items() if name != "mscale"},
            "attention_factor": (0.07 * math.log(4) + 1) / (0.09 * math.log(4) + 1),
        }
    },
    "deepseek_v3": _NO_PREDICTION_LAYERS,
    "deepseek_v3-plain": _NO_PREDICTION_LAYERS,
    "glm4_moe": _NO_PREDICTION_LAYERS,
    # Positions or experts of a model without them, and the place of a norm that is not there.
    "granitemoehybrid": {"rope_parameters": None},
    "granitemoehybrid-dense": {"num_experts_per_tok": None, "router_aux_loss_coef": None},
    "falcon_h1": {"mamba_norm_before_gate": None},
    "phi3": {"original_max_position_embeddings": None},
    "phi3-window": {"original_max_position_embeddings": None},
    "gemma4_text": {"vocab_size_per_layer_input": None},  # of a table that is not there
    "gemma4_text-plain": {"vocab_size_per_layer_input": None},
}


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.slow] * ("-" in case)) for case in CASES]
)
def test_numbers_of_transformers(case, tmp_path):
    golden = of_family_vectors(case)
    reference, folder = tmp_path / "source", tmp_path / "run"
    golden.store(reference, golden.parameters)
    run(f"from=hf:{reference}", f"to={folder}")
    keys = ("scan_layers=false", "remat_policy=none")
    model, params = model_in_run(folder, *keys), parameters_in_run(folder)

    @jax.jit
    def numbers(params, batch):
        def loss(params):
            # The logits that the loss reads, instead of a second forward pass. Capturing turns off
            # the fused softmax of CPUs, which matmul_precision=highest (EXACT) does, too.
            with capturing(["head/output"]) as captured:
                total = loss_sums(model.merge(params), batch, model.config.objective).total
            return total / batch.loss_mask_BT.sum(), captured.values["head/output"]

        (loss_value, logits), gradients = jax.value_and_grad(loss, has_aux=True)(params)
        return logits, loss_value, gradients

    logits, loss, gradients = numbers(params, golden.batch)
    close(logits, golden.logits, TRANSFORMERS.logits)
    close(loss, golden.loss, TRANSFORMERS.loss)
    wanted = golden.converted(tmp_path / "gradients", golden.gradients)
    is_recurrent = {"linear_num_key_heads", "ssm_state_size"} & golden.config_json.keys()
    near = RECURRENT if is_recurrent else TRANSFORMERS
    close_gradients(gradients, wanted, near.gradients)

    run(f"from={folder}", f"to=hf:{tmp_path / 'out'}")
    same_bits(load_file(tmp_path / "out" / "model.safetensors"), golden.parameters)
    exported = json.loads((tmp_path / "out" / "config.json").read_text())
    stored = {name: value for name, value in golden.config_json.items() if name not in NOT_OF_MODEL}
    written = {name: exported.get(name) for name in stored}
    assert written == stored | REWRITTEN.get(case, {})
    again, given = HFWeights(tmp_path / "out"), HFWeights(reference)
    assert (again.keys, again.family) == (given.keys, given.family)


@pytest.mark.parametrize(
    ("decoder_block", "keys", "name", "value"),
    [
        ("minimax_m2", {"rotary_pct": 0.5}, "rotary_dim", 4),
        ("minimax_m2", {}, "scoring_func", "sigmoid"),
        ("hy_v3", {"moe_layers": [1, 2]}, "first_k_dense_replace", 1),
        ("hy_v3", {"moe_layers": [0, 2]}, "first_k_dense_replace", None),
    ],
)
def test_older_keys_that_vllm_reads(decoder_block, keys, name, value):
    experts = {"num_experts": 4, "num_experts_per_tok": 2}
    config = tiny_config(decoder_block, **experts, **keys)
    assert to_config_json(FAMILIES[decoder_block], config).get(name) == value


# Cases whose parts a family holds that comes first; others are exported as their own.
NARROWER = {
    "ernie4_5": "llama",
    "seed_oss": "llama",
    "phi3-window": "mistral",
    "phi3-short": "llama",
    "qwen3_5_moe_text": "qwen3_next",
}


@pytest.mark.parametrize("case", CASES)
def test_a_model_is_exported_as_the_narrowest_family(case):
    config_json = of_family_vectors(case).config_json
    family = resolve_family(config_json, "here")
    keys = config_from_hf(family, config_json, "here", {})
    narrowest = find_family(load_config(**keys), "")
    assert narrowest.model_type == NARROWER.get(case, family.model_type)


def older(config_json: dict[str, Any]) -> dict[str, Any]:
    """A config.json as versions of transformers before 5, or authors, wrote it."""
    if "linear_head_dim" in config_json:
        return published_by_kimi(config_json)
    config = {name: value for name, value in config_json.items() if name != "rope_parameters"}
    parameters = dict(config_json["rope_parameters"])
    if GLOBAL in parameters:
        config["rope_local_base_freq"] = parameters[LOCAL]["rope_theta"]
        parameters = dict(parameters[GLOBAL])
    for name in ("rope_theta", "partial_rotary_factor"):
        if name in parameters:
            config[name] = parameters.pop(name)
    is_scaled = parameters["rope_type"] != "default"
    return config | {"rope_scaling": parameters if is_scaled else None}


def published_by_kimi(config_json: dict[str, Any]) -> dict[str, Any]:
    """A config.json with layers counted from 1, and the sizes of KDA in an object."""
    config = dict(config_json)
    kinds = [*enumerate(config.pop("layer_types"), 1)]
    config["first_k_dense_replace"] = config.pop("mlp_layer_types").index("sparse")
    config["linear_attn_config"] = {
        "full_attn_layers": [layer for layer, kind in kinds if kind == GLOBAL],
        "kda_layers": [layer for layer, kind in kinds if kind != GLOBAL],
        "head_dim": config.pop("linear_head_dim"),
        "num_heads": config.pop("linear_num_heads"),
        "short_conv_kernel_size": config.pop("linear_conv_kernel_dim"),
    }
    return config | {"mla_use_nope": True, "rope_theta": 10_000.0, "rope_scaling": None}


def test_keys_of_published_kimi_linear_are_written():
    config_json = dict(of_family_vectors("kimi_linear").config_json)
    family = resolve_family(config_json, "here")
    keys = config_from_hf(family, config_json, "here", {})
    written, published = to_config_json(family, load_config(**keys)), published_by_kimi(config_json)
    for name in ("first_k_dense_replace", "linear_attn_config", "mla_use_nope"):
        assert written[name] == published[name]


# Each kind of layer has more than older files can say, or there are no rotary positions.
ONLY_NEWER = (
    "gemma4_text",
    "gemma4_text-per-layer",
    "gemma4_text-plain",
    "olmo_hybrid-nope",
    "mamba2",
    "mamba2-tied",
    "nemotron_h",
)


@pytest.mark.parametrize("case", [case for case in CASES if case not in ONLY_NEWER])
def test_older_files_are_read_alike(case):
    config_json = of_family_vectors(case).config_json
    family = resolve_family(config_json, "here")
    keys = config_from_hf(family, older(config_json), "here", {})
    assert keys == config_from_hf(family, config_json, "here", {})


@pytest.mark.parametrize(
    ("case", "rule"),
    [
        ("gemma2", {}),
        ("gemma3_text", {"sliding_window_pattern": 3}),
        ("olmo3", {}),
        ("cohere2", {"sliding_window_pattern": 4}),
        ("exaone4", {"sliding_window_pattern": 2}),
        ("qwen2", {}),
        ("smollm3-interval", {"no_rope_layers": None}),
    ],
)
def test_rules_of_older_files_give_the_same_layers(case, rule):
    config_json = of_family_vectors(case).config_json
    family = resolve_family(config_json, "here")
    keys = config_from_hf(family, config_json | {"layer_types": None} | rule, "here", {})
    assert keys == config_from_hf(family, config_json, "here", {})


@pytest.mark.parametrize("case", ["gemma3_text", "qwen2", "phi3-long"])
def test_an_older_folder_becomes_a_newer_one(case, tmp_path):
    golden = of_family_vectors(case)
    folder = write(tmp_path / "hf", older(golden.config_json), golden.parameters)
    run(f"from=hf:{folder}", f"to={tmp_path / 'run'}")
    run(f"from={tmp_path / 'run'}", f"to=hf:{tmp_path / 'out'}")
    exported = json.loads((tmp_path / "out" / "config.json").read_text())
    of_model = golden.config_json.keys() - NOT_OF_MODEL
    assert {name: exported[name] for name in of_model} == {
        name: golden.config_json[name] for name in of_model
    }
    assert not exported.keys() & {"rope_theta", "rope_scaling", "rope_local_base_freq"}


@pytest.mark.parametrize(
    ("case", "older_keys"),
    [
        ("nemotron_h", {"layers_block_type": None, "hybrid_override_pattern": "M*-EME"}),
        (
            "granitemoehybrid",
            {
                "layer_types": ["mamba", "attention", "mamba"],
                "position_embedding_type": "nope",
                "mamba_d_head": "auto",
                "time_step_limit": None,
            },
        ),
        ("falcon_h1-norm", {"mamba_d_ssm": None, "ssm_multipliers": None}),
        ("mamba2-tied", {"time_step_limit": [0.0, math.inf]}),
    ],
)
def test_state_spaces_as_published(case, older_keys):
    config_json = of_family_vectors(case).config_json
    family = resolve_family(config_json, "here")
    keys = config_from_hf(family, config_json | older_keys, "here", {})
    assert keys == config_from_hf(family, config_json, "here", {})


def test_global_heads_as_published():
    config_json = of_family_vectors("gemma4_text").config_json
    family = resolve_family(config_json, "here")
    published = {"global_head_dim": 12, "num_global_key_value_heads": 1, "per_layer_config": None}
    keys = config_from_hf(family, config_json | published, "here", {})
    assert keys == config_from_hf(family, config_json, "here", {})


def test_a_text_part_that_is_silent_about_its_sizes():
    """As published: Gemma 3 of 4B leaves out what its class has by default."""
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    config_json = {"model_type": "gemma3", "text_config": text, "vision_config": {}}
    family = resolve_family(config_json, "here")
    keys = config_from_hf(family, config_json, "here", {})
    imported = load_config(**keys)
    preset = load_config(model_name="gemma3-4b", max_target_length=131_072)
    assert model_config_values(imported)["vocab_size"] == 262_208
    assert keys["layer_pattern"] == "(LLLLLG)LLLL"
    written = [to_config_json(family, config) for config in (imported, preset)]
    assert written[0] == written[1] | {"vocab_size": 262_208}
    del text["num_hidden_layers"]
    assert config_from_hf(family, config_json, "here", {})["layer_pattern"] == "(LLLLLG)LL"


_YARN_OF_DEEPSEEK = {
    "type": "yarn",
    "factor": 40,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32,
    "beta_slow": 1,
}
_LATENT_ATTENTION = {
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "rope_theta": 10_000,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 163_840,
    "moe_layer_freq": 1,
    "aux_loss_alpha": 0.001,
    "seq_aux": True,
}
# Preset -> config.json as published, without what no class reads.
PUBLISHED = {
    "deepseek2-16b": _LATENT_ATTENTION
    | {
        "model_type": "deepseek_v2",
        "hidden_size": 2048,
        "intermediate_size": 10_944,
        "moe_intermediate_size": 1408,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "q_lora_rank": None,
        "first_k_dense_replace": 1,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "greedy",
        "scoring_func": "softmax",
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
        "rope_scaling": _YARN_OF_DEEPSEEK | {"mscale": 0.707, "mscale_all_dim": 0.707},
        "vocab_size": 102_400,
    },
    "deepseek3-671b": _LATENT_ATTENTION
    | {
        "model_type": "deepseek_v3",
        "hidden_size": 7168,
        "intermediate_size": 18_432,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "q_lora_rank": 1536,
        "first_k_dense_replace": 3,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "n_group": 8,
        "topk_group": 4,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "num_nextn_predict_layers": 1,
        "rope_scaling": _YARN_OF_DEEPSEEK | {"mscale": 1.0, "mscale_all_dim": 1.0},
        "vocab_size": 129_280,
    },
    "kimi-k2-1t": _LATENT_ATTENTION
    | {
        "model_type": "kimi_k2",
        "hidden_size": 7168,
        "intermediate_size": 18_432,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 61,
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "q_lora_rank": 1536,
        "first_k_dense_replace": 1,
        "n_routed_experts": 384,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.827,
        "rope_theta": 50_000.0,
        "rope_scaling": _YARN_OF_DEEPSEEK
        | {"factor": 32.0, "beta_fast": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0},
        "max_position_embeddings": 131_072,
        "vocab_size": 163_840,
    },
    "gpt-oss-20b": {
        "model_type": "gpt_oss",
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 24,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "layer_types": [LOCAL, GLOBAL] * 12,
        "sliding_window": 128,
        "attention_bias": True,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "experts_per_token": 4,
        "swiglu_limit": 7.0,
        "hidden_act": "silu",
        "rope_theta": 150_000,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "original_max_position_embeddings": 4096,
            "truncate": False,
        },
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131_072,
        "vocab_size": 201_088,
    },
    "glm-4.5-air": {
        "model_type": "glm4_moe",
        "hidden_size": 4096,
        "intermediate_size": 10_944,
        "moe_intermediate_size": 1408,
        "num_hidden_layers": 46,
        "num_attention_heads": 96,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "partial_rotary_factor": 0.5,
        "attention_bias": True,
        "use_qk_norm": False,
        "first_k_dense_replace": 1,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "rope_theta": 1_000_000,
        "rope_scaling": None,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131_072,
        "vocab_size": 151_552,
    },
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 768,  # 6144, which no layer has
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "use_sliding_window": False,
        "sliding_window": None,
        "rope_theta": 1_000_000.0,
        "rope_scaling": None,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 40_960,
        "vocab_size": 151_936,
    },
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_preset_is_the_published_model(name):
    config_json = PUBLISHED[name]
    family = resolve_family(config_json, "here")
    imported = load_config(**config_from_hf(family, config_json, "here", {}))
    preset = load_config(
        model_name=name,
        max_target_length=config_json["max_position_embeddings"],
        # of training alone
        load_balance_loss_weight=imported.model.mixture_of_experts.load_balance_loss_weight,
    )
    assert to_config_json(family, preset) == to_config_json(family, imported)
    assert find_family(preset, "") is family


def test_a_multimodal_folder(tmp_path):
    golden = of_family_vectors("gemma3_text")
    text = {name: value for name, value in golden.config_json.items() if name != "model_type"}
    config_json = {"model_type": "gemma3", "text_config": text, "vision_config": {}}
    vision = {"model.vision_tower.a.weight": np.zeros(3, np.float32)}
    for prefix in ("model.language_model.", "language_model.model."):
        tensors = {
            prefix + name.removeprefix("model."): tensor
            for name, tensor in golden.parameters.items()
        }
        weights = HFWeights(write(tmp_path / prefix, config_json, tensors | vision))
        assert "only the text model is read. Skipped: vision_tower (1 tensors)" in weights.notes[0]
        plain = HFWeights(write(tmp_path / "plain", golden.config_json, golden.parameters))
        assert weights.keys == plain.keys
        for name in weights.model.parameters:
            np.testing.assert_array_equal(weights.read(name), plain.read(name))


def test_published_files_of_qwen3_5(tmp_path):
    """A model of text, images, and further tokens; in a text all positions are the same."""
    golden = of_family_vectors("qwen3_5_text")
    rotary = {"mrope_interleaved": True, "mrope_section": [1, 1, 0]}
    text = golden.config_json | {
        "attn_output_gate": True,
        "mlp_only_layers": [],
        "rope_parameters": golden.config_json["rope_parameters"] | rotary,
    }
    config_json = {"model_type": "qwen3_5", "text_config": text, "tie_word_embeddings": False}
    tensors = {
        name.replace("model.", "model.language_model."): tensor
        for name, tensor in golden.parameters.items()
    }
    others = {name: np.zeros(3, np.float32) for name in ("model.visual.a.weight", "mtp.fc.weight")}
    weights = HFWeights(write(tmp_path / "all", config_json, tensors | others))
    notes = " ".join(weights.notes)
    assert "visual (1 tensors)" in notes
    assert "mtp" in notes
    plain = HFWeights(write(tmp_path / "text", golden.config_json, golden.parameters))
    assert weights.keys == plain.keys
    for name in weights.model.parameters:
        np.testing.assert_array_equal(weights.read(name), plain.read(name))


def test_layers_of_multi_token_prediction_are_named_and_skipped(tmp_path):
    golden = of_family_vectors("deepseek_v3")
    layer = {f"model.layers.2.{name}.weight": np.zeros((24, 24)) for name in ("eh_proj", "enorm")}
    weights = HFWeights(write(tmp_path, golden.config_json, golden.parameters | layer))
    assert "not read: model.layers.2.* (2 tensors)" in weights.notes[0]
    beyond = {"model.layers.1.mlp.extra.weight": np.zeros(3, np.float32)}
    with pytest.raises(UserError, match=r"model\.layers\.1\.mlp\.extra\.weight"):
        HFWeights(write(tmp_path, golden.config_json, golden.parameters | beyond))


def test_quantized_files_are_named(tmp_path):
    golden = of_family_vectors("gpt_oss")
    name = "model.layers.0.mlp.experts.down_proj"
    tensors = {key: tensor for key, tensor in golden.parameters.items() if key != name}
    tensors |= {f"{name}_blocks": np.zeros(3, np.uint8), f"{name}_scales": np.zeros(3, np.uint8)}
    config_json = {**golden.config_json, "quantization_config": {"quant_method": "mxfp4"}}
    with pytest.raises(UserError, match="has quantization_config, and quantized weights are not"):
        HFWeights(write(tmp_path, config_json, tensors))


def test_layers_with_experts_in_other_words():
    """An export reads what each layer has, whichever keys say it."""
    config_json = of_family_vectors("deepseek_v3").config_json
    family = resolve_family(config_json, "here")
    keys = config_from_hf(family, config_json, "here", {})
    assert (keys["layer_pattern"], keys["num_experts"]) == ("DE", 8)
    listed = {**keys, "layer_pattern": "", "layer_kinds": {}, "moe_layers": [1]}
    assert to_config_json(family, load_config(**listed)) == to_config_json(
        family, load_config(**keys)
    )
    with pytest.raises(UserError, match="a dense layer follows one with experts"):
        find_family(load_config(**{**listed, "moe_layers": [0]}), "deepseek_v3")
    with pytest.raises(UserError, match="shared_experts=0"):
        find_family(load_config(**{**listed, "shared_experts": 0}), "deepseek_v3")


def test_heads_in_the_order_of_the_file(tmp_path):
    """A model that rotates adjacent dimensions reads and writes them as they are."""
    golden = of_family_vectors("glm4")
    folder = golden.store(tmp_path / "hf", golden.parameters)
    run(f"from=hf:{folder}", f"to={tmp_path / 'run'}", "rope_pairs=adjacent")
    model, params = model_in_run(tmp_path / "run"), parameters_in_run(tmp_path / "run")
    close(jax.jit(model.merge(params))(golden.batch), golden.logits, TRANSFORMERS.logits)
    query = golden.parameters["model.layers.0.self_attn.q_proj.bias"].reshape(4, 8)
    stored, row = model.stored(0, "self_attention/query/bias")
    values = parameters_in_run(tmp_path / "run")
    for name in stored.split("/"):
        values = values[name]
    np.testing.assert_array_equal(values if row is None else values[row], query)
    run(f"from={tmp_path / 'run'}", f"to=hf:{tmp_path / 'out'}")
    same_bits(load_file(tmp_path / "out" / "model.safetensors"), golden.parameters)
    config = load_config(decoder_block="llama2", rope_pairs="adjacent", dataset_type="synthetic")
    assert find_family(config, "").model_type == "ernie4_5"


def test_layers_of_a_kind_that_differ_are_refused():
    keys = {
        "decoder_block": "smollm3",
        "base_num_decoder_layers": 4,
        "layer_pattern": "GGAB",
        "layer_kinds": {"G": {}, "A": {"rope_max_timescale": 5.0}, "B": {"ffn_bias": True}},
        "dataset_type": "synthetic",
    }
    with pytest.raises(UserError) as caught:
        find_family(load_config(**keys), "smollm3")
    assert "rope_max_timescale=5.0 in some layers" in str(caught.value)
    assert "ffn_bias=True in some layers" in str(caught.value)
