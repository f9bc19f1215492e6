"""Llama (Touvron et al. 2023; Grattafiori et al. 2024), and the rows that its descendants share.

Rotary dimensions pair by halves, as ours do, so no row is permuted.
"""

from MaxText.conversion.families.rotary_scaling import ROTARY_SCALING
from MaxText.conversion.family import (
    BOOLEANS,
    SHARED_PARTS,
    Family,
    Row,
    like,
    only,
    ratio,
    row,
    same,
)

_LAYER = "model.layers.{layer}."
_ATTENTION = "layers/self_attention/"


def _projection(theirs: str, ours: str, theirs_axes: str, ours_axes: str) -> tuple[Row, ...]:
    """A product and its bias, which some members of the family have."""
    outputs = theirs_axes[: theirs_axes.index(")") + 1] if theirs_axes[0] == "(" else theirs_axes[0]
    return (
        row(f"{_LAYER}{theirs}.weight", f"layers/{ours}/kernel", theirs_axes, ours_axes),
        row(f"{_LAYER}{theirs}.bias", f"layers/{ours}/bias", outputs, outputs.strip("()")),
    )


ROWS = (
    row("model.embed_tokens.weight", "token_embedder/embedding", "V D", "V D"),
    row(_LAYER + "input_layernorm.weight", "layers/pre_self_attention_layer_norm/scale", "D", "D"),
    *_projection("self_attn.q_proj", "self_attention/query", "(N H) D", "D N H"),
    *_projection("self_attn.k_proj", "self_attention/key", "(K H) D", "D K H"),
    *_projection("self_attn.v_proj", "self_attention/value", "(K H) D", "D K H"),
    *_projection("self_attn.o_proj", "self_attention/out", "D (N H)", "N H D"),
    row(_LAYER + "self_attn.q_norm.weight", _ATTENTION + "query_norm/scale", "H", "H"),
    row(_LAYER + "self_attn.k_norm.weight", _ATTENTION + "key_norm/scale", "H", "H"),
    row(_LAYER + "post_attention_layernorm.weight", "layers/pre_mlp_layer_norm/scale", "D", "D"),
    *_projection("mlp.gate_proj", "mlp/wi_0", "F D", "D F"),
    *_projection("mlp.up_proj", "mlp/wi_1", "F D", "D F"),
    *_projection("mlp.down_proj", "mlp/wo", "D F", "F D"),
    row("model.norm.weight", "decoder_norm/scale", "D", "D"),
    row("lm_head.weight", "logits_dense/kernel", "V D", "D V"),
)

PARTS = {
    **SHARED_PARTS,
    "block_arrangement": "sequential",
    "normalization_type": "rms_norm",
    "position_embedding": "rotary",
    "rotary_pct": 1.0,
}

# Our gated feed-forward is activation(wi_0 x) * wi_1 x, gate first.
_ACTIVATIONS = (
    ("silu", ("silu", "linear")),
    ("swish", ("swish", "linear")),
    ("gelu", ("gelu_erf", "linear")),
    ("gelu_new", ("gelu", "linear")),
    ("gelu_pytorch_tanh", ("gelu", "linear")),
    ("relu", ("relu", "linear")),
)

SIZES = (
    same("vocab_size", "vocab_size"),
    same("hidden_size", "base_emb_dim"),
    same("num_hidden_layers", "base_num_decoder_layers"),
    same("num_attention_heads", "base_num_query_heads"),
    same("num_key_value_heads", "base_num_kv_heads", default=like("num_attention_heads")),
    same("intermediate_size", "base_mlp_dim"),
    same("rms_norm_eps", "normalization_layer_epsilon", default=1e-6),
    same("rope_theta", "rope_max_timescale", default=10_000.0),
    only("partial_rotary_factor", 1.0, 1),
)

SETTINGS = (
    *SIZES,
    same("hidden_act", "mlp_activations", default="silu", values=_ACTIVATIONS),
    same("tie_word_embeddings", "logits_via_embedding", default=False, values=BOOLEANS),
)

LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    decoder_block="llama2",
    parts={**PARTS, "use_qk_norm": False},
    settings=(
        *SETTINGS,
        same("max_position_embeddings", "max_target_length", default=2048),
        same("head_dim", "head_dim", default=ratio("hidden_size", "num_attention_heads")),
        same("attention_bias", "qkv_bias proj_bias", default=False, values=BOOLEANS),
        same("mlp_bias", "ffn_bias", default=False, values=BOOLEANS),
        *ROTARY_SCALING,
    ),
    rows=ROWS,
    prefix="model.",
    ignored=(".rotary_emb.inv_freq",),
)
