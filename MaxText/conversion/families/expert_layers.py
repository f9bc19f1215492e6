"""Layers of experts in config.json, beside dense ones, and the rows of their tensors.

`table` has every kind of layers of a family twice: with experts, under its own name, and dense
(`dense`). Settings of experts are for the kinds with experts alone.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from MaxText.config.values import TypedValue
from MaxText.conversion import family as hf
from MaxText.conversion.layer_table import (
    NUM_EXPERTS,
    LayerKind,
    Layers,
    LayerTable,
    LayerTableError,
)

_EXPERTS = "layers/mlp/experts/"
_SHARED = "layers/mlp/shared_experts/"

SPARSE = "sparse"
DENSE = "dense"
MLP_TYPES = "mlp_layer_types"  # the list of transformers, of these two names
# Of families whose layers differ in nothing but experts.
ALIKE = LayerTable(
    kinds=(LayerKind(SPARSE, "E", {}),),
    read=lambda layers: [SPARSE] * layers.count,
    write=lambda names: {},
)


def dense(kind: str) -> str:
    """Returns the name of the dense kind of layers beside one with experts."""
    return f"dense {kind}"


def table(
    layers: LayerTable,
    letters: str,
    read_experts: Callable[[Layers], Iterable[bool]],
    write_experts: Callable[[Sequence[bool]], Mapping[str, Any]],
) -> LayerTable:
    """Returns the table of a family in which some layers have experts, and others are dense.

    Args:
      layers: What else distinguishes layers; those with experts are the kinds of this table.
      letters: Of the dense kinds, in the order of `layers.kinds`.
      read_experts: Returns whether each layer has experts. May raise LayerTableError.
      write_experts: Returns keys of config.json, from whether each layer has experts.
    """
    dense_kinds = [
        LayerKind(dense(kind.name), letter, {**kind.keys, NUM_EXPERTS: 1})
        for kind, letter in zip(layers.kinds, letters, strict=True)
    ]
    kind_of_dense = {dense(kind.name): kind.name for kind in layers.kinds}

    def read(config: Layers) -> list[str]:
        names = zip(layers.read(config), read_experts(config), strict=True)
        return [name if has_experts else dense(name) for name, has_experts in names]

    def write(names: Sequence[str]) -> dict[str, Any]:
        has_experts = [name not in kind_of_dense for name in names]
        if names and not any(has_experts):
            raise LayerTableError("no layer has experts")
        other_keys = layers.write([kind_of_dense.get(name, name) for name in names])
        return {**other_keys, **write_experts(has_experts)}

    return LayerTable((*dense_kinds, *layers.kinds), read, write)


def first_are_dense(key: str, default: int) -> dict[str, Callable[..., Any]]:
    """Returns the functions of `table` for families whose first layers are dense.

    Args:
      key: The key with their number.
      default: Of the family.
    """

    def read(layers: Layers) -> list[bool]:
        first = layers.config.get(key, default)
        if hf.whole_number(first, at_least=0) is hf.REQUIRED:
            raise LayerTableError(f"{key}={first} is not a number of layers")
        return [index >= first for index in range(layers.count)]

    def write(has_experts: Sequence[bool]) -> dict[str, Any]:
        num_dense = has_experts.index(True) if has_experts else 0
        if not all(has_experts[num_dense:]):
            raise LayerTableError("a dense layer follows one with experts")
        return {key: num_dense}

    return {"read_experts": read, "write_experts": write}


def write_mlp_types(has_experts: Sequence[bool]) -> dict[str, Any]:
    """Returns the list of layers with and without experts, of configs that have it.

    The number of dense layers is with it if they come first: published files of these families have
    it, and vLLM reads it.
    """
    written: dict[str, Any] = {
        MLP_TYPES: [SPARSE if is_sparse else DENSE for is_sparse in has_experts]
    }
    num_dense = list(has_experts).count(False)
    if all(has_experts[num_dense:]):
        written["first_k_dense_replace"] = num_dense
    return written


def gates_are_normalized(*, default: bool, **fields: Any) -> hf.ConfigMapping:
    """Returns the setting of whether the gates of a token are divided by their sum."""
    return hf.mapped("norm_topk_prob", "norm_topk_prob", default, hf.BOOLEANS, **fields)


def number(
    hf_names: str, key: str, default: hf.Default, *, at_least: int = 1, **fields: Any
) -> hf.ConfigMapping:
    """Returns the setting of a number of experts or groups."""

    def read(value: hf.HFValue, config: hf.HFConfig) -> TypedValue:
        return hf.whole_number(value, at_least=at_least)

    def write(values: Mapping[str, Any]) -> Any:
        return hf.whole_number(values[key], at_least=at_least)

    return hf.mapped(hf_names, key, default, **{"read": read, "write": write, **fields})


def width(hf_name: str, key: str, default: int, **fields: Any) -> hf.ConfigMapping:
    """Returns the setting of the width of experts, or of shared experts."""

    def write(values: hf.KeyValues) -> int:
        own_or_experts = (values[key], values["moe_mlp_dim"], values["base_mlp_dim"])
        return next(size for size in own_or_experts if size != -1)

    return hf.mapped(hf_name, key, default, write=write, **fields)


def balance_loss(hf_name: str, default: float, **fields: Any) -> hf.ConfigMapping:
    """Returns the setting of the weight of the load balance loss."""
    return hf.mapped(hf_name, "load_balance_loss_weight", default, **fields)


def balance_loss_if_any(**fields: Any) -> hf.ConfigMapping:
    """Returns the same setting for classes without such a loss: written unless it is 0."""

    def write(values: hf.KeyValues) -> hf.HFValue:
        return values["load_balance_loss_weight"] or hf.OMITTED

    return balance_loss("router_aux_loss_coef", 0.0, write=write, **fields)


def rows(
    folder: str, router: str = "gate", projections: str = "gate_proj up_proj down_proj"
) -> hf.Rows:
    """Returns the rows of a router and of experts with tensors of their own.

    Args:
      folder: Prefix of the tensors of a layer's experts.
      router: Of the logits' projection.
      projections: Of an expert: gate, up and down.
    """
    gate, up, down = (f"{folder}experts.{{expert}}.{name}.weight" for name in projections.split())
    return (
        *hf.projection(folder + router, "layers/mlp/gate", "E D", "D E"),
        hf.row(gate, _EXPERTS + "wi_0", "F D", "D F"),
        hf.row(up, _EXPERTS + "wi_1", "F D", "D F"),
        hf.row(down, _EXPERTS + "wo", "D F", "F D"),
    )


def correction_bias(hf_name: str) -> hf.Rows:
    """Returns the row of what is added to the scores that experts are chosen by."""
    return (hf.row(hf_name, "layers/mlp/gate_correction_bias", "E", "E"),)


def shared_rows(hf_name: str, gate: str = "") -> hf.Rows:
    """Returns the rows of the experts that every token visits.

    Args:
      hf_name: Prefix of their tensors.
      gate: The projection to the scalar that their output is multiplied by; empty for none.
    """
    return (
        *hf.projection(hf_name + "gate_proj", _SHARED + "wi_0", "F D", "D F"),
        *hf.projection(hf_name + "up_proj", _SHARED + "wi_1", "F D", "D F"),
        *hf.projection(hf_name + "down_proj", _SHARED + "wo", "D F", "F D"),
        *(hf.projection(gate, _SHARED + "gate", "G D", "D G") if gate else ()),
    )


# Layers of multi-token prediction, which are stored behind the last layer, for runs without it.
PREDICTION_LAYERS = tuple(f"model.layers.{{num_layers+{index}}}." for index in range(4))
