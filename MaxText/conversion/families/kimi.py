"""Kimi Linear (Kimi Team 2025, arXiv 2510.26692): Kimi Delta Attention and latent attention.

No layer has rotary positions: what latent attention rotates elsewhere is a plain slice here. Layers
with DeepSeek-V3's experts follow a dense one. Published files have the layers of each kind, counted
from 1, and the sizes of KDA in `linear_attn_config`; transformers lists the kind of every layer.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from MaxText.conversion import family as hf
from MaxText.conversion.families import expert_layers, rotary
from MaxText.conversion.families.deepseek import LATENT_ATTENTION, latent_attention
from MaxText.conversion.families.llama import (
    GATED_MLP,
    LAYER,
    MLP,
    PRE_NORMS,
    biases,
    descendant,
    rows,
)
from MaxText.conversion.layer_table import (
    GLOBAL,
    LINEAR,
    LayerKind,
    Layers,
    LayerTable,
    LayerTableError,
    read_layer_types,
    read_list,
    write_layer_types,
)

_KINDS = (LINEAR, GLOBAL)  # those with experts
_SELF = LAYER + "self_attn."
_MOE = LAYER + "block_sparse_moe."
_PUBLISHED = "linear_attn_config"
# Sizes of KDA in transformers, and in linear_attn_config.
_SIZES = {
    "linear_head_dim": "head_dim",
    "linear_num_heads": "num_heads",
    "linear_conv_kernel_dim": "short_conv_kernel_size",
}
# Of later models, which the class in transformers does not have.
_OPTIONS = ("gate_lower_bound", "use_full_rank_gate")
_LATER = "The class in transformers does not read it."


def _read_published(config: dict[str, Any]) -> dict[str, Any]:
    """Returns a config.json with the sizes and options of KDA as keys of its own."""
    published = config.get(_PUBLISHED)
    if not isinstance(published, Mapping):
        return config
    options = {name: published[name] for name in _OPTIONS if name in published}
    sizes = {name: published[old] for name, old in _SIZES.items() if old in published}
    return config | options | sizes


def _write_published(config: dict[str, Any]) -> dict[str, Any]:
    """Returns a config.json with the keys of published files, too, which vLLM needs.

    Its class knows no other layers of KDA. That of transformers reads most of these keys as well,
    and `mla_use_nope` after version 5.24.
    """
    numbered = [*enumerate(config["layer_types"], 1)]
    layers = {
        "kda_layers": [number for number, kind in numbered if kind == LINEAR],
        "full_attn_layers": [number for number, kind in numbered if kind == GLOBAL],
    }
    sizes = {old: config[name] for name, old in _SIZES.items() if name in config}
    return config | {_PUBLISHED: layers | sizes, "mla_use_nope": True}


def _read_layer_types(layers: Layers) -> list[str]:
    default: Iterable[str] = (
        GLOBAL if index and index % 4 == 0 else LINEAR for index in range(layers.count)
    )
    published = layers.config.get(_PUBLISHED)
    if isinstance(published, Mapping) and "kda_layers" in published:
        default = _published_types(published, layers.count)
    return read_layer_types(layers, default, others=LINEAR)


def _published_types(published: Mapping[str, Any], count: int) -> list[str]:
    """Returns the kind of each layer by lists of layers, which are counted from 1."""
    types = dict.fromkeys(range(1, count + 1), "")
    for name, kind in (("kda_layers", LINEAR), ("full_attn_layers", GLOBAL)):
        listed = published.get(name)
        if not isinstance(listed, list):
            raise LayerTableError(f"{_PUBLISHED}.{name}={listed} is not a list of layers")
        types |= dict.fromkeys((layer for layer in listed if layer in types), kind)
    missing = [layer for layer, kind in types.items() if not kind]
    if missing:
        raise LayerTableError(f"{_PUBLISHED} has no layer {', '.join(map(str, missing))}")
    return list(types.values())


_FIRST_ARE_DENSE = expert_layers.first_are_dense("first_k_dense_replace", 1)


def _read_experts(layers: Layers) -> list[bool]:
    if layers.config.get(expert_layers.MLP_TYPES) is None:
        return _FIRST_ARE_DENSE["read_experts"](layers)
    types = read_list(layers, expert_layers.MLP_TYPES, None)
    return [name != expert_layers.DENSE for name in types]


def _read_groups(value: Any, config: Mapping[str, Any]) -> Any:
    """Returns the number of groups of experts; a single one is none."""
    count = hf.whole_number(value, at_least=1)
    return -1 if count == 1 else count


def _write_chosen_groups(values: Mapping[str, Any]) -> int:
    chosen = values["topk_routing_group"]
    return values["n_routing_groups"] if chosen == -1 else chosen


_ROUTING = (
    expert_layers.number("num_experts", "num_experts", 256, at_least=2, kinds=_KINDS),
    expert_layers.number(
        "num_experts_per_token num_experts_per_tok", "num_experts_per_tok", 8, kinds=_KINDS
    ),
    expert_layers.width("moe_intermediate_size", "moe_mlp_dim", 1024, kinds=_KINDS),
    expert_layers.number("num_shared_experts n_shared_experts", "shared_experts", 1, kinds=_KINDS),
    expert_layers.balance_loss_if_any(kinds=_KINDS),
    hf.mapped(
        "moe_renormalize norm_topk_prob",
        "norm_topk_prob",
        default=True,
        values=hf.BOOLEANS,
        kinds=_KINDS,
    ),
    hf.mapped("routed_scaling_factor", "routed_scaling_factor", 2.446, kinds=_KINDS),
    hf.mapped(
        "num_expert_group n_group",
        "n_routing_groups",
        1,
        kinds=_KINDS,
        read=_read_groups,
        write=lambda values: max(values["n_routing_groups"], 1),
    ),
    expert_layers.number(
        "topk_group", "topk_routing_group", 1, kinds=_KINDS, write=_write_chosen_groups
    ),
    # Without groups the key has no effect, and transformers reads its own in any case.
    hf.without_key("topk_group", lambda values: 1, kinds=_KINDS),
    hf.supported("moe_layer_freq", 1, hint="Layers with experts follow the dense ones."),
    hf.supported("moe_router_activation_func", "sigmoid"),
)


def _of_head(tensor: str, param: str, hf_axes: str, param_axes: str) -> hf.WeightMapping:
    """Returns the row of a weight of KDA."""
    return hf.row(_SELF + tensor, hf.ATTENTION + param, hf_axes, param_axes)


# Queries and outputs are those of LATENT_ATTENTION, whose tensors have the same names.
_KDA = (
    *(
        _of_head(f"{tensor}.weight", f"{param}/kernel", "(N H) D", "D N H")
        for tensor, param in (("k_proj", "key"), ("v_proj", "value"))
    ),
    *(
        _of_head(f"{letter}_conv1d.weight", f"{param}_conv/kernel", "(N H) U W", "W N H")
        for letter, param in (("q", "query"), ("k", "key"), ("v", "value"))
    ),
    *(
        row
        for letter, param in (("f", "decay"), ("g", "gate"))
        for row in (
            _of_head(f"{letter}_a_proj.weight", f"{param}_down/kernel", "R D", "D R"),
            _of_head(f"{letter}_b_proj.weight", f"{param}/kernel", "(N H) R", "R N H"),
        )
    ),
    _of_head("b_proj.weight", "beta/kernel", "N D", "D N"),
    _of_head("A_log", "A_log", "U U N U", "N"),
    _of_head("dt_bias", "dt_bias", "(N H)", "N H"),
    _of_head("o_norm.weight", "norm/scale", "H", "H"),
)
# transformers 5.24 gives dense layers the name of experts.
_DENSE_MLP = tuple(
    dataclasses.replace(row, legacy_names=(row.hf_name.replace(MLP, _MOE),)) for row in GATED_MLP
)
_WITHOUT_ROTARY = tuple(
    dataclasses.replace(row, rotary_order="halves", rotary_part="first") for row in LATENT_ATTENTION
)

KIMI_LINEAR = descendant(
    "KimiLinearForCausalLM",
    *latent_attention(),
    hf.mapped("model_max_length max_position_embeddings", "max_target_length", 1_048_576),
    hf.mapped("linear_num_heads", "linear_num_value_heads", 32),
    hf.mapped("linear_head_dim", "linear_key_head_dim linear_value_head_dim", 128),
    hf.mapped("linear_conv_kernel_dim", "linear_conv_kernel_dim", 4),
    *_ROUTING,
    hf.supported("gate_lower_bound", None, hint=_LATER),
    hf.supported("use_full_rank_gate", False, hint=_LATER),
    hf.supported("mla_use_output_gate", False, hint=_LATER),
    hf.supported("mla_use_nope", True, hint="Its latent attention has no rotary positions."),
    biases("attention_bias", "qkv_bias proj_bias"),
    without=("mlp_bias", *(setting.name for setting in rotary.settings())),
    defaults={"q_lora_rank": None, "rms_norm_eps": 1e-5},
    choices={
        "linear_allow_neg_eigval": False,
        "linear_norm_epsilon": None,
        "kda_lower_bound": None,
        "kda_lora_rank": None,
    },
    model_type="kimi_linear",
    decoder_block="kimi_linear",
    rows=rows(
        PRE_NORMS,
        _WITHOUT_ROTARY,
        _KDA,
        _DENSE_MLP,
        expert_layers.rows(_MOE, projections="w1 w3 w2"),
        expert_layers.shared_rows(_MOE + "shared_experts."),
        expert_layers.correction_bias(_MOE + "gate.e_score_correction_bias"),
    ),
    layers=expert_layers.table(
        LayerTable(
            (
                LayerKind(LINEAR, "K", {"mixer": "kda"}),
                LayerKind(GLOBAL, "A", {"mixer": "latent_attention"}),
            ),
            _read_layer_types,
            write_layer_types,
        ),
        "ka",
        _read_experts,
        expert_layers.write_mlp_types,
    ),
    rotary=None,
    read_config=_read_published,
    write_config=_write_published,
)
