"""Llama (Touvron et al. 2023; Grattafiori et al. 2024) and descendants.

Mistral's (Jiang et al. 2023) first version has a sliding window. Mixtral (Jiang et al. 2024) has
experts, named as in the published files, which transformers 5 still reads and writes. Qwen2 (Yang
et al. 2024) has query, key and value biases, Qwen3 (2025) query and key norms. In Gemma 1 (Gemma
Team 2024, arXiv 2403.08295) norms multiply by 1 + weight and embeddings by sqrt(hidden_size), the
gate uses tanh GELU, and the head is tied. Rotary dimensions pair by halves, as here.
"""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from MaxText.conversion import family as hf
from MaxText.conversion.families import rotary
from MaxText.conversion.rotary_config import RotaryDefaults

_LAYER = "model.layers.{layer}."
_EXPERT = _LAYER + "block_sparse_moe.experts.{expert}."

# The gated feed-forward here is activation(wi_0 x) * wi_1 x, gate first.
_ACTIVATIONS = hf.activations("silu swish gelu gelu_new gelu_pytorch_tanh relu", "linear")
_ACTIVATIONS_OF_GEMMA = (
    ("gelu_pytorch_tanh", ("gelu", "linear")),
    # The first published files say "gelu" but mean tanh GELU; transformers knows this.
    ("gelu", ("gelu", "linear")),
    ("gelu_new", ("gelu", "linear")),
    ("silu", ("silu", "linear")),
    ("relu", ("relu", "linear")),
)
_MLP = (
    *hf.projection(_LAYER + "mlp.gate_proj", "layers/mlp/wi_0", "F D", "D F"),
    *hf.projection(_LAYER + "mlp.up_proj", "layers/mlp/wi_1", "F D", "D F"),
    *hf.projection(_LAYER + "mlp.down_proj", "layers/mlp/wo", "D F", "F D"),
)
_EXPERTS = (
    hf.row(_LAYER + "block_sparse_moe.gate.weight", "layers/mlp/gate/kernel", "E D", "D E"),
    hf.row(_EXPERT + "w1.weight", "layers/mlp/experts/wi_0", "F D", "D F"),
    hf.row(_EXPERT + "w3.weight", "layers/mlp/experts/wi_1", "F D", "D F"),
    hf.row(_EXPERT + "w2.weight", "layers/mlp/experts/wo", "D F", "F D"),
)


def _rows(feed_forward: hf.Rows) -> hf.Rows:
    return (
        hf.row("model.embed_tokens.weight", "token_embedder/embedding", "V D", "V D"),
        *hf.norm(_LAYER + "input_layernorm", "layers/pre_self_attention_layer_norm"),
        *hf.attention(_LAYER + "self_attn.", "q_proj k_proj v_proj o_proj", kv="K"),
        hf.row(_LAYER + "self_attn.q_norm.weight", hf.ATTENTION + "query_norm/scale", "H", "H"),
        hf.row(_LAYER + "self_attn.k_norm.weight", hf.ATTENTION + "key_norm/scale", "H", "H"),
        *hf.norm(_LAYER + "post_attention_layernorm", "layers/pre_mlp_layer_norm"),
        *feed_forward,
        *hf.norm("model.norm", "decoder_norm"),
        hf.row("lm_head.weight", "logits_dense/kernel", "V D", "D V"),
    )


LLAMA = hf.Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    decoder_block="llama2",
    settings=(
        hf.mapped("vocab_size", "vocab_size"),
        hf.mapped("hidden_size", "base_emb_dim"),
        hf.mapped("num_hidden_layers", "base_num_decoder_layers"),
        hf.mapped("num_attention_heads", "base_num_query_heads"),
        hf.mapped("num_key_value_heads", "base_num_kv_heads", hf.copy_of("num_attention_heads")),
        hf.mapped("intermediate_size", "base_mlp_dim"),
        hf.mapped("rms_norm_eps", "normalization_layer_epsilon", default=1e-6),
        hf.mapped("hidden_act", "mlp_activations", default="silu", values=_ACTIVATIONS),
        hf.mapped("tie_word_embeddings", "logits_via_embedding", default=False, values=hf.BOOLEANS),
        hf.mapped("max_position_embeddings", "max_target_length", default=2048),
        hf.mapped("head_dim", "head_dim", hf.divided_by("hidden_size", "num_attention_heads")),
        hf.mapped("attention_bias", "qkv_bias proj_bias", default=False, values=hf.BOOLEANS),
        hf.mapped("mlp_bias", "ffn_bias", default=False, values=hf.BOOLEANS),
        *rotary.settings(),
    ),
    rows=_rows(_MLP),
    prefix="model.",
    ignored=(".rotary_emb.inv_freq",),
    rotary=RotaryDefaults(),
)


def _descendant(
    architecture: str, *settings: hf.ConfigMapping, without: Collection[str] = (), **fields: Any
) -> hf.Family:
    """Returns a family that differs from Llama.

    Args:
      settings: Added to Llama's, or replacing those of the same name and keys.
      without: Names of settings of Llama's that it lacks.
      fields: Other fields of Family.
    """
    by_key = {(setting.name, setting.keys): setting for setting in (*LLAMA.settings, *settings)}
    return dataclasses.replace(
        LLAMA,
        model_type=architecture.removesuffix("ForCausalLM").lower(),
        architecture=architecture,
        settings=tuple(setting for setting in by_key.values() if setting.name not in without),
        **fields,
    )


_WINDOW = "sliding_window"  # of all layers in Mistral and Mixtral; local layers here


def _read_window(value: Any, config: Mapping[str, Any]) -> Any:
    """Returns attention types: all global if no text exceeds the window."""
    if value is None:
        return ()
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        return hf.REQUIRED
    length = config.get(hf.REQUESTED_LENGTH, config["max_position_embeddings"])
    # An invalid length is reported elsewhere.
    if isinstance(length, int | float) and value >= length:
        return ()
    return ((("local",), config.get("num_hidden_layers")),)


def _unused_window(config: Mapping[str, Any]) -> Any:
    """Returns the window if no layer is local; unused windows are refused."""
    return hf.REQUIRED if _read_window(config[_WINDOW], config) else config[_WINDOW]


def _write_window(values: Mapping[str, Any]) -> Any:
    """Returns the window if all layers are local, None if all are global."""
    types = values["attention_types"]
    if not types:
        return None
    is_local = all(set(pattern) == {"local"} for pattern, _ in types)
    return values["sliding_window_size"] if is_local else hf.REQUIRED


def _window(default: int | None) -> tuple[hf.ConfigMapping, ...]:
    return (
        hf.ConfigMapping(
            (_WINDOW,),
            ("attention_types",),
            default,
            hint="It is a number of tokens, or null.",
            read=_read_window,
            write=_write_window,
        ),
        hf.ConfigMapping(
            (_WINDOW,),
            ("sliding_window_size",),
            default,
            is_written=False,
            implied=_unused_window,
            read=lambda value, config: value,
        ),
    )


def _two_or_more(hf_names: str, key: str, default: int, hint: str) -> hf.ConfigMapping:
    def possible(value: Any) -> Any:
        return value if type(value) is int and value > 1 else hf.REQUIRED

    return hf.ConfigMapping(
        tuple(hf_names.split()),
        (key,),
        default,
        hint=hint,
        read=lambda value, config: possible(value),
        write=lambda values: possible(values[key]),
    )


def _length(default: int) -> hf.ConfigMapping:
    return hf.mapped("max_position_embeddings", "max_target_length", default=default)


_BIASES = ("attention_bias", "mlp_bias")
_NO_WINDOW = hf.supported(
    "use_sliding_window", False, hint="Every layer attends to all earlier tokens here."
)

MISTRAL = _descendant("MistralForCausalLM", _length(131_072), *_window(4096), without=_BIASES)

MIXTRAL = _descendant(
    "MixtralForCausalLM",
    hf.mapped("num_key_value_heads", "base_num_kv_heads", default=8),
    hf.mapped("rms_norm_eps", "normalization_layer_epsilon", default=1e-5),
    _length(131_072),
    _two_or_more(
        "num_local_experts num_experts", "num_experts", 8, "One expert is an ordinary Mistral."
    ),
    _two_or_more(
        "num_experts_per_tok",
        "num_experts_per_tok",
        2,
        "The gate of a single expert is its probability here, and 1 there.",
    ),
    hf.mapped("router_aux_loss_coef", "load_balance_loss_weight", default=0.001),
    hf.supported("router_jitter_noise", 0.0),
    *_window(None),
    choices={
        "moe_layers": None,
        "moe_mlp_dim": -1,
        "moe_activations": None,
        "eval_capacity_factor": -1.0,
        "moe_second.policy_eval": "all",
    },
    without=_BIASES,
    rows=_rows(_EXPERTS),
    rotary=RotaryDefaults(theta=1e6),
)

QWEN2 = _descendant(
    "Qwen2ForCausalLM",
    _length(32_768),
    _NO_WINDOW,
    choices={"qkv_bias": True},
    without=_BIASES,
    ignored=(),
)

QWEN3 = _descendant(
    "Qwen3ForCausalLM",
    _length(32_768),
    hf.mapped("head_dim", "head_dim", default=128),
    _NO_WINDOW,
    choices={"use_qk_norm": True},
    without=("mlp_bias",),
    ignored=(),
)

GEMMA = _descendant(
    "GemmaForCausalLM",
    _length(8192),
    hf.mapped("head_dim", "head_dim", default=256),
    hf.mapped("tie_word_embeddings", "logits_via_embedding", default=True, values=hf.BOOLEANS),
    hf.mapped("hidden_act", "mlp_activations", "gelu_pytorch_tanh", _ACTIVATIONS_OF_GEMMA),
    hf.supported("hidden_activation", "gelu_pytorch_tanh"),
    hf.supported("use_bidirectional_attention", False),
    without=("mlp_bias",),
    decoder_block="gemma",
)
