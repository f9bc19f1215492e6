"""Makes the vectors of this folder with transformers: tiny random models, logits, loss, gradients.

    PYTHONPATH=. python tests/golden/families/make.py            # all cases
    PYTHONPATH=. python tests/golden/families/make.py gemma3     # those with a word in their name

Needs torch and transformers (`library` in the JSON files has the versions). README.md says what the
files hold. Weights are not stored: `weights` draws them again, from NumPy's RandomState, whose
numbers never change.
"""

import contextlib
import json
import re
import sys
import tempfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

FOLDER = Path(__file__).parent
_KIMI_DENSE = re.compile(r"block_sparse_moe\.(gate|up|down)_proj\.")
BATCH = 2
LENGTH = 20

# Sizes of all cases. There is no padding id, whose embedding would get no gradient.
SIZES = {
    "vocab_size": 64,
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 4.0,
    "beta_slow": 0.5,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 16,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
# Latent attention and experts of DeepSeek.
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 6,
    "v_head_dim": 9,
    "moe_intermediate_size": 12,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
}
LOCAL = "sliding_attention"
GLOBAL = "full_attention"
LINEAR = "linear_attention"
DELTA_NET = {
    "head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    # Vectors of few numbers are near 0 here and there, where norms amplify rounding.
    "rms_norm_eps": 1e-2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 12,
    "layer_types": [LINEAR, GLOBAL, LINEAR],
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 500.0,
        "partial_rotary_factor": 0.5,
    },
}
SHARED_EXPERT = {
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 12,
    "shared_expert_intermediate_size": 20,
}

# case: changes of SIZES. The text before a hyphen is the model_type.
# A state space whose chunks are shorter than the sequences.
MAMBA = {
    "mamba_n_heads": 6,
    "mamba_d_head": 8,
    "mamba_d_state": 5,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 7,
}
RECURRENT = "linear_attention"
NO_ATTENTION = dict.fromkeys(
    (
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "max_position_embeddings",
    )
)

CASES: dict[str, dict[str, Any]] = {
    "arcee": {"attention_bias": True, "mlp_bias": True, "head_dim": 8, "rope_parameters": YARN},
    "ernie4_5": {"use_bias": True, "head_dim": 8, "rms_norm_eps": 1e-3},
    "qwen2": {
        "use_sliding_window": True,
        "sliding_window": 5,
        "max_window_layers": 1,
        "rope_parameters": YARN,
    },
    "qwen3": {
        "head_dim": 8,
        "attention_bias": True,
        "use_sliding_window": True,
        "sliding_window": 5,
        "layer_types": [GLOBAL, LOCAL, GLOBAL],
        "tie_word_embeddings": True,
    },
    "seed_oss": {"head_dim": 8, "attention_out_bias": True, "mlp_bias": True},
    "stablelm": {"use_qkv_bias": True, "hidden_size": 32, "qk_layernorm": True},
    "stablelm-parallel": {
        "use_parallel_residual": True,
        "num_hidden_layers": 2,
        "hidden_size": 32,
    },
    "starcoder2": {"sliding_window": 5},
    "nemotron": {"attention_bias": True, "mlp_bias": True, "head_dim": 8},
    "smollm3": {
        "num_hidden_layers": 4,
        "use_sliding_window": True,
        "sliding_window": 5,
        "no_rope_layers": [1, 0, 1, 0],
        "layer_types": [LOCAL, GLOBAL, GLOBAL, LOCAL],
        "attention_bias": True,
    },
    "smollm3-interval": {"num_hidden_layers": 4, "no_rope_layer_interval": 2, "mlp_bias": True},
    "phi3": {"rope_parameters": {"rope_theta": 500.0, "partial_rotary_factor": 0.67}},
    "phi3-window": {"sliding_window": 5, "num_hidden_layers": 2},
    "phi3-long": {
        "original_max_position_embeddings": 16,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 500.0,
            "short_factor": [1.0, 1.1, 1.2, 1.3],
            "long_factor": [1.0, 1.5, 2.5, 4.0],
            "partial_rotary_factor": 0.67,
        },
    },
    "phi3-short": {
        "original_max_position_embeddings": 32,
        "num_hidden_layers": 2,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 500.0,
            "short_factor": [1.0, 1.3, 2.0],
            "long_factor": [1.0, 1.5, 2.5],
        },
    },
    "gemma2": {
        "num_hidden_layers": 4,
        "head_dim": 8,
        "query_pre_attn_scalar": 5,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 5.0,
        "sliding_window": 5,
        "attention_bias": True,
    },
    "gemma3_text": {
        "num_hidden_layers": 5,
        "head_dim": 8,
        "query_pre_attn_scalar": 5,
        "layer_types": [LOCAL, LOCAL, GLOBAL, LOCAL, LOCAL],
        "sliding_window": 5,
        "final_logit_softcapping": 7.0,
        "rope_parameters": {
            LOCAL: {"rope_type": "default", "rope_theta": 100.0},
            GLOBAL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 5000.0},
        },
    },
    "olmo2": {"attention_bias": True, "rope_parameters": LLAMA3},
    "olmo3": {
        "num_hidden_layers": 4,
        "sliding_window": 5,
        "rope_parameters": {
            LOCAL: {"rope_type": "default", "rope_theta": 500_000.0},
            GLOBAL: {**YARN, "attention_factor": 1.3},
        },
    },
    "granite": {
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.4,
        "attention_multiplier": 0.6,
        "logits_scaling": 1.7,
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
    },
    "ministral3": {
        "head_dim": 8,
        "rope_parameters": {
            **YARN,
            "original_max_position_embeddings": 4,
            "mscale": 1.0,
            "mscale_all_dim": 0.5,
            "llama_4_scaling_beta": 0.4,
        },
    },
    "glm4": {"head_dim": 8, "rope_parameters": {"rope_theta": 500.0, "rope_type": "default"}},
    "nanochat": {"final_logit_softcapping": 5.0, "attention_bias": True},
    "exaone4": {
        "num_hidden_layers": 4,
        "sliding_window": 5,
        "sliding_window_pattern": 2,
        "head_dim": 8,
    },
    "exaone4-global": {"num_hidden_layers": 2, "sliding_window": None, "layer_types": [GLOBAL] * 2},
    "hunyuan_v1_dense": {
        "head_dim": 8,
        "attention_bias": True,
        "rope_parameters": {
            "rope_type": "dynamic",
            "alpha": 30.0,
            "factor": 1.0,
            "rope_theta": 500.0,
        },
    },
    "cohere2": {
        "num_hidden_layers": 4,
        "sliding_window": 5,
        "attention_bias": True,
        "logit_scale": 0.3,
    },
    "apertus": {"attention_bias": True},
    "gemma4_text": {
        "num_hidden_layers": 4,
        "head_dim": 8,
        "global_head_dim": 12,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0,
        "layer_types": [LOCAL, GLOBAL, LOCAL, GLOBAL],
        "sliding_window": 5,
        "final_logit_softcapping": 7.0,
    },
    "gemma4_text-per-layer": {
        "num_hidden_layers": 2,
        "head_dim": 8,
        "global_head_dim": 8,
        "hidden_size_per_layer_input": 6,
        "vocab_size_per_layer_input": 80,
        "layer_types": [LOCAL, GLOBAL],
        "sliding_window": 5,
    },
    "gemma4_text-plain": {
        "num_hidden_layers": 2,
        "head_dim": 8,
        "global_head_dim": 16,
        "hidden_size_per_layer_input": 0,
        "layer_types": [LOCAL, GLOBAL],
        "sliding_window": 5,
        "attention_bias": True,
    },
    "qwen3_moe": {
        "num_hidden_layers": 2,
        "head_dim": 8,
        "num_experts": 5,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 12,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
        "attention_bias": True,
    },
    "qwen3_moe-window": {
        "num_hidden_layers": 2,
        "head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 12,
        "decoder_sparse_step": 2,
        "use_sliding_window": True,
        "sliding_window": 5,
    },
    "qwen2_moe": {
        "num_hidden_layers": 2,
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 12,
        "shared_expert_intermediate_size": 20,
        "use_sliding_window": True,
        "sliding_window": 5,
        "decoder_sparse_step": 2,
    },
    "qwen3_next": {**DELTA_NET, **SHARED_EXPERT, "mlp_only_layers": [1], "norm_topk_prob": False},
    "qwen3_next-alike": {
        **SHARED_EXPERT,
        "num_hidden_layers": 2,
        "head_dim": 8,
        "linear_num_key_heads": 3,
        "linear_num_value_heads": 3,
        "linear_key_head_dim": 4,
        "linear_value_head_dim": 6,
        "linear_conv_kernel_dim": 3,
        "layer_types": [LINEAR, GLOBAL],
    },
    "qwen3_5_text": {**DELTA_NET, "attention_bias": True},
    "qwen3_5_moe_text": {**DELTA_NET, **SHARED_EXPERT, "tie_word_embeddings": True},
    "olmo_hybrid": {
        "rms_norm_eps": 1e-2,
        "layer_types": [LINEAR, LINEAR, GLOBAL],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 20,
        "linear_value_head_dim": 10,  # transformers 5.24 stores convolutions of one width only
        "attention_bias": True,
        "rope_parameters": LLAMA3,
    },
    "olmo_hybrid-nope": {
        "num_hidden_layers": 2,
        "layer_types": [LINEAR, GLOBAL],
        "linear_allow_neg_eigval": False,
        "linear_value_head_dim": 4,
        "rope_parameters": {"rope_type": "default", "rope_theta": None},
    },
    "deepseek_v2": {
        **LATENT,
        "num_hidden_layers": 2,
        "q_lora_rank": None,
        "n_shared_experts": 2,
        "routed_scaling_factor": 1.5,
        "first_k_dense_replace": 1,
    },
    "deepseek_v2-groups": {
        **LATENT,
        "num_hidden_layers": 2,
        "q_lora_rank": 10,
        "n_shared_experts": 1,
        "topk_method": "group_limited_greedy",
        "n_group": 4,
        "topk_group": 2,
        "attention_bias": True,
        "mlp_bias": False,
        "first_k_dense_replace": 0,
        "rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.9},
    },
    "deepseek_v3": {
        **LATENT,
        "num_hidden_layers": 2,
        "q_lora_rank": 10,
        "n_shared_experts": 1,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 1,
        "attention_bias": True,
        "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
    },
    "deepseek_v3-plain": {
        **LATENT,
        "num_hidden_layers": 2,
        "q_lora_rank": None,
        "n_shared_experts": 2,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 0,
        "norm_topk_prob": False,
        "rope_parameters": YARN,
    },
    "kimi_linear": {
        **{name: size for name, size in LATENT.items() if name != "n_routed_experts"},
        "num_experts": 8,
        "q_lora_rank": None,
        "num_expert_group": 2,
        "topk_group": 1,
        "num_shared_experts": 2,
        "layer_types": [LINEAR, GLOBAL, LINEAR],
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "linear_head_dim": 10,
        "linear_num_heads": 3,
        "linear_conv_kernel_dim": 3,
    },
    "gpt_oss": {
        "num_hidden_layers": 2,
        "head_dim": 8,
        "intermediate_size": 12,
        "num_local_experts": 5,
        "num_experts_per_tok": 3,
        "sliding_window": 5,
        "swiglu_limit": 0.8,
        "rope_parameters": {**YARN, "truncate": False},
    },
    "glm4_moe": {
        "num_hidden_layers": 2,
        "head_dim": 12,
        "n_routed_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 12,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.5,
        "attention_bias": True,
        "use_qk_norm": True,
        "n_group": 2,
        "topk_group": 1,
    },
    "minimax_m2": {
        "num_hidden_layers": 1,
        "head_dim": 12,
        "num_local_experts": 6,
        "num_experts_per_tok": 3,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 500.0,
            "partial_rotary_factor": 0.5,
        },
    },
    "granitemoe": {
        "num_hidden_layers": 1,
        "num_local_experts": 5,
        "num_experts_per_tok": 3,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.4,
        "attention_multiplier": 0.6,
        "logits_scaling": 1.7,
        "attention_bias": True,
        "tie_word_embeddings": True,
    },
    "hy_v3": {
        "num_hidden_layers": 2,
        "head_dim": 8,
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 12,
        "num_shared_experts": 2,
        "mlp_layer_types": ["sparse", "dense"],
        "router_scaling_factor": 1.7,
    },
    "mamba2": {
        **NO_ATTENTION,
        "num_heads": 6,
        "head_dim": 8,
        "state_size": 6,
        "n_groups": 2,
        "chunk_size": 7,
        "use_bias": True,
        "time_step_limit": [0.3, 1.5],
    },
    "mamba2-tied": {
        **NO_ATTENTION,
        "num_hidden_layers": 2,
        "num_heads": 12,
        "head_dim": 4,
        "state_size": 3,
        "n_groups": 1,
        "conv_kernel": 3,
        "use_conv_bias": False,
        "tie_word_embeddings": True,
    },
    "bamba": {**MAMBA, "num_hidden_layers": 3, "attn_layer_indices": [1], "head_dim": 8},
    "granitemoehybrid": {
        **MAMBA,
        "layer_types": [RECURRENT, GLOBAL, RECURRENT],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 12,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.4,
        "attention_multiplier": 0.6,
        "logits_scaling": 1.7,
    },
    "granitemoehybrid-dense": {
        **MAMBA,
        "num_hidden_layers": 2,
        "layer_types": [RECURRENT, GLOBAL],
        "num_local_experts": 0,
        "shared_intermediate_size": 32,
        "position_embedding_type": "rope",
        "tie_word_embeddings": True,
    },
    "falcon_h1": {
        **MAMBA,
        "num_hidden_layers": 2,
        "mamba_d_ssm": 48,
        "head_dim": 8,
        "embedding_multiplier": 3.0,
        "lm_head_multiplier": 0.3,
        "key_multiplier": 0.7,
        "attention_in_multiplier": 1.2,
        "attention_out_multiplier": 0.8,
        "ssm_in_multiplier": 0.9,
        "ssm_out_multiplier": 1.1,
        "ssm_multipliers": [0.6, 1.3, 0.7, 1.4, 0.5],
        "mlp_multipliers": [0.8, 1.2],
        "attention_bias": True,
        "mlp_bias": True,
    },
    "falcon_h1-norm": {
        **MAMBA,
        "num_hidden_layers": 2,
        "mamba_d_ssm": 48,
        "mamba_rms_norm": True,
        "mamba_proj_bias": True,
        "projectors_bias": True,
        "tie_word_embeddings": True,
    },
    "nemotron_h": {
        "layers_block_type": [RECURRENT, GLOBAL, "mlp", "moe", RECURRENT, "moe"],
        "mamba_num_heads": 6,
        "mamba_head_dim": 8,
        "ssm_state_size": 5,
        "n_groups": 2,
        "chunk_size": 7,
        "head_dim": 8,
        "use_bias": True,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 1.5,
        "moe_intermediate_size": 10,
        "moe_shared_expert_intermediate_size": 14,
    },
}


def weights(shapes: Mapping[str, Sequence[int]], centers: Mapping[str, float]) -> dict[str, Any]:
    """Returns random weights that are far from an initialization, float32 by name.

    Args:
      shapes: Of the tensors.
      centers: The mean of the tensors that have one: 1 for most norms.
    """
    drawn = {}
    for name, shape in shapes.items():
        noise = np.random.RandomState(zlib.crc32(name.encode())).standard_normal(tuple(shape))
        is_table = "embed" in name
        scale = 0.5 if is_table else 0.4 if len(shape) < 2 else shape[-1] ** -0.5
        drawn[name] = (centers.get(name, 0.0) + scale * noise).astype(np.float32)
    return drawn


def _make(case: str) -> None:
    """Writes the files of a case."""
    import torch  # pyright: ignore[reportMissingImports]
    import transformers  # pyright: ignore[reportMissingImports]
    from safetensors.numpy import load_file, save_file

    model_type = case.partition("-")[0]
    config = transformers.AutoConfig.for_model(model_type, **(SIZES | CASES[case]))
    config.dtype = torch.float32
    how = {"attn_implementation": "eager", "experts_implementation": "eager"}
    with tempfile.TemporaryDirectory() as folder:
        model = transformers.AutoModelForCausalLM.from_config(config, **how).float()
        model.save_pretrained(folder)
        config_json = json.loads(Path(folder, "config.json").read_text(encoding="utf-8"))
        stored = _with_published_names(load_file(f"{folder}/model.safetensors"))
        is_scale = {name: array.ndim == 1 and array[0] == 1 for name, array in stored.items()}
        centers = {name: 1.0 for name in stored if is_scale[name]}
        fixed = {name: array.tolist() for name, array in stored.items() if _is_fixed(name)}
        drawn = weights({name: array.shape for name, array in stored.items()}, centers)
        drawn |= {name: stored[name] for name in fixed}
        save_file(drawn, f"{folder}/model.safetensors", {"format": "pt"})
        # Some classes store experts one by one, and keep them in one array.
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, **how)
    tokens = np.random.RandomState(0).randint(0, config.vocab_size, (BATCH, LENGTH))
    with _float64_throughout():
        output = model.double()(torch.from_numpy(tokens), labels=torch.from_numpy(tokens))
        output.loss.backward()
    stored_gradients = _gradients_as_stored(model)
    gradients = {
        f"grad/{name}": gradient.astype(np.float32)
        for name, gradient in stored_gradients.items()
        if not np.isnan(gradient).any()
    }
    facts = {
        "hf_config": config_json,
        "shapes": {name: list(array.shape) for name, array in stored.items()},
        "centers": centers,
        "fixed": fixed,
        "without_gradient": sorted(
            name for name, gradient in stored_gradients.items() if np.isnan(gradient).any()
        ),
        "library": {module.__name__: module.__version__ for module in (np, torch, transformers)},
    }
    text = json.dumps(facts, indent=1, default=str)
    (FOLDER / f"{case}.json").write_text(text + "\n", encoding="utf-8")
    np.savez_compressed(
        FOLDER / f"{case}.npz",
        input_ids=tokens.astype(np.int32),
        logits=output.logits.detach().float().numpy(),
        loss=output.loss.detach().numpy(),
        **gradients,
    )
    print(f"{case}: loss {output.loss.item():.4f}")


def _gradients_as_stored(model: Any) -> dict[str, np.ndarray]:
    """Returns the gradients of a model's parameters under the names of its file.

    What the file has besides parameters is NaN. Replaces the parameters of the model.
    """
    import torch  # pyright: ignore[reportMissingImports]
    from safetensors.numpy import load_file

    with torch.no_grad():
        for buffer in model.buffers():
            if buffer.is_floating_point():
                buffer.fill_(torch.nan)
        for parameter in model.parameters():
            parameter.copy_(parameter.grad)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return _with_published_names(load_file(f"{folder}/model.safetensors"))


def _with_published_names(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns tensors with the names of published files, which transformers reads.

    It writes the norm of OLMo hybrid's attention under the name of another one, and dense layers of
    Kimi Linear under the name of those with experts.
    """

    def published(name: str) -> str:
        layer, found, end = name.partition(".feedforward_layer_norm.")
        is_of_attention = found and f"{layer}.self_attn.q_proj.weight" in arrays
        if is_of_attention:
            return f"{layer}.post_attention_layernorm.{end}"
        return _KIMI_DENSE.sub(r"mlp.\1_proj.", name)

    return {published(name): array for name, array in arrays.items()}


@contextlib.contextmanager
def _float64_throughout() -> Iterator[None]:
    """Makes transformers compute in float64 where it asks for float32: norms, softmax, rotary."""
    import torch  # pyright: ignore[reportMissingImports]

    convert = torch.Tensor.to
    convert_type = torch.Tensor.type
    softmax = torch.nn.functional.softmax

    def to(tensor, *arguments, **keywords):
        arguments = [torch.float64 if x is torch.float32 else x for x in arguments]
        if keywords.get("dtype") is torch.float32:
            keywords["dtype"] = torch.float64
        return convert(tensor, *arguments, **keywords)

    def as_type(tensor, dtype=None):
        dtype = torch.float64 if dtype is torch.float32 else dtype
        return convert_type(tensor) if dtype is None else convert_type(tensor, dtype)

    def exact_softmax(scores, dim, dtype=None):
        return softmax(scores, dim=dim, dtype=torch.float64)

    with (
        mock.patch.object(torch.Tensor, "to", to),
        mock.patch.object(torch.Tensor, "type", as_type),
        mock.patch.object(torch.Tensor, "float", torch.Tensor.double),
        mock.patch.object(torch.nn.functional, "softmax", exact_softmax),
    ):
        yield


def _is_fixed(name: str) -> bool:
    """Returns whether a tensor is a constant of the architecture."""
    return name.endswith(("act_fn.beta", "act_fn.eps"))


if __name__ == "__main__":
    for case in CASES:
        if len(sys.argv) == 1 or any(word in case for word in sys.argv[1:]):
            _make(case)
