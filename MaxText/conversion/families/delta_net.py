"""Hybrids of gated DeltaNet and attention.

Qwen3-Next (Qwen Team 2025), Qwen3.5 (Qwen Team 2026) and OLMo hybrid (OLMo Team 2026).
Every fourth layer has attention, or `layer_types` names them. In Qwen, norms multiply by 1 +
weight, except the gated one of DeltaNet; queries have a gate for each output beside them; a quarter
of each head is rotated. Qwen3-Next stores the projections of DeltaNet by key head: its query, its
key, its values and their gates. Qwen3.5 is dense or has experts in all layers, as most of
Qwen3-Next's; `qwen3_5` and `qwen3_5_moe` are multimodal models around these. In OLMo hybrid norms
are those of the outputs of attention and its feed-forward, and of the inputs in the other layers.
"""

import dataclasses
from typing import Any

from MaxText.conversion import family as hf
from MaxText.conversion.families import expert_layers, prediction_layers, rotary
from MaxText.conversion.families.llama import (
    GATED_MLP,
    JOINT_QK_NORMS,
    LAYER,
    MLP,
    POST_ATTENTION,
    POST_MLP,
    PRE_ATTENTION,
    PRE_MLP,
    PRE_NORMS,
    attention,
    descendant,
    head_dim_of_width,
    qk_norms,
    rows,
)
from MaxText.conversion.families.qwen import read_sparse_layers, write_sparse_layers
from MaxText.conversion.layer_table import (
    GLOBAL,
    GLOBAL_KIND,
    LINEAR,
    LayerKind,
    Layers,
    LayerTable,
    every_nth_global,
    write_layer_types,
)
from MaxText.conversion.rotary_config import RotaryDefaults

_DELTA_NET = LAYER + "linear_attn."
_DECAY = hf.ATTENTION + "A_log"  # of DeltaNet alone


def _of_delta_net(*names: str) -> str:
    """Returns the names of kernels of DeltaNet, separated by spaces."""
    return " ".join(f"{hf.ATTENTION}{name}/kernel" for name in names)


def _outputs(out: str, norm: str) -> hf.Rows:
    """Returns the rows of DeltaNet that all families have, by the names of two of them."""
    return (
        hf.row(_DELTA_NET + "A_log", _DECAY, "N", "N"),
        hf.row(_DELTA_NET + "dt_bias", hf.ATTENTION + "dt_bias", "N", "N"),
        hf.row(f"{_DELTA_NET}{norm}.weight", hf.ATTENTION + "norm/scale", "H", "H"),
        *hf.projection(
            _DELTA_NET + out, hf.ATTENTION + "out", "D (N H)", "N H D", only_with=_DECAY
        ),
    )


def _projections(*names: str) -> hf.Rows:
    """Returns the rows of separate projections, from pairs "tensor parameter" of names."""
    pairs = [name.split() for name in names]
    of_keys = ("query", "key")
    one_number = ("beta", "decay")
    return tuple(
        hf.row(
            f"{_DELTA_NET}{tensor}.weight",
            _of_delta_net(param),
            "N D" if param in one_number else "(M H) D" if param in of_keys else "(N H) D",
            "D N" if param in one_number else "D M H" if param in of_keys else "D N H",
            only_with=_DECAY,
        )
        for tensor, param in pairs
    )


_CONVOLUTION = hf.row(
    _DELTA_NET + "conv1d.weight",
    _of_delta_net("query_conv", "key_conv", "value_conv"),
    "(M H) U W | (M H) U W | (N H) U W",
    "W M H | W M H | W N H",
)
_BY_KEY_HEAD = (
    hf.row(
        _DELTA_NET + "in_proj_qkvz.weight",
        _of_delta_net("query", "key", "value", "gate"),
        "(M H) D | (M H) D | (N H) D | (N H) D",
        "D M H | D M H | D N H | D N H",
        is_grouped=True,
        only_with=_DECAY,
    ),
    hf.row(
        _DELTA_NET + "in_proj_ba.weight",
        _of_delta_net("beta", "decay"),
        "N D | N D",
        "D N | D N",
        is_grouped=True,
    ),
)
_QKV = hf.row(
    _DELTA_NET + "in_proj_qkv.weight",
    _of_delta_net("query", "key", "value"),
    "(M H) D | (M H) D | (N H) D",
    "D M H | D M H | D N H",
    only_with=_DECAY,
)
_SELF = LAYER + "self_attn."
_GATED_ATTENTION = (
    *hf.projection(
        _SELF + "q_proj",
        f"{hf.ATTENTION}query {hf.ATTENTION}gate",
        "(N J H) D",
        "D N H",
        only_without=_DECAY,
    ),
    *hf.projection(_SELF + "k_proj", hf.ATTENTION + "key", "(K H) D", "D K H", only_without=_DECAY),
    *hf.projection(
        _SELF + "v_proj", hf.ATTENTION + "value", "(K H) D", "D K H", only_without=_DECAY
    ),
    *hf.projection(_SELF + "o_proj", hf.ATTENTION + "out", "D (N H)", "N H D", only_without=_DECAY),
    *qk_norms(),
)


def _size(name: str, default: hf.Default) -> hf.ConfigMapping:
    return hf.mapped(name, name, default)


def _sizes(
    key_heads: hf.Default = 16,
    value_heads: hf.Default = 32,
    key_width: hf.Default = 128,
    value_width: hf.Default = 128,
) -> tuple[hf.ConfigMapping, ...]:
    """Returns the settings of DeltaNet's sizes, from the defaults of a class."""
    return (
        _size("linear_num_key_heads", key_heads),
        _size("linear_num_value_heads", value_heads),
        _size("linear_key_head_dim", key_width),
        _size("linear_value_head_dim", value_width),
        _size("linear_conv_kernel_dim", 4),
    )


DELTA_KIND = LayerKind(LINEAR, "D", {"mixer": "gated_delta_net"})
_LAYERS = LayerTable(
    (DELTA_KIND, GLOBAL_KIND),
    every_nth_global("full_attention_interval", default=4, others=LINEAR),
    write_layer_types,
)
_SPARSE = (LINEAR, GLOBAL)


def _experts(
    count: int, per_token: int, kinds: tuple[str, ...] = ()
) -> tuple[hf.ConfigMapping, ...]:
    """Returns the settings of experts.

    Args:
      count: Default of their number.
      per_token: Default of those that a token visits.
      kinds: The kinds of layers with experts; empty for all.
    """
    return (
        expert_layers.number("num_experts", "num_experts", count, at_least=2, kinds=kinds),
        expert_layers.number("num_experts_per_tok", "num_experts_per_tok", per_token, kinds=kinds),
        expert_layers.width("moe_intermediate_size", "moe_mlp_dim", 512, kinds=kinds),
        expert_layers.width(
            "shared_expert_intermediate_size", "shared_expert_mlp_dim", 512, kinds=kinds
        ),
        expert_layers.balance_loss("router_aux_loss_coef", 0.001, kinds=kinds),
    )


_EXPERT_ROWS = (
    *expert_layers.rows(MLP),
    *expert_layers.shared_rows(MLP + "shared_expert.", MLP + "shared_expert_gate"),
)
_OF_QWEN: dict[str, Any] = {
    "choices": {"linear_allow_neg_eigval": False, "linear_norm_epsilon": None},
    "rotary": RotaryDefaults(fraction=0.25),
    "skipped": ("mtp.",),
    "prediction": prediction_layers.BESIDE_THE_MODEL,
}
_SHARED_SETTINGS = (
    *_sizes(),
    *rotary.settings(fraction_types=rotary.ALL_TYPES),
    # Published files say so, transformers does not read it.
    hf.supported("attn_output_gate", True, hint="Attention has a gate in these classes."),
)

QWEN3_NEXT = descendant(
    "Qwen3NextForCausalLM",
    *_SHARED_SETTINGS,
    *_experts(512, per_token=10, kinds=_SPARSE),
    expert_layers.gates_are_normalized(default=True, kinds=_SPARSE),
    prediction_layers.count_if_any("num_nextn_predict_layers"),
    without=("mlp_bias",),
    defaults={
        "intermediate_size": 5632,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "max_position_embeddings": 32_768,
    },
    model_type="qwen3_next",
    decoder_block="qwen3_next",
    rows=rows(
        PRE_NORMS,
        _GATED_ATTENTION,
        _BY_KEY_HEAD,
        (_CONVOLUTION,),
        _outputs("out_proj", "norm"),
        GATED_MLP,
        _EXPERT_ROWS,
    ),
    layers=expert_layers.table(_LAYERS, "dg", read_sparse_layers, write_sparse_layers),
    **_OF_QWEN,
)

_ROWS_OF_QWEN3_5 = (
    PRE_NORMS,
    _GATED_ATTENTION,
    (_QKV, _CONVOLUTION),
    _projections("in_proj_z gate", "in_proj_b beta", "in_proj_a decay"),
    _outputs("out_proj", "norm"),
)

QWEN3_5 = descendant(
    "Qwen3_5ForCausalLM",
    *_SHARED_SETTINGS,
    prediction_layers.count_if_any("mtp_num_hidden_layers"),
    without=("mlp_bias",),
    defaults={"num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 32_768},
    model_type="qwen3_5_text",
    decoder_block="qwen3_5",
    rows=rows(*_ROWS_OF_QWEN3_5, GATED_MLP),
    layers=_LAYERS,
    wrappers=("qwen3_5",),
    **_OF_QWEN,
)

QWEN3_5_MOE = descendant(
    "Qwen3_5MoeForCausalLM",
    *_SHARED_SETTINGS,
    *_experts(256, per_token=8),
    hf.ConfigMapping(
        ("base_mlp_dim",),  # not in config.json; all layers have experts
        ("base_mlp_dim",),
        hf.copy_of("moe_intermediate_size"),
        is_written=False,
    ),
    prediction_layers.count_if_any("mtp_num_hidden_layers"),
    without=("mlp_bias",),
    defaults={"num_key_value_heads": 2, "head_dim": 256, "max_position_embeddings": 32_768},
    model_type="qwen3_5_moe_text",
    decoder_block="qwen3_5_moe",
    rows=rows(*_ROWS_OF_QWEN3_5, _EXPERT_ROWS),
    layers=_LAYERS,
    wrappers=("qwen3_5_moe",),
    **_OF_QWEN,
)

_QUERY_HEADS = hf.copy_of("num_attention_heads")
_THETA = "rope_parameters.rope_theta"


def _key_width(config: hf.HFConfig) -> int:
    """Returns the width of keys: three quarters of the model's, over their heads."""
    return int(0.75 * config["hidden_size"] / config["linear_num_key_heads"])


def _positions(config: hf.HFConfig) -> str:
    """Returns the position encoding: none if config.json has null as the rotary base."""
    return "rotary" if config.get(_THETA) else "none"


def _read_positions(config: dict[str, Any]) -> dict[str, Any]:
    """Returns a config.json without rotary parameters if they have no base."""
    if config.get(_THETA):
        return config
    return {name: value for name, value in config.items() if not name.startswith("rope_parameters")}


def _write_positions(config: dict[str, Any]) -> dict[str, Any]:
    """Returns a config.json that says so if there are no rotary positions."""
    return {"rope_parameters": {"rope_type": "default", "rope_theta": None}, **config}


_read_every_fourth = every_nth_global("", default=4, others=LINEAR)


def _read_olmo_types(layers: Layers) -> list[str]:
    """Returns the kinds of layers: by default every fourth has attention, or else the last."""
    types = _read_every_fourth(layers)
    is_given = layers.config.get("layer_types") is not None
    return types if is_given or GLOBAL in types else [*types[:-1], GLOBAL]


OLMO_HYBRID = descendant(
    "OlmoHybridForCausalLM",
    hf.family_default("position_embedding", _positions),
    *rotary.settings(),  # after what disables them
    head_dim_of_width(),
    *_sizes(_QUERY_HEADS, _QUERY_HEADS, _key_width, hf.scaled_by(2, "linear_key_head_dim")),
    hf.mapped("linear_allow_neg_eigval", "linear_allow_neg_eigval", True, hf.BOOLEANS),
    without=("mlp_bias", "head_dim"),
    defaults={"max_position_embeddings": 65_536},
    choices={"linear_norm_epsilon": 1e-5},
    model_type="olmo_hybrid",
    decoder_block="olmo_hybrid",
    rows=rows(
        (
            *hf.norm(LAYER + "attention_layer_norm", PRE_ATTENTION),
            *hf.norm(LAYER + "feedforward_layer_norm", PRE_MLP),
            hf.row(
                LAYER + "post_attention_layernorm.weight",
                POST_ATTENTION + "/scale",
                "D",
                "D",
                # transformers 5.24 gives it the name of another norm, in layers of DeltaNet.
                legacy_names=(LAYER + "feedforward_layer_norm.weight",),
            ),
            *hf.norm(LAYER + "post_feedforward_layernorm", POST_MLP),
        ),
        tuple(dataclasses.replace(row, only_without=_DECAY) for row in attention()),
        JOINT_QK_NORMS,
        _projections("q_proj query", "k_proj key", "v_proj value", "g_proj gate"),
        _projections("b_proj beta", "a_proj decay"),
        (
            hf.row(
                _DELTA_NET + "q_conv1d.weight", _of_delta_net("query_conv"), "(M H) U W", "W M H"
            ),
            hf.row(_DELTA_NET + "k_conv1d.weight", _of_delta_net("key_conv"), "(M H) U W", "W M H"),
            hf.row(
                _DELTA_NET + "v_conv1d.weight", _of_delta_net("value_conv"), "(N H) U W", "W N H"
            ),
        ),
        _outputs("o_proj", "o_norm"),
        GATED_MLP,
    ),
    layers=LayerTable(
        (
            LayerKind(LINEAR, "D", {**DELTA_KIND.keys, "norm_placement": "pre"}),
            LayerKind(GLOBAL, "G", {**GLOBAL_KIND.keys, "norm_placement": "post"}),
        ),
        _read_olmo_types,
        write_layer_types,
    ),
    read_config=_read_positions,
    write_config=_write_positions,
)
