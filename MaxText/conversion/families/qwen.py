"""Qwen2 (Yang et al. 2024): biases on query, key and value. Qwen3 (2025): norms of q and k."""

from MaxText.conversion.families.llama import PARTS, ROWS, SETTINGS
from MaxText.conversion.families.rotary_scaling import ROTARY_SCALING
from MaxText.conversion.family import BOOLEANS, Family, only, ratio, same

_FULL_ATTENTION = only(
    "use_sliding_window",
    False,
    remedy="Every layer attends to all earlier tokens here.",
)
_LENGTH = same("max_position_embeddings", "max_target_length", default=32_768)

QWEN2 = Family(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    decoder_block="llama2",
    parts={
        **PARTS,
        "use_qk_norm": False,
        "qkv_bias": True,
        "proj_bias": False,
        "ffn_bias": False,
    },
    settings=(
        *SETTINGS,
        _LENGTH,
        same("head_dim", "head_dim", default=ratio("hidden_size", "num_attention_heads")),
        _FULL_ATTENTION,
        *ROTARY_SCALING,
    ),
    rows=ROWS,
    prefix="model.",
)

QWEN3 = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    decoder_block="llama2",
    parts={**PARTS, "use_qk_norm": True, "ffn_bias": False},
    settings=(
        *SETTINGS,
        _LENGTH,
        same("head_dim", "head_dim", default=128),
        same("attention_bias", "qkv_bias proj_bias", default=False, values=BOOLEANS),
        _FULL_ATTENTION,
        *ROTARY_SCALING,
    ),
    rows=ROWS,
    prefix="model.",
)
