"""GPT-Neo (Black et al. 2021): unscaled queries and local attention layers."""

from collections.abc import Mapping
from typing import Any

from MaxText.conversion.families.gpt2 import ACTIVATIONS, AROUND_LAYERS, PARTS
from MaxText.conversion.family import (
    BOOLEANS,
    REQUIRED,
    Family,
    Setting,
    computed,
    multiple,
    projection,
    ratio,
    same,
)

_LAYER = "transformer.h.{layer}."
_THERE = _LAYER + "attn.attention."
_HERE = "layers/self_attention/"


def _kinds(types: Any) -> list[str] | None:
    """Expands [[[global, local], 2]]; returns None for anything else."""
    try:
        kinds = [kind for pattern, times in types for _ in range(times) for kind in pattern]
        return kinds if set(kinds) <= {"global", "local"} else None
    except (TypeError, ValueError):
        return None


def _read_types(value: Any, config: Mapping[str, Any]) -> Any:
    kinds = _kinds(value)
    if kinds is None or len(kinds) != config.get("num_layers"):
        return REQUIRED
    return tuple((tuple(pattern), times) for pattern, times in value)


def _write_types(values: Mapping[str, Any]) -> Any:
    types = values["attention_types"] or ((("global",), values["base_num_decoder_layers"]),)
    return REQUIRED if _kinds(types) is None else [[list(pattern), n] for pattern, n in types]


def _read_layers(value: Any, config: Mapping[str, Any]) -> Any:
    """Checks the expanded list that transformers writes next to attention_types."""
    types = config["attention_types"]
    return _read_types(types, config) if value == _kinds(types) else REQUIRED


def _write_layers(values: Mapping[str, Any]) -> Any:
    types = _write_types(values)
    return types if types is REQUIRED else _kinds(types)


def _window_of_no_layer(config: Mapping[str, Any]) -> Any:
    """Returns the window if no layer is local: our keys refuse an unused window."""
    has_local = "local" in (_kinds(config["attention_types"]) or ())
    return REQUIRED if has_local else config["window_size"]


GPT_NEO = Family(
    model_type="gpt_neo",
    architecture="GPTNeoForCausalLM",
    decoder_block="gpt_neo",
    own={**PARTS, "attention_scale": 1.0, "qkv_bias": False},
    settings=(
        same("vocab_size", "vocab_size"),
        same("max_position_embeddings", "trainable_position_size max_target_length", default=2048),
        same("hidden_size", "base_emb_dim"),
        same("num_layers num_hidden_layers", "base_num_decoder_layers"),
        same("num_heads num_attention_heads", "base_num_query_heads base_num_kv_heads"),
        computed("head_dim", ratio("hidden_size", "num_heads")),
        same("intermediate_size", "base_mlp_dim", default=multiple(4, "hidden_size")),
        same("layer_norm_epsilon", "normalization_layer_epsilon", default=1e-5),
        same("activation_function", "mlp_activations", default="gelu_new", values=ACTIVATIONS),
        Setting(
            ("attention_types",),
            ("attention_types",),
            lambda config: [[["global", "local"], config["num_layers"] // 2]],
            remedy="Layers are global or local, as many as num_layers says.",
            read=_read_types,
            write=_write_types,
        ),
        Setting(
            ("attention_layers",),
            ("attention_types",),
            lambda config: _kinds(config["attention_types"]),
            remedy="It differs from attention_types.",
            read=_read_layers,
            write=_write_layers,
        ),
        same("window_size", "sliding_window_size", default=256, implied=_window_of_no_layer),
        same("tie_word_embeddings", "logits_via_embedding", default=True, values=BOOLEANS),
    ),
    rows=(
        *AROUND_LAYERS,
        *projection(_THERE + "q_proj", _HERE + "query", "(N H) D", "D N H"),
        *projection(_THERE + "k_proj", _HERE + "key", "(N H) D", "D N H"),
        *projection(_THERE + "v_proj", _HERE + "value", "(N H) D", "D N H"),
        *projection(_THERE + "out_proj", _HERE + "out", "D (N H)", "N H D"),
        *projection(_LAYER + "mlp.c_fc", "layers/mlp/wi", "F D", "D F"),
        *projection(_LAYER + "mlp.c_proj", "layers/mlp/wo", "D F", "F D"),
    ),
    prefix="transformer.",
    ignored=(".attention.bias", ".attention.masked_bias"),
)
