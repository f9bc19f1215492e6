"""GPT-NeoX (Black et al. 2022) and Pythia (Biderman et al. 2023).

Rows of the fused projection are grouped by head: head, then query, key, value.
"""

from MaxText.conversion.families.rotary_scaling import ROTARY_SCALING
from MaxText.conversion.family import (
    BOOLEANS,
    SHARED_PARTS,
    Family,
    computed,
    ratio,
    row,
    same,
)

_LAYER = "gpt_neox.layers.{layer}."
_ATTENTION = "layers/self_attention/"

ROWS = (
    row("gpt_neox.embed_in.weight", "token_embedder/embedding", "V D", "V D"),
    row(_LAYER + "input_layernorm.weight", "layers/pre_self_attention_layer_norm/scale", "D", "D"),
    row(_LAYER + "input_layernorm.bias", "layers/pre_self_attention_layer_norm/bias", "D", "D"),
    row(
        _LAYER + "attention.query_key_value.weight",
        f"{_ATTENTION}query/kernel {_ATTENTION}key/kernel {_ATTENTION}value/kernel",
        "(N J H) D",
        "D N H",
    ),
    row(
        _LAYER + "attention.query_key_value.bias",
        f"{_ATTENTION}query/bias {_ATTENTION}key/bias {_ATTENTION}value/bias",
        "(N J H)",
        "N H",
    ),
    row(_LAYER + "attention.dense.weight", _ATTENTION + "out/kernel", "D (N H)", "N H D"),
    row(_LAYER + "attention.dense.bias", _ATTENTION + "out/bias", "D", "D"),
    row(_LAYER + "post_attention_layernorm.weight", "layers/pre_mlp_layer_norm/scale", "D", "D"),
    row(_LAYER + "post_attention_layernorm.bias", "layers/pre_mlp_layer_norm/bias", "D", "D"),
    row(_LAYER + "mlp.dense_h_to_4h.weight", "layers/mlp/wi/kernel", "F D", "D F"),
    row(_LAYER + "mlp.dense_h_to_4h.bias", "layers/mlp/wi/bias", "F", "F"),
    row(_LAYER + "mlp.dense_4h_to_h.weight", "layers/mlp/wo/kernel", "D F", "F D"),
    row(_LAYER + "mlp.dense_4h_to_h.bias", "layers/mlp/wo/bias", "D", "D"),
    row("gpt_neox.final_layer_norm.weight", "decoder_norm/scale", "D", "D"),
    row("gpt_neox.final_layer_norm.bias", "decoder_norm/bias", "D", "D"),
    row("embed_out.weight", "logits_dense/kernel", "V D", "D V", older=("lm_head.weight",)),
)

GPT_NEOX = Family(
    model_type="gpt_neox",
    architecture="GPTNeoXForCausalLM",
    decoder_block="gpt_neox",
    parts={
        **SHARED_PARTS,
        "normalization_type": "layer_norm",
        "normalization_bias": True,
        "position_embedding": "rotary",
        "ffn_bias": True,
        "use_qk_norm": False,
    },
    settings=(
        same("vocab_size", "vocab_size"),
        same("max_position_embeddings", "max_target_length", default=2048),
        same("hidden_size", "base_emb_dim"),
        same("num_hidden_layers", "base_num_decoder_layers"),
        same("num_attention_heads", "base_num_query_heads base_num_kv_heads"),
        computed("head_dim", ratio("hidden_size", "num_attention_heads")),
        same("intermediate_size", "base_mlp_dim"),
        same("layer_norm_eps", "normalization_layer_epsilon", default=1e-5),
        same("rotary_pct partial_rotary_factor", "rotary_pct", default=0.25),
        same("rotary_emb_base rope_theta", "rope_max_timescale", default=10_000.0),
        same(
            "hidden_act",
            "mlp_activations",
            default="gelu",
            values=(
                ("gelu", ("gelu_erf",)),
                ("gelu_new", ("gelu",)),
                ("gelu_fast", ("gelu",)),
                ("gelu_pytorch_tanh", ("gelu",)),
                ("relu", ("relu",)),
            ),
        ),
        same(
            "use_parallel_residual",
            "block_arrangement",
            default=True,
            values=((True, "parallel"), (False, "sequential")),
        ),
        same("attention_bias", "qkv_bias proj_bias", default=True, values=BOOLEANS),
        same("tie_word_embeddings", "logits_via_embedding", default=False, values=BOOLEANS),
        *ROTARY_SCALING,
    ),
    rows=ROWS,
    prefix="gpt_neox.",
    head="embed_out.weight",
    ignored=(".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq"),
)
