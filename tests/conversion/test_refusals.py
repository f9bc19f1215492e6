"""What a config.json cannot be, by the names that it has there."""

import pytest

from MaxText.conversion.families import FAMILIES
from MaxText.conversion.hf_config import config_from_hf
from MaxText.conversion.hf_import import HFWeights
from MaxText.errors import UserError
from tests.conversion.golden_models import hugging_face, of_family_vectors
from tests.conversion.small_folders import DESCENDANTS, of_family, random, write
from tests.golden.families.make import CASES

YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
REFUSED = [
    ("llama", {"rope_scaling": {"type": "dynamic"}}),
    ("llama", {"rope_scaling": {"rope_type": "llama3"}}),
    ("llama", {"rope_scaling": {"type": "linear", "factor": 0.5}}),
    ("llama", {"rope_scaling": "x"}),
    ("qwen3", {"rope_scaling": YARN | {"attention_factor": 0}}),
    ("qwen3", {"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": "x"}}),
    ("qwen2", {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}),
    ("llama", {"hidden_act": "xielu", "partial_rotary_factor": 0.5}),
    ("llama", {"hidden_size": None}),
    ("qwen2", {"layer_types": ["full_attention", "sliding_attention"]}),
    ("qwen2", {"layer_types": ["full_attention"]}),
    ("qwen3", {"layer_types": ["linear_attention", "full_attention"]}),
    ("mistral", {"sliding_window": "x"}),
    ("mixtral", {"sliding_window": 0}),
    ("mixtral", {"num_local_experts": 1}),
    ("mixtral", {"num_experts_per_tok": 1}),
    ("mixtral", {"router_jitter_noise": 0.1}),
    ("gemma", {"hidden_activation": "gelu"}),
    ("gemma", {"use_bidirectional_attention": True}),
    ("gemma2", {"sliding_window": None}),
    ("gemma2", {"query_pre_attn_scalar": 5.5, "final_logit_softcapping": 0}),
    ("gemma3_text", {"attn_logit_softcapping": 50.0}),
    ("gemma3_text", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}),
    ("gemma4_text", {"hidden_size_per_layer_input": -1, "num_kv_shared_layers": 1}),
    ("gemma4_text", {"enable_moe_block": True, "use_bidirectional_attention": "all"}),
    ("gemma4_text", {"per_layer_config": {"1": {"head_dim": 12}}}),
    ("gemma4_text", {"per_layer_config": {"1": {"sliding_window": 4}, "3": {}}}),
    ("olmo3", {"rope_parameters": {"full_attention": YARN | {"truncate": False}}}),
    ("olmo3", {"layer_types": None, "num_hidden_layers": None}),
    ("phi3", {"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}),
    ("smollm3", {"no_rope_layers": [1, 1], "layer_types": None}),
    ("smollm3", {"use_sliding_window": False}),
    ("exaone4", {"sliding_window": None}),
    ("cohere2", {"logit_scale": 0, "head_dim": 8}),
    ("hunyuan_v1_dense", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}),
    ("qwen3_moe", {"num_local_experts": 1, "mlp_only_layers": "x"}),
    ("qwen2_moe", {"decoder_sparse_step": 0}),
    ("deepseek_v2", {"topk_method": "noaux_tc", "norm_topk_prob": True, "mlp_bias": True}),
    ("deepseek_v2", {"rope_scaling": {"type": "linear", "factor": 2.0}}),
    ("deepseek_v3", {"rope_interleave": False, "num_key_value_heads": 1}),
    ("deepseek_v3", {"scoring_func": "softmax", "n_group": 0, "first_k_dense_replace": -1}),
    ("deepseek_v3", {"n_shared_experts": 0, "moe_layer_freq": 2}),
    ("gpt_oss", {"swiglu_alpha": 1.0, "swiglu_limit": 0}),
    ("minimax_m2", {"router_jitter_noise": 0.1}),
    ("hy_v3", {"mlp_layer_types": ["dense"], "mlp_bias": True}),
    ("gptneo", {"attention_types": [[["linear"], 4]]}),
    ("gptneo", {"attention_layers": ["local"] * 4}),
    ("llama", {"model_type": "opt"}),
    ("llama", {"model_type": ["llama"]}),
    ("muddformer", {"dense_type": "qkr", "dense": False}),
    ("muddformer", {"n_local_heads": 1, "head_dim": 4}),
    ("muddformer", {"n_layer": 1}),
    ("muddformer", {"intermediate_size": 64}),
    ("muddpythia", {"intermediate_size": None}),
    ("muddpythia", {"window_size": 256}),
    ("muddpythia", {"rotary_pct": 0.1}),
    ("tokenformer", {"norm": "layernorm", "pos_emb": "alibi", "no_weight_tying": True}),
    ("tokenformer", {"norm_activation_type": "relu"}),
    ("tokenformer", {"ffn_slot_num": "many", "proj_slot_num": 0}),
    ("tokenformer", {"seq_length": None, "max_position_embeddings": None}),
    ("tokenformer", {"rotary_pct": 0.2}),
    ("tokenformer", {"architectures": "TokenFormerForCausalLM"}),
]


def name_of(row):
    model_type, change = row
    return f"{model_type}: {', '.join(f'{key}={value}' for key, value in change.items())}"


@pytest.mark.parametrize(("model_type", "change"), REFUSED, ids=map(name_of, REFUSED))
def test_a_config_json_that_cannot_be_imported(model_type, change, tmp_path, told):
    if model_type == "gptneo":
        config, tensors = hugging_face("gptneo").config_json, hugging_face("gptneo").parameters
    elif model_type in CASES and model_type not in DESCENDANTS:
        golden = of_family_vectors(model_type)
        config, tensors = golden.config_json, golden.parameters
    else:
        config, tensors = of_family(model_type)
    with pytest.raises(UserError) as caught:
        HFWeights(write(tmp_path, config | change, tensors))
    told(caught.value)


@pytest.mark.parametrize("name", ["hidden_size", "num_key_value_heads", "head_dim"])
def test_wrong_sizes_are_named_as_in_config_json(name):
    for value, problem in {
        "abc": f"{name}: 'abc' is not an integer",
        -4: f"{name}: -4 is not >= 1",
        0: f"{name}: 0 is not >= 1",
        2.5: f"{name}: 2.5 is not an integer",
        True: f"{name}: true is not an integer",
    }.items():
        config = random("mistral")[0] | {name: value}
        with pytest.raises(UserError) as caught:
            config_from_hf(FAMILIES["mistral"], config, "here", {})
        assert f"\n  {problem}" in str(caught.value)
