"""GPT-2 (Radford et al. 2019). Projections are stored as [inputs, outputs]."""

from MaxText.conversion.family import (
    BOOLEANS,
    Family,
    computed,
    multiple,
    norm,
    only,
    projection,
    ratio,
    row,
    same,
)

_LAYER = "transformer.h.{layer}."
_ATTENTION = "layers/self_attention/"

ACTIVATIONS = (
    ("gelu_new", ("gelu",)),
    ("gelu_pytorch_tanh", ("gelu",)),
    ("gelu", ("gelu_erf",)),
    ("relu", ("relu",)),
    ("silu", ("silu",)),
)

# Shared with GPT-Neo.
AROUND_LAYERS = (
    row("transformer.wte.weight", "token_embedder/embedding", "V D", "V D"),
    row("transformer.wpe.weight", "position_embedder/embedding", "P D", "P D"),
    *norm(_LAYER + "ln_1", "layers/pre_self_attention_layer_norm"),
    *norm(_LAYER + "ln_2", "layers/pre_mlp_layer_norm"),
    *norm("transformer.ln_f", "decoder_norm"),
    row("lm_head.weight", "logits_dense/kernel", "V D", "D V"),
)
PARTS = {
    "block_arrangement": "sequential",
    "normalization_type": "layer_norm",
    "normalization_bias": True,
    "position_embedding": "learned",
    "qkv_bias": True,
    "proj_bias": True,
    "ffn_bias": True,
    "use_qk_norm": False,
}

GPT2 = Family(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    decoder_block="gpt2",
    own=PARTS,
    settings=(
        same("vocab_size", "vocab_size"),
        same("n_positions", "trainable_position_size max_target_length"),
        same("n_embd", "base_emb_dim"),
        same("n_layer", "base_num_decoder_layers"),
        same("n_head", "base_num_query_heads base_num_kv_heads"),
        computed("head_dim", ratio("n_embd", "n_head")),
        same("n_inner", "base_mlp_dim", default=multiple(4, "n_embd")),
        same("layer_norm_epsilon", "normalization_layer_epsilon", default=1e-5),
        same("activation_function", "mlp_activations", default="gelu_new", values=ACTIVATIONS),
        same("tie_word_embeddings", "logits_via_embedding", default=True, values=BOOLEANS),
        only("scale_attn_weights", True),
        only("scale_attn_by_inverse_layer_idx", False),
        only("add_cross_attention", False),
        # Affects only the order of scaling and conversion to float32, which is always done here.
        only("reorder_and_upcast_attn", False, True),
    ),
    rows=(
        *AROUND_LAYERS,
        *projection(
            _LAYER + "attn.c_attn",
            f"{_ATTENTION}query {_ATTENTION}key {_ATTENTION}value",
            "D (J N H)",
            "D N H",
        ),
        *projection(_LAYER + "attn.c_proj", _ATTENTION + "out", "(N H) D", "N H D"),
        *projection(_LAYER + "mlp.c_fc", "layers/mlp/wi", "D F", "D F"),
        *projection(_LAYER + "mlp.c_proj", "layers/mlp/wo", "F D", "F D"),
    ),
    prefix="transformer.",
    ignored=(".attn.bias", ".attn.masked_bias"),
)
