"""gpt-oss (OpenAI 2025, arXiv 2508.10925).

Attention has sinks and biases, and a window in every other layer, the first included. Experts have
biases and a clamped GLU; their gate and up projections are one tensor of alternating columns. The
published files are in MXFP4, which transformers stores as bfloat16 when it is told to dequantize.
"""

from MaxText.conversion import family as hf
from MaxText.conversion.families import expert_layers, rotary, windows
from MaxText.conversion.families.llama import (
    LAYER,
    MLP,
    PRE_NORMS,
    attention,
    biases,
    descendant,
    rows,
)
from MaxText.conversion.layer_table import (
    GLOBAL_KIND,
    LOCAL_KIND,
    LayerTable,
    every_nth_global,
    write_layer_types,
)
from MaxText.conversion.rotary_config import RotaryDefaults

_EXPERTS = "layers/mlp/experts/"
_EXPERT_ROWS = (
    *hf.projection(MLP + "router", "layers/mlp/gate", "E D", "D E"),
    hf.row(MLP + "experts.gate_up_proj", f"{_EXPERTS}wi_0 {_EXPERTS}wi_1", "E D (F J)", "E D F"),
    hf.row(
        MLP + "experts.gate_up_proj_bias",
        f"{_EXPERTS}wi_0_bias {_EXPERTS}wi_1_bias",
        "E (F J)",
        "E F",
    ),
    hf.row(MLP + "experts.down_proj", _EXPERTS + "wo", "E F D", "E F D"),
    hf.row(MLP + "experts.down_proj_bias", _EXPERTS + "wo_bias", "E D", "E D"),
)

GPT_OSS = descendant(
    "GptOssForCausalLM",
    expert_layers.number("num_local_experts num_experts", "num_experts", 128, at_least=2),
    expert_layers.number("num_experts_per_tok", "num_experts_per_tok", 4),
    expert_layers.balance_loss("router_aux_loss_coef", 0.001),
    hf.mapped("swiglu_limit", "mlp_activations_limit", 7.0, read=hf.read_positive_number),
    hf.supported("swiglu_alpha", 1.702),
    hf.constant("hidden_act", "silu", default="silu"),
    biases("attention_bias", "qkv_bias proj_bias", default=True),
    windows.of_local_layers(128),
    *rotary.settings(fraction_types=()),
    without=("mlp_bias",),
    defaults={
        "num_key_value_heads": 8,
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131_072,
    },
    model_type="gpt_oss",
    decoder_block="gpt_oss",
    rows=rows(
        PRE_NORMS,
        attention(),
        (hf.row(LAYER + "self_attn.sinks", hf.ATTENTION + "sinks", "N", "N"),),
        _EXPERT_ROWS,
    ),
    layers=LayerTable(
        (LOCAL_KIND, GLOBAL_KIND), every_nth_global("", default=2), write_layer_types
    ),
    rotary=RotaryDefaults(
        theta=150_000.0,
        parameters={
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    ),
)
