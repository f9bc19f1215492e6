"""Mistral (Jiang et al. 2023): Llama's tensors and, in the first version, a sliding window."""

from MaxText.conversion.families import windows
from MaxText.conversion.families.llama import PARTS, ROWS, SETTINGS
from MaxText.conversion.families.rotary_scaling import ROTARY_SCALING
from MaxText.conversion.family import Family, ratio, same

MISTRAL = Family(
    model_type="mistral",
    architecture="MistralForCausalLM",
    decoder_block="llama2",
    parts={
        **{name: value for name, value in PARTS.items() if name != "attention_types"},
        "use_qk_norm": False,
        "qkv_bias": False,
        "proj_bias": False,
        "ffn_bias": False,
    },
    settings=(
        *SETTINGS,
        same("max_position_embeddings", "max_target_length", default=131_072),
        same("head_dim", "head_dim", default=ratio("hidden_size", "num_attention_heads")),
        *windows.window(4096),
        *ROTARY_SCALING,
    ),
    rows=ROWS,
    prefix="model.",
    ignored=(".rotary_emb.inv_freq",),
    window=windows.NAME,
)
