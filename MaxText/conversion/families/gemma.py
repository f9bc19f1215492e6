"""Gemma 1 to 4 (Gemma Team 2024, arXiv 2403.08295 and 2408.00118; 2025, arXiv 2503.19786; 2026).

Embeddings are multiplied by sqrt(hidden_size), the gate uses tanh GELU, and the head is tied. Norms
multiply by 1 + weight, in Gemma 4 by weight. Gemma 2 and later have norms before and after each
branch, and layers with a window. Gemma 3 and 4 have query and key norms, and rotary parameters for
each kind of layer. In Gemma 4 global layers have heads of their own (`per_layer_config`; published
files have `global_head_dim` and `num_global_key_value_heads`), and may have no value projection.
Layers may also read per-layer embeddings (`hidden_size_per_layer_input`, 256 unless a file says 0).
`gemma3` and `gemma4` are multimodal models around these.
"""

from collections.abc import Sequence
from typing import Any

from MaxText.config.values import TypedValue
from MaxText.conversion import family as hf
from MaxText.conversion.families import rotary, windows
from MaxText.conversion.families.llama import (
    GATED_MLP,
    LAYER,
    POST_ATTENTION,
    POST_MLP,
    PRE_ATTENTION,
    PRE_MLP,
    activation,
    attention,
    biases,
    descendant,
    qk_norms,
    rows,
    tied_by_default,
)
from MaxText.conversion.layer_table import (
    GLOBAL,
    GLOBAL_KIND,
    LOCAL,
    LOCAL_KIND,
    Layers,
    LayerTable,
    LayerTableError,
    every_nth_global,
    write_layer_types,
)
from MaxText.conversion.rotary_config import RotaryDefaults

_ACTIVATIONS_OF_GEMMA = (
    ("gelu_pytorch_tanh", ("gelu", "linear")),
    # The first published files say "gelu" but mean tanh GELU; transformers knows this.
    ("gelu", ("gelu", "linear")),
    ("gelu_new", ("gelu", "linear")),
    ("silu", ("silu", "linear")),
    ("relu", ("relu", "linear")),
)
_ONLY_CAUSAL = "Tokens see earlier tokens only."

GEMMA = descendant(
    "GemmaForCausalLM",
    tied_by_default(),
    activation("gelu_pytorch_tanh", values=_ACTIVATIONS_OF_GEMMA),
    hf.supported("hidden_activation", "gelu_pytorch_tanh"),
    hf.supported("use_bidirectional_attention", False, hint=_ONLY_CAUSAL),
    without=("mlp_bias",),
    defaults={"num_key_value_heads": 16, "head_dim": 256, "max_position_embeddings": 8192},
    decoder_block="gemma",
)

_SANDWICH_NORMS = (
    *hf.norm(LAYER + "input_layernorm", PRE_ATTENTION),
    *hf.norm(LAYER + "post_attention_layernorm", POST_ATTENTION),
    *hf.norm(LAYER + "pre_feedforward_layernorm", PRE_MLP),
    *hf.norm(LAYER + "post_feedforward_layernorm", POST_MLP),
)


def _read_scalar(value: hf.HFValue, config: hf.HFConfig) -> TypedValue:
    """Returns the score scale of `query_pre_attn_scalar`; None for the width of a head."""
    if hf.whole_number(value, at_least=1) is hf.REQUIRED:
        return hf.REQUIRED
    return None if value == config["head_dim"] else value**-0.5


def _write_scalar(values: hf.KeyValues) -> hf.HFValue:
    """Returns `query_pre_attn_scalar`, which is an integer."""
    if values["attention_scale"] is None:
        return values["head_dim"]
    scalar = round(values["attention_scale"] ** -2)
    return scalar if scalar and scalar**-0.5 == values["attention_scale"] else hf.REQUIRED


_SHARED = (
    tied_by_default(),
    activation(
        "gelu_pytorch_tanh",
        "hidden_activation",
        hf.activations("gelu_pytorch_tanh gelu gelu_new silu swish relu", "linear"),
    ),
    hf.soft_cap("final_logit_softcapping", "final_logits_soft_cap", default=None),
    biases("attention_bias", "qkv_bias proj_bias"),
)
_SCALAR = hf.ConfigMapping(
    ("query_pre_attn_scalar",),
    ("attention_scale",),
    256,
    hint="It is an integer.",
    read=_read_scalar,
    write=_write_scalar,
)

# Sizes in transformers if config.json omits them; those of Gemma 2 2B.
_SIZES_OF_2B = {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
}

GEMMA2 = descendant(
    "Gemma2ForCausalLM",
    *_SHARED,
    _SCALAR,
    hf.soft_cap("attn_logit_softcapping", "attn_logits_soft_cap", default=50.0),
    hf.supported("use_bidirectional_attention", None, False, hint=_ONLY_CAUSAL),
    windows.of_local_layers(4096),
    without=("mlp_bias", "hidden_act"),
    defaults={
        **_SIZES_OF_2B,
        "vocab_size": 256_000,
        "max_position_embeddings": 8192,
        "final_logit_softcapping": 30.0,
    },
    decoder_block="gemma2",
    rows=rows(_SANDWICH_NORMS, attention(), GATED_MLP),
    layers=LayerTable(
        (LOCAL_KIND, GLOBAL_KIND), every_nth_global("", default=2), write_layer_types
    ),
)

_BY_KIND = (*rotary.settings(LOCAL), *rotary.settings(GLOBAL))
# Settings of Llama that families with rotary parameters by kind of layer lack.
_WITHOUT = ("mlp_bias", "hidden_act", *(setting.name for setting in rotary.settings()))

GEMMA3 = descendant(
    "Gemma3ForCausalLM",
    *_SHARED,
    _SCALAR,
    hf.supported(
        "attn_logit_softcapping", None, hint="transformers does not apply it in this family."
    ),
    hf.supported("use_bidirectional_attention", False, None, hint=_ONLY_CAUSAL),
    windows.of_local_layers(4096),
    *_BY_KIND,
    without=_WITHOUT,
    defaults={
        **_SIZES_OF_2B,
        "vocab_size": 262_208,
        "max_position_embeddings": 131_072,
    },
    model_type="gemma3_text",
    decoder_block="gemma3",
    rows=rows(_SANDWICH_NORMS, attention(), qk_norms(), GATED_MLP),
    layers=LayerTable(
        (LOCAL_KIND, GLOBAL_KIND),
        every_nth_global("sliding_window_pattern", default=6),
        write_layer_types,
    ),
    rotary=RotaryDefaults(
        thetas_by_kind={LOCAL: 10_000.0, GLOBAL: 1_000_000.0},
        theta_names_by_kind={LOCAL: "rope_local_base_freq", GLOBAL: "rope_theta"},
    ),
    wrappers=("gemma3",),
)

_HEADS = ("head_dim", "num_key_value_heads")
_GLOBAL_HEADS = ("global_head_dim", "num_global_key_value_heads")
_PER_LAYER = "per_layer_config"


def _read_layers_of_gemma4(layers: Layers) -> list[str]:
    """Returns the kinds of layers; the last one is always global."""
    names = every_nth_global("", default=6)(layers)
    names[-1] = GLOBAL
    overrides = layers.config.get(_PER_LAYER)
    if overrides is None:
        return names
    for index, name in enumerate(names):
        override = overrides.get(str(index), {})
        is_possible = override.keys() <= set(_HEADS) if name == GLOBAL else not override
        if not is_possible or override != overrides.get(str(names.index(name)), {}):
            raise LayerTableError(
                f"{_PER_LAYER}: layer {index} has {override}; only {' and '.join(_HEADS)} of all "
                f"{GLOBAL} layers alike can be imported"
            )
    return names


def _write_layers_of_gemma4(names: Sequence[str]) -> dict[str, Any]:
    if names and names[-1] != GLOBAL:
        raise LayerTableError("the last layer has a window, and in transformers it cannot")
    return write_layer_types(names)


def _read_gemma4(config: dict[str, Any]) -> dict[str, Any]:
    """Returns a config.json with the heads of global layers as in published files."""
    overrides = config.get(_PER_LAYER)
    if overrides is not None:
        override = next(iter(overrides.values()), {})
        head_dim = override.get("head_dim", config.get("head_dim"))
        num_kv_heads = override.get("num_key_value_heads")
    else:
        head_dim = config.get("global_head_dim")
        num_kv_heads = config.get("num_global_key_value_heads")
        if not config.get("attention_k_eq_v"):
            num_kv_heads = None
    if num_kv_heads is None:
        num_kv_heads = config.get("num_key_value_heads")
    heads = dict(zip(_GLOBAL_HEADS, (head_dim, num_kv_heads), strict=True))
    stated_heads = {name: value for name, value in heads.items() if value is not None}
    return _without_global_heads(config) | stated_heads


def _write_gemma4(config: dict[str, Any]) -> dict[str, Any]:
    """Returns a config.json with the heads of global layers as transformers 5 writes them."""
    override = {
        own_name: config[name]
        for name, own_name in zip(_GLOBAL_HEADS, _HEADS, strict=True)
        if config.get(name) != config.get(own_name)
    }
    overrides = {
        str(index): override
        for index, name in enumerate(config["layer_types"])
        if name == GLOBAL and override
    }
    return _without_global_heads(config) | {_PER_LAYER: overrides}


def _without_global_heads(config: hf.HFConfig) -> dict[str, Any]:
    """Returns the other settings of a config.json than those in `_GLOBAL_HEADS`."""
    return {name: value for name, value in config.items() if name not in _GLOBAL_HEADS}


def _read_width(value: hf.HFValue, config: hf.HFConfig) -> TypedValue:
    """Returns the width of per-layer embeddings; 0 is none."""
    return hf.whole_number(value, at_least=0)


def _write_rows(values: hf.KeyValues) -> int:
    """Returns the rows of the table of per-layer embeddings."""
    num_rows = values["vocab_size_per_layer_input"]
    return values["vocab_size"] if num_rows == -1 else num_rows


_PER_LAYER_INPUTS = (
    hf.row("model.embed_tokens_per_layer.weight", "per_layer_inputs/embedding", "V (L P)", "V L P"),
    hf.row(
        "model.per_layer_model_projection.weight",
        "per_layer_inputs/projection/kernel",
        "(L P) D",
        "D L P",
    ),
    hf.row("model.per_layer_projection_norm.weight", "per_layer_inputs/norm/scale", "P", "P"),
    hf.row(
        LAYER + "per_layer_input_gate.weight", "layers/per_layer_input_gate/kernel", "P D", "D P"
    ),
    hf.row(
        LAYER + "per_layer_projection.weight", "layers/per_layer_projection/kernel", "D P", "P D"
    ),
    *hf.norm(LAYER + "post_per_layer_input_norm", "layers/post_per_layer_input_norm"),
)
_ONLY_DENSE = "Only the dense layers of the family can be imported."

GEMMA4 = descendant(
    "Gemma4ForCausalLM",
    *_SHARED,
    hf.supported("use_bidirectional_attention", None, "vision", hint=_ONLY_CAUSAL),
    hf.mapped("hidden_size_per_layer_input", "hidden_size_per_layer_input", 256, read=_read_width),
    hf.mapped(
        "vocab_size_per_layer_input", "vocab_size_per_layer_input", 262_144, write=_write_rows
    ),
    hf.supported("num_kv_shared_layers", 0, hint="Every layer has its own keys and values here."),
    hf.supported("use_double_wide_mlp", False, True),  # of layers that share keys and values
    hf.supported("enable_moe_block", False, hint=_ONLY_DENSE),
    windows.of_local_layers(512),
    hf.mapped("num_key_value_heads", "base_num_kv_heads", 4, kinds=(LOCAL,)),
    hf.mapped("head_dim", "head_dim", 256, kinds=(LOCAL,)),
    hf.mapped("num_global_key_value_heads", "base_num_kv_heads", 4, kinds=(GLOBAL,)),
    hf.mapped("global_head_dim", "head_dim", 512, kinds=(GLOBAL,)),
    hf.mapped("attention_k_eq_v", "share_kv_projections", False, hf.BOOLEANS, kinds=(GLOBAL,)),
    *_BY_KIND,
    without=_WITHOUT,
    defaults={
        "vocab_size": 262_144,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 30,
        "num_attention_heads": 8,
        "max_position_embeddings": 131_072,
    },
    model_type="gemma4_text",
    decoder_block="gemma4",
    rows=rows(
        _SANDWICH_NORMS,
        attention(),
        qk_norms(),
        GATED_MLP,
        _PER_LAYER_INPUTS,
        (hf.row(LAYER + "layer_scalar", "layers/layer_scalar/scale", "U", ""),),
    ),
    layers=LayerTable((LOCAL_KIND, GLOBAL_KIND), _read_layers_of_gemma4, _write_layers_of_gemma4),
    rotary=RotaryDefaults(
        thetas_by_kind={LOCAL: 10_000.0, GLOBAL: 1_000_000.0},
        parameters_by_kind={
            GLOBAL: {"rope_type": "proportional", "partial_rotary_factor": 0.25},
        },
        scaled_kind="",
    ),
    read_config=_read_gemma4,
    write_config=_write_gemma4,
    wrappers=("gemma4",),
)
