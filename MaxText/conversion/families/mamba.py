"""Mamba-2 (Dao and Gu 2024, arXiv 2405.21060) and hybrids of it and attention.

Bamba (IBM 2024) and Granite 4 (IBM 2025) have attention in some layers; Granite's have experts, a
shared MLP, and no positions. Layers of Falcon-H1 (TII 2025, arXiv 2507.22448) have both on one
norm, and factors nearly everywhere. Layers of Nemotron-H (NVIDIA 2025, arXiv 2504.03624) have a
single part: Mamba-2, attention, an MLP or experts.

A file has z, x, B, C and dt in one projection, and x, B and C in one convolution. Chunks are
written, though no result depends on them.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from MaxText.conversion import family as hf
from MaxText.conversion.families import expert_layers, rotary
from MaxText.conversion.families.deepseek import SPARSE, sigmoid_routing
from MaxText.conversion.families.layer_norm import logit_factor
from MaxText.conversion.families.llama import (
    LAYER,
    PRE_ATTENTION,
    PRE_MLP,
    PRE_NORMS,
    UNGATED,
    activation,
    attention,
    biases,
    descendant,
)
from MaxText.conversion.families.relatives import GRANITE_EXPERTS, MULTIPLIERS
from MaxText.conversion.layer_table import (
    GLOBAL,
    GLOBAL_KIND,
    LayerKind,
    Layers,
    LayerTable,
    LayerTableError,
    read_list,
    write_layer_types,
)
from MaxText.conversion.rotary_config import RotaryDefaults

_RECURRENT = "linear_attention"
_OLDER_TYPES = {"mamba": _RECURRENT, "attention": GLOBAL}
_MAMBA_KIND = LayerKind(_RECURRENT, "M", {"mixer": "mamba2"})
_KINDS = (_MAMBA_KIND, GLOBAL_KIND)


# ---- Rows


def mamba_rows(folder: str, params: str = hf.ATTENTION) -> hf.Rows:
    """Returns the rows of a Mamba-2 mixer.

    Args:
      folder: Prefix of its tensors.
      params: Prefix of its parameters.
    """
    projections = [f"{params}{name}_proj" for name in ("z", "x", "B", "C", "dt")]
    convolutions = [f"{params}{name}_conv" for name in ("x", "B", "C")]

    def several(modules: Sequence[str], param: str) -> str:
        return " ".join(f"{module}/{param}" for module in modules)

    return (
        hf.row(
            folder + "in_proj.weight",
            several(projections, "kernel"),
            "(N H) D | (N H) D | (G S) D | (G S) D | N D",
            "D N H | D N H | D G S | D G S | D N",
        ),
        hf.row(
            folder + "in_proj.bias",
            several(projections, "bias"),
            "(N H) | (N H) | (G S) | (G S) | N",
            "N H | N H | G S | G S | N",
        ),
        hf.row(
            folder + "conv1d.weight",
            several(convolutions, "kernel"),
            "(N H) U W | (G S) U W | (G S) U W",
            "W N H | W G S | W G S",
        ),
        hf.row(
            folder + "conv1d.bias",
            several(convolutions, "bias"),
            "(N H) | (G S) | (G S)",
            "N H | G S | G S",
        ),
        *(hf.row(folder + name, params + name, "N", "N") for name in ("A_log", "D", "dt_bias")),
        hf.row(folder + "norm.weight", params + "norm/scale", "(N H)", "N H"),
        # Attention has an output projection of the same name.
        *hf.projection(
            folder + "out_proj", params + "out", "D (N H)", "N H D", only_with=params + "A_log"
        ),
    )


def _attention_rows(rows: hf.Rows) -> hf.Rows:
    """Returns rows of attention for models in which layers have it or Mamba-2."""
    return tuple(dataclasses.replace(row, only_with=hf.ATTENTION + "query/kernel") for row in rows)


def _rows(
    *in_layers: hf.Rows, table: str = "model.embed_tokens", final_norm: str = "model.norm"
) -> hf.Rows:
    """Returns the rows of a model, from those of its layers."""
    return (
        hf.row(f"{table}.weight", "token_embedder/embedding", "V D", "V D"),
        *(row for layer_rows in in_layers for row in layer_rows),
        *hf.norm(final_norm, "decoder_norm"),
        hf.row("lm_head.weight", "logits_dense/kernel", "V D", "D V"),
    )


_GATED_MLP = (
    *hf.projection(LAYER + "feed_forward.gate_proj", "layers/mlp/wi_0", "F D", "D F"),
    *hf.projection(LAYER + "feed_forward.up_proj", "layers/mlp/wi_1", "F D", "D F"),
    *hf.projection(LAYER + "feed_forward.down_proj", "layers/mlp/wo", "D F", "F D"),
)
_NORMS = (
    *hf.norm(LAYER + "input_layernorm", PRE_ATTENTION),
    *hf.norm(LAYER + "pre_ff_layernorm", PRE_MLP),
)


# ---- Settings


def _number(value: Any) -> Any:
    """Returns a number of config.json, in which transformers 5 writes infinity as an object."""
    if isinstance(value, Mapping):
        value = value.get("__float__")
    try:
        return float(value)
    except (TypeError, ValueError):
        return hf.REQUIRED


def _read_limits(value: Any, config: Mapping[str, Any]) -> Any:
    """Returns the limits of time steps; no limits if they are 0 and infinity."""
    limits = tuple(map(_number, value)) if isinstance(value, list) else ()
    if len(limits) != 2 or hf.REQUIRED in limits:
        return hf.REQUIRED
    if limits == (0.0, math.inf):
        return ()
    return limits if math.isfinite(limits[1]) else hf.REQUIRED


def _write_limits(values: Mapping[str, Any]) -> list[Any]:
    return list(values["time_step_limit"] or (0.0, {"__float__": "Infinity"}))


_LIMITS = hf.ConfigMapping(
    ("time_step_limit", "mamba_dt_limit"),
    ("time_step_limit",),
    [0.0, math.inf],
    read=_read_limits,
    write=_write_limits,
)


def _size(hf_names: str, key: str, default: Any) -> hf.ConfigMapping:
    """Returns the setting of a size."""
    return hf.mapped(
        hf_names, key, default, read=lambda value, config: hf.whole_number(value, at_least=1)
    )


def _width(config: Mapping[str, Any]) -> int:
    """Returns the width of all heads together in Bamba and its relatives."""
    width = config.get("mamba_d_ssm")
    return config.get("mamba_expand", 2) * config["hidden_size"] if width is None else width


def _read_head_dim(value: Any, config: Mapping[str, Any]) -> Any:
    width = _width(config) // config["mamba_n_heads"] if value == "auto" else value
    return hf.whole_number(width, at_least=1)


def _expand(values: Mapping[str, Any]) -> Any:
    """Returns the width of all heads together in multiples of the model's."""
    width = values["mamba_n_heads"] * values["mamba_d_head"]
    factor, remainder = divmod(width, values["base_emb_dim"])
    return hf.REQUIRED if remainder else factor


def _mamba_settings(expand: hf.Computed = _expand) -> tuple[hf.ConfigMapping, ...]:
    """Returns the settings of Bamba's names.

    Args:
      expand: The value of mamba_expand, from our keys.
    """
    return (
        _size("mamba_n_heads", "mamba_n_heads", 128),
        hf.mapped("mamba_d_head", "mamba_d_head", "auto", read=_read_head_dim),
        _size("mamba_d_state", "mamba_d_state", 256),
        _size("mamba_n_groups", "mamba_n_groups", 1),
        _size("mamba_d_conv", "mamba_d_conv", 4),
        _size("mamba_chunk_size", "mamba_chunk_size", 256),
        hf.without_key("mamba_expand", expand),
        biases("mamba_conv_bias", "mamba_conv_bias", default=True),
        biases("mamba_proj_bias", "mamba_proj_bias"),
        _LIMITS,
    )


# ---- Mamba-2 alone


def _without_attention() -> frozenset[str]:
    """Returns the names of settings of Llama's that models without attention lack."""
    return frozenset(
        (
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "attention_bias",
            *_ROTARY_NAMES,
        )
    )


_ROTARY_NAMES = tuple(setting.name for setting in rotary.settings())
_BACKBONE = "backbone.layers.{layer}."

MAMBA2 = descendant(
    "Mamba2ForCausalLM",
    _size("num_heads", "mamba_n_heads", 128),
    _size("head_dim", "mamba_d_head", 64),
    _size("state_size", "mamba_d_state", 128),
    _size("n_groups", "mamba_n_groups", 8),
    _size("conv_kernel", "mamba_d_conv", 4),
    _size("chunk_size", "mamba_chunk_size", 256),
    hf.without_key("expand", _expand),
    biases("use_conv_bias", "mamba_conv_bias", default=True),
    biases("use_bias", "mamba_proj_bias"),
    _LIMITS,
    hf.mapped("time_step_min", "time_step_min", 0.001),
    hf.mapped("time_step_max", "time_step_max", 0.1),
    hf.mapped("layer_norm_epsilon", "normalization_layer_epsilon", 1e-5),
    hf.supported("hidden_act", "silu"),
    without=_without_attention()
    | {"intermediate_size", "mlp_bias", "max_position_embeddings", "rms_norm_eps"},
    decoder_block="mamba2",
    rows=_rows(
        hf.norm(_BACKBONE + "norm", PRE_ATTENTION),
        mamba_rows(_BACKBONE + "mixer."),
        table="backbone.embeddings",
        final_norm="backbone.norm_f",
    ),
    prefix="backbone.",
    rotary=None,
)


# ---- Bamba


def _read_indices(layers: Layers) -> list[str]:
    """Returns the kinds of Bamba's layers."""
    indices = layers.config.get("attn_layer_indices") or []
    if not isinstance(indices, list):
        raise LayerTableError(f"attn_layer_indices={indices} is not a list of layers")
    return [GLOBAL if index in indices else _RECURRENT for index in range(layers.count)]


def _write_indices(names: Sequence[str]) -> dict[str, Any]:
    indices = [index for index, name in enumerate(names) if name == GLOBAL]
    return {"attn_layer_indices": indices}


BAMBA = descendant(
    "BambaForCausalLM",
    *_mamba_settings(),
    *rotary.settings(fraction_types=rotary.ALL_TYPES),
    defaults={
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 262_144,
    },
    decoder_block="bamba",
    rows=_rows(
        _NORMS,
        _attention_rows(attention()),
        mamba_rows(LAYER + "mamba."),
        _GATED_MLP,
        final_norm="model.final_layernorm",
    ),
    layers=LayerTable(_KINDS, _read_indices, _write_indices),
    rotary=RotaryDefaults(fraction=0.5),
)


# ---- Granite 4


def _newer_types(types: Iterable[Any]) -> list[Any]:
    """Returns kinds of layers in the names of transformers 5."""
    return [_OLDER_TYPES.get(kind, kind) for kind in types]


def _read_types(layers: Layers) -> list[str]:
    """Returns the kinds of Granite's layers."""
    name = "layer_types" if layers.config.get("layer_types") else "layers_block_type"
    types = _newer_types(read_list(layers, name, [_RECURRENT] * layers.count))
    unknown = sorted({str(kind) for kind in types} - {_RECURRENT, GLOBAL})
    if unknown:
        raise LayerTableError(f"{name}: {', '.join(unknown)} cannot be imported")
    return types


def _read_granite(config: dict[str, Any]) -> dict[str, Any]:
    """Returns a config.json whose dense layers have the width of their only MLP."""
    if config.get("num_local_experts", 8) or "shared_intermediate_size" not in config:
        return config
    return config | {"intermediate_size": config["shared_intermediate_size"]}


def _write_granite(config: dict[str, Any]) -> dict[str, Any]:
    return {"shared_intermediate_size": config["intermediate_size"], **config}


def _read_num_experts(value: Any, config: Mapping[str, Any]) -> Any:
    """Returns the number of experts; none are one MLP."""
    count = hf.whole_number(value, at_least=0)
    return hf.REQUIRED if count == 1 else 1 if count == 0 else count


def _write_num_experts(values: Mapping[str, Any]) -> int:
    return 0 if values["num_experts"] == 1 else values["num_experts"]


_SHARED_MLP = LAYER + "shared_mlp."


def _shared_mlp(params: str) -> hf.Rows:
    """Returns the rows of Granite's shared MLP, which is the only one of models without experts."""
    return (
        hf.row(
            _SHARED_MLP + "input_linear.weight",
            f"{params}wi_0/kernel {params}wi_1/kernel",
            "(J F) D",
            "D F",
        ),
        *hf.projection(_SHARED_MLP + "output_linear", params + "wo", "D F", "F D"),
    )


GRANITEMOEHYBRID = descendant(
    "GraniteMoeHybridForCausalLM",
    *MULTIPLIERS,
    *_mamba_settings(),
    hf.mapped(
        "position_embedding_type",
        "position_embedding",
        None,
        ((None, "none"), ("nope", "none"), ("rope", "rotary")),
        null=None,
    ),
    hf.mapped(
        "num_local_experts num_experts",
        "num_experts",
        8,
        read=_read_num_experts,
        write=_write_num_experts,
    ),
    expert_layers.number("num_experts_per_tok", "num_experts_per_tok", 2),
    expert_layers.width("shared_intermediate_size", "shared_expert_mlp_dim", 1024),
    expert_layers.balance_loss("router_aux_loss_coef", 0.001),
    without=("mlp_bias",),
    choices={"moe_mlp_dim": -1},
    decoder_block="granitemoehybrid",
    rows=_rows(
        PRE_NORMS,
        _attention_rows(attention()),
        mamba_rows(LAYER + "mamba."),
        GRANITE_EXPERTS,
        _shared_mlp("layers/mlp/shared_experts/"),
        _shared_mlp("layers/mlp/"),
    ),
    layers=LayerTable(_KINDS, _read_types, write_layer_types),
    read_config=_read_granite,
    write_config=_write_granite,
)


# ---- Falcon-H1


def _factors(hf_name: str, key: str, count: int) -> hf.ConfigMapping:
    """Returns the setting of a list of factors; all of them 1 are none here."""
    ones = [1.0] * count

    def read(value: Any, config: Mapping[str, Any]) -> Any:
        factors = tuple(map(_number, value)) if isinstance(value, list) else ()
        if len(factors) != count or hf.REQUIRED in factors:
            return hf.REQUIRED
        return () if factors == (1.0,) * count else factors

    return hf.mapped(
        hf_name, key, ones, null=ones, read=read, write=lambda values: list(values[key]) or ones
    )


def _read_key_factor(value: Any, config: Mapping[str, Any]) -> Any:
    """Returns the scale of scores, from a factor of keys."""
    factor = hf.positive_number(value)
    return hf.REQUIRED if factor is hf.REQUIRED else factor * config["head_dim"] ** -0.5


def _write_key_factor(values: Mapping[str, Any]) -> float:
    """Returns the factor of keys: of the nearest numbers, the shortest."""
    scale = values["attention_scale"]
    return 1.0 if scale is None else float(f"{scale * values['head_dim'] ** 0.5:.15g}")


def _read_falcon(config: dict[str, Any]) -> dict[str, Any]:
    """Returns a config.json with the width of all heads, which only null leaves open."""
    return {"mamba_d_ssm": 1024, **config}


def _read_d_ssm(value: Any, config: Mapping[str, Any]) -> Any:
    """Returns None if the heads are as wide together as config.json says, else REQUIRED."""
    head_dim = _read_head_dim(config["mamba_d_head"], config)
    return None if config["mamba_n_heads"] * head_dim == _width(config) else hf.REQUIRED


def _read_out_bias(value: Any, config: Mapping[str, Any]) -> Any:
    return None if value is config["mamba_proj_bias"] else hf.REQUIRED


FALCON_H1 = descendant(
    "FalconH1ForCausalLM",
    *_mamba_settings(expand=lambda values: 2),
    hf.ConfigMapping(
        ("mamba_d_ssm",),
        (),
        None,
        hint="It is mamba_n_heads * mamba_d_head.",
        null=None,
        read=_read_d_ssm,
        write=lambda values: values["mamba_n_heads"] * values["mamba_d_head"],
    ),
    hf.ConfigMapping(
        ("projectors_bias",),
        (),
        False,
        hint="It is mamba_proj_bias here.",
        read=_read_out_bias,
        write=lambda values: values["mamba_proj_bias"],
    ),
    biases("mamba_rms_norm", "mamba_rms_norm"),
    biases("mamba_norm_before_gate", "mamba_norm_before_gate", default=True),
    hf.mapped("embedding_multiplier", "embedding_multiplier", 1.0),
    logit_factor("lm_head_multiplier", 1.0),
    hf.mapped(
        "key_multiplier",
        "attention_scale",
        1.0,
        read=_read_key_factor,
        write=_write_key_factor,
    ),
    hf.mapped("attention_in_multiplier", "attention_in_multiplier", 1.0),
    hf.mapped("attention_out_multiplier", "attention_out_multiplier", 1.0),
    hf.mapped("ssm_in_multiplier", "ssm_in_multiplier", 1.0),
    hf.mapped("ssm_out_multiplier", "ssm_out_multiplier", 1.0),
    _factors("ssm_multipliers", "ssm_multipliers", 5),
    _factors("mlp_multipliers", "mlp_multipliers", 2),
    defaults={
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 8192,
    },
    model_type="falcon_h1",
    decoder_block="falcon_h1",
    rows=_rows(
        _NORMS,
        attention(),
        mamba_rows(LAYER + "mamba.", hf.ATTENTION + "parallel_mixer/"),
        _GATED_MLP,
        final_norm="model.final_layernorm",
    ),
    read_config=_read_falcon,
)


# ---- Nemotron-H

_TYPES = "layers_block_type"
_PATTERN = "hybrid_override_pattern"
_ONLY_MIXER = {"feed_forward_type": "none"}
_ONLY_FEED_FORWARD = {"mixer": "none", "feed_forward_type": "mlp"}
_MLP = "mlp"
_NEMOTRON_KINDS = (
    LayerKind(_RECURRENT, "M", {"mixer": "mamba2", **_ONLY_MIXER}),
    LayerKind(GLOBAL, "*", {"mixer": "attention", **_ONLY_MIXER}),
    LayerKind(_MLP, "-", {**_ONLY_FEED_FORWARD, "num_experts": 1}),
    LayerKind(expert_layers.SPARSE, "E", _ONLY_FEED_FORWARD),
)
_OF_PATTERN = {kind.letter: kind.name for kind in _NEMOTRON_KINDS}


def _read_parts(layers: Layers) -> list[str]:
    """Returns the kinds of Nemotron-H's layers, from their list or the older pattern."""
    pattern = layers.config.get(_PATTERN)
    from_pattern = [_OF_PATTERN.get(letter, letter) for letter in pattern or ()]
    default = from_pattern if len(from_pattern) == layers.count else None
    types = _newer_types(read_list(layers, _TYPES, default))
    names = [expert_layers.SPARSE if kind == "moe" else kind for kind in types]
    unknown = sorted({str(name) for name in names} - set(_OF_PATTERN.values()))
    if unknown:
        raise LayerTableError(f"{_TYPES}: {', '.join(unknown)} cannot be imported")
    return names


def _write_parts(names: Sequence[str]) -> dict[str, Any]:
    return {_TYPES: ["moe" if name == expert_layers.SPARSE else name for name in names]}


def _read_nemotron(config: dict[str, Any]) -> dict[str, Any]:
    """Returns a config.json with the number of layers, which newer files do not have.

    The class ignores the number in files without a list of layers, too, and has one of each kind.
    """
    if not config.get(_TYPES) and not config.get(_PATTERN):
        config = config | {_TYPES: [_RECURRENT, "moe", GLOBAL, _MLP]}
    return config | {"num_hidden_layers": len(config.get(_TYPES) or config[_PATTERN])}


def _write_nemotron(config: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name != "num_hidden_layers"}


_MIXER = _BACKBONE + "mixer."
_EXPERTS = "layers/mlp/experts/"
_SHARED_EXPERTS = "layers/mlp/shared_experts/"

NEMOTRON_H = descendant(
    "NemotronHForCausalLM",
    _size("mamba_num_heads", "mamba_n_heads", 128),
    _size("mamba_head_dim", "mamba_d_head", 64),
    _size("ssm_state_size", "mamba_d_state", 128),
    _size("n_groups mamba_n_groups", "mamba_n_groups", 8),
    _size("conv_kernel mamba_d_conv", "mamba_d_conv", 4),
    _size("chunk_size mamba_chunk_size", "mamba_chunk_size", 128),
    # Without effect: heads have their own width.
    hf.without_key("expand", lambda values: 2),
    biases("use_conv_bias mamba_conv_bias", "mamba_conv_bias", default=True),
    biases("use_bias", "mamba_proj_bias"),
    _LIMITS,
    hf.mapped("time_step_min mamba_dt_min", "time_step_min", 0.001),
    hf.mapped("time_step_max mamba_dt_max", "time_step_max", 0.1),
    hf.mapped("layer_norm_epsilon", "normalization_layer_epsilon", 1e-5),
    activation("relu2", "mlp_hidden_act", UNGATED),
    hf.supported("mamba_hidden_act", "silu"),
    hf.supported("mlp_bias", False, hint="Routed experts have no biases beside others here."),
    # Its class has no such biases whatever config.json says.
    hf.without_key("attention_bias", lambda values: False),
    hf.supported("sliding_window", None, null=None),
    hf.supported("moe_latent_size", None, null=None, hint="Experts read the stream itself here."),
    expert_layers.number(
        "n_routed_experts num_local_experts", "num_experts", 8, at_least=2, kinds=SPARSE
    ),
    expert_layers.number("num_experts_per_tok", "num_experts_per_tok", 2, kinds=SPARSE),
    expert_layers.width("moe_intermediate_size", "moe_mlp_dim", 7688, kinds=SPARSE),
    expert_layers.width(
        "moe_shared_expert_intermediate_size", "shared_expert_mlp_dim", 7688, kinds=SPARSE
    ),
    hf.supported("n_shared_experts", 1, kinds=SPARSE),
    *sigmoid_routing(1.0, groups=1, chosen_groups=1),
    # Layers of multi-token prediction (mtp.*) are not read: they are of one part, too.
    hf.without_key("num_nextn_predict_layers", lambda values: 0),
    without=("hidden_act", "rms_norm_eps", *_ROTARY_NAMES),
    defaults={
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 4096,
        "intermediate_size": 21504,
    },
    model_type="nemotron_h",
    decoder_block="nemotron_h",
    rows=_rows(
        hf.norm(_BACKBONE + "norm", PRE_ATTENTION),
        hf.norm(_BACKBONE + "norm", PRE_MLP),
        _attention_rows(hf.attention(_MIXER, "q_proj k_proj v_proj o_proj", "K")),
        mamba_rows(_MIXER),
        hf.projection(_MIXER + "up_proj", "layers/mlp/wi", "F D", "D F"),
        hf.projection(_MIXER + "down_proj", "layers/mlp/wo", "D F", "F D"),
        hf.projection(_MIXER + "gate", "layers/mlp/gate", "E D", "D E"),
        (
            hf.row(_MIXER + "experts.{expert}.up_proj.weight", _EXPERTS + "wi", "F D", "D F"),
            hf.row(_MIXER + "experts.{expert}.down_proj.weight", _EXPERTS + "wo", "D F", "F D"),
        ),
        hf.projection(_MIXER + "shared_experts.up_proj", _SHARED_EXPERTS + "wi", "F D", "D F"),
        hf.projection(_MIXER + "shared_experts.down_proj", _SHARED_EXPERTS + "wo", "D F", "F D"),
        expert_layers.correction_bias(_MIXER + "gate.e_score_correction_bias"),
        table="backbone.embeddings",
        final_norm="backbone.norm_f",
    ),
    prefix="backbone.",
    skipped=("mtp.",),
    layers=LayerTable(_NEMOTRON_KINDS, _read_parts, _write_parts),
    read_config=_read_nemotron,
    write_config=_write_nemotron,
    rotary=None,
)
