"""Qwen2 (Yang et al. 2024) and Qwen3 (Yang et al. 2025), dense and with experts.

Qwen2 has query, key and value biases, Qwen3 query and key norms. With `use_sliding_window` the
layers from `max_window_layers` on have a window, or those that `layer_types` names; with experts
all layers of Qwen3, and every other one of Qwen2's first `max_window_layers`.

Layers have experts except those of `mlp_only_layers`, and those whose number, counted from 1,
`decoder_sparse_step` does not divide. Qwen2 has a shared expert that each token turns on or off.
"""

from collections.abc import Sequence
from typing import Any

from MaxText.conversion import family as hf
from MaxText.conversion.families import expert_layers, windows
from MaxText.conversion.families.llama import (
    GATED_MLP,
    MLP,
    PRE_NORMS,
    attention,
    biases,
    descendant,
    qk_norms,
    rows,
)
from MaxText.conversion.layer_table import (
    GLOBAL,
    GLOBAL_KIND,
    LOCAL,
    LOCAL_KIND,
    Layers,
    LayerTable,
    LayerTableError,
    read_layer_types,
)

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

_STEP = "decoder_sparse_step"
_DENSE_LAYERS = "mlp_only_layers"


def read_sparse_layers(layers: Layers) -> list[bool]:
    """Returns whether each layer has experts."""
    step = layers.config.get(_STEP, 1)
    dense = layers.config.get(_DENSE_LAYERS, [])
    if type(step) is not int or step < 1:
        raise LayerTableError(f"{_STEP}={step} is not a number of layers")
    if not isinstance(dense, list):
        raise LayerTableError(f"{_DENSE_LAYERS}={dense} is not a list of layers")
    return [index not in dense and (index + 1) % step == 0 for index in range(layers.count)]


def write_sparse_layers(has_experts: Sequence[bool]) -> dict[str, Any]:
    """Returns keys of config.json: every n-th layer, or else a list of the dense ones."""
    count = len(has_experts)
    steps = (
        step
        for step in range(1, count + 1)
        if list(has_experts) == [(index + 1) % step == 0 for index in range(count)]
    )
    if step := next(steps, None):
        return {_STEP: step, _DENSE_LAYERS: []}
    dense = [index for index, is_sparse in enumerate(has_experts) if not is_sparse]
    return {_STEP: 1, _DENSE_LAYERS: dense}


def _read_windows(layers: Layers) -> list[str]:
    """Returns the kinds of Qwen3's layers with experts: all have a window, or none has."""
    if windows.is_used(layers):
        return list(windows.of_all_layers(4096).read(layers))
    return [GLOBAL] * layers.count


def _write_windows(names: Sequence[str]) -> dict[str, Any]:
    written = windows.of_all_layers(4096).write(names)
    return {**written, windows.USED: LOCAL in names}


def _read_early_windows(layers: Layers) -> list[str]:
    """Returns the kinds of Qwen2's layers with experts."""
    has_window = windows.is_used(layers)
    first_global = layers.config.get("max_window_layers", 28) if has_window else 0
    types = (
        LOCAL if index % 2 == 0 and index < first_global else GLOBAL
        for index in range(layers.count)
    )
    names = read_layer_types(layers, types)
    windows.check_window(layers, names, has_window=has_window)
    return names


_KINDS = (LOCAL_KIND, GLOBAL_KIND)
_SPARSE = (LOCAL, GLOBAL)


def _table(layers: LayerTable) -> LayerTable:
    return expert_layers.table(layers, "WD", read_sparse_layers, write_sparse_layers)


def _expert_settings(
    num_experts: str, count: int, per_token: int, width: int
) -> tuple[hf.ConfigMapping, ...]:
    """Returns the settings of experts, from the name and the defaults of a class."""
    return (
        expert_layers.number(num_experts, "num_experts", count, at_least=2, kinds=_SPARSE),
        expert_layers.number(
            "num_experts_per_tok", "num_experts_per_tok", per_token, kinds=_SPARSE
        ),
        expert_layers.width("moe_intermediate_size", "moe_mlp_dim", width, kinds=_SPARSE),
        expert_layers.gates_are_normalized(default=False, kinds=_SPARSE),
        expert_layers.balance_loss("router_aux_loss_coef", 0.001, kinds=_SPARSE),
        windows.of_local_layers(4096, kinds=(LOCAL, expert_layers.dense(LOCAL))),
    )


QWEN2_MOE = descendant(
    "Qwen2MoeForCausalLM",
    *_expert_settings("num_experts", 60, per_token=4, width=1408),
    expert_layers.width(
        "shared_expert_intermediate_size", "shared_expert_mlp_dim", 5632, kinds=_SPARSE
    ),
    biases("qkv_bias", "qkv_bias", default=True),
    without=("attention_bias", "mlp_bias"),
    defaults={"num_key_value_heads": 16, "max_position_embeddings": 32_768},
    model_type="qwen2_moe",
    decoder_block="qwen2_moe",
    rows=rows(
        PRE_NORMS,
        attention(),
        GATED_MLP,
        expert_layers.rows(MLP),
        expert_layers.shared_rows(MLP + "shared_expert.", MLP + "shared_expert_gate"),
    ),
    ignored=(),
    layers=_table(LayerTable(_KINDS, _read_early_windows, windows.write_used)),
)

QWEN3_MOE = descendant(
    "Qwen3MoeForCausalLM",
    *_expert_settings("num_local_experts num_experts", 128, per_token=8, width=768),
    without=("mlp_bias",),
    defaults={"num_key_value_heads": 4, "max_position_embeddings": 32_768},
    model_type="qwen3_moe",
    decoder_block="qwen3_moe",
    rows=rows(PRE_NORMS, attention(), qk_norms(), GATED_MLP, expert_layers.rows(MLP)),
    ignored=(),
    layers=_table(LayerTable(_KINDS, _read_windows, _write_windows)),
)
