"""Hugging Face checkpoints of a few kilobytes: random models of every family."""

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from MaxText.config.loading import load_config
from MaxText.conversion.hf_config import config_from_hf, resolve_family
from MaxText.conversion.hf_import import TensorMap
from MaxText.training.backend_defaults import abstract_model

_SIZES = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
_SIZES |= {"num_key_value_heads": 2, "intermediate_size": 24, "max_position_embeddings": 32}
_NORMS = ("input_layernorm.weight", "post_attention_layernorm.weight")
_MOE = "block_sparse_moe"
_Q, _K, _V, _O = (f"self_attn.{letter}_proj" for letter in "qkvo")

# What transformers writes for the descendants of Llama, spelled out: model_type -> (config.json
# besides the sizes, shapes in a layer).
DESCENDANTS = {
    "mistral": (
        {"sliding_window": None, "head_dim": 8},
        {
            f"{_Q}.weight": (32, 16),
            f"{_K}.weight": (16, 16),
            f"{_V}.weight": (16, 16),
            f"{_O}.weight": (16, 32),
        },
    ),
    "qwen2": (
        {},
        {
            f"{_Q}.weight": (16, 16),
            f"{_K}.weight": (8, 16),
            f"{_V}.weight": (8, 16),
            f"{_O}.weight": (16, 16),
            f"{_Q}.bias": (16,),
            f"{_K}.bias": (8,),
            f"{_V}.bias": (8,),
        },
    ),
    "qwen3": (
        {"head_dim": 6, "tie_word_embeddings": True},
        {
            f"{_Q}.weight": (24, 16),
            f"{_K}.weight": (12, 16),
            f"{_V}.weight": (12, 16),
            f"{_O}.weight": (16, 24),
            "self_attn.q_norm.weight": (6,),
            "self_attn.k_norm.weight": (6,),
        },
    ),
    "gemma": (
        {"head_dim": 6, "tie_word_embeddings": True, "hidden_act": "gelu_pytorch_tanh"},
        {
            f"{_Q}.weight": (24, 16),
            f"{_K}.weight": (12, 16),
            f"{_V}.weight": (12, 16),
            f"{_O}.weight": (16, 24),
        },
    ),
    "mixtral": (
        {"sliding_window": None, "num_local_experts": 3, "num_experts_per_tok": 2},
        {
            f"{_Q}.weight": (16, 16),
            f"{_K}.weight": (8, 16),
            f"{_V}.weight": (8, 16),
            f"{_O}.weight": (16, 16),
            f"{_MOE}.gate.weight": (3, 16),
            **{
                f"{_MOE}.experts.{expert}.{name}.weight": shape
                for expert in range(3)
                for name, shape in {"w1": (24, 16), "w2": (16, 24), "w3": (24, 16)}.items()
            },
        },
    ),
    "llama": (
        {"attention_bias": True, "mlp_bias": True, "rope_theta": 500_000.0},
        {
            f"{_Q}.weight": (16, 16),
            f"{_K}.weight": (8, 16),
            f"{_V}.weight": (8, 16),
            f"{_O}.weight": (16, 16),
            f"{_Q}.bias": (16,),
            f"{_K}.bias": (8,),
            f"{_V}.bias": (8,),
            f"{_O}.bias": (16,),
            "mlp.gate_proj.bias": (24,),
            "mlp.up_proj.bias": (24,),
            "mlp.down_proj.bias": (16,),
        },
    ),
}


def random(model_type: str, dtype: str = "float32") -> tuple[dict, dict[str, np.ndarray]]:
    """(config.json, random tensors) of one of DESCENDANTS."""
    more, in_layer = DESCENDANTS[model_type]
    config = {"model_type": model_type, **_SIZES, **more}
    in_layer = in_layer | dict.fromkeys(_NORMS, (16,))
    if model_type != "mixtral":
        in_layer |= {"mlp.gate_proj.weight": (24, 16), "mlp.up_proj.weight": (24, 16)}
        in_layer |= {"mlp.down_proj.weight": (16, 24)}
    shapes = {
        f"model.layers.{layer}.{name}": shape
        for layer in range(config["num_hidden_layers"])
        for name, shape in in_layer.items()
    }
    shapes |= {"model.embed_tokens.weight": (40, 16), "model.norm.weight": (16,)}
    if not config.get("tie_word_embeddings"):
        shapes["lm_head.weight"] = (40, 16)
    return config, _drawn(shapes, dtype)


def tokenformer(dtype: str = "float32", **changes: Any) -> tuple[dict, dict[str, np.ndarray]]:
    """(config.json, random tensors) with the fields of the published TokenFormers.

    Args:
      changes: fields of config.json that differ from those.
    """
    config = {
        "architectures": ["TokenFormerForCausalLM"],
        "torch_dtype": "float16",
        "vocab_size": 40,
        "num_layers": 1,
        "hidden_size": 16,
        "num_attention_heads": 2,
        "qkv_slot_num": 10,
        "proj_slot_num": 14,
        "ffn_slot_num": 22,
        "seq_length": 32,
        "max_position_embeddings": 32,
        "pos_emb": "rotary",
        "rotary_pct": 0.25,
        "no_weight_tying": False,
        "norm": "layernorm_nonparam",
        "final_norm": "layernorm",
        "norm_activation_type": "l2_norm_gelu",
    }
    config |= changes
    return config, _drawn_by_table(config, dtype)


def muddformer(
    model_type: str, dtype: str = "float32", **changes: Any
) -> tuple[dict, dict[str, np.ndarray]]:
    """(config.json, random tensors) with the fields of the released models.

    Args:
      model_type: muddformer or muddpythia.
      changes: fields of config.json that differ from those.
    """
    pythia = model_type == "muddpythia"
    architecture = {"muddformer": "MUDDFormer", "muddpythia": "MUDDPythia"}[model_type]
    config = {
        "model_type": model_type,
        "architectures": [architecture],
        "auto_map": {
            "AutoConfig": f"configuration_{model_type}.{architecture}Config",
            "AutoModelForCausalLM": f"modeling_{model_type}.{architecture}",
        },
        "vocab_size": 40,
        "block_size": 32,
        "dim": 16,
        "n_layer": 2,
        "n_head": 2,
        "n_local_heads": 2,
        "head_dim": 8,
        "intermediate_size": 256,
        "rope_base": 10000,
        "norm_eps": 1e-5 if pythia else 1e-6,
        "use_qk_norm": True,
        "dense": True,
        "dynamic_dense": True,
        "dense_type": "qkvr",
        "sepln": True,
        "expand_last": True,
        "round64": True,
        "stack_hidden": False,
        "tie_word_embeddings": False,
        "is_training": False,
        "torch_dtype": dtype,
    }
    if pythia:
        config |= {"rotary_pct": 0.25, "use_parallel_residual": True, "use_linear_bias": True}
    config |= changes
    return config, _drawn_by_table(config, dtype)


def of_family(model_type: str, **changes: Any) -> tuple[dict, dict[str, np.ndarray]]:
    """(config.json, random tensors) of any family here."""
    if model_type == "tokenformer":
        return tokenformer(**changes)
    if model_type == "gpt2":
        config = {"n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 2} | changes
        config |= {"model_type": "gpt2", "vocab_size": 40}
        return config, _drawn_by_table(config, "float32")
    is_mudd = model_type.startswith("mudd")
    return muddformer(model_type, **changes) if is_mudd else random(model_type, **changes)


def _drawn_by_table(config: dict, dtype: str) -> dict[str, np.ndarray]:
    """Names and shapes are the converter's own: the golden models have those of the programs."""
    family = resolve_family(config, "here")
    model = abstract_model(load_config(**config_from_hf(family, config, "here", {})).model)
    return _drawn({tensor.name: tensor.shape for tensor in TensorMap(family, model).tensors}, dtype)


def _drawn(shapes: dict[str, tuple[int, ...]], dtype: str) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(0)
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    return {
        name: generator.standard_normal(shape, np.float32).astype(kind)
        for name, shape in shapes.items()
    }


def write(folder: Path, config: dict, tensors: dict[str, np.ndarray]) -> Path:
    """Writes config.json and model.safetensors; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(
        {k: np.asarray(v, order="C") for k, v in tensors.items()}, folder / "model.safetensors"
    )
    return folder


def same_bits(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> None:
    """Asserts the same names, shapes, formats and bits."""
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].shape == tensor.shape, name
        assert found[name].dtype == tensor.dtype, name
        assert found[name].tobytes() == tensor.tobytes(), name
