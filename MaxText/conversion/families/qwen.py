"""Qwen2 (Yang et al. 2024) and Qwen3 (Yang et al. 2025).

Qwen2 has query, key and value biases, Qwen3 query and key norms. With `use_sliding_window` the
layers from `max_window_layers` on have a window, or those that `layer_types` names.
"""

from MaxText.conversion.families import windows
from MaxText.conversion.families.llama import descendant

_SETTINGS = (windows.of_local_layers(4096),)

QWEN2 = descendant(
    "Qwen2ForCausalLM",
    *_SETTINGS,
    without=("attention_bias", "mlp_bias"),
    defaults={"num_key_value_heads": 32, "max_position_embeddings": 32_768},
    decoder_block="qwen2",
    ignored=(),
    layers=windows.OF_LATER_LAYERS,
)

QWEN3 = descendant(
    "Qwen3ForCausalLM",
    *_SETTINGS,
    without=("mlp_bias",),
    defaults={
        "num_key_value_heads": 32,
        "head_dim": 128,
        "max_position_embeddings": 32_768,
    },
    decoder_block="qwen3",
    ignored=(),
    layers=windows.OF_LATER_LAYERS,
)
