"""Gemma, the first version (Gemma Team 2024, arXiv 2403.08295): Llama's tensors, another head_dim.

Norms multiply by 1 + weight, the rows of the token table by sqrt(hidden_size) when they are looked
up, the gate goes through the tanh form of GELU, and the head is the token table.
"""

from MaxText.conversion.families.llama import PARTS, ROWS, SIZES
from MaxText.conversion.families.rotary_scaling import ROTARY_SCALING
from MaxText.conversion.family import BOOLEANS, Family, only, same

GEMMA = Family(
    model_type="gemma",
    architecture="GemmaForCausalLM",
    decoder_block="gemma",
    parts={
        **PARTS,
        "normalization_zero_centered": True,
        "scale_embedding": True,
        "use_qk_norm": False,
        "ffn_bias": False,
    },
    settings=(
        *SIZES,
        same("max_position_embeddings", "max_target_length", default=8192),
        same("head_dim", "head_dim", default=256),
        same("attention_bias", "qkv_bias proj_bias", default=False, values=BOOLEANS),
        same("tie_word_embeddings", "logits_via_embedding", default=True, values=BOOLEANS),
        same(
            "hidden_act",
            "mlp_activations",
            default="gelu_pytorch_tanh",
            values=(
                ("gelu_pytorch_tanh", ("gelu", "linear")),
                # The first files say "gelu" and mean its tanh form, as transformers knows.
                ("gelu", ("gelu", "linear")),
                ("gelu_new", ("gelu", "linear")),
                ("silu", ("silu", "linear")),
                ("relu", ("relu", "linear")),
            ),
        ),
        only("hidden_activation", "gelu_pytorch_tanh"),
        only("use_bidirectional_attention", False),
        *ROTARY_SCALING,
    ),
    rows=ROWS,
    prefix="model.",
    ignored=(".rotary_emb.inv_freq",),
)
