"""Llama (Touvron et al. 2023; Grattafiori et al. 2024), and what its descendants share.

A descendant's table is its differences: `descendant`, with rows put together from those of norms,
attention and feed-forward. Rotary dimensions pair by halves, as here.
"""

import dataclasses
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any

from MaxText.conversion import family as hf
from MaxText.conversion.families import rotary
from MaxText.conversion.rotary_config import RotaryDefaults

LAYER = "model.layers.{layer}."
MLP = LAYER + "mlp."
_SELF = LAYER + "self_attn."
_QUERY_NORM = hf.ATTENTION + "query_norm/scale"
_KEY_NORM = hf.ATTENTION + "key_norm/scale"
PRE_ATTENTION = "layers/pre_self_attention_layer_norm"
POST_ATTENTION = "layers/post_self_attention_layer_norm"
PRE_MLP = "layers/pre_mlp_layer_norm"
POST_MLP = "layers/post_mlp_layer_norm"

# The gated feed-forward here is activation(wi_0 x) * wi_1 x, gate first.
ACTIVATIONS = hf.activations("silu swish gelu gelu_new gelu_pytorch_tanh relu relu2", "linear")
UNGATED = hf.activations("relu2 gelu_pytorch_tanh gelu gelu_new relu silu swish")

PRE_NORMS = (
    *hf.norm(LAYER + "input_layernorm", PRE_ATTENTION),
    *hf.norm(LAYER + "post_attention_layernorm", PRE_MLP),
)
POST_NORMS = (
    *hf.norm(LAYER + "post_attention_layernorm", POST_ATTENTION),
    *hf.norm(LAYER + "post_feedforward_layernorm", POST_MLP),
)
GATED_MLP = (
    *hf.projection(MLP + "gate_proj", "layers/mlp/wi_0", "F D", "D F"),
    *hf.projection(MLP + "up_proj", "layers/mlp/wi_1", "F D", "D F"),
    *hf.projection(MLP + "down_proj", "layers/mlp/wo", "D F", "F D"),
)
FUSED_MLP = (
    hf.row(
        MLP + "gate_up_proj.weight",
        "layers/mlp/wi_0/kernel layers/mlp/wi_1/kernel",
        "(J F) D",
        "D F",
    ),
    *hf.projection(MLP + "down_proj", "layers/mlp/wo", "D F", "F D"),
)


def ungated_mlp(names: str = "up_proj down_proj") -> hf.Rows:
    """Returns the rows of a feed-forward without a gate."""
    into, out = names.split()
    return (
        *hf.projection(MLP + into, "layers/mlp/wi", "F D", "D F"),
        *hf.projection(MLP + out, "layers/mlp/wo", "D F", "F D"),
    )


def attention(rotary_order: hf.RotaryOrder = "halves") -> hf.Rows:
    """Returns the rows of separate projections."""
    return hf.attention(_SELF, "q_proj k_proj v_proj o_proj", "K", rotary_order)


FUSED_ATTENTION = (
    hf.row(
        _SELF + "qkv_proj.weight",
        " ".join(f"{hf.ATTENTION}{name}/kernel" for name in ("query", "key", "value")),
        "(N H) D | (K H) D | (K H) D",
        "D N H | D K H | D K H",
    ),
    *hf.projection(_SELF + "o_proj", hf.ATTENTION + "out", "D (N H)", "N H D"),
)


def qk_norms(names: str = "q_norm k_norm") -> hf.Rows:
    """Returns the rows of norms of each head."""
    query, key = names.split()
    return (
        hf.row(f"{_SELF}{query}.weight", _QUERY_NORM, "H", "H"),
        hf.row(f"{_SELF}{key}.weight", _KEY_NORM, "H", "H"),
    )


JOINT_QK_NORMS = (
    hf.row(_SELF + "q_norm.weight", _QUERY_NORM, "(N H)", "N H"),
    hf.row(_SELF + "k_norm.weight", _KEY_NORM, "(K H)", "K H"),
)
SEPARATE_QK_NORMS = (
    hf.row(_SELF + "q_layernorm.norms.{head}.weight", _QUERY_NORM, "H", "H"),
    hf.row(_SELF + "k_layernorm.norms.{head}.weight", _KEY_NORM, "H", "H"),
)


def rows(*in_layers: hf.Rows) -> hf.Rows:
    """Returns the rows of a model, from those of its layers."""
    return (
        hf.row("model.embed_tokens.weight", "token_embedder/embedding", "V D", "V D"),
        *(row for layer_rows in in_layers for row in layer_rows),
        *hf.norm("model.norm", "decoder_norm"),
        hf.row("lm_head.weight", "logits_dense/kernel", "V D", "D V"),
    )


_HEAD_DIM = hf.divided_by("hidden_size", "num_attention_heads")
QUERY_HEADS = hf.copy_of("num_attention_heads")

LLAMA = hf.Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    decoder_block="llama2",
    settings=(
        hf.mapped("vocab_size", "vocab_size"),
        hf.mapped("hidden_size", "base_emb_dim"),
        hf.mapped("num_hidden_layers", "base_num_decoder_layers"),
        hf.mapped("num_attention_heads", "base_num_query_heads"),
        hf.mapped("num_key_value_heads", "base_num_kv_heads", QUERY_HEADS, null=QUERY_HEADS),
        hf.mapped("intermediate_size", "base_mlp_dim"),
        hf.mapped("rms_norm_eps", "normalization_layer_epsilon", default=1e-6),
        hf.mapped("hidden_act", "mlp_activations", default="silu", values=ACTIVATIONS),
        hf.mapped("tie_word_embeddings", "logits_via_embedding", default=False, values=hf.BOOLEANS),
        hf.mapped("max_position_embeddings", "max_target_length", default=2048),
        hf.mapped("head_dim", "head_dim", _HEAD_DIM, null=_HEAD_DIM),
        hf.mapped("attention_bias", "qkv_bias proj_bias", default=False, values=hf.BOOLEANS),
        hf.mapped("mlp_bias", "ffn_bias", default=False, values=hf.BOOLEANS),
        *rotary.settings(),
    ),
    rows=rows(PRE_NORMS, attention(), qk_norms(), GATED_MLP),
    prefix="model.",
    ignored=(".rotary_emb.inv_freq",),
    rotary=RotaryDefaults(),
)


def descendant(
    architecture: str,
    *settings: hf.ConfigMapping,
    without: Collection[str] = (),
    defaults: Mapping[str, Any] = MappingProxyType({}),
    **fields: Any,
) -> hf.Family:
    """Returns a family that differs from Llama.

    Args:
      architecture: Its class in transformers. model_type is its name in lower case, if `fields` has
        no other.
      settings: Added to Llama's, or in place of those of the same name, and of the same keys.
      without: Names of further settings of Llama's that it lacks.
      defaults: What a config.json means that lacks a key, unlike in Llama.
      fields: Other fields of Family.
    """
    replaced = {setting.name for setting in settings}.union(without)
    of_llama = [setting for setting in LLAMA.settings if setting.name not in replaced]
    own_keys = {key for setting in settings for key in setting.keys if not setting.kinds}
    of_llama = [setting for setting in of_llama if own_keys.isdisjoint(setting.keys)]
    all_settings = (
        dataclasses.replace(setting, default=defaults[setting.name])
        if setting.name in defaults
        else setting
        for setting in (*of_llama, *settings)
    )
    fields = {"model_type": architecture.removesuffix("ForCausalLM").lower()} | fields
    return dataclasses.replace(
        LLAMA, architecture=architecture, settings=tuple(all_settings), **fields
    )


def head_dim_of_width() -> hf.ConfigMapping:
    """Returns the setting of families whose heads always share the width of the model."""
    return hf.family_default("head_dim", _HEAD_DIM)


def biases(name: str, keys: str, *, default: bool = False) -> hf.ConfigMapping:
    """Returns the setting of biases."""
    return hf.mapped(name, keys, default, hf.BOOLEANS)


def activation(
    default: str, name: str = "hidden_act", values: Any = ACTIVATIONS
) -> hf.ConfigMapping:
    """Returns the setting of the feed-forward's activation."""
    return hf.mapped(name, "mlp_activations", default, values)


def tied_by_default() -> hf.ConfigMapping:
    """Returns the setting of families whose head is tied if config.json does not say."""
    return hf.mapped("tie_word_embeddings", "logits_via_embedding", True, hf.BOOLEANS)
