"""DeepSeek-V2 and V2-Lite (DeepSeek-AI 2024, arXiv 2405.04434) and V3 (2024, arXiv 2412.19437).

All have latent attention, whose rotary slice rotates adjacent dimensions in files, and layers with
fine and shared experts behind `first_k_dense_replace` dense ones. V2 chooses experts by softmax
scores (`topk_method`), V3 by sigmoid scores and a correction bias. The factor that YaRN gives to
scores is `mscale_all_dim`. Layers of multi-token prediction follow the last one.
Kimi K2 (Kimi Team 2025, arXiv 2507.20534) is a V3 under another model_type.
"""

import dataclasses
from typing import Any

from MaxText.config.values import TypedValue
from MaxText.conversion import family as hf
from MaxText.conversion.families import expert_layers, prediction_layers, rotary
from MaxText.conversion.families.llama import (
    GATED_MLP,
    LAYER,
    MLP,
    PRE_NORMS,
    QUERY_HEADS,
    biases,
    descendant,
    rows,
)
from MaxText.conversion.rotary_config import OBJECT, RotaryDefaults

_SELF = LAYER + "self_attn."
_QUERY_DOWN = hf.ATTENTION + "query_down/kernel"
_SLICE: dict[str, Any] = {"rotary_order": "adjacent", "rotary_part": "last"}

LATENT_ATTENTION = (
    *hf.projection(
        _SELF + "q_proj",
        hf.ATTENTION + "query",
        "(N H) D",
        "D N H",
        only_without=_QUERY_DOWN,
        **_SLICE,
    ),
    *hf.projection(_SELF + "q_a_proj", hf.ATTENTION + "query_down", "Q D", "D Q"),
    hf.row(_SELF + "q_a_layernorm.weight", hf.ATTENTION + "query_down_norm/scale", "Q", "Q"),
    *hf.projection(
        _SELF + "q_b_proj",
        hf.ATTENTION + "query",
        "(N H) Q",
        "Q N H",
        only_with=_QUERY_DOWN,
        **_SLICE,
    ),
    *hf.projection(_SELF + "kv_a_proj_with_mqa", hf.ATTENTION + "latent", "L D", "D L", **_SLICE),
    hf.row(_SELF + "kv_a_layernorm.weight", hf.ATTENTION + "latent_norm/scale", "L", "L"),
    *hf.projection(_SELF + "kv_b_proj", hf.ATTENTION + "key_value", "(N W) L", "L N W"),
    *hf.projection(_SELF + "o_proj", hf.ATTENTION + "out", "D (N W)", "N W D"),
)


def _read_query_rank(value: hf.HFValue, config: hf.HFConfig) -> TypedValue:
    """Returns the width of the vector that queries are projected from; null is none."""
    return 0 if value is None else hf.whole_number(value, at_least=1)


def _read_kv_heads(value: hf.HFValue, config: hf.HFConfig) -> TypedValue:
    return value if value == config["num_attention_heads"] else hf.REQUIRED


def latent_attention() -> tuple[hf.ConfigMapping, ...]:
    """Returns the settings of latent attention's sizes.

    transformers calls the width of the rotary slice `head_dim`, too.
    """
    return (
        hf.ConfigMapping(
            ("q_lora_rank",),
            ("q_lora_rank",),
            1536,
            null=None,
            read=_read_query_rank,
            write=lambda values: values["q_lora_rank"] or None,
        ),
        hf.mapped("kv_lora_rank", "kv_lora_rank", 512),
        hf.mapped("qk_nope_head_dim", "qk_nope_head_dim", 128),
        hf.mapped("qk_rope_head_dim", "qk_rope_head_dim", 64),
        hf.mapped("v_head_dim", "v_head_dim", 128),
        hf.ConfigMapping(
            ("num_key_value_heads",),
            ("base_num_kv_heads",),
            QUERY_HEADS,
            null=QUERY_HEADS,
            hint="In latent attention it is num_attention_heads.",
            read=_read_kv_heads,
            write=lambda values: values["base_num_query_heads"],
        ),
        hf.without_key("head_dim", lambda values: values["qk_rope_head_dim"]),
        hf.without_key(
            "qk_head_dim", lambda values: values["qk_nope_head_dim"] + values["qk_rope_head_dim"]
        ),
    )


_FACTOR = f"{OBJECT}.attention_factor"


def _has_equal_mscales(values: hf.KeyValues) -> bool:
    """Returns whether `mscale` equals `mscale_all_dim`, so that sines and cosines are unscaled."""
    is_yarn = values["rope_type"] == "yarn"
    return is_yarn and values["mscale"] > 0 and values["rope_attention_factor"] == 1


def _write_factor(values: hf.KeyValues) -> hf.HFValue:
    return (
        hf.OMITTED if _has_equal_mscales(values) else values["rope_attention_factor"] or hf.OMITTED
    )


def rotary_slice() -> tuple[hf.ConfigMapping, ...]:
    """Returns the settings of the rotary positions of the slice, and of YaRN's factor of scores."""
    return (
        *(
            dataclasses.replace(setting, write=_write_factor)
            if setting.name == _FACTOR
            else setting
            for setting in rotary.settings(types=("default", "yarn"))
        ),
        hf.mapped(
            f"{OBJECT}.mscale_all_dim",
            "mscale",
            0.0,
            write=lambda values: values["mscale"] or hf.OMITTED,
        ),
        hf.without_key(
            f"{OBJECT}.mscale",
            lambda values: values["mscale"] if _has_equal_mscales(values) else hf.OMITTED,
        ),
        rotary.either_order(),
    )


SPARSE = (expert_layers.SPARSE,)


def fine_experts(
    count: int, per_token: Any, width: int, shared: int
) -> tuple[hf.ConfigMapping, ...]:
    """Returns the settings of routed and shared experts, from the defaults of a class."""
    return (
        expert_layers.number(
            "n_routed_experts num_experts num_local_experts",
            "num_experts",
            count,
            at_least=2,
            kinds=SPARSE,
        ),
        expert_layers.number("num_experts_per_tok", "num_experts_per_tok", per_token, kinds=SPARSE),
        expert_layers.width("moe_intermediate_size", "moe_mlp_dim", width, kinds=SPARSE),
        expert_layers.number("n_shared_experts", "shared_experts", shared, kinds=SPARSE),
        expert_layers.balance_loss_if_any(kinds=SPARSE),
        hf.supported("moe_layer_freq", 1, hint="Layers with experts follow the dense ones."),
    )


def _read_groups(value: hf.HFValue, config: hf.HFConfig) -> TypedValue:
    """Returns the number of groups of experts; a single one is none."""
    count = hf.whole_number(value, at_least=1)
    return -1 if count == 1 else count


def sigmoid_routing(
    scaling: float, groups: int, chosen_groups: int
) -> tuple[hf.ConfigMapping, ...]:
    """Returns the settings of V3's routing, from the defaults of a class."""
    return (
        expert_layers.gates_are_normalized(default=True, kinds=SPARSE),
        hf.mapped("routed_scaling_factor", "routed_scaling_factor", scaling, kinds=SPARSE),
        hf.mapped(
            "n_group",
            "n_routing_groups",
            groups,
            kinds=SPARSE,
            read=_read_groups,
            write=lambda values: max(values["n_routing_groups"], 1),
        ),
        *_chosen_groups(chosen_groups, of_one_group=1),
    )


def _chosen_groups(default: Any, of_one_group: Any) -> tuple[hf.ConfigMapping, ...]:
    """Returns the settings of the groups that a token chooses from.

    Args:
      default: Of the class.
      of_one_group: What a model without groups is written with.
    """

    def write(values: hf.KeyValues) -> int:
        chosen = values["topk_routing_group"]
        return values["n_routing_groups"] if chosen == -1 else chosen

    return (
        expert_layers.number(
            "topk_group", "topk_routing_group", default, kinds=SPARSE, write=write
        ),
        # Without groups the key has no effect, and transformers reads its own in any case.
        hf.without_key("topk_group", lambda values: of_one_group, kinds=SPARSE),
    )


_GREEDY = "greedy"
_BY_GROUP = "group_limited_greedy"


def _read_method(value: hf.HFValue, config: hf.HFConfig) -> TypedValue:
    return value if value in (_GREEDY, _BY_GROUP) else hf.REQUIRED


def _write_method(values: hf.KeyValues) -> str:
    return _GREEDY if values["n_routing_groups"] == -1 else _BY_GROUP


def _read_groups_of_v2(value: hf.HFValue, config: hf.HFConfig) -> TypedValue:
    return _read_groups(value, config) if config.get("topk_method") == _BY_GROUP else -1


def _write_groups_of_v2(values: hf.KeyValues) -> int | None:
    return None if values["n_routing_groups"] == -1 else values["n_routing_groups"]


_EXPERT_ROWS = (
    *expert_layers.rows(MLP),
    *expert_layers.shared_rows(MLP + "shared_experts."),
)

DEEPSEEK_V2 = descendant(
    "DeepseekV2ForCausalLM",
    *latent_attention(),
    *rotary_slice(),
    *fine_experts(64, hf.REQUIRED, width=1407, shared=2),
    hf.ConfigMapping(
        ("topk_method",), (), _GREEDY, kinds=SPARSE, read=_read_method, write=_write_method
    ),
    hf.mapped(
        "n_group",
        "n_routing_groups",
        None,
        kinds=SPARSE,
        null=None,
        read=_read_groups_of_v2,
        write=_write_groups_of_v2,
    ),
    *_chosen_groups(hf.REQUIRED, of_one_group=None),
    hf.mapped("routed_scaling_factor", "routed_scaling_factor", 1.0, kinds=SPARSE),
    hf.supported("scoring_func", "softmax"),
    hf.supported("norm_topk_prob", False, hint="The class in transformers does not read it."),
    hf.supported("mlp_bias", False, hint="Routed experts have no biases beside others here."),
    biases("attention_bias", "qkv_bias proj_bias"),
    model_type="deepseek_v2",
    decoder_block="deepseek_v2",
    rows=rows(PRE_NORMS, LATENT_ATTENTION, GATED_MLP, _EXPERT_ROWS),
    layers=expert_layers.table(
        expert_layers.ALIKE, "D", **expert_layers.first_are_dense("first_k_dense_replace", 0)
    ),
    rotary=RotaryDefaults(),
)

DEEPSEEK_V3 = descendant(
    "DeepseekV3ForCausalLM",
    *latent_attention(),
    *rotary_slice(),
    *fine_experts(256, 8, width=2048, shared=1),
    *sigmoid_routing(2.5, groups=8, chosen_groups=4),
    # transformers has a single method; programs such as vLLM read these.
    hf.constant("topk_method", "noaux_tc", default="noaux_tc"),
    hf.constant("scoring_func", "sigmoid", default="sigmoid"),
    hf.supported("rope_interleave", True, hint="The rotary slice has adjacent pairs in files."),
    prediction_layers.count(),
    biases("attention_bias", "qkv_bias proj_bias"),
    without=("mlp_bias",),
    defaults={"max_position_embeddings": 4096},
    model_type="deepseek_v3",
    decoder_block="deepseek_v3",
    rows=rows(
        PRE_NORMS,
        LATENT_ATTENTION,
        GATED_MLP,
        _EXPERT_ROWS,
        expert_layers.correction_bias(MLP + "gate.e_score_correction_bias"),
    ),
    skipped=expert_layers.PREDICTION_LAYERS,
    prediction=prediction_layers.BEHIND_THE_LAST,
    layers=expert_layers.table(
        expert_layers.ALIKE, "D", **expert_layers.first_are_dense("first_k_dense_replace", 3)
    ),
    rotary=RotaryDefaults(),
    other_model_types=("kimi_k2",),
)
