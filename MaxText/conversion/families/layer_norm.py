"""Families with LayerNorm: Cohere 2, StarCoder2, StableLM and Nemotron.

Cohere 2 (Command R7B, 2024) has parallel branches behind one norm without bias, rotates adjacent
dimensions in layers with a window, has no rotary positions in the others, and multiplies logits.
StarCoder2 (Lozhkov et al. 2024) has biases and an ungated feed-forward. StableLM (Bellagente et al.
2024) rotates a part of each head. Nemotron-4 and Minitron (Parmar et al. 2024) store norm scales as
their difference from 1.
"""

from MaxText.config.values import TypedValue
from MaxText.conversion import family as hf
from MaxText.conversion.families import rotary, windows
from MaxText.conversion.families.llama import (
    GATED_MLP,
    PRE_NORMS,
    SEPARATE_QK_NORMS,
    UNGATED,
    activation,
    attention,
    biases,
    descendant,
    head_dim_of_width,
    rows,
    tied_by_default,
    ungated_mlp,
)
from MaxText.conversion.layer_table import (
    GLOBAL,
    LOCAL,
    LayerKind,
    LayerTable,
    every_nth_global,
    write_layer_types,
)
from MaxText.conversion.rotary_config import RotaryDefaults

_EPSILON = "normalization_layer_epsilon"
_EPSILON_NAME = "rms_norm_eps"  # Llama's


def _read_scale(value: hf.HFValue, config: hf.HFConfig) -> TypedValue:
    """Returns the divisor of logits for a factor."""
    factor = hf.positive_number(value)
    return hf.REQUIRED if factor is hf.REQUIRED else 1.0 / factor


def _write_scale(values: hf.KeyValues) -> float:
    """Returns the factor of logits for a divisor: of the nearest numbers, the shortest."""
    return float(f"{1.0 / values['logits_scaling']:.15g}")


def logit_factor(name: str, default: float) -> hf.ConfigMapping:
    """Returns the setting of a factor of logits, the inverse of logits_scaling."""
    return hf.mapped(name, "logits_scaling", default, read=_read_scale, write=_write_scale)


COHERE2 = descendant(
    "Cohere2ForCausalLM",
    hf.mapped("layer_norm_eps", _EPSILON, default=1e-5),
    logit_factor("logit_scale", 0.0625),
    tied_by_default(),
    hf.write_only("head_dim", "head_dim", hf.divided_by("hidden_size", "num_attention_heads")),
    windows.of_local_layers(4096),
    rotary.either_order(),
    without=("mlp_bias",),
    defaults={"max_position_embeddings": 8192},
    decoder_block="cohere2",
    rows=rows(PRE_NORMS, attention("adjacent"), GATED_MLP),
    layers=LayerTable(
        (
            LayerKind(LOCAL, "L", {"mixer": "local_attention", "position_embedding": "rotary"}),
            LayerKind(GLOBAL, "N", {"mixer": "attention", "position_embedding": "none"}),
        ),
        every_nth_global("sliding_window_pattern", default=4),
        write_layer_types,
    ),
)

STARCODER2 = descendant(
    "Starcoder2ForCausalLM",
    hf.mapped("norm_epsilon", _EPSILON, default=1e-5),
    activation("gelu_pytorch_tanh", values=UNGATED),
    biases("use_bias", "qkv_bias proj_bias ffn_bias", default=True),
    tied_by_default(),
    windows.of_local_layers(None),
    without=("attention_bias", "mlp_bias"),
    defaults={"num_key_value_heads": 2, "max_position_embeddings": 4096},
    decoder_block="starcoder2",
    rows=rows(PRE_NORMS, attention(), ungated_mlp("c_fc c_proj")),
    layers=windows.of_all_layers(None),
)

STABLELM = descendant(
    "StableLmForCausalLM",
    hf.mapped("layer_norm_eps", _EPSILON, default=1e-5),
    biases("use_qkv_bias", "qkv_bias"),
    biases("qk_layernorm", "use_qk_norm"),
    hf.mapped("use_parallel_residual", "block_arrangement", False, hf.PARALLEL),
    head_dim_of_width(),
    *rotary.settings(fraction_types=rotary.ALL_TYPES),
    choices={
        "parallel_residual_shared_norm": True,
        "qk_norm_scope": "separate",
        "qk_norm_type": "layer_norm",
    },
    without=("attention_bias", "mlp_bias"),
    defaults={"num_key_value_heads": 32, "max_position_embeddings": 4096},
    decoder_block="stablelm",
    rows=rows(PRE_NORMS, attention(), SEPARATE_QK_NORMS, GATED_MLP),
    rotary=RotaryDefaults(fraction=0.25),
)

NEMOTRON = descendant(
    "NemotronForCausalLM",
    hf.mapped("norm_eps", _EPSILON, default=1e-5),
    activation("relu2", values=UNGATED),
    *rotary.settings(fraction_types=rotary.ALL_TYPES),
    defaults={"max_position_embeddings": 4096},
    decoder_block="nemotron",
    rows=rows(PRE_NORMS, attention(), ungated_mlp()),
    rotary=RotaryDefaults(fraction=0.5),
)
