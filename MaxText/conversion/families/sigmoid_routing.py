"""Families with sigmoid routing and a correction bias, and attention with heads.

GLM-4.5 (Zhipu AI 2025, arXiv 2508.06471) has DeepSeek-V3's experts, biases of queries, keys and
values, and maybe their norms. MiniMax-M2 (2025) has experts in every layer, norms of queries and
keys over all heads, and the names of Mixtral. Hunyuan 3 (Tencent 2026) lists the dense layers
(`mlp_layer_types`).
"""

from typing import Any

from MaxText.conversion import family as hf
from MaxText.conversion.families import expert_layers, prediction_layers, rotary
from MaxText.conversion.families.deepseek import SPARSE, fine_experts, sigmoid_routing
from MaxText.conversion.families.llama import (
    GATED_MLP,
    JOINT_QK_NORMS,
    LAYER,
    MLP,
    PRE_NORMS,
    attention,
    biases,
    descendant,
    qk_norms,
    rows,
)
from MaxText.conversion.layer_table import Layers, read_list
from MaxText.conversion.rotary_config import RotaryDefaults

GLM4_MOE = descendant(
    "Glm4MoeForCausalLM",
    *fine_experts(128, 8, width=1408, shared=1),
    *sigmoid_routing(1.0, groups=1, chosen_groups=1),
    *rotary.settings(fraction_types=rotary.ALL_TYPES),
    prediction_layers.count(),
    hf.mapped("use_qk_norm", "use_qk_norm", default=False, values=hf.BOOLEANS),
    biases("attention_bias", "qkv_bias"),
    without=("mlp_bias",),
    defaults={
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131_072,
    },
    model_type="glm4_moe",
    decoder_block="glm4_moe",
    rows=rows(
        PRE_NORMS,
        attention(),
        qk_norms(),
        GATED_MLP,
        expert_layers.rows(MLP),
        expert_layers.shared_rows(MLP + "shared_experts."),
        expert_layers.correction_bias(MLP + "gate.e_score_correction_bias"),
    ),
    skipped=expert_layers.PREDICTION_LAYERS,
    prediction=prediction_layers.BEHIND_THE_LAST,
    layers=expert_layers.table(
        expert_layers.ALIKE, "D", **expert_layers.first_are_dense("first_k_dense_replace", 1)
    ),
    rotary=RotaryDefaults(fraction=0.5),
)

_SPARSE_MOE = LAYER + "block_sparse_moe."


def _read_minimax(config: dict[str, Any]) -> dict[str, Any]:
    """Returns a config.json with `rotary_dim` of published files as a fraction of a head."""
    fraction = f"{rotary.OBJECT}.partial_rotary_factor"
    rotary_dim = config.get("rotary_dim")
    if rotary_dim is None or fraction in config:
        return config
    return config | {fraction: rotary_dim / config.get("head_dim", 128)}


def _write_minimax(config: dict[str, Any]) -> dict[str, Any]:
    """Returns a config.json with keys of published files that vLLM needs, unlike transformers."""
    fraction = config[rotary.OBJECT].get("partial_rotary_factor", 1.0)
    rotary_dim = round(fraction * config["head_dim"])
    return config | {"rotary_dim": rotary_dim, "scoring_func": "sigmoid"}


MINIMAX_M2 = descendant(
    "MiniMaxM2ForCausalLM",
    expert_layers.number("num_local_experts num_experts", "num_experts", 256, at_least=2),
    expert_layers.number("num_experts_per_tok", "num_experts_per_tok", 8),
    expert_layers.balance_loss("router_aux_loss_coef", 0.001),
    hf.supported("router_jitter_noise", 0.0),
    *rotary.settings(fraction_types=rotary.ALL_TYPES),
    without=("attention_bias", "mlp_bias"),
    defaults={
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 196_608,
    },
    choices={"moe_mlp_dim": -1},
    model_type="minimax_m2",
    decoder_block="minimax_m2",
    rows=rows(
        PRE_NORMS,
        attention(),
        JOINT_QK_NORMS,
        expert_layers.rows(_SPARSE_MOE, projections="w1 w3 w2"),
        expert_layers.correction_bias(_SPARSE_MOE + "e_score_correction_bias"),
    ),
    rotary=RotaryDefaults(theta=5_000_000.0),
    read_config=_read_minimax,
    write_config=_write_minimax,
)


def _read_mlp_types(layers: Layers) -> list[bool]:
    first_is_dense = (
        expert_layers.DENSE if index == 0 else expert_layers.SPARSE for index in range(layers.count)
    )
    types = read_list(layers, expert_layers.MLP_TYPES, first_is_dense)
    return [name != expert_layers.DENSE for name in types]


HY_V3 = descendant(
    "HYV3ForCausalLM",
    expert_layers.number(
        "num_experts num_local_experts", "num_experts", 192, at_least=2, kinds=SPARSE
    ),
    expert_layers.number("num_experts_per_tok", "num_experts_per_tok", 8, kinds=SPARSE),
    expert_layers.number("num_shared_experts", "shared_experts", 1, kinds=SPARSE),
    expert_layers.width("moe_intermediate_size", "moe_mlp_dim", 1536, kinds=SPARSE),
    hf.mapped("router_scaling_factor", "routed_scaling_factor", 2.826, kinds=SPARSE),
    expert_layers.balance_loss_if_any(kinds=SPARSE),
    hf.supported("mlp_bias", False, hint="Routed experts have no biases beside others here."),
    defaults={
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131_072,
    },
    model_type="hy_v3",
    decoder_block="hy_v3",
    rows=rows(
        PRE_NORMS,
        attention(),
        qk_norms(),
        GATED_MLP,
        expert_layers.rows(MLP, router="router.gate"),
        expert_layers.shared_rows(MLP + "shared_mlp."),
        expert_layers.correction_bias(MLP + "expert_bias"),
    ),
    skipped=expert_layers.PREDICTION_LAYERS,
    layers=expert_layers.table(
        expert_layers.ALIKE, "D", _read_mlp_types, expert_layers.write_mlp_types
    ),
    rotary=RotaryDefaults(theta=11_158_840.0),
)
